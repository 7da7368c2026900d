"""No job is charged after the end of its gang: what comes later is idle, and what was charged so is given back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from services.kit.ids import utc_now
from services.telemetry.repository import corrections
from services.telemetry.repository.corrections import return_late
from tests.support.control_plane import (
    OPERATOR,
    FakeAgent,
    accept_job,
    allocate,
    end_allocation,
    service_headers,
    usage,
)
from tests.support.ledger import fold_now, unsigned

DAY_S = 86_400.0
RULE = "no_line_after_its_gang"
SUMMED = ("energy_j", "gpu_energy_j", "estimated_energy_j", "carbon_gco2", "gpu_s")


async def ask(plane, path: str, **params: Any) -> Any:
    answer = await plane.http.get(path, params=params, headers=service_headers(OPERATOR))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def broken(plane) -> dict[str, str]:
    """Return the rules that do not hold, with what is said of them."""
    rules = (await ask(plane, "/v1/invariants"))["invariants"]
    return {rule["name"]: rule["detail"] for rule in rules if not rule["holds"]}


async def rows(plane, query: str, *arguments: Any) -> list[dict[str, Any]]:
    async with plane.database.connection() as connection:
        return [dict(row) for row in await connection.fetch(query, *arguments)]


async def lines(plane) -> list[dict[str, Any]]:
    return await rows(plane, "SELECT * FROM energy_usages ORDER BY boot_id, sequence, owner")


async def figures(plane, job: str) -> dict[str, float]:
    """Return a job's footprint, which its lines in a report must agree with."""
    (footprint,) = await rows(plane, "SELECT * FROM job_footprints WHERE job_id = $1", job)
    report = await ask(plane, "/v1/reports/footprint", group_by="job")
    (line,) = [each["footprint"] for each in report["lines"] if each["group"] == job]
    assert {name: line[name] for name in SUMMED} == pytest.approx({name: footprint[name] for name in SUMMED})
    return {name: footprint[name] for name in SUMMED}


async def totals(plane) -> dict[str, dict[str, float]]:
    """Return what the nodes used in all."""
    query = """
        SELECT node_id, sum(gpu_energy_j + cpu_energy_j + static_energy_j) AS energy_j, sum(carbon_gco2) AS carbon_gco2,
            sum(gpu_energy_j) AS gpu_energy_j FROM energy_usages GROUP BY 1"""
    return {row.pop("node_id"): row for row in await rows(plane, query)}


async def ends(plane, agent: FakeAgent, gang: str, at_s: float) -> None:
    """Have a node say when the gang ended there by its clock, and the gang given up."""
    at = datetime.fromtimestamp(at_s, UTC).isoformat()
    agent.ranks[gang] = {"allocation_id": gang, "state": "exited", "exit_code": 1, "ended_by": "itself", "ended_at": at}
    await agent.beat()
    await end_allocation(plane.database, gang)


def ten_seconds(agent: FakeAgent, gang: str, from_s: float) -> dict[str, Any]:
    used = usage(gang, 1_000, cpu_energy_j=100, static_energy_j=40)
    return agent.interval(from_s, from_s + 10, used, usage(None, 500, gpus=3, static_energy_j=120))


async def charged_for_long(plane, *, since_s: float, lines_after: int = 3) -> tuple[FakeAgent, str, str]:
    """Charge a gang ten seconds, in the middle of which it ends, and some more times ten seconds after that."""
    agent = await plane.agent()
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    await agent.report(*(ten_seconds(agent, gang, since_s + 10 * number) for number in range(1 + lines_after)))
    await ends(plane, agent, gang, since_s + 5)
    return agent, job, gang


async def test_energy_after_the_end_of_a_gang_is_idle(plane) -> None:
    agent, job, gang = await charged_for_long(plane, since_s=utc_now().timestamp() - 100, lines_after=0)
    before = await figures(plane, job)

    assert (await agent.report(ten_seconds(agent, gang, utc_now().timestamp() - 80))).json()["accepted"] == 1

    (idle,) = [line for line in await lines(plane) if line["sequence"] == agent.sequence]
    assert (idle["owner"], idle["job_id"], idle["gpu_energy_j"], idle["gpus"]) == ("", None, 1_500, 3)
    assert await figures(plane, job) == before
    assert await broken(plane) == {}


async def test_a_gang_that_was_given_up_unheard_is_charged_until_then(plane) -> None:
    agent = await plane.agent()
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    await end_allocation(plane.database, gang)
    now = utc_now().timestamp()
    await agent.report(ten_seconds(agent, gang, now - 9), ten_seconds(agent, gang, now + 1))

    assert [line["job_id"] for line in await lines(plane)] == [None, job, None]
    assert await broken(plane) == {}


async def test_what_was_charged_after_the_end_is_given_back_by_new_lines(plane) -> None:
    _, job, gang = await charged_for_long(plane, since_s=utc_now().timestamp() - 100)
    before, written = await totals(plane), await lines(plane)
    found = await broken(plane)
    assert list(found) == [RULE]
    assert found[RULE].count(f"{job}: 1140.0 J on n0 from ") == 3
    assert gang in found[RULE]

    assert await return_late(plane.database, unsigned, at_once=2) == 1

    assert await broken(plane) == {}
    assert await totals(plane) == {"n0": pytest.approx(before["n0"])}
    assert [line for line in await lines(plane) if line in written] == written, "no line is rewritten"
    now = await figures(plane, job)
    assert now == pytest.approx(
        {"energy_j": 1_140, "gpu_energy_j": 1_000, "estimated_energy_j": 140, "carbon_gco2": 0.114, "gpu_s": 10}
    )
    uses = (await ask(plane, f"/v1/jobs/{job}/footprint"))["intervals"]
    assert [use["energy_j"] for use in uses] == [1_140]
    assert datetime.fromisoformat(uses[-1]["end_at"]) == written[0]["end_at"]

    after = await lines(plane)
    assert await return_late(plane.database, unsigned) == 0
    assert await lines(plane) == after


async def test_the_moment_until_an_agent_knows_of_an_end_breaks_no_rule_and_is_given_back(plane) -> None:
    agent = await plane.agent()
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    since_s = utc_now().timestamp() - 100
    whole = ten_seconds(agent, gang, since_s)
    await agent.report(whole, agent.interval(since_s + 10, since_s + 11, usage(gang, 100), usage(None, 500, gpus=3)))
    before = await figures(plane, job)
    await ends(plane, agent, gang, since_s + 9)
    assert await broken(plane) == {}

    await return_late(plane.database, unsigned)

    assert await broken(plane) == {}
    assert (await figures(plane, job))["gpu_energy_j"] == before["gpu_energy_j"] - 100


async def test_a_correction_that_is_cut_off_leaves_nothing_half_done(plane, monkeypatch: pytest.MonkeyPatch) -> None:
    _, job, _ = await charged_for_long(plane, since_s=utc_now().timestamp() - 100)
    written, before = await lines(plane), await figures(plane, job)

    async def dies(*_: object) -> None:
        raise ConnectionError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(corrections, "add_footprints", dies)
        with pytest.raises(ConnectionError):
            await return_late(plane.database, unsigned)
    assert await lines(plane) == written
    assert await figures(plane, job) == before

    await return_late(plane.database, unsigned)
    assert (await figures(plane, job))["energy_j"] == pytest.approx(1_140)


@pytest.mark.parametrize("fold_first", [False, True])
async def test_days_that_were_combined_are_right_too(plane, fold_first: bool) -> None:
    midnight = utc_now().timestamp() // DAY_S * DAY_S - 5 * DAY_S
    agent, job, gang = await charged_for_long(plane, since_s=midnight - 20, lines_after=0)
    async with plane.database.connection() as connection:  # as if its end had been heard of only after all this
        await connection.execute("UPDATE rank_statuses SET ended_at = NULL")
        await connection.execute("UPDATE allocations SET ended_at = NULL, state = 'running'")
    await agent.report(*(ten_seconds(agent, gang, midnight + 10 * number) for number in range(3)))
    if fold_first:
        assert await fold_now(plane.database, 2 * DAY_S) == 3
    async with plane.database.connection() as connection:
        end = datetime.fromtimestamp(midnight - 15, UTC)
        await connection.execute("UPDATE rank_statuses SET ended_at = $1", end)
        await connection.execute("UPDATE allocations SET ended_at = $1, state = 'ended'", end)
    report = await ask(plane, "/v1/reports/footprint")
    assert list(await broken(plane)) == [RULE]

    assert await return_late(plane.database, unsigned) == 1
    if not fold_first:
        assert await fold_now(plane.database, 2 * DAY_S) == 3
    await return_late(plane.database, unsigned)

    assert await broken(plane) == {}
    assert (await figures(plane, job))["energy_j"] == pytest.approx(1_140)
    now = await ask(plane, "/v1/reports/footprint")
    for name in ("energy_j", "gpu_energy_j", "carbon_gco2"):
        assert now["total"][name] == pytest.approx(report["total"][name])
    assert now["idle"]["energy_j"] == pytest.approx(4 * 620 + 3 * 1_140)


async def test_what_was_measured_while_a_clock_was_ahead_is_not_late(plane) -> None:
    agent = await plane.agent()
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    t = utc_now().timestamp() - 100
    moments = (t, t + 3_600 + 10, t + 3_600 + 20, t + 30)  # the clock is set an hour ahead, and back
    await agent.report(*(ten_seconds(agent, gang, at) for at in moments))
    await ends(plane, agent, gang, t + 35)

    assert await broken(plane) == {}
    assert await return_late(plane.database, unsigned) == 0


async def test_an_end_before_the_begin_is_of_a_clock_that_was_set_back_and_takes_nothing(plane) -> None:
    agent = await plane.agent()
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    t = utc_now().timestamp() - 20
    begun = {"started_at": datetime.fromtimestamp(t, UTC).isoformat()}
    agent.ranks[gang] = {"allocation_id": gang, "state": "running", **begun}
    await agent.beat()
    await agent.report(ten_seconds(agent, gang, t))
    before = await figures(plane, job)
    await ends(plane, agent, gang, t - 3_590)  # an hour back, and ten seconds later

    assert await broken(plane) == {}
    assert await return_late(plane.database, unsigned) == 0
    assert await figures(plane, job) == before


async def test_a_mean_intensity_counts_a_corrected_interval_once(plane) -> None:
    t = utc_now().timestamp() - 100
    plane.carbon.steps = [(0, t + 10, 100, "measured"), (t + 10, 4e9, 400, "measured")]
    await charged_for_long(plane, since_s=t, lines_after=1)
    await return_late(plane.database, unsigned)
    (zone,) = (await ask(plane, "/v1/reports/footprint"))["zones"]
    assert zone["mean_gco2_per_kwh"] == pytest.approx(250)
