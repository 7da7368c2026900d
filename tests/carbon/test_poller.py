"""Keeping the store up to date: first fetch, gaps after downtime, outages, and a fast replay."""

import asyncio
import itertools
from dataclasses import replace
from datetime import UTC, datetime

import httpx
import pytest

from carbon_service.poller import possible
from carbon_service.providers.protocol import Point, ProviderError
from carbon_service.providers.recorded import Recorded
from carbon_service.providers.uk import ENTRY as UK
from carbon_service.repository import Repository
from carbon_service.zones import Source
from services.core.domain.carbon import Signal
from tests.carbon.harness import NOW_S, Bench, Now, a_bench
from tests.carbon.upstream import Answer, Upstream, Watch, built

HALF_HOUR_S = 1800.0


def period(start_s: float, actual: float | None, forecast: float = 100.0) -> dict[str, object]:
    start, end = (f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%MZ}" for at in (start_s, start_s + HALF_HOUR_S))
    return {"from": start, "to": end, "intensity": {"forecast": forecast, "actual": actual, "index": "low"}}


class Britain:
    """The UK's API on loopback with a whole year of values: the half-hour's number, measured once it has ended."""

    def __init__(self, upstream: Upstream, now: Now) -> None:
        self.upstream, self.now = upstream, now
        self.update()

    def update(self) -> None:
        """Answer as of now, whatever range is asked for."""
        started_s = self.now() // HALF_HOUR_S * HALF_HOUR_S
        past = [period(started_s - back * HALF_HOUR_S, float(back)) for back in range(400, 0, -1)]
        ahead = [period(started_s + on * HALF_HOUR_S, None, 500.0 + on) for on in range(96)]
        self.upstream.answers.clear()
        self.upstream.answer("/intensity", {"data": ahead[:1]})
        for path in self.paths():
            self.upstream.answer(path, {"data": ahead if path.endswith("fw48h") else past})

    def paths(self) -> list[str]:
        """Return the ranges a poll now may ask for."""
        now = f"{datetime.fromtimestamp(self.now(), UTC):%Y-%m-%dT%H:%MZ}"
        starts = [self.now() - minutes * 60 for minutes in range(0, 14 * 24 * 60, 30)]
        starts += [start // HALF_HOUR_S * HALF_HOUR_S for start in starts]
        ranges = [f"/intensity/{datetime.fromtimestamp(start, UTC):%Y-%m-%dT%H:%MZ}/{now}" for start in starts]
        return [*ranges, f"/intensity/{now}/fw48h"]


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def britain(upstream: Upstream, now: Now) -> Britain:
    return Britain(upstream, now)


@pytest.fixture
def uk(http: httpx.AsyncClient, britain: Britain, watch: Watch, now: Now, repository: Repository) -> Bench:
    provider = built(UK, http, now, watch.pacing(attempts=2, monotonic_s=now), url=britain.upstream.url)
    return a_bench(provider, "GB", repository, now)


async def test_the_first_poll_fetches_a_week_the_present_and_a_forecast(uk: Bench) -> None:
    await uk.poll()
    history, _ = await uk.service.history("GB", None, NOW_S - 9 * 86_400, None, 1000)
    assert len(history.points) == 7 * 48
    assert history.points[-1].is_estimated
    forecast = await uk.service.forecast("GB", None, 86_400, "real")
    assert (forecast.method, forecast.points[1].gco2_per_kwh) == ("provider", 501.0)
    assert uk.source.last_error is None


async def test_downtime_leaves_no_gap(uk: Bench, britain: Britain) -> None:
    await uk.poll()
    uk.now.s += 10 * 3600
    britain.update()
    await uk.poll()
    history, _ = await uk.service.history("GB", None, NOW_S - 3600, None, 1000)
    starts = [point.start_at.timestamp() for point in history.points]
    assert {later - earlier for earlier, later in itertools.pairwise(starts)} == {HALF_HOUR_S}
    assert starts[-1] == uk.now.s // HALF_HOUR_S * HALF_HOUR_S


async def test_an_estimate_is_replaced_once_measured(uk: Bench, britain: Britain) -> None:
    await uk.poll()
    assert (await uk.service.current("GB", None)).point.is_estimated
    uk.now.s += HALF_HOUR_S
    britain.update()
    await uk.poll()
    history, _ = await uk.service.history("GB", None, NOW_S - 60, NOW_S, 10)
    assert [(point.gco2_per_kwh, point.is_estimated) for point in history.points] == [(1.0, False)]


async def test_an_outage_makes_values_stale_and_the_forecast_takes_over(uk: Bench, britain: Britain) -> None:
    await uk.poll()
    britain.upstream.answers.clear()
    britain.upstream.answer("/intensity", Answer(status=503))
    uk.now.s += 2 * HALF_HOUR_S
    with pytest.raises(ProviderError):
        await uk.poll()
    late = await uk.service.current("GB", None)
    assert not late.is_stale
    uk.now.s += 2 * HALF_HOUR_S
    with pytest.raises(ProviderError):
        await uk.poll()
    current = await uk.service.current("GB", None)
    assert current.is_stale
    assert current.point.is_estimated
    assert current.point.gco2_per_kwh == 504.0
    (zone,) = uk.service.zones().items
    assert "answered" in (zone.sources[0].last_error or "")
    assert zone.sources[0].last_success_at is not None


async def test_an_average_is_over_what_was_measured(uk: Bench, britain: Britain) -> None:
    await uk.poll()
    uk.now.s += 50 * 86_400  # an outage longer than the provider remembers
    britain.update()
    await uk.poll()
    latest_s = uk.now.s // HALF_HOUR_S * HALF_HOUR_S
    before, after = NOW_S // HALF_HOUR_S * HALF_HOUR_S - HALF_HOUR_S, latest_s - HALF_HOUR_S
    assert await uk.service.mean("GB", before, before + HALF_HOUR_S) == 1.0
    assert await uk.service.mean("GB", after - HALF_HOUR_S, after + HALF_HOUR_S) == 1.5
    assert await uk.service.mean("GB", before + 20 * 86_400, before + 21 * 86_400) is None


async def test_a_provider_that_never_answered_leaves_no_data(uk: Bench, britain: Britain) -> None:
    britain.upstream.answers.clear()
    with pytest.raises(ProviderError):
        await uk.poll()
    with pytest.raises(Exception, match="Nothing is known of GB"):
        await uk.service.current("GB", None)


async def test_what_broke_here_is_told_to_the_log_alone(uk: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user sees why a zone has no values: the text of any exception may name hosts, accounts and files."""

    async def fail(_: Source) -> None:
        raise OSError("Connect call failed ('10.0.0.5', 5432): password of wattshift")

    monkeypatch.setattr(uk.poller, "poll", fail)
    polling = asyncio.create_task(uk.poller.run(uk.source))
    await asyncio.wait({polling}, timeout=0.1)
    polling.cancel()
    (zone,) = uk.service.zones().items
    assert "log says why" in str(zone.sources[0].last_error)
    assert "10.0.0.5" not in str(zone.sources[0].last_error)


async def test_a_provider_whose_clock_is_wrong_is_not_believed(uk: Bench, britain: Britain) -> None:
    britain.upstream.answer("/intensity", {"data": [period(NOW_S + 400 * 86_400, 1.0)]})
    await uk.poll()
    assert uk.source.skipped_values == 1
    assert await uk.repository.known_until_s(uk.source.key) == NOW_S // HALF_HOUR_S * HALF_HOUR_S


async def test_values_that_no_grid_has_are_not_believed(uk: Bench, britain: Britain) -> None:
    now_s = NOW_S // HALF_HOUR_S * HALF_HOUR_S
    values = [-1.0, 1e308, -1e308, 100_001.0, 0.0, 100_000.0]
    past = [period(now_s - (at + 1) * HALF_HOUR_S, value) for at, value in enumerate(values)]
    ahead = [period(now_s + at * HALF_HOUR_S, None, value) for at, value in enumerate((100.0, 1e308, -1.0, 200.0))]
    for path in britain.paths():
        britain.upstream.answers[path] = []
        britain.upstream.answer(path, {"data": ahead if path.endswith("fw48h") else past})
    await uk.poll()

    history, _ = await uk.service.history("GB", None, NOW_S - 9 * 86_400, now_s, 1000)
    assert [point.gco2_per_kwh for point in history.points] == [100_000.0, 0.0]
    issue = await uk.repository.forecast(uk.source.key, NOW_S)
    assert issue is not None
    assert [point.gco2_per_kwh for point in issue.points] == [100.0, 200.0]
    assert uk.source.skipped_values == 6


async def test_marginal_emissions_may_be_avoided_ones(uk: Bench) -> None:
    points = tuple(
        Point(at, at + 1.0, value, is_estimated=False) for at, value in enumerate((-20.0, -1e6, 50.0, -9999.0))
    )
    marginal = replace(uk.source, key=replace(uk.source.key, signal=Signal.MARGINAL))
    assert [point.gco2_per_kwh for point in possible(points, marginal)] == [-20.0, 50.0]
    assert [point.gco2_per_kwh for point in possible(points, uk.source)] == [50.0]


async def test_forecasts_are_asked_for_at_their_own_pace(uk: Bench, britain: Britain) -> None:
    for _ in range(3):
        await uk.poll()
    assert [path.endswith("fw48h") for path in britain.upstream.paths()].count(True) == 1


async def test_a_fast_replay_writes_each_point_once(repository: Repository) -> None:
    now = Now()
    replay = await repository.start_replay(600.0, None, NOW_S)
    bench = a_bench(Recorded(replay, now), "DE", repository, now, backfill_s=86_400)
    for _ in range(5):
        await bench.poll()
        now.s += 5
    history, _ = await bench.service.history("DE", None, NOW_S - 1000, None, 10_000)
    assert len(history.points) == 24 + 5  # a day before, and one every six seconds of twenty-five
    assert not (await bench.service.current("DE", None)).is_stale


async def test_rows_of_a_fast_replay_are_bounded(repository: Repository) -> None:
    now = Now()
    replay = await repository.start_replay(86_400.0, None, NOW_S)
    bench = a_bench(Recorded(replay, now), "DE", repository, now, max_points=1000, max_forecasts=20)
    for _ in range(4):
        await bench.poll()
        now.s += 700
    found = await repository.points(bench.source.key, 0, now.s + 99, limit=9999, begins_by_s=now.s + 99)
    assert 900 < len(found) <= 1300


async def test_a_restart_of_a_replay_fills_the_time_it_was_down(repository: Repository) -> None:
    now = Now()
    for _ in range(2):
        replay = await repository.start_replay(600.0, None, now())
        bench = a_bench(Recorded(replay, now), "DE", repository, now)
        await bench.poll()
        now.s += 3000
    history, _ = await bench.service.history("DE", None, NOW_S, NOW_S + 3000, 10_000)
    assert len(history.points) == 500


async def test_another_speed_leaves_the_past_as_it_was(repository: Repository) -> None:
    now = Now()
    fast = a_bench(Recorded(await repository.start_replay(600.0, None, now()), now), "DE", repository, now)
    await fast.poll()
    now.s += 8
    before = (await fast.service.current("DE", None)).point.gco2_per_kwh
    slow = a_bench(Recorded(await repository.start_replay(60.0, None, now()), now), "DE", repository, now)
    await slow.poll()
    current = await slow.service.current("DE", None)
    assert (current.point.gco2_per_kwh, current.time_scale) == (before, 60.0)
    history, _ = await slow.service.history("DE", None, NOW_S, now() + 1, 10)
    spans = [(point.start_at.timestamp(), point.end_at.timestamp()) for point in history.points]
    assert [round(start - NOW_S, 3) for start, _ in spans] == [0.0, 6.0, 8.0]
    assert spans[1][1] == spans[2][0]
