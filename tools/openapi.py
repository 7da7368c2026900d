"""The description of the public API: OpenAPI 3.1, made from operations and the contracts' models."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode, models_json_schema

import services.contracts
from gateway.routes import EVENTS, JSON, Upstream
from services.contracts.exec_sessions import ExecEvent
from services.contracts.identity import IDEMPOTENCY_HEADER, REQUEST_ID_HEADER, Role
from services.contracts.jobs import JobEvent
from services.contracts.nodes import (
    LOG_EOF_HEADER,
    LOG_GENERATION_HEADER,
    LOG_NEXT_OFFSET_HEADER,
    LOG_NODE_HEADER,
    LOG_OFFSET_HEADER,
    LOG_SIZE_HEADER,
)
from services.contracts.problems import MEDIA_TYPE, Problem
from services.contracts.queries import LINE_MEDIA
from services.contracts.serving import Pool
from services.contracts.slim import FIELDS
from services.contracts.webhooks import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    BudgetExceededMessage,
    JobEndedMessage,
    JobStartedMessage,
    NodeLostMessage,
    PingMessage,
)
from tools.operations import Operation

Schema = dict[str, Any]

TEXT = "text/plain"
LINES = "text/csv"

DESCRIPTION = """\
Wattshift decides when, where, how wide and how fast GPU work runs, so that it finishes on time with the least carbon.

Every error is an RFC 9457 problem with a stable `code`. Lists come in pages: send `next_cursor` back as `cursor` to get
the next page. Send an `Idempotency-Key` with every submission: repeating a request with the same key and the same body
returns the same answer and submits nothing twice. `RateLimit` headers say how many requests a tenant may still make.
"""

_AUDIENCE = {
    Role.GRID: "For operators and admins, and for keys of the role `grid`, which reach the orders that they gave.",
    Role.USER: "",
    Role.OPERATOR: "For operators and admins.",
    Role.ADMIN: "For admins.",
}

PROBLEMS = {
    400: "The body is not JSON, or the request is malformed.",
    401: "No valid API key.",
    403: "The key's role, or the tenant's quota, does not allow it.",
    404: "It does not exist, or it belongs to another tenant.",
    405: "The path does not support this method.",
    413: "The body is too large.",
    414: "The URL is too long.",
    415: "The body is not `application/json` in UTF-8.",
    422: "A field is invalid; `errors` points to it.",
    429: "Too many requests; `Retry-After` says how long to wait.",
    503: "A service does not answer right now; try again later.",
}

HEADERS: dict[str, tuple[str, Schema]] = {
    IDEMPOTENCY_HEADER: (
        "Makes a submission safe to repeat.",
        {"type": "string", "pattern": "^[!-~]{1,200}$"},
    ),
    "if-match": ("Replace it only if it still has this `ETag`.", {"type": "string", "maxLength": 200}),
    "if-none-match": ("The `ETag` of an earlier answer.", {"type": "string"}),
    "last-event-id": ("Continue after this event.", {"type": "string", "pattern": "^([0-9]{1,18}-[0-9]{1,18})?$"}),
}
NAMES = {
    IDEMPOTENCY_HEADER: "Idempotency-Key",
    "if-match": "If-Match",
    "if-none-match": "If-None-Match",
    "last-event-id": "Last-Event-ID",
}
SUBMISSION_HEADERS = {
    "Idempotency-Replayed": {
        "description": "`true` when this is the answer to an earlier submission with the same key.",
        "schema": {"type": "string", "enum": ["true"]},
    },
    "Location": {"description": "Path of the job.", "schema": {"type": "string"}},
}
SLIM: Schema = {
    "type": "object",
    "additionalProperties": True,
    "description": "With `fields`: the same, whose rows have the fields asked for and no other.",
}
LOG_HEADERS = {
    LOG_OFFSET_HEADER: "Offset at which the text begins; later than requested when older output was discarded.",
    LOG_NEXT_OFFSET_HEADER: "The `offset` of what comes next.",
    LOG_SIZE_HEADER: "Bytes written so far.",
    LOG_EOF_HEADER: "`true` when nothing more will be written and this is the end.",
    LOG_GENERATION_HEADER: "Which of the job's gangs wrote the output.",
    LOG_NODE_HEADER: "On which of the gang's nodes it was written.",
}
EVENT_STREAMS: dict[type[BaseModel], str] = {
    JobEvent: "Server-sent events. Each has an `id`, which a client sends back as `Last-Event-ID` to continue after "
    "it, an `event` (`job.submitted`, `job.running`, ...), and as its `data` a `JobEvent` in JSON. With `changes` "
    'there are `changed`, too, without an id, whose `data` is `{"kinds": [...]}`: what to read again.',
    ExecEvent: "Server-sent events. Each has an `event` (`started`, `output`, `notice`, `exit`), and as its `data` an "
    "`ExecEvent` in JSON. A stream that ends without `exit` has lost its command.",
}
TAGS = {
    "jobs": "Submit, inspect and control training jobs.",
    "events": "Follow what happens to jobs.",
    "footprint": "Energy and emissions, and whether the ledger adds up.",
    "nodes": "The machines with the GPUs.",
    "policies": "Which policy decides, and what it decided.",
    "carbon": "Grid carbon intensity by zone.",
    "carbon-aware": "The Green Software Foundation's Carbon Aware API. With `GATEWAY_OPEN_EMISSIONS` no key is needed.",
    "cells": "Other installations that run jobs of this one.",
    "reservations": "GPUs for a tenant for a time, and maintenance of nodes.",
    "grid": "Orders of the grid to draw less, and what came of them.",
    "optimizer": "Optimization problems that take seconds to minutes to solve.",
    "pools": "Model servers, planned and kept running.",
    "apps": "Applications with variants of different accuracy, on fleets of GPUs cut into slices.",
    "endpoints": "Model servers of others, to which the router sends requests too.",
    "simulations": "What policies would have done with past jobs.",
    "metrics": "Figures of all processes, for Prometheus.",
    "inputs": "What jobs are given: secrets, and archives of their files.",
    "access": "Tenants, API keys and the audit log.",
    "webhooks": "Messages about jobs, budgets and nodes, posted to an address of yours.",
}


MESSAGES: dict[str, type[BaseModel]] = {
    "job.started": JobStartedMessage,
    "job.ended": JobEndedMessage,
    "budget.exceeded": BudgetExceededMessage,
    "node.lost": NodeLostMessage,
    "ping": PingMessage,
}
MESSAGE_HEADERS = {
    ID_HEADER: "The message's id, the same each time that it is sent.",
    TIMESTAMP_HEADER: "When it is sent, in seconds since 1970-01-01T00:00:00Z.",
    SIGNATURE_HEADER: "`v1,` and the HMAC-SHA256, in base64, of `id.timestamp.body`; several are separated by spaces.",
}


def examples() -> Schema:
    """Return examples of ``parameters`` in paths by their names, and of ``models`` by theirs."""
    return json.loads((Path(services.contracts.__file__).parent / "examples.json").read_text(encoding="utf-8"))


EXAMPLES = examples()


def describe(version: str, operations: Sequence[Operation]) -> Schema:
    """Return the description: by the order of tags, and in each by that of the services' routers."""
    models = _Models(operations)
    paths: Schema = {}
    for each in sorted(operations, key=lambda operation: list(TAGS).index(operation.route.tag)):
        paths.setdefault(each.route.path, {})[each.route.method.lower()] = _operation(each, models)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Wattshift",
            "version": version,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"apiKey": []}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "webhooks": {kind: _webhook(kind, model, models) for kind, model in MESSAGES.items()},
        "components": {
            "schemas": models.schemas,
            "responses": {f"Problem{status}": _problem_response(status, text) for status, text in PROBLEMS.items()},
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer", "description": "An API key: `Bearer ws_...`"}
            },
        },
    }


class _Models:
    """The models of all routes, as schemas of one set of components."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [(Problem, "serialization")]
        wanted.extend((message, "serialization") for message in MESSAGES.values())
        for each in operations:
            wanted.extend((model, "validation") for model in _models_in(each.body))
            wanted.extend((model, "serialization") for model in _models_in(each.answer or each.data))
        unique = list(dict.fromkeys(wanted))
        self._names, definitions = models_json_schema(unique, ref_template="#/components/schemas/{model}")
        self.schemas: Schema = definitions.get("$defs", {})
        taken_in = {self._name(model, "validation") for model, mode in unique if mode == "validation"}
        for name, schema in self.schemas.items():
            if name not in taken_in and not _is_part_of_input(name, taken_in, self.schemas):
                schema.pop("additionalProperties", None)  # answers gain fields; a client must not choke on them

    def _name(self, model: type[BaseModel], mode: JsonSchemaMode) -> str:
        return self._names[model, mode]["$ref"].rsplit("/", 1)[1]

    def schema(self, kind: Any, mode: JsonSchemaMode) -> Schema:
        """Return a reference to a model, or the schema of a list or mapping of models."""
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return dict(self._names[kind, mode])
        return _with_references(TypeAdapter(kind).json_schema(mode=mode, ref_template="#/components/schemas/{model}"))


def _models_in(kind: Any) -> list[type[BaseModel]]:
    if kind is None:
        return []
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for argument in getattr(kind, "__args__", ()) for model in _models_in(argument)]


def _with_references(schema: Schema) -> Schema:
    schema.pop("$defs", None)
    return schema


def _is_part_of_input(name: str, taken_in: set[str], schemas: Schema) -> bool:
    """Return whether an input model refers to the schema, directly or through others."""
    seen: set[str] = set()
    waiting = list(taken_in)
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        waiting += re.findall(r"#/components/schemas/([\w.-]+)", str(schemas.get(current, "")))
    return name in seen


def _operation(operation: Operation, models: _Models) -> Schema:
    described: Schema = {
        "operationId": operation.route.operation,
        "summary": operation.summary,
        "tags": [operation.route.tag],
        "parameters": [*_path_parameters(operation), *_query_parameters(operation), *_header_parameters(operation)],
        "responses": _responses(operation, models),
    }
    if text := " ".join(part for part in (operation.detail, _AUDIENCE[operation.route.role]) if part):
        described["description"] = text
    if operation.body is not None:
        content: Schema = {"schema": models.schema(operation.body, "validation")}
        if example := EXAMPLES["models"].get(operation.body.__name__):
            content["example"] = example
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    return described


def _webhook(kind: str, message: type[BaseModel], models: _Models) -> Schema:
    content: Schema = {"schema": models.schema(message, "serialization")}
    if example := EXAMPLES["models"].get(message.__name__):
        content["example"] = example
    described: Schema = {
        "operationId": f"receive_{kind.replace('.', '_')}",
        "summary": (message.__doc__ or "").strip(),
        "tags": ["webhooks"],
        "parameters": [
            {"name": name, "in": "header", "required": True, "description": text, "schema": {"type": "string"}}
            for name, text in MESSAGE_HEADERS.items()
        ],
        "requestBody": {"required": True, "content": {JSON: content}},
        "responses": {"2XX": {"description": "It is accepted; every other answer has it sent again later."}},
    }
    return {"post": described}


def _path_parameters(operation: Operation) -> list[Schema]:
    pattern = "^[A-Za-z0-9][A-Za-z0-9._~:-]{0,254}$"
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": pattern},
            "example": EXAMPLES["parameters"][name],
        }
        for name in re.findall(r"{(\w+)}", operation.route.path)
    ]


def _query_parameters(operation: Operation) -> list[Schema]:
    if operation.query is None:
        return []
    schema = operation.query.model_json_schema(ref_template="#/components/schemas/{model}")
    inlined = _inline(schema, schema.get("$defs", {}))
    found: list[Schema] = []
    for name, field in inlined["properties"].items():
        parameter: Schema = {"name": name, "in": "query", "required": name in inlined.get("required", [])}
        if text := field.pop("description", None):
            parameter["description"] = text
        found.append({**parameter, "schema": _without_null(field)})
    return found


def _inline(schema: Any, definitions: Schema) -> Any:
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if reference := schema.get("$ref"):
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        return {**_inline(definitions[reference.rsplit("/", 1)[1]], definitions), **rest}
    return {name: _inline(value, definitions) for name, value in schema.items() if name not in ("$defs", "title")}


def _without_null(field: Schema) -> Schema:
    """Return the schema of a parameter that is present: one that is null is left out of the URL instead."""
    kinds = [kind for kind in field.pop("anyOf", []) if kind != {"type": "null"}]
    if field.get("default", 0) is None:
        field.pop("default")
    return {**field, **kinds[0]} if len(kinds) == 1 else {**field, "anyOf": kinds} if kinds else field


def _header_parameters(operation: Operation) -> list[Schema]:
    return [
        {"name": NAMES[name], "in": "header", "required": False, "description": text, "schema": schema}
        for name in operation.headers
        for text, schema in [HEADERS[name]]
    ]


def _responses(operation: Operation, models: _Models) -> Schema:
    success: Schema = {"description": HTTPStatus(operation.status).phrase, "headers": _answer_headers(operation)}
    if operation.route.media == EVENTS:
        success["content"] = {EVENTS: _event_stream(operation, models)}
    elif operation.route.media == TEXT:
        success["content"] = {TEXT: {"schema": {"type": "string"}}}
    elif operation.data is not None:
        line = models.schema(operation.data, "serialization")
        text: Schema = {"type": "string"}
        success["content"] = {
            LINES: {"schema": {**text, "x-columns": list(operation.data.model_fields)}},
            LINE_MEDIA["jsonl"]: {"schema": {**text, "x-line": line}},
        }
    elif operation.answer is not None:
        content: Schema = {"schema": models.schema(operation.answer, "serialization")}
        if operation.query is not None and FIELDS in operation.query.model_fields:
            content["schema"] = {"anyOf": [content["schema"], SLIM]}
        if example := EXAMPLES["models"].get(getattr(operation.answer, "__name__", "")):
            content["example"] = example
        success["content"] = {JSON: content}
    responses: Schema = {str(operation.status): success}
    refused = sorted({*PROBLEMS} - ({413, 415} if operation.body is None else set()))
    for code in refused:
        responses[str(code)] = {"$ref": f"#/components/responses/Problem{code}"}
    for status, meaning in operation.statuses.items():
        if status >= 400:
            responses[str(status)] = _problem_response(status, meaning)
        elif status in (200, 201):
            responses[str(status)] = {**success, "description": meaning}
        else:
            responses[str(status)] = {"description": meaning}
    return dict(sorted(responses.items()))


def _event_stream(operation: Operation, models: _Models) -> Schema:
    """Return a string, as generated clients read it: most of them have no notion of an event stream."""
    assert operation.data is not None
    schema: Schema = {
        "type": "string",
        "description": EVENT_STREAMS[operation.data],
        "contentMediaType": EVENTS,
        "x-event-data": models.schema(operation.data, "serialization"),
    }
    return {"schema": schema, "example": EXAMPLES["models"][operation.data.__name__]}


def _answer_headers(operation: Operation) -> Schema:
    headers: Schema = {
        REQUEST_ID_HEADER: {
            "description": "Identifies the request in our logs.",
            "schema": {"type": "string"},
        },
    }
    if operation.route.to is Upstream.GATEWAY and operation.body is not None:
        headers |= SUBMISSION_HEADERS
    if "if-none-match" in operation.headers or (operation.answer is Pool and operation.status == 200):
        headers["ETag"] = {"description": "Identifies this version of the answer.", "schema": {"type": "string"}}
    if operation.route.media == TEXT and operation.route.to is not Upstream.GATEWAY:
        headers |= {name: {"description": text, "schema": {"type": "string"}} for name, text in LOG_HEADERS.items()}
    return headers


def _problem_response(status: int, text: str) -> Schema:
    described: Schema = {
        "description": text,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    if status in (429, 503):
        described["headers"] = {
            "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
        }
    return described
