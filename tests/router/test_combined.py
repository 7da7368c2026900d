"""Pools, registered servers, models and tenants in any combination: who is sent to which server."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.identity import Identity, KeyLimits, Role
from services.contracts.routing import RoutedClass, RoutedPool, RoutedServer, RoutingTable
from services.contracts.served_models import ServedModels, servers_of
from services.core.policies.freesh.laxity import ServingRequest
from services.core.policies.freesh.server_choice import Work
from services.router.fleet import Fleet, Server
from services.router.lanes import LaneRules, Lanes, Ticket
from tests.router.conftest import Stage, error_of
from tests.support.app_instances import until
from tests.support.routers import Running, a_key, a_routed_pool, a_routed_server, chat

TENANTS, MODELS, CLASSES = ("acme", "umbra", "zeta"), ("base", "lora", "other"), ("SS", "LL")

tenants = st.sampled_from(TENANTS)
owners = st.fixed_dictionaries(
    {"tenant_id": tenants, "tenants": st.lists(st.sampled_from([*TENANTS, "*"]), max_size=2, unique=True)}
)
models = st.lists(st.sampled_from(MODELS), min_size=1, unique=True)
instances = st.lists(st.sampled_from([*CLASSES, None]), max_size=2)


@st.composite
def tables(draw: st.DrawFn) -> RoutingTable:
    pools: list[RoutedPool] = []
    servers: list[RoutedServer] = []

    def add(name: str, **more: Any) -> None:
        known: dict[str, Any] = {
            "url": f"http://127.0.0.1:{len(servers) + 1}",
            "location": "here",
            "state": "ready",
            "capacity": 1,
        }
        servers.append(RoutedServer.model_validate({"id": name, **known, **more}))

    classes = [RoutedClass(name=each) for each in CLASSES]
    for number, (owner, named) in enumerate(draw(st.lists(st.tuples(owners, models), max_size=3))):
        taken = {model for pool in pools if pool.tenant_id == owner["tenant_id"] for model in pool.models}
        if free := [model for model in named if model not in taken]:  # one pool of a tenant serves a name
            known = {"name": f"pool-{number}", "models": free, "classes": classes, "input_tokens": 9}
            pools.append(RoutedPool.model_validate({**known, **owner}))
            for at, name in enumerate(draw(instances)):
                add(f"{number}-{at}", pool=f"pool-{number}", tenant_id=owner["tenant_id"], request_class=name)
    for number, (owner, named) in enumerate(draw(st.lists(st.tuples(owners, models), max_size=4))):
        add(f"endpoint:{number}", models=named, **owner)
    return RoutingTable(made_at=datetime(2026, 1, 1, tzinfo=UTC), pools=pools, servers=servers)


def plainly_may(table: RoutingTable, server: RoutedServer, model: str, caller: Identity) -> bool:
    """Whether a server may be sent a request for a model, by what its owner said."""
    owned = next((each for each in table.pools if each.name == server.pool), server)
    may = {owned.tenant_id, *owned.tenants}
    return model in owned.models and (caller.is_operator or bool(may & {caller.tenant_id, "*"}))


@given(tables())
def test_a_request_reaches_the_servers_that_its_caller_and_its_model_allow(table: RoutingTable) -> None:
    fleet, lanes = Fleet(), Lanes(LaneRules())
    fleet.adopt(table)
    callers = [Identity(tenant_id=each, key_id=each, role=Role.USER) for each in TENANTS]
    for caller in (*callers, Identity(tenant_id="acme", key_id="ops", role=Role.OPERATOR)):
        for model in MODELS:
            may = {each.id for each in table.servers if plainly_may(table, each, model, caller)}
            pool = fleet.pool_of(model, caller)
            if pool is None:
                assert not may, f"{caller} asks for {model} in vain"
                continue
            assert model in pool.spec.models
            reached: set[str] = set()
            for at, name in enumerate([*CLASSES, ""]):
                lane = lanes.of(pool, name)
                request = ServingRequest(f"r{at}", 0.0, 10.0, tenant=caller.tenant_id)
                ticket = Ticket(request, 60.0, {}, Work(10, 10.0), (model, caller), pool.is_mixed)
                taken: list[Server] = []
                everywhere = frozenset(each.origin.authority for each in fleet.every_server())
                carried = replace(ticket, request=replace(request), among=everywhere)  # as a gateway asks the picker
                while (server := lane.choose(ticket, 1e9)) is not None:  # each holds one
                    assert lane.choose(carried, 1e9) is server, "a gateway is told another one"
                    server.held += 1
                    taken.append(server)
                for server in taken:
                    server.held -= 1
                reached |= {each.id for each in taken}
            assert reached <= may, f"{caller} asks for {model}"
            of_pool = {each.id for each in table.servers if each.pool == pool.spec.name}
            own = {each.id for each in table.servers if each.pool is None and each.tenant_id == pool.spec.tenant_id}
            assert (of_pool | own) & may <= reached, f"{caller} asks for {model}"
            callers = {each.id for each in table.servers if each.pool is None and each.tenant_id == caller.tenant_id}
            assert not callers & may or callers & reached, f"{caller} asks for {model}, and has a server of its own"
            served = ServedModels(table.pools, table.servers)
            assert {each.id for each in servers_of(served, caller)[model]} == reached, "and batches count on them"


async def test_a_shared_pool_shares_no_server_that_its_tenant_keeps_to_itself(stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(models=["base", "lora"], tenants=["umbra"])]
    own = {"models": ["base"], "pool": None, "job_id": None, "gco2_per_kwh": 1.0}  # the cleanest by far
    stage.plane.servers = [a_routed_server(stage.one), a_routed_server(stage.two, "endpoint:own", **own)]
    async with stage.router() as router:
        await router.adopted()
        for model in ("base", "lora"):
            body = {"model": model, "messages": []}
            answers = [await router.ask(json=body, key=a_key("umbra")) for _ in range(4)]
            assert [each.status_code for each in answers] == [200] * 4
        assert len(stage.two.seen) == 0
        stage.plane.pools, stage.plane.servers = [], stage.plane.servers[1:]
        await router.adopted()
        assert (await router.ask(json={"model": "base", "messages": []})).status_code == 200
        refused = await router.ask(json={"model": "base", "messages": []}, key=a_key("umbra"))
        assert error_of(refused) == (404, "model_not_found")


@pytest.mark.parametrize("why", ["accuracy", "owner"])
async def test_who_may_only_go_to_a_server_of_another_class_gets_it_once_it_has_room(why: str) -> None:
    pool = {"pool": "chat", "tenant_id": "acme", "location": "here", "state": "ready", "capacity": 1}
    rows = [
        {"id": "endpoint:rough", "url": "http://127.0.0.1:1", "request_class": "SS", "accuracy_pct": 60, **pool},
        {"id": "fine", "url": "http://127.0.0.1:2", "request_class": "LL", "accuracy_pct": 90, **pool},
    ]
    if why == "owner":
        rows[0] |= {"pool": None, "models": ["base"], "tenant_id": "acme"}
    classes = [RoutedClass(name=each) for each in CLASSES]
    spec = {"name": "chat", "tenant_id": "acme", "tenants": ["umbra"], "models": ["base"], "classes": classes}
    table = {"made_at": datetime(2026, 1, 1, tzinfo=UTC), "pools": [spec], "servers": rows}
    fleet, lanes = Fleet(), Lanes(LaneRules())
    fleet.adopt(RoutingTable.model_validate(table))
    caller = Identity(tenant_id="umbra", key_id="k", role=Role.USER)
    known = fleet.pools["chat"]
    lane = lanes.of(known, "SS")
    asks = {"asks": ("base", caller), "is_mixed": known.is_mixed, "least_accuracy_pct": 80.0 * (why == "accuracy")}
    first, second = (
        Ticket(ServingRequest(name, 0.0, 10.0, tenant="umbra"), 60.0, {}, Work(10, 10.0), **asks) for name in "ab"
    )
    server = await lane.take(first, 60.0)
    assert server.id == "fine"
    waits = asyncio.ensure_future(lane.take(second, 60.0))
    await asyncio.sleep(0)
    lane.leave(first, server)
    lanes.room_at(server)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waits.done(), "it waits beside a server that would take it"
    assert (await waits).id == "fine"


STATES = ("ready", "ready", "draining", None)  #: Of a server; None: it is not in the table


class Routers:
    """Two routers before two servers that come, drain and go, and the requests of one key, which limits them."""

    PER_MIN = 60

    def __init__(self, stage: Stage, routers: list[Running], seed: int) -> None:
        self.stage, self.routers, self.draw = stage, routers, random.Random(seed)
        self.servers = {"instance_1": stage.one, "instance_2": stage.two}
        self.states: dict[str, str | None] = dict.fromkeys(self.servers, "ready")
        self.asked: dict[str, asyncio.Task[httpx.Response]] = {}
        self.left = set[str]()

    async def step(self) -> None:
        draw = self.draw
        match draw.choices(("ask", "leave", "state", "limits", "wait"), (60, 10, 15, 5, 20))[0]:
            case "ask":
                text = f"q{len(self.asked)}"
                self.stage.one.takes_s, self.stage.two.takes_s = draw.choice((0.0, 0.02)), draw.choice((0.0, 0.02))
                body = chat(text, stream=draw.random() < 0.5, max_tokens=draw.choice((5, 50)))
                self.asked[text] = asyncio.create_task(draw.choice(self.routers).ask(json=body))
            case "leave" if open_ := [text for text, task in self.asked.items() if not task.done()]:
                self.left.add(text := draw.choice(open_))
                self.asked[text].cancel()
            case "state":
                await self.state(draw.choice([*self.servers]), draw.choice(STATES))
            case "limits":
                for router in self.routers:
                    await router.router.shared_limits.look()
                    await router.router.peers.look()
            case _:
                await asyncio.sleep(draw.choice((0.0, 0.005, 0.03)))

    async def state(self, name: str, state: str | None) -> None:
        """Have a server drain, be lost or come back, and see that it gets nothing new while it does not serve."""
        self.states[name] = state
        self.stage.plane.servers = [
            a_routed_server(self.servers[each], each, state=there, capacity=4)
            for each, there in self.states.items()
            if there is not None
        ]
        for router in self.routers:
            await router.adopted()
        if state != "ready":
            server, under_way = self.servers[name], sum(self.held(router, name) for router in self.routers)
            most = len(server.seen) - server.held + under_way
            await asyncio.sleep(0.03)
            assert len(server.seen) <= most, "a server that does not serve gets something new"

    def held(self, router: Running, name: str) -> int:
        return sum(each.held for each in router.router.fleet.everyone() if each.id == name)

    async def end(self) -> None:
        for name in self.servers:
            await self.state(name, "ready")
        answers = dict(zip(self.asked, await asyncio.gather(*self.asked.values(), return_exceptions=True), strict=True))
        sent = Counter(
            json.loads(body)["messages"][0]["content"] for server in self.servers.values() for body in server.seen
        )
        for text, answer in answers.items():
            if text in self.left:
                continue
            assert isinstance(answer, httpx.Response), (text, answer)
            is_served = answer.status_code == 200
            assert sent[text] == is_served, (text, answer.status_code, "sent twice, or answered by nobody")
            assert is_served or answer.status_code in (429, 503), (text, answer.text)
        granted = sum(getattr(answer, "status_code", 200) == 200 for answer in answers.values())
        assert granted <= 2 * (self.PER_MIN + 10), "two routers' limit and a grant"
        everyone = [each for router in self.routers for each in router.router.fleet.everyone()]
        await until(lambda: not any(each.held for each in everyone))
        for router in self.routers:
            assert not router.router.gate.in_flight
            assert not router.router.gate.at_once.open, "a place is not given back"
            assert not any(len(lane.queue) for lane in router.router.lanes.all())
            assert (await router.ask(json=chat("after"), key=a_key("umbra"))).status_code in (200, 404)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 150), marks=pytest.mark.slow)], ids=["few", "many"])
async def test_servers_that_drain_and_go_lose_no_request_of_two_routers(stage: Stage, seeds: range) -> None:
    for seed in seeds:
        stage.one.seen.clear()
        stage.two.seen.clear()
        stage.plane.key_limits = KeyLimits(requests_per_min=Routers.PER_MIN, month_tokens=100_000)
        async with stage.router(preemptions=0) as one, stage.router(preemptions=0) as two:  # which send again
            routers = Routers(stage, [one, two], seed)
            try:
                await routers.state("instance_1", "ready")
                for _ in range(80):
                    await routers.step()
                await routers.end()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
