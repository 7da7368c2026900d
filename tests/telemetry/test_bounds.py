"""What a node's hardware cannot have used is taken in, booked at what it can, kept beside it as reported, and counted;
no line lies outside the life of its gang."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.kit.ids import utc_now
from services.telemetry.figures import MARKED
from services.telemetry.repository.corrections import return_late
from tests.support.control_plane import FakeAgent, accept_job, allocate, usage
from tests.support.ledger import unsigned
from tests.telemetry.test_corrections import ask, broken, ends, figures, lines, rows, totals

LIMIT_W, HOST_W = 400.0, 500.0
MOST_GPU_W = 1.2 * LIMIT_W * 4


async def bounded(plane, **registration: Any) -> FakeAgent:
    """Return a node of 4 GPUs of at most 400 W each, with a host of 500 W."""
    agent = FakeAgent(plane.http, "n0", zone=plane.zone, most_host_w=HOST_W, **registration)
    for device in agent.registration["devices"]:
        device["highest_limit_w"] = LIMIT_W
    await agent.register()
    await agent.beat()
    return agent


async def node(plane) -> dict[str, Any]:
    return await ask(plane, "/v1/nodes/n0")


async def test_what_no_board_can_use_is_booked_at_what_it_can_and_kept_as_reported(plane) -> None:
    agent = await bounded(plane)
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    counted = MARKED.labels("hardware")._value.get()
    t = utc_now().timestamp() - 100

    answer = await agent.report(
        agent.interval(t, t + 5, usage(gang, 22e6, static_energy_j=100), usage(None, 200, gpus=3)),
        agent.interval(t + 5, t + 10, usage(gang, 1_000), usage(None, 200, gpus=3)),
    )

    assert answer.json() == {"accepted": 2, "duplicates": 0}, "what waits behind it gets through"
    idle, used, idle_after, used_after = await lines_in_order(plane)
    booked_j = 5 * MOST_GPU_W
    assert used["gpu_energy_j"] + idle["gpu_energy_j"] == pytest.approx(booked_j)
    assert used["gpu_energy_j"] == pytest.approx(booked_j, rel=1e-4)
    assert [(each["source"], each["basis"]) for each in (used, idle)] == [("modelled", "hardware")] * 2
    assert (used["reported_energy_j"], idle["reported_energy_j"]) == (22e6 + 100, 200)
    assert used["static_energy_j"] == 100
    assert [(each["source"], each["basis"], each["reported_energy_j"]) for each in (used_after, idle_after)] == [
        ("counter", None, None)
    ] * 2
    kept = await rows(plane, "SELECT metered_gpu_energy_j, reported_gpu_energy_j FROM energy_intervals ORDER BY 1 DESC")
    assert kept == [
        {"metered_gpu_energy_j": pytest.approx(booked_j), "reported_gpu_energy_j": 22e6 + 200},
        {"metered_gpu_energy_j": 1_200, "reported_gpu_energy_j": None},
    ]
    assert (await figures(plane, job))["gpu_energy_j"] == pytest.approx(used["gpu_energy_j"] + 1_000)
    assert (await node(plane))["marked_intervals"] == 1
    assert MARKED.labels("hardware")._value.get() == counted + 2
    assert await broken(plane) == {}


async def test_parts_whose_sum_is_more_than_one_part_may_be_are_booked_too(plane) -> None:
    agent = await bounded(plane)
    t = utc_now().timestamp() - 100
    answer = await agent.report(agent.interval(t, t + 5, usage(None, 9e11), usage(None, 9e11, gpus=3), metered_j=9e11))
    assert answer.json() == {"accepted": 1, "duplicates": 0}
    (line,) = await lines(plane)
    assert (line["gpu_energy_j"], line["reported_energy_j"]) == (pytest.approx(5 * MOST_GPU_W), 1.8e12)


async def lines_in_order(plane) -> list[dict[str, Any]]:
    return sorted(await lines(plane), key=lambda line: (line["sequence"], line["owner"]))


async def test_a_host_has_a_bound_too_also_one_that_does_not_say_its_own(plane) -> None:
    agent = await bounded(plane)
    t = utc_now().timestamp() - 100
    impossible = usage(None, 0, cpu_energy_j=262_138, static_energy_j=100)
    await agent.report(agent.interval(t, t + 1, impossible))
    (line,) = await lines(plane)
    assert line["cpu_energy_j"] + line["static_energy_j"] == pytest.approx(HOST_W)
    assert (line["cpu_source"], line["source"], line["basis"]) == ("modelled", "counter", "hardware")
    assert line["reported_energy_j"] == 262_238

    former = FakeAgent(plane.http, "n1", zone=plane.zone)
    del former.registration["most_host_w"]
    await former.register()
    await former.report(former.interval(t, t + 1, impossible), former.interval(t + 1, t + 2, usage(None, 0)))
    assert [each["cpu_energy_j"] < 10_000 for each in await lines(plane) if each["node_id"] == "n1"] == [True, True]


async def test_no_interval_is_so_long_that_hardware_can_use_anything_in_it(plane) -> None:
    agent = await bounded(plane)
    t = utc_now().timestamp()
    await agent.report(agent.interval(t - 20 * 365 * 86_400, t, usage(None, 9e11), metered_j=9e11))
    (line,) = await lines(plane)
    assert (line["gpu_energy_j"], line["basis"]) == (pytest.approx(7 * 86_400 * MOST_GPU_W), "hardware")
    assert line["reported_energy_j"] == 9e11


async def test_the_first_interval_of_a_node_has_no_time_before_it_was_one(plane) -> None:
    agent = await bounded(plane)
    t = utc_now().timestamp()
    async with plane.database.connection() as connection:
        await connection.execute(
            "INSERT INTO node_credentials (node_id, credential_sha256, redis_sha256, enrolment, enrolled_at) "
            "VALUES ('n0', '', '', '', to_timestamp($1))",
            t - 100,
        )
    await agent.report(agent.interval(t - 86_400, t, usage(None, 9e11), metered_j=9e11))
    (line,) = await lines(plane)
    assert (line["gpu_energy_j"], line["basis"]) == (pytest.approx(100 * MOST_GPU_W), "hardware")


async def test_a_long_interval_has_no_time_that_was_booked_before(plane) -> None:
    """A node was away since its last interval, or it was not away."""
    agent = await bounded(plane)
    t = utc_now().timestamp() - 10_000
    await agent.report(agent.interval(t - 60, t, usage(None, 0)))
    day = agent.interval(t + 4_000 - 86_400, t + 4_000, usage(None, 9e11), metered_j=9e11)
    again = agent.interval(t + 4_010 - 86_400, t + 4_010, usage(None, 9e11), metered_j=9e11)
    await agent.report(day, again)
    booked = [each["gpu_energy_j"] for each in await lines_in_order(plane)]
    assert booked == [0, pytest.approx(4_000 * MOST_GPU_W), pytest.approx(10 * MOST_GPU_W)]


async def test_what_a_node_still_has_to_report_is_of_when_it_had_more_gpus(plane) -> None:
    agent = await bounded(plane)
    agent.registration["devices"], agent.registration["most_host_w"] = [], 1.0
    await agent.register()
    t = utc_now().timestamp() - 100
    await agent.report(agent.interval(t, t + 10, usage(None, 9_000, static_energy_j=900)))
    (line,) = await lines(plane)
    assert (line["gpu_energy_j"], line["static_energy_j"], line["basis"]) == (9_000, 900, None)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reported=st.lists(
        st.tuples(st.floats(-5, 60), st.floats(0, 1e12), st.floats(0, 1e12), st.floats(0, 1e12)), min_size=1, max_size=8
    )
)
async def test_whatever_is_reported_is_booked_within_what_the_hardware_can_use(
    plane, reported: list[tuple[float, float, float, float]]
) -> None:
    agent = await bounded(plane)
    agent.boot_id = f"boot-{utc_now().timestamp()}"
    t = utc_now().timestamp() - 1_000
    intervals = [
        agent.interval(t, t + length_s, usage(None, gpu_j, cpu_energy_j=host_j), metered_j=metered_j)
        for length_s, gpu_j, metered_j, host_j in reported
    ]
    assert (await agent.report(*intervals, *intervals)).json() == {
        "accepted": len(reported), "duplicates": len(reported),
    }  # fmt: skip
    seconds = sum(max(length_s, 0.0) + 1 for length_s, *_ in reported)
    mine = [each for each in await lines(plane) if each["boot_id"] == agent.boot_id]
    assert sum(each["gpu_energy_j"] for each in mine) <= MOST_GPU_W * seconds
    assert sum(each["cpu_energy_j"] for each in mine) <= HOST_W * seconds
    for each in mine:
        assert (each["basis"] is None) == (each["reported_energy_j"] is None)


async def test_next_to_nothing_is_nothing_and_holds_up_no_report(plane) -> None:
    agent = await bounded(plane)
    t = utc_now().timestamp() - 100
    tiny = usage(None, 5e-324, cpu_energy_j=1e-310, static_energy_j=1e-200)
    assert (await agent.report(agent.interval(t, t + 1, tiny))).json() == {"accepted": 1, "duplicates": 0}
    (line,) = await lines(plane)
    assert (line["gpu_energy_j"], line["cpu_energy_j"], line["static_energy_j"]) == (0, 0, 0)


async def test_what_an_agent_modelled_for_its_meters_is_marked_and_counted(plane) -> None:
    agent = await bounded(plane)
    t = utc_now().timestamp() - 100
    marked = usage(None, 100, cpu_energy_j=50, source="modelled", basis="meter")
    await agent.report(
        {**agent.interval(t, t + 2, marked), "cpu_source": "modelled"},
        agent.interval(t + 2, t + 4, usage(None, 100, basis="something of a later release")),
    )
    first, second = await lines_in_order(plane)
    assert (first["source"], first["cpu_source"], first["basis"]) == ("modelled", "modelled", "meter")
    assert first["reported_energy_j"] is None
    assert second["basis"] == "meter"
    assert (await node(plane))["marked_intervals"] == 2


async def test_the_check_of_a_counter_is_shown_on_the_node(plane) -> None:
    agent = await bounded(plane)
    reading = {"index": 0, "power_w": 50, "utilization": 0, "energy_j": 5, "counter_ratio": 0.93, "meter_faults": 2}
    await agent.beat(devices=[reading])
    (shown,) = (await node(plane))["readings"]
    assert (shown["counter_ratio"], shown["meter_faults"]) == (0.93, 2)


# --- when


async def a_gang(plane, agent: FakeAgent, *, began_s: float, ended_s: float | None) -> tuple[str, str]:
    """Return a job and its gang that was there from when to when, as its node says."""
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    if ended_s is not None:
        await ends(plane, agent, gang, ended_s)
    async with plane.database.connection() as connection:
        await connection.execute(
            "INSERT INTO rank_statuses (allocation_id, node_id, state, started_at) VALUES ($1, 'n0', 'running', $2) "
            "ON CONFLICT (allocation_id, node_id) DO UPDATE SET started_at = excluded.started_at",
            gang,
            datetime.fromtimestamp(began_s, UTC),
        )
    return job, gang


async def test_energy_before_a_gang_was_there_is_idle(plane) -> None:
    agent = await bounded(plane)
    t = utc_now().timestamp() - 1_000
    job, gang = await a_gang(plane, agent, began_s=t + 100, ended_s=None)
    await agent.report(agent.interval(t, t + 50, usage(gang, 1_000)), agent.interval(t + 95, t + 105, usage(gang, 500)))
    early, its = await lines_in_order(plane)
    assert (early["owner"], early["job_id"], early["basis"], early["gpu_energy_j"]) == ("", None, "life", 1_000)
    assert (its["job_id"], its["basis"], its["gpu_energy_j"]) == (job, None, 500)
    assert (await node(plane))["marked_intervals"] == 0, "its meters are right"


async def test_of_a_line_that_begins_before_its_gang_was_there_that_part_is_idle(plane) -> None:
    agent = await bounded(plane)
    t = utc_now().timestamp() - 1_000
    job, gang = await a_gang(plane, agent, began_s=t + 300, ended_s=t + 400)
    await agent.report(agent.interval(t, t + 600, usage(gang, 60_000), usage(None, 90, gpus=3)))
    idle, its = await lines_in_order(plane)
    assert (its["gpu_energy_j"], its["basis"]) == (pytest.approx(10_000), "life")
    assert (its["start_at"].timestamp(), its["end_at"].timestamp()) == (pytest.approx(t + 300), pytest.approx(t + 400))
    assert idle["gpu_energy_j"] == pytest.approx(50_000 + 90)
    assert (await figures(plane, job))["gpu_s"] == pytest.approx(100)
    assert await broken(plane) == {}


async def test_of_a_line_that_goes_on_after_the_end_the_rest_is_idle(plane) -> None:
    agent = await bounded(plane)
    t = utc_now().timestamp() - 1_000
    job, gang = await a_gang(plane, agent, began_s=t, ended_s=t + 6)
    await agent.report(agent.interval(t, t + 600, usage(gang, 60_000, static_energy_j=600), usage(None, 90, gpus=3)))
    idle, its = await lines_in_order(plane)
    assert (its["gpu_energy_j"], its["static_energy_j"], its["basis"]) == (pytest.approx(600), pytest.approx(6), "life")
    assert idle["gpu_energy_j"] == pytest.approx(59_400 + 90)
    assert (await figures(plane, job))["gpu_s"] == pytest.approx(6)
    assert await broken(plane) == {}


@pytest.mark.parametrize("known", ["by the agent", "by the node's report"])
async def test_what_was_shared_out_over_an_absence_is_charged_for_the_time_of_its_life(plane, known: str) -> None:
    agent = await bounded(plane)
    t = utc_now().timestamp() - 1_000
    job, gang = await a_gang(plane, agent, began_s=t, ended_s=None if known == "by the agent" else t + 6)
    until: dict[str, Any] = {"until": datetime.fromtimestamp(t + 6, UTC).isoformat()} if known == "by the agent" else {}
    await agent.report(agent.interval(t, t + 600, usage(gang, 600, source="modelled", **until), usage(None, 59_400)))
    _, its = await lines_in_order(plane)
    assert (its["gpu_energy_j"], its["end_at"].timestamp()) == (pytest.approx(600), pytest.approx(t + 6))
    assert (await figures(plane, job))["gpu_s"] == pytest.approx(6)


async def in_the_past(plane, agent: FakeAgent, source: str) -> tuple[str, str, float]:
    """Charge a gang as an earlier release did, that lived for 6 s in the middle: 600 s before, 600 s over its end."""
    t = utc_now().timestamp() - 2_000
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    await agent.report(
        agent.interval(t - 600, t - 20, usage(gang, 58_000, source=source)),
        agent.interval(t, t + 600, usage(gang, 60_000, source=source), usage(None, 30, gpus=3)),
    )
    await ends(plane, agent, gang, t + 6)
    async with plane.database.connection() as connection:
        await connection.execute("UPDATE rank_statuses SET started_at = $1", datetime.fromtimestamp(t, UTC))
    return job, gang, t


@pytest.mark.parametrize(("source", "left_j"), [("counter", 600), ("modelled", 60_000)])
async def test_lines_of_the_past_outside_a_life_are_named_and_corrected_by_new_lines(
    plane, source: str, left_j: float
) -> None:
    agent = await bounded(plane)
    job, gang, _ = await in_the_past(plane, agent, source)
    before, written = await totals(plane), await lines(plane)
    found = await broken(plane)
    assert list(found) == ["no_line_after_its_gang", "no_line_before_its_gang"]
    assert f"{job}: 60000.0 J on n0 from " in found["no_line_after_its_gang"]
    assert f"{job}: 58000.0 J on n0 from " in found["no_line_before_its_gang"]
    assert gang in found["no_line_before_its_gang"]

    assert await return_late(plane.database, unsigned, at_once=1) == 1

    assert await broken(plane) == {}
    assert await totals(plane) == {"n0": pytest.approx(before["n0"])}
    after = await lines(plane)
    assert [line for line in after if line in written] == written, "no line is rewritten"
    assert {line["basis"] for line in after if line not in written} == {"returned"}
    now = await figures(plane, job)
    assert now["gpu_energy_j"] == pytest.approx(left_j)
    assert now["gpu_s"] == pytest.approx(6, abs=1e-3)
    assert await return_late(plane.database, unsigned) == 0
    assert await lines(plane) == after
