"""The process that owns jobs from submission to their end: it accepts, lists, holds and cancels them, publishes their
events, and manages tenants and keys. The scheduler decides which job runs when.

``submissions`` and ``commits`` are the hot path (many submissions share one transaction); ``jobs`` and ``steering``
read and change single jobs; ``feed`` and ``streaming`` publish events; ``logs`` fetches output from the nodes;
``access`` manages tenants and keys, ``first_start`` creates the first ones. All SQL is in ``repository``.
"""
