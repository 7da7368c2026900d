"""Variants of families of models, as measured on slices of an H200; ``lab/inference/profiles.py`` writes the file."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("families.json")


def measured_families() -> dict[str, dict[str, Any]]:
    """Return the variants of each family: ``accuracy_pct``, and mean, deviation and watts above idle by slice."""
    return json.loads(FILE.read_bytes())
