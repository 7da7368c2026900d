"""Work that takes longer than a request should: accepted by a service, stored in Postgres, done by Celery workers.

``work_queue`` is what callers can do, ``queue`` sends ids to workers, ``worker`` claims a row, does the work and writes
the answer if its claim is still valid, and ``sweeper`` repairs what a crash left behind. The queries are those of
``services.db.background``; here they are the protocol ``store.WorkStore``.
"""
