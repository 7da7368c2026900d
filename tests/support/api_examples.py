"""The examples that the public API's description shows, by the names of their models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import services.contracts

PATH = Path(services.contracts.__file__).parent / "examples.json"
EXAMPLES: dict[str, Any] = json.loads(PATH.read_text())["models"]
