"""Process: long solves, submitted over HTTP, stored in Postgres and computed by Celery workers.

``app`` composes the process, ``endpoints`` speak HTTP, ``service`` holds the use cases; ``kinds`` lists what can be
solved, one entry for each kind, and ``worker`` solves. Queuing, claiming, storing and resuming after a crash are the
same for all background work: ``services.kit.background`` and ``services.db.background``.
"""
