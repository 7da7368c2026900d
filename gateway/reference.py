"""The API's description as one plain page: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import html
import json
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f23; }
code, pre { font: 14px/1.4 ui-monospace, monospace; } pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; }
h2 { border-bottom: 1px solid #d5dae0; margin-top: 2.5rem; } summary { cursor: pointer; padding: .3rem 0; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .2rem .6rem; }
tr { border-bottom: 1px solid #e8ebee; } .method { display: inline-block; min-width: 4.5rem; font-weight: 600; }
details { border-left: 3px solid #d5dae0; padding-left: .8rem; margin: .3rem 0; }
@media (prefers-color-scheme: dark) { body { background: #15181c; color: #dfe3e8; } pre { background: #1f242a; }
  a { color: #7ab7ff; } }
"""


def render(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    info = document["info"]
    by_tag: dict[str, list[str]] = {tag["name"]: [] for tag in document["tags"]}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag[operation["tags"][0]].append(_operation(method, path, operation))
    sections = [
        f'<h2 id="{tag["name"]}">{_text(tag["name"])}</h2><p>{_text(tag["description"])}</p>'
        + "".join(by_tag[tag["name"]])
        for tag in document["tags"]
    ]
    models = "".join(
        f'<details id="{name}"><summary><code>{_text(name)}</code></summary>'
        f"<p>{_text(schema.get('description', ''))}</p>{_fields(schema)}</details>"
        for name, schema in sorted(document["components"]["schemas"].items())
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(info["title"])} API</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{_text(info['title'])} API {_text(info['version'])}</h1>"
        f"<p>{_text(info['description'])}</p>"
        '<p>For programs: <a href="/openapi.json">/openapi.json</a> (OpenAPI 3.1).</p>'
        f"{''.join(sections)}<h2>models</h2>{models}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts: list[str] = []
    if text := operation.get("description"):
        parts.append(f"<p>{_text(text)}</p>")
    if parameters := operation["parameters"]:
        rows = "".join(
            f"<tr><td><code>{_text(p['name'])}</code></td><td>{p['in']}</td><td>{_kind(p['schema'])}</td>"
            f"<td>{_text(p.get('description', ''))}</td></tr>"
            for p in parameters
        )
        parts.append(f"<table><tr><th>parameter</th><th>in</th><th>type</th><th></th></tr>{rows}</table>")
    if body := operation.get("requestBody"):
        parts.append(_content("body", body["content"]))
    answers = operation["responses"].items()
    parts += [_content(status, answer["content"]) for status, answer in answers if "content" in answer and status < "3"]
    statuses = ", ".join(status for status, _ in answers)
    parts.append(f"<p>answers: {statuses}</p>")
    return (
        f'<details id="{operation["operationId"]}"><summary><span class="method">{method.upper()}</span>'
        f"<code>{_text(path)}</code> {_text(operation['summary'])}</summary>{''.join(parts)}</details>"
    )


def _content(label: str, content: dict[str, Any]) -> str:
    found: list[str] = []
    for media, described in content.items():
        found.append(f"<p>{_text(label)}: {_kind(described['schema'])} <code>{_text(media)}</code></p>")
        if (example := described.get("example")) is not None:
            shown = example if isinstance(example, str) else json.dumps(example, indent=2)
            found.append(f"<pre>{_text(shown)}</pre>")
    return "".join(found)


def _fields(schema: dict[str, Any]) -> str:
    if "properties" not in schema:
        return f"<p>{_kind(schema)}</p>"
    required = schema.get("required", [])
    rows = "".join(
        f"<tr><td><code>{_text(name)}</code>{'' if name in required else '?'}</td><td>{_kind(field)}</td>"
        f"<td>{_text(field.get('description', ''))}</td></tr>"
        for name, field in schema["properties"].items()
    )
    return f"<table>{rows}</table>"


def _kind(schema: dict[str, Any]) -> str:
    if reference := schema.get("$ref"):
        name = reference.rsplit("/", 1)[1]
        return f'<a href="#{name}">{_text(name)}</a>'
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_kind(choice) for choice in choices)
    if values := schema.get("enum"):
        return ", ".join(f"<code>{_text(str(value))}</code>" for value in values)
    if "const" in schema:
        return f"<code>{_text(str(schema['const']))}</code>"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"mapping to {_kind(schema['additionalProperties'])}"
    return _text(str(schema.get("format") or schema.get("type") or "anything"))


def _text(text: str) -> str:
    return html.escape(text)
