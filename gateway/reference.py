"""The API's description as one plain page, ``reference.html``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader


def render(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    templates.filters["indented"] = lambda example: json.dumps(example, indent=2)
    return templates.get_template("reference.html").render(document)
