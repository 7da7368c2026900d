"""Process: long solves, submitted over HTTP, kept in Postgres, worked off by Celery.

``app`` composes the process, ``endpoints`` speak HTTP, ``service`` holds the use cases and ``repository`` the queries;
``kinds`` lists what can be solved, one entry for each kind. ``tasks`` is the worker's side: it takes the id of a solve,
claims its row, solves and writes the answer, and ``sweeper`` puts right whatever a crash left behind.
"""
