"""Process: long solves, submitted over HTTP, kept in Postgres, worked off by Celery.

``app`` composes the process, ``endpoints`` speak HTTP, ``service`` holds the use cases; ``kinds`` lists what can be
solved, one entry for each kind, and ``worker`` solves. How work is queued, claimed, kept and taken up again after a
crash is the same for all background work: ``services.kit.background`` and ``services.db.background``.
"""
