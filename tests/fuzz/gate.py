"""The public API, asked by everybody: who has no key is answered nothing, and a refusal changes nothing.

Every operation is about objects of `acme` that are there. Another tenant sees nothing of them and changes nothing of
them, whatever it is answered; a key never does more than its role. The admin asks in `operations.py`.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case

from gateway.routes import Route, read_routes
from services.contracts.identity import Role
from services.contracts.serving import PLANNER
from services.simulator.service import OWNER
from tests.fuzz.asking import BODIES, CONFIG, DESCRIBED, FOLLOWED, JSON, MOST, WORDS, ask, assert_answered
from tests.fuzz.world import MARKER, World
from tests.support.api_examples import EXAMPLES

BY_OPERATION = {(route.method, route.path): route for route in read_routes()}
ROLES = {"a reader": Role.READ_ONLY, "a user": Role.USER, "another tenant": Role.USER, "an operator": Role.OPERATOR}
KEPT = {
    "api_keys": "last_used_at",
    "apps": "planned_revision, plan_id, target",
    "audit_log": "",
    "budgets": "month, used, exceeded, detail",
    "fleets": "assignment, failures, retry_at",
    "gpu_partitions": "state, detail, applied_at",
    "job_arrays": "",
    "jobs": "state, reason, detail, expected_start_at, generation, preemptions, restarts, exit_code, attained_gpu_s, "
    "queued_at, started_at, ended_at, not_before, node_losses, gated, bound_to, cell",
    "model_endpoints": "",
    "node_credentials": "",
    "node_enrolments": "",
    "pool_traffic": "",
    "pools": "plan_id, planned_at",
    "scheduler_state": "memory, version, last_active_at",
    "secrets": "",
    "simulation_submissions": "",
    "simulations": "attempts, claim, enqueued_at",
    "solve_submissions": "",
    "solves": "attempts, claim, enqueued_at",
    "submissions": "",
    "tenants": "",
    "upload_chunks": "",
    "uploads": "",
    "users": "",
    "webhooks": "failures, failing_since, paused_until, disabled_at, disabled_reason",
}
"""Tables that requests write, and their columns that processes write by themselves, too.

Without `simulation_inputs`, and what is `THEIR_OWN`: the simulator compares policies to explain a job, and plans of
pools and fleets are solved.
"""
THEIR_OWN = (OWNER.tenant_id, PLANNER.tenant_id)
ENDS_IT = ("/cancel", "/hold", "/rotate", "/revoke")
schema = schemathesis.openapi.from_dict(DESCRIBED, config=CONFIG)


class Kept:
    """What the database has of all that requests write."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()  # tests here are not asynchronous, and the installation's loop rests
        self._connection = self._loop.run_until_complete(asyncpg.connect(url))
        columns = self._loop.run_until_complete(
            self._connection.fetch("SELECT table_name FROM information_schema.columns WHERE column_name = 'tenant_id'")
        )
        of_tenants = {row["table_name"] for row in columns}
        self._query = " UNION ALL ".join(
            f"SELECT '{name}' AS what, {'tenant_id' if name in of_tenants else '$$'}, count(*), "
            f"sum(hashtextextended((to_jsonb(t) - '{{{left_out}}}'::text[])::text, 0)) FROM {name} t "
            "WHERE to_jsonb(t) ->> 'deleted_at' IS NULL GROUP BY 2"  # what is being deleted goes by itself
            for name, left_out in KEPT.items()
        ).replace("$$", "''")

    def now(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return how many rows there are, and a hash of them, by table and tenant."""
        rows = self._loop.run_until_complete(self._connection.fetch(self._query))
        return {(row[0], row[1] or ""): (row[2], row[3]) for row in rows if row[1] not in THEIR_OWN}

    def close(self) -> None:
        """Disconnect."""
        self._loop.run_until_complete(self._connection.close())
        self._loop.close()


@pytest.fixture(scope="module")
def kept(world: World) -> Iterator[Kept]:
    found = Kept(world.stack.environment["DATABASE_URL"])
    yield found
    found.close()


def test_the_kept_are_tables_and_see_a_change(kept: Kept, world: World) -> None:
    """Nothing that this file relies on is always equal."""
    before = kept.now()
    spec = {"name": "one", "command": ["true"], "hold": True}
    sent = {"method": "POST", "url": f"{world.stack.gateway_url}/v1/jobs", "json": spec}
    assert ask(world.session, sent, world.somebody["another tenant"]).status_code == 201
    now = kept.now()
    changed = {key for key in {*before, *now} if before.get(key) != now.get(key)}
    assert ("jobs", "umbra") in changed
    assert not any(tenant == "acme" for _, tenant in changed)
    assert {table for table, _ in now} >= {"jobs", "secrets", "uploads", "webhooks", "budgets", "solves", "simulations"}


@schema.parametrize()
@settings(max_examples=MOST, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_nobody_is_answered_more_than_the_key_allows(case: Case, world: World, kept: Kept) -> None:
    if case.path in FOLLOWED and isinstance(case.query, dict):
        case.query["follow"] = "false"
    route = BY_OPERATION[case.method, case.path]
    made_up = dict(case.path_parameters or {})
    sent = case.as_transport_kwargs(base_url=world.stack.gateway_url)
    theirs = sent | {"url": world.stack.gateway_url + filled(case.path, {**made_up, **world.objects})}
    Asking(world, kept, route, theirs, own(sent, route, made_up, world)).hold()


def own(sent: dict[str, Any], route: Route, made_up: dict[str, Any], world: World) -> dict[str, Any]:
    """Return what those ask who may: about the same, but where it would end what the others ask about."""
    is_end = route.method == "DELETE" or route.path.endswith(ENDS_IT)
    known = {} if is_end else {**world.objects, "job_id": world.held_job}
    return sent | {"url": world.stack.gateway_url + filled(route.path, {**made_up, **known})}


def filled(template: str, values: dict[str, Any]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: quote(str(values[found[1]]), safe=""), template)


class Asking:
    """One request, by everybody."""

    def __init__(self, world: World, kept: Kept, route: Route, theirs: dict[str, Any], own: dict[str, Any]) -> None:
        self._world, self._kept, self._route = world, kept, route
        self._theirs, self._own = theirs, own
        self._asked = f"{route.method} {theirs['url'][:300]} {str(theirs.get('json', theirs.get('data')))[:200]}"

    def hold(self) -> None:
        """See that each gets no more than is theirs."""
        at_first = self._kept.now()
        for who, headers in self._world.nobody_at_the_gate.items():
            answer = ask(self._world.session, self._theirs, headers)
            assert_answered(answer, f"{self._asked}, {who}")
            assert answer.status_code in (401, 404, 414), (self._asked, who, answer.text)
            assert answer.status_code != 404 or "There is no such" not in answer.text, (self._asked, who, answer.text)
        before = self._kept.now()
        self._assert_same(at_first, before, "nobody")
        for who in ROLES:
            before = self._of(who, before)

    def _of(self, who: str, before: dict[Any, Any]) -> dict[Any, Any]:
        """Have one ask who has a key; return what is kept afterwards."""
        sent = self._theirs if who == "another tenant" else self._own
        answer = ask(self._world.session, sent, self._world.somebody[who])
        assert_answered(answer, f"{self._asked}, {who}")
        now, method = self._kept.now(), self._route.method
        if not ROLES[who].may(method, self._route.role):
            assert answer.status_code in (403, 404, 414), (self._asked, who, answer.text)
        if answer.status_code >= 400 or method == "GET":
            self._assert_same(before, now, who)
        if who == "another tenant":
            assert MARKER not in answer.text or MARKER in str(sent), (self._asked, answer.text)
            known = set(ID.findall(answer.text)) & set(self._world.objects.values())
            assert known <= set(ID.findall(str(sent))), (self._asked, answer.text)
            self._assert_same(_of_acme(before), _of_acme(now), who)
        return now

    def _assert_same(self, before: dict[Any, Any], now: dict[Any, Any], who: str) -> None:
        changed = {key for key in {*before, *now} if before.get(key) != now.get(key)}
        assert not changed, (self._asked, who, changed)


def _of_acme(kept: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    return {key: value for key, value in kept.items() if key[1] == "acme"}


SAME = ("fleet", "number")  #: Names of what others may see, too, and a number
OF_TENANTS = [route for route in read_routes() if route.role is Role.USER and "{zone}" not in route.path]
ID = re.compile(r"[a-z]+_[0-9a-z]{26}")


def test_a_tenant_has_one_of_everything_that_paths_name(world: World) -> None:
    named = {name for route in OF_TENANTS for name in re.findall(r"\{(\w+)\}", route.path)}
    assert named - {*world.objects} == {"session_id"}, "which is known while its command runs"


@pytest.mark.parametrize("route", OF_TENANTS, ids=lambda route: route.operation)
def test_what_is_another_tenants_is_answered_as_what_is_not_there(route: Route, world: World, kept: Kept) -> None:
    """Also with an id or a cursor of it that was guessed right."""
    described = DESCRIBED["paths"][route.path][route.method.lower()]
    query = {each["name"] for each in described["parameters"] if each["in"] == "query"}
    asked = {"follow": "false"} if "follow" in query else {}
    schema = described.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    body = EXAMPLES.get(schema.get("$ref", "").rpartition("/")[2], {}) if route.has_body else None
    if route.operation == "put_app":
        return  # names of applications are all tenants': that one is taken is said
    missing = {name: made_up(value) for name, value in world.objects.items()} | {
        name: world.objects[name] for name in SAME
    }

    def ask_as(who: str, names: dict[str, str], **more: str) -> requests.Response:
        url = world.stack.gateway_url + filled(route.path, {"session_id": "x" * 26, **names})
        sent = {"method": route.method, "url": url, "params": {**asked, **more}, "json": body}
        return ask(world.session, sent, world.somebody[who])

    before = kept.now()
    if "{" in route.path:
        theirs, none = ask_as("another tenant", world.objects), ask_as("another tenant", missing)
        assert (theirs.status_code, plain(theirs, world.objects)) == (none.status_code, plain(none, missing))
    if "cursor" in query:
        page = ask_as("a user", world.objects, limit="1").json()
        cursors = [page["next_cursor"] or world.objects["webhook_id"], *world.objects.values()]
        for cursor in cursors:
            theirs, none = (ask_as("another tenant", world.objects, cursor=each) for each in (cursor, made_up(cursor)))
            assert (theirs.status_code, plain(theirs)) == (none.status_code, plain(none)), (route.path, cursor)
    assert _of_acme(before) == _of_acme(kept.now())


def made_up(value: str) -> str:
    """Return what could be one more of its kind."""
    return value[:-1] + ("1" if value.endswith("0") else "0")


def plain(answer: requests.Response, named: dict[str, str] | None = None) -> str:
    """Return an answer without what it was asked about, and when it was."""
    text = answer.text
    for name, value in sorted((named or {}).items(), key=lambda each: -len(each[1])):
        text = text.replace(value, f"({name})") if len(value) > 4 else text
    text = text.replace('"version":2', '"version":1')  # of a secret that it has twice
    return re.sub(r'"(request_id|\w+_at|\w*now)":("[^"]*"|null)', "", text)


@pytest.mark.parametrize("route", read_routes(), ids=lambda route: route.operation)
def test_hostile_words_and_bodies_are_refused_and_change_nothing(route: Route, world: World, kept: Kept) -> None:
    known = filled(route.path, defaultdict(lambda: "nothing"))
    tries = [(re.sub(r"\{\w+\}", word, route.path), b"") for word in WORDS if "{" in route.path]
    tries += [(known, body) for body in BODIES] if route.has_body else []
    parameters = DESCRIBED["paths"][route.path][route.method.lower()]["parameters"]
    query = [each["name"] for each in parameters if each["in"] == "query"]
    tries += [(f"{known}?{name}={WORDS[0]}&follow=false", b"") for name in query]
    before = kept.now()
    for where, body in tries:
        sent = {"method": route.method, "url": world.stack.gateway_url + where, "data": body, "headers": JSON}
        answer = ask(world.session, sent, world.admin)
        assert_answered(answer, f"{route.method} {where[:200]} {body[:50]!r}")
        now = kept.now()
        assert answer.status_code < 400 or now == before, (route.operation, where[:200], body[:50])
        before = now
