"""The decision loop: the sole writer of allocations.

``loop`` decides when to do what; ``ingest`` folds what nodes report into jobs and allocations; ``snapshot`` loads
what a policy
sees; ``apply`` writes a plan, its memory and its commands in one transaction; ``relay`` hands the commands to Redis.
``gangs`` holds the rules by which a gang's reports become its fate, as pure functions.
"""
