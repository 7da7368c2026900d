"""Write what the client can be made from: ``python clients/python/generate.py``.

``models.py`` is made from ``deploy/openapi.json``: a frozen dataclass for every model that the wrapped operations
answer, and for what they take a TypedDict of the fields, all optional but those without a default. ``client.py`` is
``aio.py`` without ``async`` and ``await``.
"""

from __future__ import annotations

import json
import keyword
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGE = HERE / "src" / "wattshift"
OPENAPI = HERE.parents[1] / "deploy" / "openapi.json"

ANSWERED = (
    *("submit_job", "submit_jobs", "list_jobs", "get_job", "explain_job", "get_job_footprint", "get_job_prediction"),
    *("report_footprint", "submit_simulation", "get_simulation", "list_nodes", "list_zones"),
    *("list_arrays", "get_array", "set_secret", "list_secrets"),
    *("get_current_intensity", "get_intensity_forecast", "get_active_policy"),
)
"""The operations whose answers the client returns as models."""

TAKEN = ("submit_job", "submit_simulation")
"""The operations whose bodies it takes by their fields."""

ALSO = ("JobEvent",)
OF_ITS_OWN = {"JobSpec": ("name", "command", "gpus")}
"""Fields that a method takes as parameters of its own: the rest is a class, which the whole inherits."""

WIDTH = 110

HEADER = '''"""{summary} Made by ``clients/python/generate.py``: change nothing here."""

from __future__ import annotations
'''

Schema = dict[str, Any]


def main() -> None:
    """Write both files."""
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


def made() -> dict[Path, str]:
    """Return the texts of both files, formatted, by their paths."""
    texts = {
        PACKAGE / "models.py": models_of(json.loads(OPENAPI.read_text(encoding="utf-8"))),
        PACKAGE / "client.py": without_async((PACKAGE / "aio.py").read_text(encoding="utf-8")),
    }
    return {path: _formatted(path, text) for path, text in texts.items()}


def models_of(document: Schema) -> str:
    """Return the module of models for a description of the API."""
    schemas: dict[str, Schema] = document["components"]["schemas"]
    operations = {
        operation["operationId"]: operation for path in document["paths"].values() for operation in path.values()
    }
    answered = [_answer(operations[name]) for name in ANSWERED]
    taken = [operations[name]["requestBody"]["content"]["application/json"]["schema"] for name in TAKEN]
    parts = [
        HEADER.format(summary="The control plane's models."),
        "from dataclasses import dataclass, field",
        "from datetime import datetime",
        "from typing import Any, Literal, NotRequired, Required, TypedDict",
        "",
    ]
    parts += [_dataclass(name, schemas) for name in _closure([*answered, *map(_reference, ALSO)], schemas)]
    parts += [_typed_dict(name, schemas) for name in _closure(taken, schemas)]
    return "\n".join(parts)


def without_async(text: str) -> str:
    """Return the module of the client that blocks, from the asynchronous one."""
    summary, _, rest = text.partition("\n")
    assert summary.startswith('"""')
    for old, new in (
        (r"\basync with\b", "with"),
        (r"\basync for\b", "for"),
        (r"\basync def\b", "def"),
        (r"\bawait ", ""),
        (r"\basynccontextmanager\b", "contextmanager"),
        (r"\bAsyncClient\b", "Client"),
        (r"\bAsyncBaseTransport\b", "BaseTransport"),
        (r"\bAsyncGuard\b", "Guard"),
        (r"\bAsyncIterator\b", "Iterator"),
        (r"\bAsyncSender\b", "Sender"),
        (r"\b__aenter__\b", "__enter__"),
        (r"\b__aexit__\b", "__exit__"),
        (r"\baiter_", "iter_"),
        (r"\baread\b", "read"),
        (r"\baclose\b", "close"),
        (r"\basyncio\.sleep\b", "time.sleep"),
        (r"^import asyncio$", "import time"),
        (r"^import time\nimport time$", "import time"),
    ):
        rest = re.sub(old, new, rest, flags=re.MULTILINE)
    _, _, rest = rest.partition("from __future__ import annotations\n")
    return HEADER.format(summary="The client that blocks.") + rest


def _answer(operation: Schema) -> Schema:
    status = min(status for status in operation["responses"] if status.startswith("2"))
    return operation["responses"][status]["content"]["application/json"]["schema"]


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _closure(roots: list[Schema], schemas: dict[str, Schema]) -> list[str]:
    """Return the names of the object models that are reached, sorted."""
    found: set[str] = set()
    waiting: list[Any] = list(roots)
    while waiting:
        for name in re.findall(r"#/components/schemas/([\w.-]+)", json.dumps(waiting.pop())):
            if name not in found:
                found.add(name)
                waiting.append(schemas[name])
    return sorted(name for name in found if "properties" in schemas[name])


def _dataclass(name: str, schemas: dict[str, Schema]) -> str:
    schema = schemas[name]
    needed = set(schema.get("required", []))
    lines = ["@dataclass(frozen=True, kw_only=True)", f"class {name}:", _docstring(schema, schema["properties"])]
    for field, described in schema["properties"].items():
        kind = _type(described, schemas, "")
        default = "" if field in needed else f" = {_default(described, schemas)}"
        if default.endswith("= None") and "None" not in kind.split(" | "):
            kind += " | None"
        lines.append(f"    {_name(field)}: {kind}{default}")
    return "\n".join(lines) + "\n\n"


def _typed_dict(name: str, schemas: dict[str, Schema]) -> str:
    schema = schemas[name]
    needed = set(schema.get("required", []))
    apart = OF_ITS_OWN.get(name, ())

    def written(fields: Schema) -> str:
        kinds = {field: _type(described, schemas, "Fields") for field, described in fields.items()}
        return "\n".join(
            f"    {_name(field)}: {f'Required[{kind}]' if field in needed else kind}" for field, kind in kinds.items()
        )

    own = {field: schema["properties"][field] for field in apart}
    rest = {field: described for field, described in schema["properties"].items() if field not in apart}
    suffix = "Terms" if apart else "Fields"
    text = f"class {name}{suffix}(TypedDict, total=False):\n{_docstring(schema, rest)}\n{written(rest)}\n\n"
    if apart:
        text += f'class {name}Fields({name}Terms, total=False):\n    """All of its fields."""\n\n{written(own)}\n\n'
    return text


def _docstring(schema: Schema, properties: Schema) -> str:
    """Return what the API says of a model and its fields."""
    summary = schema.get("description", "").strip() or f"{schema['title']}."
    notes = [(name, each["description"]) for name, each in properties.items() if each.get("description")]
    lines = [line.rstrip() for line in summary.splitlines()]
    if notes:
        lines += ["", "Attributes:"]
        for name, text in notes:
            lines += _wrapped(f"{name}: {' '.join(text.split())}", "    ", "        ")
    quote = 'r"""' if "\\" in "\n".join(lines) else '"""'
    body = "\n".join(f"    {line}".rstrip() for line in lines).lstrip()
    return f'    {quote}{body}{"" if len(lines) == 1 else chr(10) + "    "}"""\n'


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    lines, current = [], first
    for word in text.split(" "):
        if len(current) + len(word) > WIDTH and current.strip():
            lines.append(current.rstrip())
            current = rest
        current += word + " "
    return [*lines, current.rstrip()]


def _type(schema: Schema, schemas: dict[str, Schema], suffix: str) -> str:
    """Return a schema as a type; texts of a fixed set are any text in answers, as later releases may add some."""
    if reference := schema.get("$ref"):
        name = reference.rsplit("/", 1)[1]
        return f"{name}{suffix}" if "properties" in schemas[name] else _type(schemas[name], schemas, suffix)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(_type(each, schemas, suffix) for each in choices))
    if values := schema.get("enum"):
        return f"Literal[{', '.join(map(repr, values))}]" if suffix else "str"
    kind = schema.get("type")
    if kind == "array":
        return f"list[{_type(schema.get('items', {}), schemas, suffix)}]"
    if kind == "object":
        values = schema.get("additionalProperties") or next(iter(schema.get("patternProperties", {}).values()), {})
        return f"dict[str, {_type(values, schemas, suffix) if isinstance(values, dict) else 'Any'}]"
    if kind == "string":
        return ("datetime | str" if suffix else "datetime") if schema.get("format") == "date-time" else "str"
    plain = {"integer": "int", "number": "float", "boolean": "bool", "null": "None"}
    return plain.get(str(kind), "str" if isinstance(schema.get("const"), str) else "Any")


def _default(schema: Schema, schemas: dict[str, Schema]) -> str:
    """Return the default of a field that an answer may leave out."""
    kind = _type(schema, schemas, "")
    if "None" not in kind.split(" | ") and kind.startswith(("list[", "dict[")):
        later = re.sub(r"\b(?!Any\b)([A-Z]\w*)", r'"\1"', kind)  # a class that may be defined further down
        return f"field(default_factory={later})"
    default = schema.get("default")
    return repr(default) if isinstance(default, (str, int, float, bool)) else "None"


def _name(field: str) -> str:
    assert field.isidentifier(), field
    assert not keyword.iskeyword(field), field
    return field


def _formatted(path: Path, text: str) -> str:
    """Return a text as ruff formats it: imports in order, those without use left out."""
    ruff = [sys.executable, "-m", "ruff"]
    name = ["--stdin-filename", str(path)]
    for command in (
        ["check", "--quiet", "--fix-only", "--unsafe-fixes", "--select", "I,F401,UP028", *name, "-"],
        ["format", *name, "-"],
    ):
        text = subprocess.run([*ruff, *command], input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    main()
