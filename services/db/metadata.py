"""Where every table is registered, and the column types they share."""

from sqlalchemy import DateTime, MetaData

metadata = MetaData()

Timestamp = DateTime(timezone=True)
