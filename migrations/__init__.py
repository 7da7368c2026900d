"""One Alembic history for the one database. ``python -m migrations`` brings ``DATABASE_URL`` to the newest schema."""
