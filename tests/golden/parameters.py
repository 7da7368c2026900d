"""What may be set of each policy, and what it is otherwise; remake it with `python -m tests.golden.parameters`."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from services.core.policies.parameters import ParameterDescription, describe_parameters
from services.core.policies.registry import POLICIES

FILE = Path(__file__).parent / "parameters.json"
NOT_COMPARED = {"summary", "paper", "config", "build"}


def policies() -> dict[str, Any]:
    """Return, by policy, how it is treated, and each of its parameters in a line."""
    found: dict[str, Any] = {}
    for name, entry in POLICIES.items():
        treated = {each.name: getattr(entry, each.name) for each in fields(entry) if each.name not in NOT_COMPARED}
        found[name] = treated | {"parameters": {each.name: _line(each) for each in describe_parameters(entry.config)}}
    return json.loads(json.dumps(found))


def _line(parameter: ParameterDescription) -> str:
    words = f"{parameter.type}{' or null' if parameter.nullable else ''} = {json.dumps(parameter.default)}"
    if (parameter.minimum, parameter.maximum) != (None, None):
        words += f", {parameter.minimum} to {parameter.maximum}"
    return words + (f" {parameter.unit}" if parameter.unit else "") + "".join(f", {one}" for one in parameter.choices)


if __name__ == "__main__":
    FILE.write_text(json.dumps(policies(), indent=1) + "\n", encoding="utf-8")
