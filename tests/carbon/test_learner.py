"""What is learned of a source: kept, said with its quantiles and its backtest, by one replica, and never by force."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from carbon_service.learner import Learner, predicted
from carbon_service.providers.entry import LiveProvider, LiveSettings
from carbon_service.providers.protocol import DAY_S, Feed, Point, ProviderError, Series
from carbon_service.providers.recorded import Recorded, load
from carbon_service.replay import Replay
from carbon_service.repository import Repository
from services.contracts.carbon import ForecastBacktest
from services.core.domain.carbon import Signal
from services.kit.problems import ProblemError
from tests.carbon.harness import NOW_S, Bench, Now, a_bench, running

HOUR_S = 3600.0
GRID_S = float(load("GB").times_s[0]) + 120 * DAY_S
"""What the replayed grid's clock shows at first."""


def replayed(repository: Repository, zone: str = "GB", speed: float = 1.0) -> Bench:
    """Return a bench of a recording whose grid is 120 days old."""
    now = Now()
    provider = Recorded(Replay(now.s, GRID_S, speed), now)
    return a_bench(provider, zone, repository, now, backfill_s=90 * DAY_S)


def learner_of(bench: Bench) -> Learner:
    return Learner(bench.repository, [bench.source], bench.now)


async def test_a_zone_without_a_provider_forecast_has_a_learned_one(repository: Repository) -> None:
    bench = replayed(repository)
    await bench.poll()
    assert (await bench.service.forecast("GB", None, None, "real")).method == "persistence"
    with pytest.raises(ProblemError, match="has been learned yet"):
        await bench.service.backtest("GB", None)
    assert await learner_of(bench).turn() == 1
    made = await bench.service.forecast("GB", None, 96 * HOUR_S, "real")
    assert made.method == "ridge"
    assert not made.is_stale
    assert made.persistence_from is None or made.persistence_from == made.points[-1].start_at
    with_range = [point for point in made.points if point.p10 is not None and point.p90 is not None]
    assert len(with_range) >= 95
    assert all(point.p10 <= point.gco2_per_kwh <= point.p90 for point in with_range)  # type: ignore[operator]
    tested = await bench.service.backtest("GB", None)
    errors = {each.method: each.mean_absolute_error_gco2_per_kwh for each in tested.errors}
    assert tested.method == "ridge"
    assert np.mean(errors["ridge"]) < np.mean(errors["persistence"])
    assert len(errors["ridge"]) == 4
    outlook = await bench.service.outlook("GB", None, HOUR_S, 24 * HOUR_S, "real")
    assert {point.kind for point in outlook.points} == {"measured", "learned"}
    known = outlook.as_domain()
    assert known.low is not None
    assert known.high is not None
    measured = np.array([point.kind == "measured" for point in outlook.points])
    assert (known.high - known.low)[measured].tolist() == [0.0] * int(measured.sum())
    assert ((known.high - known.low)[~measured] > 0).all()


async def test_the_provider_comes_first_and_what_was_learned_goes_on(repository: Repository) -> None:
    bench = replayed(repository, "DE")
    await bench.poll()
    await learner_of(bench).turn()
    made = await bench.service.forecast("DE", None, 72 * HOUR_S, "real")
    assert made.method == "provider"
    assert made.learned_from is not None
    assert made.persistence_from is None
    first = next(point for point in made.points if point.start_at == made.learned_from)
    assert first.p10 is not None


async def test_the_running_service_learns_by_itself_and_a_restart_has_it(empty_database: str) -> None:
    now = Now()
    async with running(empty_database, now, zones=("GB",), learn_forecasts=True) as api:
        for _ in range(600):  # the learner looks again after 5 s
            if (answer := await api.get("/v1/carbon/GB/forecast/backtest")).status_code == 200:
                break
            await asyncio.sleep(0.1)
        tested = ForecastBacktest.model_validate_json(answer.content)
        assert tested.forecasts > 0
    async with running(empty_database, now, zones=("GB",)) as api:
        again = await api.get("/v1/carbon/GB/forecast/backtest")
        assert ForecastBacktest.model_validate_json(again.content) == tested
        assert (await api.get("/v1/carbon/GB/forecast")).json()["method"] == tested.method


async def test_it_is_learned_once_an_hour_and_by_one_replica(repository: Repository) -> None:
    bench = replayed(repository)
    await bench.poll()
    async with repository.learning() as is_ours:
        assert is_ours
        assert await learner_of(bench).turn() == 0
    assert await learner_of(bench).turn() == 1
    assert await learner_of(bench).turn() == 0  # another replica, or this one started again: it is in the store
    bench.now.s += HOUR_S
    await bench.poll()
    assert await learner_of(bench).turn() == 1


async def test_an_old_forecast_gives_way_to_persistence_and_an_earlier_moment_sees_its_own(
    repository: Repository,
) -> None:
    bench = replayed(repository)
    await bench.poll()
    await learner_of(bench).turn()
    bench.now.s += 1.5 * DAY_S
    await bench.poll()
    assert (await bench.service.forecast("GB", None, None, "real")).method == "persistence"
    await learner_of(bench).turn()
    assert (await bench.service.forecast("GB", None, None, "real")).method == "ridge"
    then = await bench.service.known_at("GB", NOW_S + HOUR_S)
    assert then.learned is not None
    assert then.learned.generated_s == NOW_S


async def test_a_young_installation_begins_with_what_other_grids_taught(repository: Repository) -> None:
    bench = replayed(repository)
    bench.poller._settings = bench.poller._settings.model_copy(update={"backfill_s": 5 * DAY_S})
    await bench.poll()
    await learner_of(bench).turn()
    tested = await bench.service.backtest("GB", None)
    assert (tested.method, tested.forecasts, tested.errors) == ("pretrained", 0, [])
    assert "days of history are needed" in tested.note
    made = await bench.service.forecast("GB", None, 96 * HOUR_S, "real")
    assert made.method == "pretrained"
    with_range = [point for point in made.points if point.p10 is not None and point.p90 is not None]
    assert len(with_range) >= 95
    assert all(point.p10 <= point.gco2_per_kwh <= point.p90 for point in with_range)  # type: ignore[operator]


@pytest.mark.parametrize(("speed", "learned"), [(600.0, 1), (100_000.0, 0)])
async def test_a_replay_is_learned_on_the_clock_of_its_grid(repository: Repository, speed: float, learned: int) -> None:
    slow, fast = replayed(repository), replayed(repository, speed=speed)
    await fast.poll()
    assert await learner_of(fast).turn() == learned
    if learned:
        known = await repository.learned(fast.source.key, NOW_S)
        assert known is not None
        ends = [point.end_s - point.start_s for point in known.points]
        assert ends == pytest.approx([HOUR_S / speed] * 96, abs=1e-5)
        points = (await slow.source.provider.history("GB", Signal.AVERAGE_DIRECT, NOW_S - 90 * DAY_S, NOW_S + 1)).points
        at_one = predicted(points, slow.source.feed, Replay(NOW_S, GRID_S, 1.0), Signal.AVERAGE_DIRECT)
        np.testing.assert_allclose(
            [point.gco2_per_kwh for point in known.points], [point.gco2_per_kwh for point in at_one.points], rtol=1e-6
        )


def test_five_minute_values_are_predicted_in_five_minute_steps() -> None:
    rng = np.random.default_rng(2)
    steps = 60 * 288
    noise = np.convolve(rng.normal(0, 15, steps + 200), 0.98 ** np.arange(201), "valid")
    swing = 40 * np.where(np.arange(steps) % 12 < 6, 1, -1)  # within each hour
    values = 200 + 150 * np.sin(2 * np.pi * np.arange(steps) / 288) + swing + noise
    begin_s = NOW_S - NOW_S % DAY_S - 60 * DAY_S
    points = [Point(begin_s + 300.0 * i, begin_s + 300.0 * (i + 1), float(value)) for i, value in enumerate(values)]
    feed = Feed("a zone", "", step_s=300.0, max_age_s=1800.0, poll_interval_s=60.0, history_s=DAY_S)
    now_s = points[-1].end_s
    made = predicted(points, feed, Replay(now_s, now_s, 1.0), Signal.AVERAGE_DIRECT)
    assert made.method == "ridge"
    assert len(made.points) == 96 * 12
    assert made.points[0].start_s == now_s
    first = np.array([point.gco2_per_kwh for point in made.points]).reshape(96, 12)
    assert (first[:, :6].mean(axis=1) - first[:, 6:].mean(axis=1) > 50).all()


def test_a_month_of_five_minute_values_is_blended_where_that_beats_persistence() -> None:
    """A signal that drifts and knows no time of day, as marginal ones nearly do: the last value says most."""
    rng = np.random.default_rng(3)
    values = 400 + np.cumsum(rng.normal(0, 4, 30 * 288))
    begin_s = NOW_S - NOW_S % 300 - 30 * DAY_S
    points = [Point(begin_s + 300.0 * i, begin_s + 300.0 * (i + 1), float(value)) for i, value in enumerate(values)]
    del points[5_000:5_050]
    feed = Feed("a zone", "", step_s=300.0, max_age_s=1800.0, poll_interval_s=60.0, history_s=DAY_S)
    now_s = points[-1].end_s
    made = predicted(points, feed, Replay(now_s, now_s, 1.0), Signal.AVERAGE_DIRECT)
    assert made.method == "blend"
    assert "days of history are needed" in made.note
    assert len(made.points) == 96 * 12
    assert (made.points[0].start_s, made.points[-1].end_s) == (now_s, now_s + 4 * DAY_S)
    assert made.points[0].gco2_per_kwh == pytest.approx(values[-1], abs=20)
    assert all(point.p10 <= point.gco2_per_kwh <= point.p90 for point in made.points)  # type: ignore[operator]
    assert made.backtest is not None
    assert made.backtest["mae"]["blend"][0] < made.backtest["mae"]["persistence"][0]
    assert len(made.backtest["mae"]["blend"]) == 4
    again = np.tile(values[:288], 30)  # each day as the one before
    steady = [Point(begin_s + 300.0 * i, begin_s + 300.0 * (i + 1), float(value)) for i, value in enumerate(again)]
    assert predicted(steady, feed, Replay(now_s, now_s, 1.0), Signal.AVERAGE_DIRECT).method == "persistence"
    few, then = points[: 9 * 288], Replay(points[9 * 288].start_s, now_s, 1.0)
    assert predicted(few, feed, then, Signal.MARGINAL).method == "persistence"
    assert predicted(few, feed, then, Signal.AVERAGE_DIRECT).method == "pretrained"


class Windy(LiveProvider[LiveSettings]):
    """A live grid whose wind changes every half day, told the evening before for the day after; down if asked to be."""

    name = "windy"

    def __init__(self, now: Now, told: bool) -> None:
        self._now_s = self.now = now
        self.told, self.asked = told, list[tuple[float, float]]()
        self.wind_mw = np.random.default_rng(3).uniform(0.0, 100.0, 400)  # by half days since long ago
        self.began_s = NOW_S // DAY_S * DAY_S - 150 * DAY_S

    def wind(self, at_s: float) -> float:
        return float(self.wind_mw[int((at_s - self.began_s) // (DAY_S / 2))])

    def feed(self, zone: str) -> Feed:
        return Feed("Windy", "ours", HOUR_S, 6 * HOUR_S, 900.0, 140 * DAY_S)

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        hours = np.arange(start_s // HOUR_S * HOUR_S, min(end_s, self.now() - HOUR_S), HOUR_S).tolist()
        return Series(tuple(Point(at, at + HOUR_S, 300.0 - 2 * self.wind(at)) for at in hours))

    async def expected(self, zone: str, start_s: float, end_s: float) -> dict[float, dict[str, float]]:
        self.asked.append((start_s, end_s))
        if not self.told:
            raise ProviderError("not today")
        tonight_s = self.now() // DAY_S * DAY_S + DAY_S
        hours = np.arange(start_s // HOUR_S * HOUR_S, min(end_s, tonight_s), HOUR_S).tolist()
        return {at: {"wind": self.wind(at)} for at in hours}


@pytest.mark.parametrize("told", [True, False])
async def test_day_ahead_wind_is_fetched_kept_and_learned_from_and_its_absence_harms_nothing(
    repository: Repository, told: bool
) -> None:
    now = Now()
    zone = "WI-TOLD" if told else "WI"
    grid = Windy(now, told)
    bench = a_bench(grid, zone, repository, now, backfill_s=140 * DAY_S)
    await bench.poll()
    assert bench.source.last_error is None
    assert await learner_of(bench).turn() == 1
    made = await bench.service.forecast(zone, None, 14 * HOUR_S, "real")
    off = [abs(each.gco2_per_kwh - 300.0 + 2 * grid.wind(each.start_at.timestamp())) for each in made.points]
    assert (np.mean(off[:12]) < 12.0) == told  # the mean distance of two levels is 67
    stored = await repository.expected(bench.source.key)
    assert len(stored) == (140 * 24 + 15 if told else 0)
    now.s += HOUR_S
    await bench.poll()
    assert len(grid.asked) == 2
    assert grid.asked[1][0] > now.s - 1.1 * DAY_S if told else grid.asked[1][0] < now.s - 139 * DAY_S
    assert await repository.prune(bench.source.key, now.s - 30 * DAY_S, 10**6, 10) > 0
    assert len(await repository.expected(bench.source.key)) <= 31 * 24
