"""Where every table is registered, and the column types they share."""

from __future__ import annotations

from sqlalchemy import DateTime, MetaData

metadata = MetaData()

Timestamp = DateTime(timezone=True)
