"""Clocks where answers are not streamed: what routers can say of them, and what agents do while nothing is said."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_agent.latency_clocks import Measured as Readings
from lab.serving.model_server import ModelServer
from lab.serving.servers import SimulatedInstance
from lab.serving.site import ServerKind
from services.contracts.clocks import ClockPolicy
from services.contracts.routing import RoutingTable
from services.core.domain.serving import LatencyLimits
from services.core.policies.freesh.laxity import ServiceTimes
from services.core.policies.freesh.miad import Clocks
from services.router.fleet import Fleet
from services.router.lanes import LaneRules, Lanes
from services.router.latency import LatencyReporter
from services.router.metrics import Metrics
from services.router.probes import Measured
from tests.agent.test_latency_clocks import CLOCKS, TERMS, Run, a_report
from tests.support.routers import ModelServer as Stub
from tests.support.routers import a_routed_pool, a_routed_server

SERVER = ModelServer(64, 0.05, 0.0, 0.03, 0.0003, lowest_clock_mhz=210.0, busy_w=400.0)
LIMIT_S = 0.060
POLICIES = [ClockPolicy.MIAD, ClockPolicy.LEARNED]


def kind_of(server: ModelServer) -> ServerKind:
    clocks = Clocks(tuple(map(float, CLOCKS)))
    return ServerKind(server, ServiceTimes(0.05, 0.03), LatencyLimits(tbt_s=LIMIT_S), clocks, 1.0, 0.0, None)


@dataclass
class Client:
    """One that asks again as soon as it is answered."""

    request: int
    asked_s: float
    prefilled_s: float
    seen: float = 0.0


class Loop:
    """A server, the router's reports and an agent's decisions in virtual time.

    Attributes:
        whole: Whether answers come at once; else each second says what tokens came in it.
        measures: Whether the server itself states how long its tokens took.
        queue_s: How long each request waits at the server before it is worked on.
    """

    def __init__(
        self,
        policy: ClockPolicy,
        *,
        whole: bool,
        tokens: int,
        clients: int,
        measures: bool = False,
        queue_s: float = 0.0,
    ) -> None:
        self.whole, self.tokens, self.measures, self.queue_s = whole, tokens, measures, queue_s
        self.server = SimulatedInstance("i1", 0, "m", kind_of(SERVER), "SS", 0.0, float(CLOCKS[-1]), 0.0)
        terms = TERMS.model_copy(
            update={"policy": policy, "max_ttft_ms": 20_000.0, "max_tbt_ms": 1e3 * LIMIT_S, "max_e2e_s": None}
        )
        spec = a_routed_server(Stub(url="http://127.0.0.1:1"), node_id="n", job_id="job_1", clocks=terms)
        table = RoutingTable(made_at=datetime.now(UTC), pools=[a_routed_pool()], servers=[spec])
        self.fleet = Fleet(())
        self.fleet.adopt(table)
        self.routed = self.fleet.servers[spec.id]
        self.reporter = LatencyReporter(cast("Any", None), self.fleet, Lanes(LaneRules()), "r1", Metrics())
        self.run = Run()
        self.numbers = itertools.count()
        self.now_s = 0.0
        self.clients = [self._ask(0.37 * at) for at in range(clients)]
        self.true_s: list[float] = []
        self.exceeded: list[bool] = []

    def _ask(self, at_s: float) -> Client:
        prefill_s = SERVER.prefill_s(0, self.server.clock_mhz)
        return Client(next(self.numbers), at_s, at_s + self.queue_s + prefill_s)

    def second(self) -> None:
        """Serve for a second in small steps, report it, and have the clock decided."""
        before_s, before = self.server.seen.busy_s, self.server.seen.steps
        for _ in range(50):
            self.now_s += 0.02
            self.server.advance(self.now_s)
            self._serve()
        steps = self.server.seen.steps - before
        self.true_s.append((self.server.seen.busy_s - before_s) / steps if steps else 0.0)
        own = {}
        if self.measures and steps >= 1:
            own = {self.routed.id: Measured(self.true_s[-1], round(steps * len(self.clients)), 1.0)}
        self.routed.held = len(self.clients)
        [report] = self.reporter.reports(datetime.now(UTC), self.now_s, own).values()
        self.run.measured = Readings(SERVER.power_w(self.server.clock_mhz, is_busy=True))
        [clock] = self.run.second(report)
        self.exceeded.append(self.run.clocks.describe(self.run.now_s)[0]["exceeded"])
        assert clock is not None
        self.server.clock_mhz = clock
        self.server.changed()

    def _serve(self) -> None:
        for client in self.clients:
            if client.request not in self.server.members and client.prefilled_s <= self.now_s and not client.seen:
                self.server.join(client.request, float(self.tokens))
                client.seen = self.server.steps
                if not self.whole:
                    self.reporter.first("instance_1", "SS", self.now_s - client.asked_s, 0.0)
        if not self.whole:
            for client in self.clients:
                if client.request in self.server.members and (came := int(self.server.steps - client.seen)) >= 1:
                    self.reporter.gap("instance_1", "SS", came * self.server.step_s, came)
                    client.seen += came
        ended = set(self.server.ended())
        for at, client in enumerate(self.clients):
            if client.request in ended:
                if self.whole:
                    self.reporter.whole("instance_1", "SS", client.asked_s, self.now_s, self.tokens)
                self.reporter.end("instance_1", "SS", self.now_s - client.asked_s, self.tokens)
                self.clients[at] = self._ask(self.now_s)


def settled(loop: Loop, seconds: int = 500) -> tuple[float, float]:
    """Return the mean time per token in the second half, and the mean clock."""
    clocks: list[float] = []
    for _ in range(seconds):
        loop.second()
        clocks.append(loop.server.clock_mhz)
    half = [each for each in loop.true_s[seconds // 2 :] if each]
    return sum(half) / len(half), sum(clocks[seconds // 2 :]) / len(clocks[seconds // 2 :])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tokens", [30, 300])
@pytest.mark.parametrize("how", ["streamed", "whole", "whole_measured"])
def test_a_pool_settles_under_its_limit_however_its_answers_come(policy: ClockPolicy, tokens: int, how: str) -> None:
    """At the highest clock a token takes 32 ms, at the lowest 197; the limit is met down to about 700 MHz."""
    loop = Loop(policy, whole=how != "streamed", tokens=tokens, clients=6, measures=how == "whole_measured")

    tbt_s, clock_mhz = settled(loop)

    assert tbt_s <= LIMIT_S
    assert clock_mhz < 0.9 * CLOCKS[-1], "it saves what the limit leaves"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exceeded_limit_of_whole_answers_is_seen(policy: ClockPolicy) -> None:
    loop = Loop(policy, whole=True, tokens=30, clients=60)
    loop.server.kind = kind_of(replace(SERVER, decode_base_s=0.07))
    loop.server.changed()
    for _ in range(30):
        loop.second()

    assert loop.server.clock_mhz == CLOCKS[-1]
    assert sum(loop.exceeded) >= 8


def test_a_queue_at_the_server_is_no_time_per_token_where_the_server_says_so() -> None:
    """Each request waits for 9 s at the server, which makes 300 ms of each of 30 tokens if nothing else is known."""
    blind, told = (
        Loop(ClockPolicy.MIAD, whole=True, tokens=30, clients=6, queue_s=9.0, measures=measures)
        for measures in (False, True)
    )

    _, highest = settled(blind, 200)
    tbt_s, lower = settled(told, 200)

    assert highest > 0.98 * CLOCKS[-1], "the bound is on the safe side"
    assert tbt_s <= LIMIT_S
    assert lower < 0.8 * CLOCKS[-1]


@given(
    st.sampled_from(POLICIES),
    st.lists(
        st.tuples(
            st.sampled_from(["seen", "violated", "silent", "idle", "only_e2e", "old"]),
            st.integers(1, 40),
            st.booleans(),
        ),
        max_size=60,
    ),
    st.sets(st.sampled_from(["max_ttft_ms", "max_tbt_ms", "max_e2e_s"]), min_size=1),
)
def test_no_clock_is_lowered_while_requests_are_served_and_nothing_is_seen_of_them(
    policy: ClockPolicy, seconds: list[tuple[str, int, bool]], limits: set[str]
) -> None:
    terms = TERMS.model_copy(
        update={"policy": policy, **dict.fromkeys({"max_ttft_ms", "max_tbt_ms", "max_e2e_s"} - limits)}
    )
    run, before = Run(), float(CLOCKS[-1])
    run.measured = Readings(300.0)
    unobserved = 0
    for what, held, other_router in seconds:
        said: dict[str, Any] = {"held": 0 if what == "idle" else held, "terms": terms}
        match what:
            case "seen" | "violated":
                seen_ms = 1e4 if what == "violated" else 10.0
                said |= {"tbt_ms": seen_ms, "first_tokens": 1, "mean_ttft_ms": seen_ms, "mean_wait_ms": 0.0}
                said |= {"ended": 1, "mean_e2e_s": seen_ms / 1e3}
            case "only_e2e":
                said |= {"tbt_ms": None, "ended": 1, "mean_e2e_s": 0.5}
            case "old":
                said |= {"tbt_ms": 10.0, "oldest_s": 600.0}
            case _:
                said |= {"tbt_ms": None}
        silent = a_report(None, router="r2", terms=terms, held=0)
        [clock] = run.second(a_report(**said), *([silent] if other_router else []))
        assert clock is not None
        is_blind = what == "silent" or (what == "only_e2e" and limits != {"max_e2e_s"})
        if is_blind:
            assert clock >= before
        if run.clocks.describe(run.now_s)[0]["unobserved"]:
            unobserved += 1
            assert clock == before
        assert run.clocks.describe(run.now_s)[0]["unobserved"] or not is_blind
        before = clock
    minutes = run.clocks.minutes("job_1", run.now_s)
    assert sum(each.unobserved for each in minutes) == unobserved


def test_what_was_seen_at_an_earlier_clock_does_not_lower_the_one_of_now() -> None:
    run = Run()
    assert run.second(a_report(oldest_s=30.0)) == [1305], "the highest had been in force for as long as is known"
    assert [run.second(a_report(oldest_s=3.0)) for _ in range(4)] == [[1305], [1305], [1200], [1200]]
    assert run.second(a_report(200.0, oldest_s=30.0)) == [1410], "what is too slow is so all the more"
    [decided] = run.clocks.describe(run.now_s)
    assert (decided["exceeded"], decided["unobserved"]) == (True, False)


def test_whole_answers_teach_what_was_held_and_not_the_seconds_of_many_tokens() -> None:
    """Ten requests are held; one that took 20 s ends, whose tokens all came in this second."""
    terms = TERMS.model_copy(update={"policy": ClockPolicy.LEARNED})
    run = Run()
    run.second(a_report(50.0, tokens=400, oldest_s=20.0, terms=terms, held=10))
    [learner] = [each.learner for each in run.clocks._learned._known.values()]
    [sample] = learner.samples

    assert sample.batch == 10
    assert sample.tokens_per_s == pytest.approx(200)
