"""Process: long solves, which are submitted over HTTP, stored in Postgres and worked off by Celery.

``app`` composes the process, ``endpoints`` speak HTTP, ``service`` holds the use cases; ``kinds`` lists what can be
solved, one entry for each kind, and ``worker`` solves. How work is queued, claimed, kept and taken up again after a
crash is the same for all background work: ``services.kit.background`` and ``services.db.background``.
"""
