"""What the schema says of itself, to releases that are older than it. Migrations alone write here."""

from __future__ import annotations

from sqlalchemy import Column, Table, Text

from services.db.metadata import metadata

schema_compatibility = Table("schema_compatibility", metadata, Column("least_revision", Text, nullable=False))
"""One row: the newest revision that the oldest release that may run on this schema has to know."""
