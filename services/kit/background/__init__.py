"""Work that takes longer than a request should: accepted by a service, kept in Postgres, done by Celery workers.

``work_queue`` is what callers may do, ``queue`` carries ids to workers, ``worker`` claims a row, works, and writes the
answer while its claim stands, and ``sweeper`` puts right whatever a crash left behind. The queries are those of
``services.db.background``, seen from here as the protocol ``store.WorkStore``.
"""
