"""What the router reports: traffic to the planner, usage to the ledger, latencies to agents, itself to its peers."""

from __future__ import annotations

import asyncio
import gc
import time
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from services.contracts.clocks import ClockPolicy, ServerClocks
from services.contracts.identity import Identity, ResolvedKey, Role, TenantLimits
from services.contracts.routing import LatencyReport, RouterState, ServerLatency
from services.contracts.streams import LATENCY_FIELD, ROUTERS_HASH, latency_stream
from services.kit.problems import ProblemError
from services.router.fleet import Fleet
from services.router.latency import LatencyReporter
from services.router.metrics import Metrics
from services.router.probes import Measured, ServerTimes, read_load
from services.router.reports import TrafficReporter, UsageReporter
from services.router.streams import Footprint
from services.router.turn import Tokens
from tests.router.conftest import Stage
from tests.support.routers import MODEL, OPERATOR, Running, a_routed_pool, a_routed_server, chat


def reported_lengths(stage: Stage) -> list[tuple[int, int]]:
    windows = [window for _, report in stage.plane.traffic for window in report.windows]
    return [lengths for window in windows for lengths in window.requests]


async def test_requests_are_reported_at_arrival_and_again_once_their_length_is_known(
    router: Running, stage: Stage
) -> None:
    traffic = router.router.traffic
    stage.one.gate = asyncio.Event()
    asking = asyncio.create_task(router.ask())
    await stage.one.until(lambda: stage.one.held == 1)
    stage.plane.traffic.clear()

    await traffic.send(time.time() + 5)
    stage.one.gate.set()
    assert (await asking).status_code == 200
    await traffic.send(time.time() + 5)

    reported = [
        (window.start_at, window.requests)
        for pool, report in stage.plane.traffic
        for window in report.windows
        if pool == "chat" and window.requests
    ]
    (first_at, [(_, predicted)]), (again_at, [(stated_in, stated_out)]) = reported
    assert first_at == again_at
    assert predicted == 200
    assert (stated_in, stated_out) == (11, 5)
    assert len({report.source for _, report in stage.plane.traffic}) == 1


async def test_silence_is_reported_as_such_and_each_window_once(router: Running, stage: Stage) -> None:
    traffic = TrafficReporter(router.router.traffic._serving, router.router.fleet, "other")
    now_s = time.time() // 5 * 5 + 1
    for later_s in (0, 5, 5, 15):
        await traffic.send(now_s + later_s)
    starts = [
        window.start_at.timestamp()
        for _, report in stage.plane.traffic
        if report.source == "other"
        for window in report.windows
    ]
    assert starts == [now_s - 6, now_s - 1, now_s + 4, now_s + 9]


async def test_what_serving_did_not_accept_is_reported_later(router: Running, stage: Stage) -> None:
    await router.ask()
    stage.plane.is_serving_up = False
    await router.router.traffic.send(time.time() + 5)
    stage.plane.is_serving_up = True
    stage.plane.traffic.clear()
    await router.router.traffic.send(time.time() + 5)
    assert (11, 5) in reported_lengths(stage)


async def test_reported_requests_are_no_objects_that_garbage_collection_looks_at(router: Running, stage: Stage) -> None:
    traffic, pool = router.router.traffic, router.router.fleet.pools["chat"]
    now_s = time.time()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(5_000):
        traffic.arrived(pool, now_s, 10, 20.0)(11, 5)
    await traffic.send(now_s + 5)
    assert reported_lengths(stage).count((11, 5)) == 5_000
    stage.plane.traffic.clear()
    await traffic.send(now_s + 5)
    assert reported_lengths(stage) == [], "nothing has changed"
    gc.collect()
    assert len(gc.get_objects()) - before < 2_500


async def test_while_serving_is_away_arrivals_are_kept_for_a_while_only(router: Running, stage: Stage) -> None:
    traffic, pool = router.router.traffic, router.router.fleet.pools["chat"]
    stage.plane.is_serving_up = False
    now_s = time.time() + 10_000
    for at_s in (now_s, now_s + 600):
        traffic.arrived(pool, at_s, 10, 20.0)
    for later_s, kept in ((605, 2), (1_000, 1), (1_600, 0)):
        await traffic.send(now_s + later_s)
        assert sum(bool(each.input_tokens) for each in traffic._windows["chat"].values()) == kept


async def test_usage_names_key_model_class_and_job_and_adds_up(router: Running, stage: Stage) -> None:
    started_s = time.monotonic()
    for _ in range(3):
        await router.ask()
    await router.ask(json=chat(stream=True))
    took_s = time.monotonic() - started_s
    await router.router.usage.send(time.time() + 120)
    usages = [usage for report in stage.plane.usage for usage in report.usages]
    assert {(usage.job_id, usage.tenant_id, usage.key_id, usage.model, usage.request_class) for usage in usages} == {
        ("job_instance_1", "acme", "key_acme", MODEL, "any")
    }
    assert sum(usage.requests for usage in usages) == 4
    assert sum(usage.output_tokens for usage in usages) == 20
    share_s = sum(usage.share_s for usage in usages)
    assert 0 < share_s <= took_s
    assert sum(usage.energy_j for usage in usages) == pytest.approx(share_s * 400)


async def test_at_any_moment_a_server_has_one_second_a_second_to_share(router: Running, stage: Stage) -> None:
    stage.one.gate = asyncio.Event()
    began_s = time.monotonic()
    asking = [asyncio.create_task(router.ask()) for _ in range(5)]
    await stage.one.until(lambda: stage.one.held == 5)
    stage.one.gate.set()
    await asyncio.gather(*asking)
    took_s = time.monotonic() - began_s
    await router.router.usage.send(time.time() + 120)
    assert sum(usage.share_s for report in stage.plane.usage for usage in report.usages) <= took_s


async def test_minutes_that_are_over_are_reported_and_kept_while_telemetry_is_away(
    router: Running, stage: Stage
) -> None:
    usage = a_reporter(router, 600.0, 659.0, 661.0)
    stage.plane.is_telemetry_up = False
    with pytest.raises(ProblemError):
        await usage.send(700.0)
    stage.plane.is_telemetry_up = True
    await usage.send(700.0)
    await usage.send(700.0)
    (report,) = stage.plane.usage
    assert (report.start_at.timestamp(), [each.requests for each in report.usages]) == (600, [2])
    await usage.send(700.0, all_windows=True)
    assert stage.plane.usage[-1].start_at.timestamp() == 660


def a_reporter(router: Running, *at_s: float) -> UsageReporter:
    """Return a reporter that has counted one request at each of these times."""
    usage = UsageReporter(router.router.usage._telemetry, "other")
    count(usage, router, *at_s)
    return usage


def count(usage: UsageReporter, router: Running, *at_s: float) -> None:
    server = router.router.fleet.servers["instance_1"]
    key = ResolvedKey(identity=Identity(tenant_id="acme", role=Role.USER, key_id="key_1"), limits=TenantLimits())
    for each_s in at_s:
        usage.served(server, key, MODEL, "SS", 1.0, Tokens(1, 1, True), Footprint(None, None, "here"), each_s)


async def test_usage_is_kept_while_telemetry_does_not_know_the_router(router: Running, stage: Stage) -> None:
    usage = a_reporter(router, 600.0)
    stage.plane.usage_refused = [401]
    with pytest.raises(ProblemError):
        await usage.send(700.0)
    await usage.send(700.0)
    assert [report.start_at.timestamp() for report in stage.plane.usage] == [600]


async def test_a_minute_that_is_refused_or_not_over_holds_up_no_other(router: Running, stage: Stage) -> None:
    usage = a_reporter(router, 10_000.0, 600.0, 660.0)  # the clock was set back after the first
    stage.plane.usage_refused = [422]
    await usage.send(800.0)
    assert [report.start_at.timestamp() for report in stage.plane.usage] == [660]


async def test_a_minute_that_comes_again_adds_to_what_was_reported_of_it(router: Running, stage: Stage) -> None:
    usage = a_reporter(router, 600.0)
    await usage.send(700.0)
    count(usage, router, 659.0, 661.0)  # the clock was set back
    await usage.send(730.0)
    count(usage, router, 615.0)  # and once more
    await usage.send(700.0)
    reported = [(report.router, report.start_at.timestamp()) for report in stage.plane.usage]
    assert reported == [("other", 600), ("other.1", 600), ("other.1", 660), ("other.2", 600)]


async def test_a_router_that_ends_reports_usage_also_while_serving_is_silent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.app.REPORTS_S", 1.0)
    async with stage.router() as router:
        await router.adopted()
        await router.ask()
        stage.plane.is_serving_silent = True
    assert [usage.requests for report in stage.plane.usage for usage in report.usages] == [1]


async def test_a_router_that_ends_reports_what_is_left(stage: Stage) -> None:
    async with stage.router() as router:
        await router.adopted()
        await router.ask()
    assert [usage.requests for report in stage.plane.usage for usage in report.usages] == [1]
    assert (11, 5) in reported_lengths(stage)


async def test_agents_hear_each_second_what_clients_of_their_servers_saw(
    router: Running, stage: Stage, redis_url: str
) -> None:
    stage.plane.servers = [a_routed_server(stage.one, node_id="node-7", request_class="SS")]
    await router.adopted()
    await router.ask(json=chat(stream=True))
    await router.router.latency.send()
    async with Redis.from_url(redis_url, decode_responses=True) as redis:
        entries = await redis.xrange(latency_stream("node-7"))
    reports = [LatencyReport.model_validate_json(fields[LATENCY_FIELD]) for _, fields in entries]
    seen = [server for report in reports for server in report.servers]
    assert sum(server.ended for server in seen) == 1
    (first,) = [server for server in seen if server.first_tokens]
    assert first.server == "instance_1"
    assert first.mean_ttft_ms is not None
    assert 0 < first.mean_ttft_ms <= 20_000
    assert first.max_ttft_ms == first.mean_ttft_ms


def its_own(router: Running, metrics: Metrics | None = None) -> LatencyReporter:
    """Return a reporter that only the test sends for."""
    return LatencyReporter(cast("Any", None), router.router.fleet, router.router.lanes, "other", metrics or Metrics())


async def seen_of(router: Running, **asked: Any) -> ServerLatency:
    """Ask once, and return what is reported of the only server."""
    reporter = its_own(router)
    outcomes = router.router.door._dispatcher.answers._outcomes
    before, outcomes.latency = outcomes.latency, reporter
    try:
        assert (await router.ask(**asked)).status_code == 200
    finally:
        outcomes.latency = before
    [report] = reporter.reports(datetime.now(UTC), time.monotonic(), {}).values()
    [row] = report.servers
    return row


async def test_a_whole_answer_bounds_the_time_that_its_tokens_took(router: Running, stage: Stage) -> None:
    """A token took at most the answer's time at the server divided by the tokens that usage states of each choice."""
    stage.plane.servers = [a_routed_server(stage.one, node_id="node-7", request_class="SS")]
    await router.adopted()
    stage.one.tokens = 30

    for choices in (1, 3):
        row = await seen_of(router, json=chat(n=choices))
        assert (row.tokens, row.ended, row.first_tokens) == (30 // choices, 1, 0)
        assert row.mean_tbt_ms is not None
        assert row.mean_e2e_s is not None
        assert 0 < row.mean_tbt_ms * row.tokens <= 1e3 * row.mean_e2e_s
        assert 1e-3 * row.mean_tbt_ms * row.tokens <= row.oldest_s

    streamed = await seen_of(router, json=chat(stream=True))
    assert (streamed.first_tokens, streamed.oldest_s) == (1, 0)
    assert "oldest_s" not in streamed.model_dump(), "an agent of an older release refuses what it does not know"


async def test_seconds_in_which_a_server_in_service_shows_no_token_are_counted(router: Running, stage: Stage) -> None:
    stage.plane.servers = [
        a_routed_server(
            stage.one,
            node_id="node-7",
            request_class="SS",
            clocks=ServerClocks(policy=ClockPolicy.MIAD, max_ttft_ms=300),
        )
    ]
    await router.adopted()
    metrics = Metrics()
    reporter, server = its_own(router, metrics), router.router.fleet.servers["instance_1"]

    def report(now_s: float, measured: dict[str, Measured]) -> float:
        reporter.reports(datetime.now(UTC), now_s, measured)
        return metrics.blind.values.get(("instance_1", "here"), 0.0)

    server.held = 1
    assert report(100.0, {}) == 0, "nobody knows since when"
    assert report(101.5, {}) == 1.5
    reporter.first("instance_1", "SS", 0.1, 0.0)
    assert report(102.5, {}) == 1.5
    assert report(103.5, {"instance_1": Measured(0.03, 10, 1.0)}) == 1.5
    server.held = 0
    assert report(104.5, {}) == 1.5
    server.held = 1
    assert report(105.0, {}) == 2.0
    server.held = 0


async def test_an_answer_of_one_piece_is_its_own_first_token(router: Running, stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, node_id="node-7", request_class="SS")]
    await router.adopted()
    stage.one.tokens = 1

    for asked in (
        {"json": chat()},
        {"path": "/v1/embeddings", "json": {"model": MODEL, "input": "Hello"}},
    ):
        row = await seen_of(router, **asked)
        assert (row.tokens, row.first_tokens, row.mean_tbt_ms) == (0, 1, None)
        assert row.mean_ttft_ms == pytest.approx(1e3 * (row.mean_e2e_s or 0))


async def test_a_whole_answer_that_does_not_state_its_tokens_shows_nothing_of_them(
    router: Running, stage: Stage
) -> None:
    stage.plane.servers = [a_routed_server(stage.one, node_id="node-7", request_class="SS")]
    await router.adopted()
    for body in (b'{"choices": []}', b'{"usage": {"completion_tokens": -1}}', b'{"usage": {"completion_tokens": 1e3}}'):
        stage.one.body = body
        row = await seen_of(router)
        assert (row.tokens, row.first_tokens, row.ended) == (0, 0, 1)


def between_tokens(seconds: float, tokens: int, name: str = "vllm:inter_token_latency_seconds") -> str:
    labels = '{model_name="m",le="} 9"}'
    return f"# TYPE {name} histogram\n{name}_sum{labels} {seconds}\n{name}_count{labels} {tokens}\n"


async def test_a_server_s_own_histogram_says_what_its_tokens_took(router: Running, stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, node_id="node-7", load_path="/metrics")]
    await router.adopted()
    server, times = router.router.fleet.servers["instance_1"], ServerTimes()

    async def read(metrics: str) -> tuple[float, int] | None:
        stage.one.metrics = metrics
        found = (await times.since_last([server])).get(server.id)
        return found and (round(found.tbt_s, 6), found.tokens)

    assert await read(between_tokens(100.0, 1_000)) is None, "nothing is known of when these were"
    assert await read(between_tokens(103.0, 1_060)) == (0.05, 60)
    assert await read(between_tokens(103.0, 1_060)) is None
    assert await read(between_tokens(2.0, 10)) is None, "it was started anew"
    assert await read(between_tokens(2.1, 11)) == (0.1, 1)
    for silent in ("", "vllm:inter_token_latency_seconds_sum NaN\n", between_tokens(3.0, 20, "other:latency_seconds")):
        assert await read(silent) is None
    old = "vllm:time_per_output_token_seconds"
    assert await read(between_tokens(3.0, 20, old)) is None
    assert await read(between_tokens(4.0, 30, old)) == (0.1, 10)
    stage.plane.servers = [a_routed_server(stage.one, node_id="node-7", url="http://127.0.0.1:1", load_path="/metrics")]
    await router.adopted()
    assert await read("") is None


async def test_what_no_server_can_have_measured_or_hold_is_not_believed(router: Running, stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, node_id="node-7", load_path="/metrics")]
    await router.adopted()
    server, times = router.router.fleet.servers["instance_1"], ServerTimes()
    for seconds, tokens in ((1.0, 10), (1e300, 20), (1e300, 30), (2e300, 40), (2e300, 1e300)):
        stage.one.metrics = between_tokens(seconds, tokens)
        assert await times.since_last([server]) == {}
    name = "vllm:num_requests_"
    for running, waiting, believed in ((-5, -3, (0, 0)), (1e308, 7, (1e6, 7)), (2, 1, (2, 1))):
        stage.one.metrics = f"{name}running {running}\n{name}waiting {waiting}\n"
        await read_load(server)
        assert (server.costs.running, server.costs.queued) == believed


async def test_servers_are_asked_while_nothing_else_tells_of_their_tokens(router: Running, stage: Stage) -> None:
    clocks = ServerClocks(policy=ClockPolicy.MIAD, max_tbt_ms=60.0, capacity=8)
    path = {"load_path": "/metrics", "node_id": "node-7", "clocks": clocks}
    stage.plane.servers = [
        a_routed_server(stage.one, "follows", **path),
        a_routed_server(stage.two, "default", node_id="node-7"),
    ]
    await router.adopted()
    reporter = its_own(router)
    follows, default = (router.router.fleet.servers[name] for name in ("follows", "default"))

    async def asked() -> int:
        before = stage.one.metrics_read
        await reporter.measured()
        assert stage.two.metrics_read == 0
        return stage.one.metrics_read - before

    stage.one.metrics_read = 0
    router.router.latency._fleet = Fleet(())  # the router's own reports ask nobody
    assert await asked() == 0, "it holds no requests"
    share_s, _ = follows.begin(), default.begin()
    assert await asked() == 1
    reporter.gap("follows", "", 0.1, 2)
    assert await asked() == 0, "its streams say it"
    reporter.whole("follows", "", 0.0, 5.0, 100)
    assert await asked() == 1
    follows.end(share_s)
    assert await asked() == 1


async def test_what_a_server_measured_takes_the_place_of_bounds(router: Running, stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, node_id="node-7")]
    await router.adopted()
    reporter = its_own(router)
    reporter.gap("instance_1", "SS", 0.4, 10)
    reporter.whole("instance_1", "LL", 0.0, 90.0, 100)
    measured = {"instance_1": Measured(0.05, 60, 1.5)}

    [report] = reporter.reports(datetime.now(UTC), 100.0, measured).values()

    told, other = report.servers
    assert (told.mean_tbt_ms, told.tokens, told.oldest_s) == (pytest.approx(50), 60, 1.5)
    assert (other.mean_tbt_ms, other.tokens, other.oldest_s) == (None, 0, 0)
    [silent] = reporter.reports(datetime.now(UTC), 101.0, measured)["node-7"].servers
    assert (silent.tokens, silent.request_class) == (60, "")


async def test_processes_count_each_other_and_share_out_the_capacity(
    stage: Stage, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.plane.servers = [a_routed_server(stage.one, capacity=9)]
    async with Redis.from_url(redis_url, decode_responses=True) as redis:
        await redis.delete(ROUTERS_HASH)
        alive = RouterState(at_s=time.time(), held={"instance_1": 4})
        gone = RouterState(at_s=time.time() - 3_600)
        entries = {"peer": alive.model_dump_json(), "gone": gone.model_dump_json(), "odd": "{}"}
        await redis.hset(ROUTERS_HASH, mapping=entries)
        async with stage.router() as router:
            await router.adopted()
            await router.router.peers.look()
            server = router.router.fleet.servers["instance_1"]
            assert (router.router.peers.processes, server.limit, server.held_elsewhere) == (2, 5, 4)
            with monkeypatch.context() as ahead:
                ahead.setattr(time, "time", lambda: alive.at_s + 3_600)
                await router.router.peers.look()
            assert router.router.peers.processes == 2, "its clock may be an hour ahead of the others'"
            assert await redis.hexists(ROUTERS_HASH, "gone") is False
            await router.adopted()
            assert server.limit == 5
            name = router.router.name
        assert await redis.hexists(ROUTERS_HASH, name) is False
        await redis.delete(ROUTERS_HASH)


async def test_metrics_and_status_say_what_happened(router: Running, stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool()]
    await router.ask()
    await router.ask(json=chat(model="nothing"))
    await router.ask(json=chat(stream=True))
    lines = (await router.http.get("/metrics", headers=OPERATOR)).text.splitlines()
    assert f'wattshift_router_requests_total{{model="{MODEL}",request_class="",status="200"}} 2' in lines
    assert f'wattshift_router_ttft_seconds_count{{model="{MODEL}",request_class=""}} 1' in lines
    assert 'wattshift_router_server_up{server="instance_1",location="here"} 1' in lines
    assert not any("nothing" in line for line in lines)
    for path in ("/status", "/metrics"):
        assert (await router.http.get(path)).status_code == 403
        assert (await router.http.get(path, headers={"authorization": "Bearer no"})).status_code == 401


async def test_what_a_server_takes_is_shown_beside_its_profile_also_beside_a_newer_one(
    router: Running, stage: Stage
) -> None:
    def drift(lines: str) -> dict[str, float]:
        found = [line for line in lines.splitlines() if line.startswith("wattshift_router_profile_drift_ratio{")]
        return {line.split('"')[5]: float(line.split()[-1]) for line in found}

    async def shown(**profile: Any) -> dict[str, float]:
        stage.plane.servers = [a_routed_server(stage.one, **profile)]
        await router.adopted()
        return drift((await router.http.get("/metrics", headers=OPERATOR)).text)

    assert await shown() == {}
    assert await shown(ttft_ms=1e6, tbt_ms=1e6) == {"prompt": 1, "answer": 1}
    await router.ask(json=chat(stream=True))
    learned = await shown(ttft_ms=1e6, tbt_ms=1e6)
    assert learned["prompt"] < 1
    newer = await shown(ttft_ms=1e5, tbt_ms=5e5)
    assert newer == pytest.approx({"prompt": 10 * learned["prompt"], "answer": 2 * learned["answer"]}, rel=1e-3)
    costs = router.router.fleet.servers["instance_1"].costs
    for _ in range(200):
        costs.fade()
    assert costs.tbt_s == pytest.approx(500), "of the newer profile"


async def test_metrics_have_the_names_of_opentelemetry_too(router: Running, stage: Stage) -> None:
    """https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/, as its exporter for Prometheus names them."""
    await router.ask()
    await router.ask(json=chat(stream=True))
    stage.one.status = 400
    await router.ask()
    lines = (await router.http.get("/metrics", headers=OPERATOR)).text.splitlines()
    server = stage.one.url.removeprefix("http://")
    labels = f'gen_ai_request_model="{MODEL}",gen_ai_operation_name="chat",server_address="{server}",location="here"'
    assert {line.partition(" # ")[0] for line in lines if line.startswith("gen_ai_") and "_count{" in line} == {
        f'gen_ai_server_request_duration_seconds_count{{{labels},error_type=""}} 2',
        f'gen_ai_server_request_duration_seconds_count{{{labels},error_type="400"}} 1',
        f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}} 1",
        f'gen_ai_client_token_usage_count{{{labels},gen_ai_token_type="input"}} 2',
        f'gen_ai_client_token_usage_count{{{labels},gen_ai_token_type="output"}} 2',
    }
    assert f'gen_ai_client_token_usage_sum{{{labels},gen_ai_token_type="output"}} 10' in lines
    assert {line.split()[3] for line in lines if line.startswith("# TYPE gen_ai_")} == {"histogram"}


async def test_prompts_are_never_logged(router: Running, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    stage.one.dies_after = 1
    await router.ask(json=chat("a very private question", stream=True))
    stage.one.status, stage.one.dies_after = 503, None
    await router.ask(json=chat("a very private question"))
    logged = "\n".join(f"{record.getMessage()} {record.__dict__.get('fields')}" for record in caplog.records)
    assert "server.broke_off" in logged
    assert "private" not in logged
