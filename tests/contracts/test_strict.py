"""What is sent to the public API has the types that it says: no flag is a number, and no text is either."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import annotated_types
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

import services.contracts
from tests.support.servers import ROOT

DESCRIBED = json.loads((ROOT / "deploy" / "openapi.json").read_text())
SCHEMAS: dict[str, Any] = DESCRIBED["components"]["schemas"]
WRONG: dict[str, tuple[Any, ...]] = {"boolean": (0, 1, "true"), "integer": (True, False, "1"), "number": (True, "1")}
"""By JSON's type, values that Python or Pydantic could take for one."""


def sent() -> set[str]:
    """Return the names of all that is sent as a body, or within one."""
    operations = [each for path in DESCRIBED["paths"].values() for each in path.values() if isinstance(each, dict)]
    waiting = set(
        re.findall(r"#/components/schemas/(\w+)", json.dumps([each.get("requestBody") for each in operations]))
    )
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= set(re.findall(r"#/components/schemas/(\w+)", json.dumps(SCHEMAS[name]))) - found
    return found


def models() -> dict[str, type[BaseModel]]:
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.walk_packages(services.contracts.__path__, "services.contracts.")
    ]
    classes = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    return {each.__name__: each for each in classes if issubclass(each, BaseModel)}


def types_of(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types of scalars that a schema takes."""
    parts = [schema, *schema.get("anyOf", ())]
    found = {each["type"] for each in parts if isinstance(each.get("type"), str)}
    numbers = {"integer" for each in parts if any(type(value) is int for value in each.get("enum", ()))}
    return found | numbers


def fields() -> Iterator[tuple[type[BaseModel], str, str]]:
    known = models()
    for name in sorted(sent() & known.keys()):
        aliases = {each.alias or field: field for field, each in known[name].model_fields.items()}
        for alias, schema in SCHEMAS[name].get("properties", {}).items():
            kinds = types_of(schema) & WRONG.keys()
            if len(kinds) == 1 and "string" not in types_of(schema) and alias in aliases:
                yield known[name], aliases[alias], *kinds


@pytest.mark.parametrize(("model", "field", "kind"), list(fields()))
def test_a_field_takes_its_own_type_alone(model: type[BaseModel], field: str, kind: str) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(model.model_fields[field].rebuild_annotation())
    for value in WRONG[kind]:
        with pytest.raises(ValidationError):
            adapter.validate_json(json.dumps(value))


def test_there_is_much_to_ask() -> None:
    assert len(list(fields())) > 100


def test_what_has_to_be_above_0_has_a_least_value() -> None:
    """The inverse of 1e-320 is not finite, and a window of 1e-320 s ends as it begins."""
    parameters = [each for path in DESCRIBED["paths"].values() for op in path.values() for each in op["parameters"]]
    told = {name: SCHEMAS[name].get("properties", {}) for name in sorted(sent())}
    told["?"] = {each["name"]: each["schema"] for each in parameters if "schema" in each}
    without = [
        f"{name}.{field}"
        for name, properties in told.items()
        for field, schema in properties.items()
        for part in (schema, *schema.get("anyOf", ()))
        if part.get("type") == "number" and part.get("exclusiveMinimum") == 0
    ]
    assert without == []


def test_no_field_has_a_bound_beside_one_of_its_type() -> None:
    """Of two, Pydantic takes that of the type."""
    bounds = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt)
    kinds = {
        f"{name}.{field}": [type(each) for each in told.metadata if isinstance(each, bounds)]
        for name, model in models().items()
        for field, told in model.model_fields.items()
    }
    assert [field for field, found in kinds.items() if len(found) > len(set(found))] == []
