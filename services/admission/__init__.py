"""The process that owns jobs from submission to their end: it accepts, lists, holds and cancels them, tells what
happened to them, and keeps tenants and their keys. Which job runs when is the scheduler's business.

``submissions`` and ``commits`` are the hot path (many submissions share one transaction); ``jobs`` and ``steering``
read and steer single jobs; ``feed`` and ``streaming`` tell events; ``logs`` fetches output from the nodes; ``access``
keeps tenants and keys, ``first_start`` makes the first ones.
"""
