"""The router's doors, asked by everybody: models by OpenAI's API, applications by the Open Inference Protocol and HTTP.

What a router refuses reaches no server, and nobody reaches a server of another tenant. A router writes nothing, so that
what its servers saw is all that a request can have changed.

The router passes requests on as they are and has no description of its own; the one below says what it reads of them.
Servers here refuse what they cannot read, as real ones do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from aiohttp import web
from hypothesis import HealthCheck, settings
from schemathesis import Case

from services.contracts.identity import Role
from tests.fuzz.asking import BODIES, CONFIG, JSON, MOST, WORDS, ask, bearer
from tests.gateway.peer import a_peer
from tests.support.app_instances import APP, InstanceServer, a_routed_app, a_routed_instance, instance_servers
from tests.support.routers import MODEL, ModelServer, a_key, a_plane, a_routed_pool, a_routed_server, a_router
from tests.support.services import TOKEN

OPEN = {"/v2", "/v2/health/live", "/v2/health/ready", "/healthz", "/readyz"}
"""What everybody may ask: whether the router itself is there."""
OPERATORS = {"/metrics", "/status"}
REFUSED_BY_SERVER = "a server refuses this"

MODELS = {"enum": [MODEL, "another", ""]}
COUNT = {"type": "integer"}
COMMON = {
    "model": MODELS,
    "stream": {"type": "boolean"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    **dict.fromkeys(("n", "max_tokens", "max_completion_tokens", "priority"), COUNT),
    "store": {"type": "boolean"},
    "tools": {"type": "array", "items": {}},
}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
MESSAGE = {"type": "object", "properties": {"role": {"type": "string"}, "content": CONTENT}}
PROMPT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": ["string", "integer", "array"]}}]}
OBJECT = {"type": "object", "properties": COMMON, "required": ["model"]}


def _operation(*names: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"responses": {"default": {"description": "-"}}}
    found["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found


def _asked(**properties: Any) -> dict[str, Any]:
    return _operation(body={**OBJECT, "properties": {**COMMON, **properties}})


DESCRIBED = {
    "openapi": "3.1.0",
    "info": {"title": "router", "version": "1"},
    "paths": {
        **{path: {"get": _operation()} for path in ("/v1/models", *sorted(OPEN | OPERATORS))},
        "/v1/models/{model}": {"get": _operation("model")},
        "/v1/chat/completions": {"post": _asked(messages={"type": "array", "items": MESSAGE})},
        "/v1/completions": {"post": _asked(prompt=PROMPT)},
        "/v1/embeddings": {"post": _asked(input=PROMPT)},
        "/v2/models/{app}": {"get": _operation("app")},
        "/v2/models/{app}/ready": {"get": _operation("app")},
        "/v2/models/{app}/infer": {"post": _operation("app", body={"type": "object"})},
        "/v2/models/{app}/versions/{version}/infer": {"post": _operation("app", "version", body={"type": "object"})},
        "/apps/{app}/{rest}": {
            method: _operation("app", "rest", body=None if method == "get" else {"type": "object"})
            for method in ("get", "post", "put", "patch", "delete")
        },
    },
}
schema = schemathesis.openapi.from_dict(DESCRIBED, config=CONFIG)
OPERATIONS = [(method.upper(), path) for path, methods in DESCRIBED["paths"].items() for method in methods]
ALL = settings(
    max_examples=MOST, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


class Fussy(ModelServer):
    """A model server that refuses what it cannot read."""

    async def _complete(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        try:
            return await super()._complete(request, asked)
        except (AttributeError, IndexError, KeyError, TypeError):
            return web.json_response({"error": {"message": REFUSED_BY_SERVER}}, status=400)


NOBODY = {
    "nobody": {},
    "a stranger": bearer("ws_" + "x" * 43),
    "a service": bearer(TOKEN),
    "one of another scheme": {"authorization": "Basic YTpi"},
    "one who says who they are": {"x-wattshift-tenant": "acme", "x-wattshift-role": "admin"},
}
SOMEBODY = {
    "a reader": bearer(a_key("acme", Role.READ_ONLY)),
    "a user": bearer(a_key("acme")),
    "another tenant": bearer(a_key("umbra")),
    "an operator": bearer(a_key("ops", Role.OPERATOR)),
}


@dataclass
class World:
    """A router with a pool and an application of ``acme``, and who may ask and who may not."""

    url: str
    model: ModelServer
    instance: InstanceServer
    session: requests.Session = field(default_factory=requests.Session)

    @property
    def seen(self) -> int:
        """How many requests have reached a server."""
        return len(self.model.seen) + len(self.instance.seen)

    def hold(self, sent: dict[str, Any], path: str) -> None:
        """Have everybody ask, and see that each gets no more than is theirs."""
        method, asked = sent["method"], f"{sent['method']} {sent['url'][:300]} {str(sent.get('data'))[:100]}"
        for who, headers in NOBODY.items():
            before = self.seen
            answer = self._ask(sent, headers, path, f"{asked}, {who}")
            allowed = {200, 404, 405} if path in OPEN else {401, 404, 405}  # a path that names nothing is 404 to all
            assert answer.status_code in allowed, (asked, who, answer.text)
            assert self.seen == before, (asked, who)
        for who, headers in SOMEBODY.items():
            before = self.seen
            answer = self._ask(sent, headers, path, f"{asked}, {who}")
            if answer.status_code >= 400 and REFUSED_BY_SERVER not in answer.text:
                assert self.seen == before, (asked, who, answer.text)
            if who == "a reader" and method not in ("GET", "HEAD"):
                assert answer.status_code in (403, 404, 405), (asked, who, answer.text)
                assert self.seen == before, (asked, who)
            if who == "another tenant":
                assert self.seen == before, (asked, who)
                assert "acme" not in answer.text, (asked, who)
                assert path in OPEN or answer.status_code >= 400 or answer.json().get("data") == [], (asked, who)
            if path in OPERATORS:
                assert answer.status_code == (200 if who == "an operator" else 403), (asked, who, answer.text)

    def _ask(self, sent: dict[str, Any], headers: dict[str, str], path: str, asked: str) -> requests.Response:
        answer = ask(self.session, sent, headers)
        assert answer.status_code < 500, (asked, answer.text)
        if answer.status_code >= 400 and REFUSED_BY_SERVER not in answer.text:
            error = answer.json()
            said = error["detail"] if path.startswith("/apps/") else error["error"]
            assert said if isinstance(said, str) else said["message"], (asked, answer.text)
        return answer


@pytest.fixture(scope="module")
def world(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A router in a thread of its own: what schemathesis calls is not asynchronous."""
    ready, found = threading.Event(), list[World]()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(_run(redis_url, tmp_path_factory.mktemp("router"), found, ready, end))
    )
    thread.start()
    try:
        while not ready.wait(0.1):
            assert thread.is_alive(), "the router did not start"
        yield found[0]
    finally:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


async def _run(redis_url: str, folder: Path, found: list[World], ready: threading.Event, end: asyncio.Event) -> None:
    model = Fussy()
    async with a_plane() as (plane, url), a_peer(model.answer) as model.url, instance_servers("one") as (instance,):
        plane.pools, plane.servers = [a_routed_pool()], [a_routed_server(model)]
        plane.apps, plane.app_servers = [a_routed_app()], [a_routed_instance(instance)]
        async with a_router(plane, url, redis_url, folder) as running:
            await running.adopted()
            found.append(World(running.url, model, instance))
            ready.set()
            await end.wait()


# The router's thread shares Python's generator of random numbers with Hypothesis, which notices; no strategy uses it.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@schema.parametrize()
@ALL
def test_everybody_gets_what_is_theirs(case: Case, world: World) -> None:
    parameters = case.path_parameters or {}
    for name, known in (("app", APP), ("model", MODEL)):
        if name in parameters and len(str(parameters[name])) % 2 == 0:
            parameters[name] = known
    sent = case.as_transport_kwargs(base_url=world.url)
    world.hold(sent, case.path)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_hostile_words_and_bodies_are_refused(method: str, path: str, world: World) -> None:
    known = path.replace("{app}", APP).replace("{model}", MODEL).replace("{version}", "1").replace("{rest}", "x")
    tries = [(path.replace("{", "").replace("}", ""), b"")]
    tries += [(known.replace(name, word), b"{}") for name in (APP, MODEL) for word in WORDS if name in known]
    if method in ("POST", "PUT", "PATCH"):
        tries += [(known, body) for body in (*BODIES, *HOSTILE)]
    for where, body in tries:
        world.hold({"method": method, "url": world.url + where, "data": body, "headers": JSON}, path)


HOSTILE = tuple(
    b'{"model": "%s", %s}' % (MODEL.encode(), rest)
    for rest in (
        *(b'"messages": 1', b'"messages": [[]]', b'"messages": [{"content": {"a": 1}}]', b'"prompt": [[1], "x", null]'),
        *(b'"n": 1e400', b'"n": -1', b'"n": %d' % 10**30, b'"max_tokens": %d' % 10**30, b'"max_tokens": -1'),
        *(b'"max_tokens": NaN', b'"stream": "yes"', b'"stream_options": []', b'"stream": true, "stream_options": 1'),
        *(b'"tools": {}', b'"tools": ' + b"[" * 300 + b"]" * 300, b'"model": "\\u0000"', b'"model": {}'),
        *(
            b'"prompt": "\\ud800"',
            b'"input": ' + b"[" * 100_000,
            b'"priority": "first"',
            b'"messages": "%s"' % (b"x" * 10**6),
        ),
    )
)


def test_the_router_stands(world: World) -> None:
    """After all that it answers as before."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    sent = {"method": "POST", "url": f"{world.url}/v1/chat/completions", "json": asked}
    assert ask(world.session, sent, bearer(a_key())).json()["choices"]
    inferred = {"method": "POST", "url": f"{world.url}/v2/models/{APP}/infer", "json": {"id": "1", "inputs": []}}
    assert ask(world.session, inferred, bearer(a_key())).status_code == 200
