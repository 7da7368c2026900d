"""The schema as the code describes it: in SQLAlchemy's metadata, and in the SQL beside its tables."""

from __future__ import annotations

import re
from pathlib import Path

from services.db import tables
from services.db.metadata import metadata

DESCRIBED = Path(tables.__file__).with_name("described.sql").read_text()
VIEWED = Path(tables.__file__).with_name("views.sql").read_text()
TABLES = {*metadata.tables, *re.findall(r"^CREATE TABLE (\w+)", DESCRIBED, re.MULTILINE)}
