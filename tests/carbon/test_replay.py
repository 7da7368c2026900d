"""Recordings as a grid: whose clock shows what, what is published when, and what happens at the end."""

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carbon_service.providers.protocol import DAY_S
from carbon_service.providers.recorded import ZONES, Recorded, load
from carbon_service.replay import Replay, next_replay
from services.core.domain.carbon import Signal

SIGNAL = Signal.AVERAGE_DIRECT
NOW_S = datetime(2026, 3, 1, 9, 30, tzinfo=UTC).timestamp()
START_S = datetime(2021, 8, 1, tzinfo=UTC).timestamp()


def a_grid(speed: float = 600.0, now_s: float = NOW_S, start_s: float = START_S) -> Recorded:
    return Recorded(Replay(NOW_S, start_s, speed), lambda: now_s)


@pytest.mark.parametrize("zone", ZONES)
def test_every_bundled_grid_is_whole(zone: str) -> None:
    recording = load(zone)
    assert recording.times_s[0] % DAY_S == 0
    assert recording.length_s % DAY_S == 0
    assert (recording.times_s[1:] > recording.times_s[:-1]).all()
    assert (recording.measured > 0).all()
    assert (recording.forecast is None) == (zone == "GB")


async def test_an_hour_lasts_six_seconds_at_speed_600() -> None:
    found = await a_grid().history("US-CAL-CISO", SIGNAL, NOW_S, NOW_S + 60)
    assert len(found.points) == 10
    assert [point.start_s - NOW_S for point in found.points[:3]] == [0.0, 6.0, 12.0]
    row = int((START_S - load("US-CAL-CISO").times_s[0]) // 3600)
    assert [point.gco2_per_kwh for point in found.points] == list(load("US-CAL-CISO").measured[row : row + 10])


@given(
    speed=st.sampled_from([0.5, 1.0, 7.0, 600.0, 86_400.0]),
    zone=st.sampled_from(sorted(ZONES)),
    offset_s=st.floats(-1e6, 1e7),
)
async def test_a_replay_has_no_gaps_and_asks_no_question_twice(speed: float, zone: str, offset_s: float) -> None:
    grid = a_grid(speed)
    start_s, step_s = NOW_S + offset_s / speed, 3600 / speed
    whole = (await grid.history(zone, SIGNAL, start_s, start_s + 40 * step_s)).points
    middle_s = whole[13].start_s
    parts = (await grid.history(zone, SIGNAL, start_s, middle_s)).points + (
        await grid.history(zone, SIGNAL, middle_s, start_s + 40 * step_s)
    ).points
    assert parts == whole
    assert all(one.end_s == following.start_s for one, following in itertools.pairwise(whole))


async def test_the_end_of_a_recording_is_followed_by_its_beginning() -> None:
    end_s = datetime(2022, 1, 1, tzinfo=UTC).timestamp()
    grid = a_grid(start_s=end_s)
    before, after = (await grid.history("SE", SIGNAL, NOW_S - 6, NOW_S + 6)).points
    recording = load("SE")
    assert (before.gco2_per_kwh, after.gco2_per_kwh) == (recording.measured[-1], recording.measured[0])
    assert grid.grid_s("SE", NOW_S + 3) == recording.times_s[0] + 1800


async def test_no_forecast_is_published_before_its_day_begins() -> None:
    noon = a_grid(now_s=NOW_S + DAY_S / 2 / 600)
    (issue,) = await noon.forecast("DE", SIGNAL, DAY_S)
    assert issue.generated_s == NOW_S
    assert len(issue.points) == 24
    assert issue.points[-1].end_s == NOW_S + DAY_S / 600
    late = a_grid(now_s=NOW_S + (DAY_S - 1) / 600)
    today, tomorrow = await late.forecast("DE", SIGNAL, DAY_S)
    assert tomorrow.generated_s == today.points[-1].end_s


async def test_a_grid_without_a_day_ahead_forecast_has_none() -> None:
    grid = a_grid()
    feed = grid.feed("GB")
    assert feed is not None
    assert not feed.has_forecast
    assert await grid.forecast("GB", SIGNAL, DAY_S) == ()


async def test_the_latest_interval_is_the_one_being_replayed() -> None:
    (point,) = (await a_grid(now_s=NOW_S + 7).latest("DE", SIGNAL)).points
    assert point.start_s == NOW_S + 6


@pytest.mark.parametrize("speed", [0.01, 1.0, 600.0, 100_000.0])
def test_what_is_published_ahead_outlasts_the_wait_for_the_next_poll(speed: float) -> None:
    feed = a_grid(speed).feed("DE")
    assert feed is not None
    assert feed.ahead_s >= 2 * feed.poll_interval_s
    assert feed.poll_interval_s >= 5.0


def test_at_speed_one_it_is_the_season_and_hour_it_is() -> None:
    replay = next_replay(None, 1.0, None, NOW_S)
    assert datetime.fromtimestamp(replay.grid_s, UTC) == datetime(2021, 3, 1, 9, 30, tzinfo=UTC)
    leap_s = datetime(2028, 2, 29, 12, tzinfo=UTC).timestamp()
    assert datetime.fromtimestamp(next_replay(None, 1.0, None, leap_s).grid_s, UTC).day == 28


def test_a_restart_goes_on_where_it_was() -> None:
    first = next_replay(None, 600.0, None, NOW_S)
    assert first.grid_s == START_S
    assert next_replay(first, 600.0, None, NOW_S + 1000) is first


def test_another_speed_goes_on_from_the_hour_it_shows() -> None:
    first = next_replay(None, 600.0, None, NOW_S)
    second = next_replay(first, 60.0, None, NOW_S + 10)
    assert second == Replay(NOW_S + 10, START_S + 6000, 60.0, None)


def test_another_start_starts_anew() -> None:
    first = next_replay(None, 600.0, None, NOW_S)
    asked_s = START_S + 40 * DAY_S
    assert next_replay(first, 600.0, asked_s, NOW_S + 10) == Replay(NOW_S + 10, asked_s, 600.0, asked_s)


def test_a_clock_beyond_what_a_calendar_holds_starts_anew() -> None:
    first = Replay(NOW_S, START_S, 100_000.0)
    years_later_s = NOW_S + 30 * DAY_S
    assert next_replay(first, 600.0, None, years_later_s).grid_s == START_S
