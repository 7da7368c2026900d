"""Traffic as it is reported: counted by the partitions' thresholds, each window of each source once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts.problems import Problem
from services.serving import traffic
from services.serving.upkeep import forget
from tests.support.pools import PoolApi, a_partition, a_pool, pool_api, windows_ago


@pytest.fixture(scope="module")
async def api(database_url: str) -> AsyncIterator[PoolApi]:
    """The API of pools; tests use a pool of their own each."""
    async with pool_api(database_url) as made:
        yield made


async def test_requests_are_counted_by_every_partition(api: PoolApi) -> None:
    await api.made("counted", partitions=[a_partition(), a_partition("whole", None)])
    requests = [[99, 199], [99, 200], [100, 199], [100, 200], [100, 10_000]]
    receipt = await api.report("counted", windows_ago(3, requests))
    assert receipt == {"windows": 3, "requests": 15}
    assert await api.counted("counted") == {"SS": 3, "SL": 3, "LS": 3, "LL": 6}
    assert await api.counted("counted", "any") == {"any": 15}


async def test_a_window_said_again_is_replaced_and_another_sources_is_not(api: PoolApi) -> None:
    await api.made("twice")
    windows = windows_ago(2, [[1, 1]])
    for _ in range(3):
        await api.report("twice", windows)
    await api.report("twice", windows, source="r2")
    assert await api.counted("twice") == {"SS": 4}
    await api.report("twice", [{**windows[0], "requests": []}])
    assert await api.counted("twice") == {"SS": 3}


async def test_a_window_without_requests_says_that_none_came(api: PoolApi) -> None:
    await api.made("quiet")
    await api.report("quiet", windows_ago(1, []))
    rows = await api.database.fetch("SELECT counts FROM pool_traffic WHERE pool = 'quiet'")
    assert [row["counts"] for row in rows] == [{"100,200": {}}]


async def test_windows_too_old_or_too_early_are_pointed_at_and_none_is_kept(api: PoolApi) -> None:
    await api.made("dated")
    now_s = datetime.now(UTC).timestamp() // 5 * 5
    ages_s = (60, 17 * 86_400, -600, -30)
    starts = [datetime.fromtimestamp(now_s - age_s, UTC) for age_s in ages_s]
    windows = [{"start_at": start.isoformat(), "requests": [[1, 1]]} for start in starts]
    answer = await api.call("POST", "/dated/traffic", json={"source": "r", "windows": windows})
    problem = Problem.model_validate_json(answer.content)
    assert (problem.status, problem.code) == (422, "invalid_request")
    assert [error.pointer for error in problem.errors] == ["/windows/1/start_at", "/windows/2/start_at"]
    assert await api.counted("dated") == {}
    await api.report("dated", [windows[0], windows[3]])
    assert await api.counted("dated") == {"SS": 2}


async def test_a_pool_that_changes_meanwhile_is_counted_by_its_new_thresholds(
    api: PoolApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.made("changing")
    loop, count, counted_by = asyncio.get_running_loop(), traffic.count_requests, list[list[str]]()

    def changes_at_first(partitions: Any, windows: Any) -> Any:
        counted_by.append([part.counted_as for part in partitions])
        if len(counted_by) == 1:
            changed = api.call("PUT", "/changing", json=a_pool(partitions=[a_partition("whole", None)]))
            assert asyncio.run_coroutine_threadsafe(changed, loop).result(30).status_code == 200
        return count(partitions, windows)

    monkeypatch.setattr(traffic, "count_requests", changes_at_first)
    await api.report("changing", windows_ago(2, [[1, 1]]))
    assert counted_by == [["100,200"], ["any"]]
    assert await api.counted("changing", "any") == {"any": 2}


BAD: list[tuple[Any, str]] = [
    ([], "/windows"),
    ([{"start_at": "2026-11-20T19:36:21Z", "requests": []}], "/windows/0/start_at"),
    ([{"start_at": "2026-11-20T19:36:20", "requests": []}], "/windows/0/start_at"),
    ([{"start_at": "2026-11-20T19:36:20Z", "requests": []}] * 2, "/windows"),
    ([{"start_at": "2026-11-20T19:36:20Z", "requests": [[1, -1]]}], "/windows/0/requests/0/1"),
    ([{"start_at": "2026-11-20T19:36:20Z", "requests": [[1]]}], "/windows/0/requests/0/1"),
]


@pytest.mark.parametrize(("windows", "pointer"), BAD)
async def test_what_is_wrong_is_pointed_at(api: PoolApi, windows: Any, pointer: str) -> None:
    await api.call("PUT", "/wrong", json=a_pool())
    answer = await api.call("POST", "/wrong/traffic", json={"source": "r", "windows": windows})
    problem = Problem.model_validate_json(answer.content)
    assert problem.status == 422
    assert [error.pointer for error in problem.errors] == [pointer]


async def test_a_past_is_that_of_thresholds_whatever_the_partition_is_called(api: PoolApi) -> None:
    await api.made("cut", partitions=[a_partition("a"), a_partition("b", (5, 5))])
    await api.report("cut", windows_ago(2, [[1, 1], [500, 500]]))
    swapped = [a_partition("a", (5, 5)), a_partition("c", (1, 1))]
    assert (await api.call("PUT", "/cut", json=a_pool(partitions=swapped))).json()["revision"] == 2
    await api.report("cut", windows_ago(2, [[1, 1]], s=30))
    assert await api.counted("cut", "100,200") == {"SS": 2, "LL": 2}
    assert await api.counted("cut", "5,5") == {"SS": 4, "LL": 2}
    assert await api.counted("cut", "1,1") == {"LL": 2}


async def test_old_windows_are_deleted(api: PoolApi) -> None:
    await api.made("old")
    await api.report("old", windows_ago(2, [[1, 1]]))
    at = datetime.now(UTC) - timedelta(days=16, seconds=1)
    await api.database.execute("INSERT INTO pool_traffic VALUES ('old', $1, 'r', '{}')", at)
    await forget(api.traffic._repository, api.traffic._settings)
    assert await api.counted("old") == {"SS": 2}


async def test_reports_of_the_same_windows_at_once_are_one(api: PoolApi) -> None:
    await api.made("storm")
    windows = windows_ago(50, [[1, 1]])
    mixed = [windows, windows[::-1], windows[25:] + windows[:25]] * 3
    await asyncio.gather(*(api.report("storm", each) for each in mixed))
    assert await api.counted("storm") == {"SS": 50}


requests = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=8)
reports = st.lists(
    st.tuples(st.sampled_from(["r1", "r2"]), st.dictionaries(st.integers(0, 5), requests, min_size=1)), max_size=5
)


async def test_what_counts_is_what_each_source_said_last(api: PoolApi) -> None:
    """Said twice, in any order, overlapping: each window of each source counts once, as it was said last."""
    await api.made("said", partitions=[a_partition(), a_partition("whole", None)])
    starts = [window["start_at"] for window in windows_ago(6, [])]
    loop = asyncio.get_running_loop()

    async def check(said: list[tuple[str, dict[int, list[tuple[int, int]]]]]) -> None:
        await api.database.execute("DELETE FROM pool_traffic WHERE pool = 'said'")
        last: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for source, spoken in [*said, *said[-1:]]:
            await api.report("said", [{"start_at": starts[at], "requests": spoken[at]} for at in spoken], source)
            last |= {(source, at): found for at, found in spoken.items()}
        expected: Counter[str] = Counter()
        for length_in, length_out in chain.from_iterable(last.values()):
            expected[("L" if length_in >= 100 else "S") + ("L" if length_out >= 200 else "S")] += 1
        assert await api.counted("said") == expected
        assert sum((await api.counted("said", "any")).values()) == expected.total()

    @settings(max_examples=25, deadline=None)
    @given(said=reports)
    def holds(said: list[tuple[str, dict[int, list[tuple[int, int]]]]]) -> None:
        asyncio.run_coroutine_threadsafe(check(said), loop).result()

    await asyncio.to_thread(holds)
