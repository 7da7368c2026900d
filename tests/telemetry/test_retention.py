"""Old lines are folded into days; every sum stays what it was."""

import pytest

from services.admission.repository.retention import forget_jobs
from services.db.engine import create_engine
from services.kit.ids import utc_now
from services.telemetry.repository.retention import forget_clocks, forget_settings
from tests.support.control_plane import OPERATOR, USER, accept_job, allocate, service_headers, usage
from tests.support.ledger import end_day, fold_now

DAY_S = 86_400.0
KWH_J = 3.6e6


async def ask(plane, path, identity=OPERATOR, **params):
    answer = await plane.http.get(path, params=params, headers=service_headers(identity))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def counts(plane) -> tuple[int, int, int]:
    tables = ("energy_usages", "energy_intervals", "energy_days")
    async with plane.database.connection() as connection:
        return tuple([await connection.fetchval(f"SELECT count(*) FROM {table}") for table in tables])


async def test_folding_keeps_every_sum_and_knows_what_is_sent_again(plane) -> None:
    agent = await plane.agent()
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    midnight = utc_now().timestamp() // DAY_S * DAY_S
    plane.carbon.steps = [(0, midnight - 5 * DAY_S, 100, "measured"), (midnight - 5 * DAY_S, 4e9, 300, "measured")]
    times = [midnight - 5.5 * DAY_S, midnight - 4.5 * DAY_S, midnight - 4.4 * DAY_S, midnight - 60]
    intervals = [
        agent.interval(t, t + 10, usage(gang, KWH_J, cpu_energy_j=KWH_J / 2), usage(None, KWH_J)) for t in times
    ]
    assert (await agent.report(*intervals[:3])).json()["accepted"] == 3
    await end_day(plane.database)
    assert (await agent.report(*intervals[3:])).json()["accepted"] == 1
    before = [await ask(plane, "/v1/reports/footprint", group_by=group) for group in ("job", "node", "tenant")]
    assert await counts(plane) == (8, 4, 0)

    assert await fold_now(plane.database, 2 * DAY_S) == 3, "a day of lines, two of intervals"
    assert await fold_now(plane.database, 2 * DAY_S) == 0

    assert await counts(plane) == (2, 1, 4)
    for then, group in zip(before, ("job", "node", "tenant"), strict=True):
        now = await ask(plane, "/v1/reports/footprint", group_by=group)
        assert now["metered_gpu_energy_j"] == pytest.approx(then["metered_gpu_energy_j"])
        for name in ("energy_j", "gpu_energy_j", "estimated_energy_j", "carbon_gco2", "gpu_s"):
            assert now["total"][name] == pytest.approx(then["total"][name])
            assert now["lines"][0]["footprint"][name] == pytest.approx(then["lines"][0]["footprint"][name])
    assert (await ask(plane, "/v1/invariants"))["holds"] is True
    assert (await agent.report(*intervals)).json() == {"accepted": 0, "duplicates": 4}
    uses = (await ask(plane, f"/v1/jobs/{job}/footprint", USER))["intervals"]
    assert [use["intensity_gco2_per_kwh"] for use in uses] == [pytest.approx(100), pytest.approx(300)]


async def test_a_very_late_line_gets_a_sum_of_its_own(plane) -> None:
    agent, other = await plane.agent("n1"), await plane.agent("n2")
    t = (utc_now().timestamp() // DAY_S - 5) * DAY_S + 100
    for node in (agent, other):
        await node.report(node.interval(t, t + 10, usage(None, KWH_J)))
        await fold_now(plane.database, 2 * DAY_S)
        await node.report(node.interval(t + 10, t + 20, usage(None, KWH_J)))
        await fold_now(plane.database, 2 * DAY_S)
    assert await counts(plane) == (0, 0, 4)
    report = await ask(plane, "/v1/reports/footprint")
    assert report["idle"]["gpu_energy_j"] == pytest.approx(4 * KWH_J) == report["metered_gpu_energy_j"]
    assert (await ask(plane, "/v1/invariants"))["holds"] is True


async def test_settings_of_gangs_that_ended_long_ago_are_forgotten(plane) -> None:
    await plane.agent()
    gangs = [await allocate(plane.database, await accept_job(plane.database), {"n0": [device]}) for device in range(3)]
    async with plane.database.connection() as connection:
        for gang in gangs:
            await connection.execute(
                "INSERT INTO settings_in_force (allocation_id, node_id, revision, refused, enforced_w, since) "
                "VALUES ($1, 'n0', 1, '{}', '[]', now())",
                gang,
            )
        ended = "UPDATE allocations SET state = 'ended', ended_at = now() - interval '3 days' * $2 WHERE id = $1"
        await connection.execute(ended, gangs[0], 1)
        await connection.execute(ended, gangs[1], 0)
        await forget_settings(plane.database, 2 * DAY_S)
        left = await connection.fetch("SELECT allocation_id FROM settings_in_force")
    assert {row["allocation_id"] for row in left} == set(gangs[1:])


async def test_old_minutes_of_clocks_are_deleted(plane) -> None:
    async with plane.database.connection() as connection:
        for days in (1, 15, 17):
            await connection.execute(
                """INSERT INTO server_clocks
                   SELECT $1, now() - make_interval(days => $2), 'n', 'miad', false, 1, 0, 900, 900, 900, 900""",
                f"job_{days}",
                days,
            )
        await forget_clocks(plane.database, 16)
        found = await connection.fetch("SELECT job_id FROM server_clocks ORDER BY 1")
    assert [row["job_id"] for row in found] == ["job_1", "job_15"]


async def test_forgetting_jobs_keeps_every_sum_of_reports(plane, database_url: str) -> None:
    agent = await plane.agent()
    job = await accept_job(plane.database, labels={"user": "ada"}, work={"total": 9, "unit": "steps"})
    gang = await allocate(plane.database, job, {"n0": [0]})
    start = (utc_now().timestamp() // DAY_S - 120) * DAY_S
    joules = [KWH_J / 3, KWH_J / 7, 0.1]
    times = [start, start + 20, start + 2 * DAY_S]
    await agent.report(*(agent.interval(t, t + 10, usage(gang, j)) for t, j in zip(times, joules, strict=True)))
    async with plane.database.connection() as connection:
        await connection.execute("INSERT INTO job_progress (job_id, done) VALUES ($1, 9)", job)
        await connection.execute(
            "UPDATE jobs SET state = 'succeeded', ended_at = now() - interval '100 days' WHERE id = $1", job
        )
        await connection.execute("UPDATE allocations SET state = 'ended' WHERE job_id = $1", job)
        await connection.execute("DELETE FROM device_claims")
    await fold_now(plane.database, 62 * DAY_S)
    groups = ("job", "user", "project", "tenant", "zone", "month")
    until = utc_now().isoformat()
    before = [await ask(plane, "/v1/reports/footprint", group_by=group, end=until) for group in groups]
    footprint = await ask(plane, f"/v1/jobs/{job}/footprint", USER)

    engine = create_engine(database_url, application_name="test")
    async with engine.begin() as connection:
        assert await forget_jobs(connection, 90 * DAY_S) == 1
    await engine.dispose()

    assert [await ask(plane, "/v1/reports/footprint", group_by=group, end=until) for group in groups] == before
    assert await ask(plane, f"/v1/jobs/{job}/footprint", USER) == footprint
    assert before[0]["total"]["energy_j"] == pytest.approx(sum(joules), rel=1e-12)
    assert (await ask(plane, "/v1/invariants"))["holds"] is True
