"""The one database: engine, tables and transactions.

Alembic owns the schema (``migrations/``); ``tables`` describes it to people and to queries,
and a test compares the two.
"""
