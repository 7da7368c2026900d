"""The store: upserts, ranges, what a new replay takes back, and what goes with age."""

import pytest

from carbon_service.providers.protocol import ForecastIssue, Point
from carbon_service.repository import Repository, SourceKey
from services.core.domain.carbon import Signal
from tests.carbon.harness import NOW_S

HOUR_S = 3600.0
KEY = SourceKey("GB", Signal.AVERAGE_DIRECT, "uk")
RECORDED = SourceKey("GB", Signal.AVERAGE_DIRECT, "recorded")


def hour(index: int, value: float, *, estimated: bool = False) -> Point:
    return Point(NOW_S + index * HOUR_S, NOW_S + (index + 1) * HOUR_S, value, estimated)


async def stored(repository: Repository, key: SourceKey = KEY, **span: float) -> list[tuple[float, float]]:
    start_s, end_s = span.get("start_s", NOW_S - 1e6), span.get("end_s", NOW_S + 1e6)
    found = await repository.points(key, start_s, end_s, limit=100, begins_by_s=span.get("begins_by_s", NOW_S + 1e6))
    return [((point.start_s - NOW_S) / HOUR_S, point.gco2_per_kwh) for point in found]


async def test_fetching_again_changes_and_does_not_add(repository: Repository) -> None:
    await repository.save_points(KEY, [hour(0, 1.0), hour(1, 2.0, estimated=True)], NOW_S)
    await repository.save_points(KEY, [hour(0, 1.5), hour(1, 3.0)], NOW_S + 9)
    assert await stored(repository) == [(0, 1.5), (1, 3.0)]


async def test_an_estimate_does_not_replace_a_measurement(repository: Repository) -> None:
    await repository.save_points(KEY, [hour(0, 1.0)], NOW_S)
    await repository.save_points(KEY, [hour(0, 9.0, estimated=True)], NOW_S)
    assert await stored(repository) == [(0, 1.0)]


async def test_a_value_fetched_again_unchanged_keeps_its_date(repository: Repository) -> None:
    await repository.save_points(KEY, [hour(0, 1.0)], NOW_S)
    await repository.save_points(KEY, [hour(0, 1.0)], NOW_S + 100)
    found = await repository.points(KEY, NOW_S, NOW_S + 1, limit=1, begins_by_s=NOW_S)
    assert found[-1].fetched_s == NOW_S


async def test_a_range_takes_the_interval_it_begins_in(repository: Repository) -> None:
    await repository.save_points(KEY, [hour(index, float(index)) for index in range(4)], NOW_S)
    assert await stored(repository, start_s=NOW_S + 1.5 * HOUR_S, end_s=NOW_S + 3 * HOUR_S) == [(1, 1.0), (2, 2.0)]
    assert await stored(repository, start_s=NOW_S + 2 * HOUR_S, begins_by_s=NOW_S + 2 * HOUR_S) == [(2, 2.0)]
    assert await stored(repository, start_s=NOW_S + 4 * HOUR_S) == []


async def test_of_more_than_the_limit_the_oldest_or_the_newest(repository: Repository) -> None:
    await repository.save_points(KEY, [hour(index, float(index)) for index in range(4)], NOW_S)
    found = [
        await repository.points(KEY, 0.0, NOW_S + 1e6, limit=2, begins_by_s=NOW_S + 1e6, newest=newest)
        for newest in (False, True)
    ]
    assert [[point.gco2_per_kwh for point in one] for one in found] == [[0.0, 1.0], [2.0, 3.0]]


async def test_providers_and_signals_are_kept_apart(repository: Repository) -> None:
    await repository.save_points(KEY, [hour(0, 1.0)], NOW_S)
    await repository.save_points(RECORDED, [hour(0, 2.0)], NOW_S)
    marginal = SourceKey("GB", Signal.MARGINAL, "uk")
    assert await stored(repository, RECORDED) == [(0, 2.0)]
    assert await stored(repository, marginal) == []
    assert await repository.known_until_s(marginal) is None
    assert await repository.known_until_s(KEY) == NOW_S + HOUR_S


async def test_the_forecast_that_was_known_at_a_time(repository: Repository) -> None:
    for issued, value in ((0, 1.0), (2, 2.0)):
        issue = ForecastIssue(NOW_S + issued * HOUR_S, (hour(5, value),))
        await repository.save_forecast(KEY, issue, NOW_S)
    known = [await repository.forecast(KEY, NOW_S + at * HOUR_S) for at in (-1, 1, 3)]
    assert known[0] is None
    assert [issue.points[0].gco2_per_kwh for issue in known[1:] if issue] == [1.0, 2.0]


async def test_a_replay_is_known_again_after_a_restart(repository: Repository) -> None:
    first = await repository.start_replay(600.0, None, NOW_S)
    assert await repository.start_replay(600.0, None, NOW_S + 500) == first


async def test_another_replay_takes_back_what_was_published_ahead(repository: Repository) -> None:
    await repository.start_replay(600.0, None, NOW_S)
    await repository.save_points(RECORDED, [hour(index, float(index)) for index in (-1, 0, 1)], NOW_S)
    await repository.save_points(KEY, [hour(2, 7.0)], NOW_S)
    await repository.save_forecast(RECORDED, ForecastIssue(NOW_S + 9000, ()), NOW_S)
    half_past_s = NOW_S + HOUR_S / 2
    replay = await repository.start_replay(60.0, None, half_past_s)
    assert replay.speed == 60.0
    assert await stored(repository, RECORDED) == [(-1, -1.0), (0, 0.0)]
    assert await repository.known_until_s(RECORDED) == half_past_s
    assert await repository.forecast(RECORDED, NOW_S + 1e6) is None
    assert await stored(repository) == [(2, 7.0)]


async def test_old_rows_and_rows_beyond_the_limit_go(repository: Repository) -> None:
    await repository.save_points(KEY, [hour(index, float(index)) for index in range(10)], NOW_S)
    await repository.save_points(RECORDED, [hour(0, 1.0)], NOW_S)
    assert await repository.prune(KEY, NOW_S + 2 * HOUR_S, 100, 100) == 3
    assert await repository.prune(KEY, 0.0, 4, 100) == 3
    assert await stored(repository) == [(index, float(index)) for index in range(6, 10)]
    assert await stored(repository, RECORDED) == [(0, 1.0)]


async def test_more_rows_than_one_statement_holds(repository: Repository) -> None:
    many = [Point(NOW_S + index, NOW_S + index + 1, float(index)) for index in range(2500)]
    await repository.save_points(KEY, many, NOW_S)
    found = await repository.points(KEY, NOW_S, NOW_S + 9999, limit=9999, begins_by_s=NOW_S + 9999)
    assert found == tuple(many)


@pytest.mark.parametrize("microseconds", [1, 333_333, 999_999])
async def test_instants_keep_their_microseconds(repository: Repository, microseconds: int) -> None:
    start_s = round(NOW_S + microseconds / 1e6, 6)
    await repository.save_points(KEY, [Point(start_s, start_s + 1, 1.0)], NOW_S)
    found = await repository.points(KEY, start_s, start_s + 1, limit=9, begins_by_s=start_s)
    assert found[0].start_s == start_s
