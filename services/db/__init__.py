"""The one database: engine, tables (one module per owning process) and transactions.

Alembic owns the schema (``migrations/``); the tables here describe it to queries, and a test compares the two.
"""
