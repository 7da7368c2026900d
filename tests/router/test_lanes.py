"""Lanes by themselves: whatever happens in the turn in which a place falls free, no place is lost and none is idle."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.routing import RoutedPool
from services.core.policies.freesh.laxity import Order, ServingRequest
from services.core.policies.freesh.server_choice import Work
from services.router.fleet import Pool, Server
from services.router.lanes import Lane, LaneRules, Lanes, NoServerError, QueueFullError, Ticket
from tests.support.routers import ModelServer, a_routed_pool, a_routed_server

PATIENCE_S = 1.0


class Turns(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until it is moved."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def a_server(name: str, **known: Any) -> Server:
    return Server(a_routed_server(ModelServer(url="http://127.0.0.1:1"), name, **known), ())


class World:
    """A lane with its servers, and the requests that are in it.

    Attributes:
        inside: The requests that were given a server, by their names.
    """

    def __init__(self, order: Order = Order.FCFS, **capacities: int) -> None:
        found = [a_server(name, capacity=capacity) for name, capacity in capacities.items()]
        self.servers = {each.id: each for each in found}
        pool = Pool(RoutedPool.model_validate(a_routed_pool()), servers=found)
        self.lanes = Lanes(LaneRules(order=order))
        self.lane: Lane = self.lanes.of(pool, "")
        for each in found:
            each.lanes = [self.lane.name]
        self.inside: dict[str, str] = {}
        self.begun: list[str] = []
        self.tickets: dict[str, Ticket] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._done: dict[str, asyncio.Event] = {}

    def come(self, name: str, *excluded: str, patience_s: float = 1e6, due_s: float = math.inf) -> None:
        request = ServingRequest(name, float(len(self.tasks)), 10.0, excluded=frozenset(excluded), due_s=due_s)
        self.tickets[name] = Ticket(request, 60.0, {}, Work(10, 10.0))
        self._done[name] = asyncio.Event()
        self.tasks[name] = asyncio.get_running_loop().create_task(self._visit(name, patience_s))

    async def _visit(self, name: str, patience_s: float) -> None:
        ticket = self.tickets[name]
        try:
            server = await self.lane.take(ticket, patience_s)
        except (QueueFullError, NoServerError):
            return
        self.inside[name] = server.id
        self.begun.append(name)
        try:
            await self._done[name].wait()
        finally:
            del self.inside[name]
            self.lane.leave(ticket, server)
            server.breaker.abandoned(ticket)
            self.lanes.room_at(server)

    def end(self, name: str) -> None:
        self._done[name].set()

    def look(self) -> None:
        """Compare what the lane believes with who is where, once nothing moves."""
        held = {name: sum(at == name for at in self.inside.values()) for name in self.servers}
        assert {name: each.held for name, each in self.servers.items()} == held
        assert all(held[name] <= each.limit for name, each in self.servers.items())
        assert sum(self.lane.in_service.values()) == len(self.inside)
        assert set(self.lane.unanswered) == set(self.inside)
        waiting = {name for name, task in self.tasks.items() if not task.done()} - set(self.inside)
        assert {each.id for each in self.lane.queue} == waiting
        idle = [name for name in waiting if self.lane.choose(self.tickets[name], 1e9) is not None]
        assert not idle, f"{idle} wait beside a server that would take them"

    async def close(self) -> None:
        """Have all requests end; whoever waits is served on the way."""
        for _ in range(2 * len(self.tasks)):
            for name in list(self.inside):
                self.end(name)
            await turns(6)
        self.look()
        assert not self.inside
        assert not len(self.lane.queue)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(story: Callable[[Turns], Awaitable[Any]]) -> None:
    loop = Turns()

    async def told() -> None:
        await story(loop)

    try:
        loop.run_until_complete(told())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(turns(6))
        loop.close()


def schedules(moments: int, most_turns: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield each order of a few events with each number of turns between them."""
    gaps = list(itertools.product(range(most_turns + 1), repeat=moments - 1))
    for order in itertools.permutations(range(moments)):
        for between in gaps:
            yield order, (*between, 8)


@pytest.mark.parametrize("is_ejected", [False, True], ids=["sound", "on trial"])
@pytest.mark.parametrize("leaves_by", ["cancel", "time-out"])
def test_no_place_is_lost_whenever_a_wait_ends_around_a_release(leaves_by: str, is_ejected: bool) -> None:
    for order, gaps in schedules(4, 2):

        async def story(loop: Turns, order: tuple[int, ...] = order, gaps: tuple[int, ...] = gaps) -> None:
            world = World(a=1)
            server = world.servers["a"]
            world.come("holder")
            await turns(2)
            world.come("leaves", patience_s=PATIENCE_S)
            world.come("stays")
            await turns(2)
            if is_ejected:  # its pause is over: the next that it is given is the trial
                server.breaker.opened_s = -1e6

            def leave() -> None:
                if leaves_by == "cancel":
                    world.tasks["leaves"].cancel()
                else:
                    loop.now_s += PATIENCE_S

            events: list[Callable[[], Any]] = [
                lambda: world.end("holder"),
                leave,
                lambda: world.tasks["stays"].cancel(),
                lambda: world.come("new"),
            ]
            for at, gap in zip(order, gaps, strict=True):
                events[at]()
                await turns(gap)
            world.look()
            await world.close()
            world.come("next")
            await turns(2)
            assert world.inside == {"next": "a"}
            await world.close()

        try:
            run(story)
        except AssertionError as error:
            pytest.fail(f"events {order}, turns between them {gaps}: {error}")


def test_a_preempted_request_takes_another_free_server_at_once() -> None:
    async def story(_: Turns) -> None:
        world = World(a=1)
        ticket = Ticket(ServingRequest("r", 0.0, 10.0), 60.0, {}, Work(10, 10.0))
        server = await world.lane.take(ticket, PATIENCE_S)
        world.lane.leave(ticket, server)
        again = asyncio.create_task(world.lane.take_again(ticket, PATIENCE_S))
        await turns(2)
        assert again.done()
        assert again.result() is server

    run(story)


def test_one_that_cannot_be_in_time_any_more_comes_last_and_takes_nobodys_place() -> None:
    async def story(_: Turns) -> None:
        world = World(Order.LLF, a=1)
        world.come("first")
        await turns(2)
        world.lane.unanswered["first"].connection = Aborted()  # type: ignore[assignment]
        world.tickets["first"].request.output_tokens = 1_000.0
        world.come("late", due_s=0.0)
        await turns(2)
        assert world.lane.preempted == 0
        world.come("in time")
        await turns(2)
        await world.close()
        assert world.begun == ["first", "in time", "late"]

    run(story)


class Aborted:
    def abort(self, _: Exception) -> None:
        pass


@pytest.mark.parametrize("order", [Order.FCFS, Order.LLF])
def test_one_that_no_free_server_may_take_holds_up_nobody(order: Order) -> None:
    async def story(_: Turns) -> None:
        world = World(order, a=2, b=1)
        world.come("at b", "a")
        await turns(1)
        world.come("failed at a", "a")
        await turns(2)
        for name in ("first", "second", "third", "fourth"):
            world.come(name)
            await turns(2)
        assert world.inside == {"at b": "b", "first": "a", "second": "a"}
        world.end("first")
        await turns(4)
        assert world.begun[-1] == "third"
        world.end("at b")
        await turns(4)
        assert world.inside["failed at a"] == "b"
        assert [each.id for each in world.lane.queue] == ["fourth"]
        await world.close()

    run(story)


def test_who_waits_for_a_server_that_is_gone_is_told_at_once_and_the_others_wait_on() -> None:
    async def story(_: Turns) -> None:
        world = World(a=1, b=1)
        world.come("at a", "b")
        world.come("at b", "a")
        await turns(2)
        world.come("failed at a", "a")
        world.come("any")
        await turns(2)
        pool = Pool(RoutedPool.model_validate(a_routed_pool()), servers=[world.servers["a"]])
        world.lane.serve(pool, "")
        world.lane.fail_waiting()
        await turns(2)
        assert world.tasks["failed at a"].done()
        assert [each.id for each in world.lane.queue] == ["any"]
        await world.close()

    run(story)


def test_only_what_the_head_may_use_is_taken_from_another_for_it() -> None:
    class Sent:
        ended = False

        def abort(self, _: Exception) -> None:
            self.ended = True

    async def story(_: Turns) -> None:
        world = World(Order.SRTF, a=1, b=1)
        sent: dict[str, Sent] = {}
        for name, excluded in (("at a", "b"), ("at b", "a")):
            world.come(name, excluded)
            await turns(1)
            world.tickets[name].request.output_tokens = 500.0
            world.tickets[name].connection = sent[name] = Sent()  # type: ignore[assignment]
        world.tickets["at a"].request.output_tokens = 900.0  # the first to go, if it were of use
        world.come("failed at a", "a")
        await turns(1)
        assert {name: each.ended for name, each in sent.items()} == {"at a": False, "at b": True}
        world.come("any")
        await turns(1)
        assert sent["at a"].ended
        await world.close()

    run(story)


@pytest.mark.parametrize("seed", range(40))
def test_each_place_goes_to_the_first_that_may_have_it(seed: int) -> None:
    rng = random.Random(seed)

    async def story(loop: Turns) -> None:
        world = World(rng.choice([Order.FCFS, Order.LLF]), a=rng.randint(1, 2), b=1, c=1)
        for step in range(60):
            match rng.choice(["come", "come", "end", "cancel", "time"]):
                case "come":
                    excluded = rng.sample(["a", "b", "c"], rng.choice([0, 0, 0, 1, 1, 2]))
                    world.come(f"r{step}", *excluded, patience_s=rng.choice([PATIENCE_S, 1e6]))
                case "end" if world.inside:
                    name = rng.choice(sorted(world.inside))
                    place, begun = world.inside[name], len(world.begun)
                    entitled = [each.id for each in world.lane.queue if place not in each.excluded]
                    world.end(name)
                    await turns(4)
                    assert world.begun[begun:] == entitled[:1]
                case "cancel" if names := sorted(name for name, each in world.tasks.items() if not each.done()):
                    world.tasks[rng.choice(names)].cancel()
                case "time":
                    loop.now_s += PATIENCE_S / 2
                case _:
                    pass
            await turns(4)
            world.look()
        await world.close()

    run(story)


def test_a_long_queue_is_looked_through_by_what_may_serve_it_not_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(_: Turns) -> None:
        world = World(a=1, b=1)
        world.come("at a")
        world.come("at b")
        await turns(1)
        for at in range(200):
            world.come(f"r{at}", *["a", "b", ""][at % 3])
        await turns(4)
        asked: list[str] = []
        choose = world.lane.choose

        def counted(ticket: Ticket, now_s: float) -> Server | None:
            asked.append(ticket.request.id)
            return choose(ticket, now_s)

        monkeypatch.setattr(world.lane, "choose", counted)
        world.lane.pump()
        assert sorted(asked) == ["r0", "r1", "r2"]
        monkeypatch.undo()
        for task in world.tasks.values():
            task.cancel()
        await turns(4)
        world.look()

    run(story)


TIMES = {"latency_s": 3.0, "ttft_ms": 100.0, "tbt_ms": 30.0}
KINDS: dict[str, dict[str, Any]] = {
    "endpoint": {"pool": None, "models": ["m"]},
    "endpoint without power": {"pool": None, "models": ["m"], "power_w": None},
    "unplanned": {},
    "small": {"full_power_w": 300.0, "max_qps": 7.0, "request_class": "SS", **TIMES},
    "large": {"full_power_w": 700.0, "max_qps": 3.427, "request_class": "SS", "idle_w": 250.0, **TIMES},
    "long": {"full_power_w": 700.0, "max_qps": 0.5, "request_class": "LL", **TIMES},
}
servers_of = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.floats(1.0, 1.02), st.booleans()), min_size=2, max_size=5
)
"""Servers' kinds, what sets their intensities off, and whether each has a PUE of 3: no two are alike."""
loads = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 9), st.floats(0, 20), st.floats(0, 60), st.integers(0, 900)),
    max_size=12,
)
"""Answers: of which server, how many more it holds by now, seconds to the first token and in all, tokens."""


def ranked(lane: Lane, count: int) -> list[str]:
    """Return the servers in the order in which requests that have no limit are given to them."""
    found: list[str] = []
    for _ in range(count):
        request = ServingRequest("r", 0.0, 100.0, excluded=frozenset(found))
        server = lane.choose(Ticket(request, math.inf, {}, Work(10, 100.0)), 1e9)
        assert server is not None
        found.append(server.id)
    return found


@given(servers_of, loads, st.permutations(range(5)))
def test_more_load_never_changes_which_server_is_cleaner(
    kinds: list[tuple[str, float, bool]], load: list[tuple[int, int, float, float, int]], places: list[int]
) -> None:
    servers = [
        a_server(f"s{at}", gco2_per_kwh=20.0 * 2.0 ** places[at] * off, pue=3.0 if wasteful else 1.0, **KINDS[kind])
        for at, (kind, off, wasteful) in enumerate(kinds)
    ]
    pool = Pool(RoutedPool.model_validate(a_routed_pool()), servers=servers)
    lane = Lanes(LaneRules()).of(pool, "")
    before = ranked(lane, len(servers))
    if len({kind for kind, _, _ in kinds}) == 1 or not any("max_qps" in KINDS[kind] for kind, _, _ in kinds):
        assert before == [
            each.id for each in sorted(servers, key=lambda each: (each.spec.gco2_per_kwh or 0.0) * each.spec.pue)
        ]
    for at, more, ttft_s, e2e_s, tokens in load:
        server = servers[at % len(servers)]
        for _ in range(min(more, server.limit - server.held - 1)):
            server.begin()
            server.costs.begin(Work(10, 100.0), 0.0)
        server.costs.learn(server.costs.begin(Work(10, 100.0), 0.0), ttft_s, ttft_s + e2e_s, tokens)
        lane.serve(pool, "")
    assert ranked(lane, len(servers)) == before
