"""The API's description as one plain page, ``reference.html``, and a page for each problem code."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from services.contracts.codes import MEANINGS, PROBLEMS

_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
_TEMPLATES.filters["indented"] = lambda example: json.dumps(example, indent=2)


def render(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    return _TEMPLATES.get_template("reference.html").render(document)


def render_problem(code: str) -> str:
    """Return the page that explains a problem code and lists the others."""
    return _TEMPLATES.get_template("problem.html").render(code=code, meanings=MEANINGS, folder=PROBLEMS)
