"""The schema as the code describes it, in SQL."""

from __future__ import annotations

import re
from pathlib import Path

from services.db import tables

DESCRIBED = Path(tables.__file__).with_name("described.sql").read_text()
VIEWED = Path(tables.__file__).with_name("views.sql").read_text()
TABLES = {*re.findall(r"^CREATE TABLE (\w+)", DESCRIBED, re.MULTILINE)}
