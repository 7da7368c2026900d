"""The decision loop: the sole writer of allocations.

``loop`` decides when to do what. ``ingest`` folds what nodes report into allocations and jobs. ``planning`` loads a
snapshot, has the policy decide, and applies the plan in one transaction. ``power`` powers nodes down and up, sets the
controls of devices, and holds the cluster's power limit. ``learning`` measures jobs while they run and predicts their
lengths. ``commands`` and ``reasons`` are the vocabulary of all four. ``relay`` hands committed commands to Redis;
``leadership`` lets one scheduler decide at a time. All SQL is in ``repository``.
"""
