"""Energy intervals become ledger lines, footprints and profiles, once each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.contracts.nodes import EnergySource
from services.kit.ids import utc_now
from tests.support.control_plane import (
    OPERATOR,
    USER,
    FakeAgent,
    accept_job,
    allocate,
    eventually,
    service_headers,
    usage,
)

KWH_J = 3.6e6


async def row(plane, query, *arguments):
    async with plane.database.connection() as connection:
        return await connection.fetchrow(query, *arguments)


async def lines(plane):
    async with plane.database.connection() as connection:
        return await connection.fetch("SELECT * FROM energy_usages ORDER BY node_id, sequence, owner")


def now_s() -> float:
    return utc_now().timestamp()


async def invariants(plane) -> dict[str, bool]:
    answer = await plane.http.get("/v1/invariants", headers=service_headers(OPERATOR))
    return {entry["name"]: entry["holds"] for entry in answer.json()["invariants"]}


async def test_an_interval_becomes_lines_with_their_carbon_once(plane) -> None:
    agent = await plane.agent()
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0, 1]})
    end = now_s()
    interval = agent.interval(
        end - 10,
        end,
        usage(gang, 0.5 * KWH_J, gpus=2, cpu_energy_j=0.3 * KWH_J, static_energy_j=0.2 * KWH_J),
        usage(None, 0.25 * KWH_J, gpus=2),
    )
    assert (await agent.report(interval)).json() == {"accepted": 1, "duplicates": 0}
    assert (await agent.report(interval, interval)).json() == {"accepted": 0, "duplicates": 2}
    idle, used = await lines(plane)
    assert (idle["owner"], idle["job_id"], idle["carbon_gco2"]) == ("", None, pytest.approx(90))
    assert (used["owner"], used["job_id"], used["carbon_gco2"]) == (gang, job, pytest.approx(360))
    assert (used["intensity_gco2_per_kwh"], used["intensity_estimated"], used["pue"]) == (360, False, 1)
    footprint = await row(plane, "SELECT * FROM job_footprints WHERE job_id = $1", job)
    assert footprint["energy_j"] == pytest.approx(KWH_J)
    assert footprint["estimated_energy_j"] == pytest.approx(0.5 * KWH_J), "CPU by model and static by configuration"
    assert footprint["gpu_s"] == pytest.approx(20)
    assert all((await invariants(plane)).values())


async def test_intensity_is_the_time_weighted_mean_and_says_when_it_was_estimated(plane) -> None:
    agent = await plane.agent()
    t = now_s()
    plane.carbon.steps = [(t - 1e6, t - 5, 100, "measured"), (t - 5, t, 500, "measured"), (t, t + 1e6, 900, "provider")]
    await agent.report(
        agent.interval(t - 10, t, usage(None, KWH_J)),
        agent.interval(t - 20, t - 10, usage(None, KWH_J)),
        agent.interval(t - 2.5, t + 2.5, usage(None, KWH_J)),
        agent.interval(t - 7, t - 7, usage(None, KWH_J)),
    )
    found = [(line["intensity_gco2_per_kwh"], line["intensity_estimated"]) for line in await lines(plane)]
    assert found == [(pytest.approx(300), False), (100, False), (pytest.approx(700, rel=1e-3), True), (100, False)]


async def test_a_late_interval_has_the_intensity_of_its_own_time(plane) -> None:
    agent = await plane.agent()
    t = now_s()
    plane.carbon.steps = [
        (t - 90_000, t - 80_000, 50, "measured"),
        (t - 80_000, t - 70_000, 150, "measured"),
        (t - 3_600, t + 3_600, 900, "measured"),
    ]
    plane.carbon.outlook_from_s = t - 3_600
    await agent.report(
        agent.interval(t - 80_010, t - 79_990, usage(None, KWH_J)), agent.interval(t - 10, t, usage(None, KWH_J))
    )
    found = [(line["intensity_gco2_per_kwh"], line["intensity_estimated"]) for line in await lines(plane)]
    assert found == [(pytest.approx(100), False), (900, False)]


async def test_without_the_carbon_service_the_last_known_intensity_is_used_and_marked(plane) -> None:
    agent = await plane.agent(zone="elsewhere")
    plane.carbon.is_down = True
    t = now_s()
    refused = await agent.report(agent.interval(t - 3, t - 2, usage(None, 1)))
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert await lines(plane) == [], "nothing is known of this zone yet: the node keeps the interval"
    async with plane.database.connection() as connection:
        await connection.execute(
            """INSERT INTO energy_usages (node_id, boot_id, sequence, owner, start_at, end_at, gpus, gpu_energy_j,
                cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue,
                carbon_gco2) VALUES ('n9', 'b', 1, '', now(), now(), 1, 0, 0, 0, 'counter', 'elsewhere', 'marginal',
                -20, false, 1, 0)"""
        )
    assert (await agent.report(agent.interval(t - 2, t - 1, usage(None, KWH_J)))).status_code == 200
    line = (await lines(plane))[0]
    assert (line["intensity_gco2_per_kwh"], line["intensity_estimated"], line["carbon_gco2"]) == (-20, True, -20)


async def test_a_node_whose_clock_is_ahead_does_not_say_what_its_zone_emits_from_now_on(plane) -> None:
    agent = await plane.agent(zone="elsewhere")
    plane.carbon.is_down = True
    async with plane.database.connection() as connection:
        await connection.execute(
            """INSERT INTO energy_usages (node_id, boot_id, sequence, owner, start_at, end_at, gpus, gpu_energy_j,
                cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue,
                carbon_gco2)
            SELECT 'n9', 'b', n, '', now() + ago, now() + ago, 1, 0, 0, 0, 'counter', 'elsewhere', 'average_direct', g,
                false, 1, 0
            FROM (VALUES (1, interval '9 years', 900), (2, interval '-9 minutes', 90)) AS v (n, ago, g)"""
        )
    t = now_s()
    assert (await agent.report(agent.interval(t - 2, t - 1, usage(None, KWH_J)))).status_code == 200
    found = [line["intensity_gco2_per_kwh"] for line in await lines(plane) if line["node_id"] != "n9"]
    assert found == [90]


async def test_energy_of_a_zone_that_the_carbon_service_lacks_waits_for_the_zone_and_says_so(plane) -> None:
    agent = await plane.agent()
    plane.carbon.has_zone = False
    t = now_s()
    interval = agent.interval(t - 3, t - 2, usage(None, 1))
    refused = await agent.report(interval)
    assert (refused.status_code, refused.json()["code"]) == (503, "unknown_zone")
    assert refused.json()["detail"].startswith("as told The energy can be accounted for once CARBON_ZONES has the zone")
    assert await lines(plane) == []

    plane.carbon.has_zone = True
    assert await eventually(lambda: _accepted(agent, interval))
    assert len(await lines(plane)) == 1


async def _accepted(agent: FakeAgent, interval: dict[str, Any]) -> bool:
    return (await agent.report(interval)).status_code == 200


async def test_a_node_that_moves_to_another_zone_is_charged_each_zone_for_its_own_time(plane) -> None:
    agent = await plane.agent(zone="west")
    t = now_s()
    agent.registration["zone"] = "east"
    await agent.register()
    await agent.register()
    moved = await row(plane, "SELECT * FROM audit_log")
    late, new = agent.interval(t - 20, t - 10, usage(None, 1)), agent.interval(now_s(), now_s() + 1, usage(None, 1))
    assert (await agent.report(late, new)).status_code == 200
    assert [line["zone"] for line in await lines(plane)] == ["west", "east"]
    assert (moved["action"], moved["target"], moved["data"]) == (
        "node.zone_changed",
        "n0",
        {"before": "west", "after": "east"},
    )
    zones = await row(plane, "SELECT array_agg(zone ORDER BY since) AS zones FROM node_zones WHERE node_id = 'n0'")
    assert zones["zones"] == ["west", "east"], "a second registration in the same zone is no change"


async def test_a_node_charges_no_job_that_it_does_not_run(plane) -> None:
    agent = await plane.agent("n1")
    await plane.agent("n2")
    job = await accept_job(plane.database)
    elsewhere = await allocate(plane.database, job, {"n2": [0]})
    t = now_s()
    await agent.report(agent.interval(t - 1, t, usage(elsewhere, 5), usage("unknown", 6), usage(None, 7)))
    assert [(line["owner"], line["job_id"]) for line in await lines(plane)] == [
        ("", None),
        (elsewhere, None),
        ("unknown", None),
    ]
    assert await row(plane, "SELECT * FROM job_footprints") is None
    assert all((await invariants(plane)).values())


async def test_energy_that_does_not_add_up_is_kept_and_shown(plane) -> None:
    agent = await plane.agent()
    t = now_s()
    await agent.report(agent.interval(t - 2, t - 1, usage(None, 999.5), metered_j=1000))
    assert (await invariants(plane))["ledger_adds_up"] is True, "within 0.1 %"
    await agent.report(agent.interval(t - 1, t, usage(None, 990), metered_j=1000))
    answer = (await plane.http.get("/v1/invariants", headers=service_headers(OPERATOR))).json()
    broken = [entry for entry in answer["invariants"] if not entry["holds"]]
    assert [entry["name"] for entry in broken] == ["ledger_adds_up"]
    assert "n0: owners 1989.5 J, devices 2000.0 J" in broken[0]["detail"]
    assert answer["holds"] is False


async def test_profiles_count_each_gang_from_its_first_report_of_progress(plane) -> None:
    leader, follower = await plane.agent("n1"), await plane.agent("n2")
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n1": [0], "n2": [0]})
    t = now_s() - 1000

    async def step(number: int, done: float | None, gang: str = gang) -> None:
        start = t + 10 * number
        await leader.report(leader.interval(start, start + 10, usage(gang, 100, done=done)))
        await follower.report(follower.interval(start, start + 10, usage(gang, 50, done=77)))

    await step(0, None)
    await step(1, 20)
    await step(2, 25)
    await step(3, 30)
    profile = await row(plane, "SELECT * FROM job_profiles")
    assert (profile["job_id"], profile["gpus"], profile["progress"], profile["duration_s"]) == (job, 2, 10, 20)
    assert profile["energy_j"] == pytest.approx(2 * 150)
    async with plane.database.connection() as connection:
        await connection.execute("UPDATE allocations SET state = 'ended'")
        await connection.execute("DELETE FROM device_claims")
    again = await allocate(plane.database, job, {"n1": [0], "n2": [0]}, generation=2)
    await step(4, 12, again)  # restarted from an older checkpoint: what is repeated and the start do not count
    await step(5, 16, again)
    await step(6, 15, gang)  # a late word of the former gang
    profile = await row(plane, "SELECT * FROM job_profiles")
    assert (profile["progress"], profile["duration_s"], profile["generation"]) == (14, 30, 2)
    assert profile["energy_j"] == pytest.approx(3 * 150)


async def test_two_nodes_report_the_same_jobs_at_once(plane) -> None:
    agents = [await plane.agent(f"n{number}", gpus=5) for number in range(4)]
    jobs = [await accept_job(plane.database) for _ in range(5)]
    gangs = [await allocate(plane.database, job, {f"n{n}": [at] for n in range(4)}) for at, job in enumerate(jobs)]
    t = now_s()
    reports = [
        agent.report(*(agent.interval(t + k, t + k + 1, *(usage(g, 10, done=k) for g in order)) for k in range(10)))
        for agent in agents
        for order in (gangs, gangs[::-1])
    ]
    assert {answer.status_code for answer in await asyncio.gather(*reports)} == {200}
    sums = await row(plane, "SELECT count(*) AS jobs, min(energy_j) AS low, max(energy_j) AS high FROM job_footprints")
    assert tuple(sums) == (5, 800, 800)
    assert all((await invariants(plane)).values())


async def test_a_job_s_report_merges_lines_of_one_intensity_and_pages(plane) -> None:
    agent = await plane.agent()
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    t = round(now_s()) - 100
    plane.carbon.steps = [(0, t + 20, 100, "measured"), (t + 20, t + 40, 200, "measured"), (t + 40, 4e9, 100, "held")]
    await agent.report(*(agent.interval(t + 10 * k, t + 10 * k + 10, usage(gang, KWH_J)) for k in range(6)))
    url = f"/v1/jobs/{job}/footprint"
    first = (await plane.http.get(url, params={"limit": 2}, headers=service_headers(USER))).json()
    assert (first["zone"], first["signal"], first["pue"]) == (plane.zone, "average_direct", 1)
    assert first["footprint"]["carbon_gco2"] == pytest.approx(800)
    second = (
        await plane.http.get(url, params={"limit": 2, "cursor": first["next_cursor"]}, headers=service_headers(USER))
    ).json()
    uses = [*first["intervals"], *second["intervals"]]
    assert [(u["intensity_gco2_per_kwh"], u["energy_j"] / KWH_J, u["estimated"]) for u in uses] == [
        (100, pytest.approx(2), False),
        (200, pytest.approx(2), False),
        (100, pytest.approx(2), True),
    ]
    assert second["next_cursor"] is None


async def test_reports_group_and_page_and_keep_tenants_apart(plane) -> None:
    agent = await plane.agent()
    users = ["\U0001f33f" * 254 + last for last in "cab"]
    mine = [
        await accept_job(plane.database, project=project, labels={"user": user})
        for project, user in zip(("a", "b", "b"), users, strict=True)
    ]
    theirs = await accept_job(plane.database, tenant="other", project="a")
    gangs = [await allocate(plane.database, job, {"n0": [at]}) for at, job in enumerate([*mine, theirs])]
    t = now_s()
    await agent.report(agent.interval(t - 10, t, *(usage(gang, KWH_J) for gang in gangs), usage(None, KWH_J)))

    async def report(identity, **params):
        answer = await plane.http.get("/v1/reports/footprint", params=params, headers=service_headers(identity))
        assert answer.status_code == 200, answer.text
        return answer.json()

    everything = await report(OPERATOR, group_by="tenant")
    assert [(line["group"], line["jobs"]) for line in everything["lines"]] == [("other", 1), ("t", 3)]
    assert everything["total"]["carbon_gco2"] == pytest.approx(5 * 360)
    assert everything["idle"]["gpu_energy_j"] == pytest.approx(KWH_J)
    assert everything["metered_gpu_energy_j"] == pytest.approx(everything["total"]["gpu_energy_j"])
    slim = await report(OPERATOR, group_by="tenant", fields="group,jobs")
    assert slim["lines"] == [{"group": "other", "jobs": 1}, {"group": "t", "jobs": 3}]
    assert slim["total"] == everything["total"]
    own = await report(USER, group_by="project", limit=1)
    assert [(line["group"], line["jobs"]) for line in own["lines"]] == [("a", 1)]
    assert own["idle"]["energy_j"] == 0
    assert own["total"]["energy_j"] == own["metered_gpu_energy_j"] == pytest.approx(3 * KWH_J)
    rest = await report(USER, group_by="project", limit=1, cursor=own["next_cursor"])
    assert [(line["group"], line["jobs"]) for line in rest["lines"]] == [("b", 2)]
    assert rest["next_cursor"] is None
    whole, found, cursor = await report(USER, group_by="user", then_by="project"), [], {}
    for _ in users:
        page = await report(USER, group_by="user", then_by="project", limit=1, **cursor)
        assert (page["total_accounts"], page["zones"]) == (whole["total_accounts"], whole["zones"])
        found, cursor = found + page["lines"], {"cursor": page["next_cursor"]}
    assert (found, cursor["cursor"]) == (whole["lines"], None)
    assert [line["group"] for line in found] == sorted(users)
    assert all(line["accounts"]["facility_energy_j"] == pytest.approx(KWH_J) for line in found)
    assert len((await report(USER, group_by="job"))["lines"]) == 3
    assert (await report(OPERATOR, start="2000-01-01T00:00:00Z", end="2001-01-01T00:00:00Z"))["total"]["energy_j"] == 0


async def test_a_job_s_footprint_is_its_tenant_s_business(plane) -> None:
    theirs = await accept_job(plane.database, tenant="other")
    for job, identity, status in ((theirs, USER, 404), (theirs, OPERATOR, 200), ("job_none", OPERATOR, 404)):
        answer = await plane.http.get(f"/v1/jobs/{job}/footprint", headers=service_headers(identity))
        assert answer.status_code == status


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"cursor": "!"}, "invalid_cursor"),
        ({"cursor": "AAA"}, "invalid_cursor"),
        ({"group_by": "planet"}, "invalid_request"),
        ({"start": "yesterday"}, "invalid_request"),
        ({"start": "2026-01-02T00:00:00Z", "end": "2026-01-01T00:00:00Z"}, "invalid_request"),
        ({"limit": 0}, "invalid_request"),
        ({"surprise": 1}, "invalid_request"),
    ],
)
async def test_a_bad_question_is_one_problem(plane, query, code) -> None:
    answer = await plane.http.get("/v1/reports/footprint", params=query, headers=service_headers(USER))
    assert (answer.status_code, answer.json()["code"]) == (422, code)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequence": 2**63},
        {"boot_id": "\x00"},
        {"metered_gpu_energy_j": -1},
        {"start_at": "0001-01-01T00:00:00+14:00"},
        {"start_at": "2026-01-01T00:00:00"},
        {"usages": [usage("x", float(10**13))]},
    ],
)
async def test_a_bad_interval_is_one_problem_and_changes_nothing(plane, wrong) -> None:
    agent = await plane.agent()
    t = now_s()
    good, bad = agent.interval(t - 2, t - 1, usage(None, 1)), agent.interval(t - 1, t, usage(None, 1))
    answer = await agent.report(good, bad | wrong)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert await lines(plane) == []


async def test_a_clock_that_was_turned_back_loses_no_energy(plane) -> None:
    agent = await plane.agent()
    t = now_s()
    assert (await agent.report(agent.interval(t, t - 5, usage(None, KWH_J)))).status_code == 200
    (line,) = await lines(plane)
    assert line["carbon_gco2"] == pytest.approx(360)


async def test_two_usages_of_one_owner_are_one_line_of_the_lesser_certainty(plane) -> None:
    agent = await plane.agent()
    t = now_s()
    both = usage(None, 10), usage(None, 20, source=EnergySource.MODELLED)
    assert (await agent.report(agent.interval(t - 1, t, *both))).status_code == 200
    (line,) = await lines(plane)
    assert (line["gpu_energy_j"], line["source"]) == (30, "modelled")
