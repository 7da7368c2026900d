"""Registration, heartbeats and leases."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from services.contracts.nodes import EndedBy, RankState
from services.telemetry.repository.temperatures import note
from tests.support.control_plane import (
    JOIN_TOKEN,
    OPERATOR,
    USER,
    FakeAgent,
    accept_job,
    allocate,
    end_allocation,
    eventually,
    running_telemetry,
    service_headers,
    telemetry_settings,
)


async def ranks_of(plane, allocation_id):
    async with plane.database.connection() as connection:
        query = "SELECT node_id, state, exit_code, ended_by FROM rank_statuses WHERE allocation_id = $1 ORDER BY 1"
        return [tuple(row) for row in await connection.fetch(query, allocation_id)]


async def progress_of(plane, job_id):
    async with plane.database.connection() as connection:
        row = await connection.fetchrow("SELECT done, total FROM job_progress WHERE job_id = $1", job_id)
    return tuple(row) if row else None


async def test_a_node_registers_and_is_seen_by_operators(plane) -> None:
    await plane.agent("n0", gpus=2, labels={"rack": "r1"}, zone=None)
    found = (await plane.http.get("/v1/nodes", headers=service_headers(OPERATOR))).json()["items"]
    assert [(n["id"], n["state"], n["gpus"], n["gpus_in_use"], n["power_w"]) for n in found] == [
        ("n0", "up", 2, 0, 100)
    ]
    assert found[0]["zone"] == "Z", "a node that names no zone is in the cluster's own"
    one = await plane.http.get("/v1/nodes/n0", headers=service_headers(OPERATOR))
    assert one.json() == found[0]
    assert (await plane.http.get("/v1/nodes/n1", headers=service_headers(OPERATOR))).status_code == 404
    assert (await plane.http.get("/v1/nodes", headers=service_headers(USER))).status_code == 403


async def test_nodes_are_listed_in_pages_and_without_their_clocks(plane) -> None:
    for name in ("p1", "p2", "p3"):
        await plane.agent(name)
    names: list[str] = []
    cursor: str | None = None
    while not names or cursor:
        asked = {"limit": 2, "clocks": "false"} | ({"cursor": cursor} if cursor else {})
        page = (await plane.http.get("/v1/nodes", params=asked, headers=service_headers(OPERATOR))).json()
        assert all(device["clocks_mhz"] == [] for node in page["items"] for device in node["devices"])
        assert len(page["items"]) <= 2
        names, cursor = names + [node["id"] for node in page["items"]], page["next_cursor"]
    everything = (await plane.http.get("/v1/nodes", headers=service_headers(OPERATOR))).json()
    assert names == [node["id"] for node in everything["items"]]
    assert everything["next_cursor"] is None
    slim = await plane.http.get("/v1/nodes", params={"fields": "id,state"}, headers=service_headers(OPERATOR))
    assert slim.json()["items"] == [{name: node[name] for name in ("id", "state")} for node in everything["items"]]
    wrong = await plane.http.get("/v1/nodes", params={"cursor": "x"}, headers=service_headers(OPERATOR))
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_cursor")


async def test_a_day_of_temperatures_is_kept_and_listed_when_asked_for(plane) -> None:
    agent = await plane.agent("warm", gpus=2)
    await plane.agent("cold")

    async def beat(*celsius: float | None) -> None:
        readings = [
            {"index": gpu, "power_w": 100.0, "utilization": 0.5, "temperature_c": each}
            for gpu, each in enumerate(celsius)
        ]
        assert (await agent.post("/v1/nodes/warm/heartbeat", agent.heartbeat(devices=readings))).status_code == 200
        await note(plane.database)

    async def move(minutes: int) -> None:
        async with plane.database.connection() as connection:
            query = "UPDATE gpu_temperatures SET at = at - make_interval(mins => $1) WHERE node_id = 'warm'"
            await connection.execute(query, minutes)

    async def listed() -> dict[str, Any]:
        asked = {"trend": "true", "fields": "id,trend"}
        found = (await plane.http.get("/v1/nodes", params=asked, headers=service_headers(OPERATOR))).json()["items"]
        return {each["id"]: each.get("trend") for each in found}

    await beat(None, None)
    assert (await listed())["warm"] is None, "an agent that knows no temperatures"
    await beat(41.4, None)
    await beat(99, 99)
    assert [each["temperature_c"] for each in (await listed())["warm"]["gpus"]] == [[41]], "one row a step"
    await move(30)
    await beat(60.6, 50)
    trend = (await listed())["warm"]
    assert (trend["step_s"], [(each["gpu"], each["temperature_c"]) for each in trend["gpus"]]) == (
        600,
        [(0, [41, None, None, 61]), (1, [None, None, None, 50])],
    )
    assert datetime.fromisoformat(trend["start_at"]).timestamp() % 600 == 0
    assert (await listed())["cold"] is None
    await move(24 * 60)
    await note(plane.database)
    assert [each["temperature_c"] for each in (await listed())["warm"]["gpus"]] == [[61], [50]]
    async with plane.database.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM gpu_temperatures") == 1
    plain = (await plane.http.get("/v1/nodes", headers=service_headers(OPERATOR))).json()["items"]
    assert not any("trend" in each for each in plain)


@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/nodes/n0", "/v1/reports/footprint", "/v1/invariants"])
async def test_without_the_services_token_nobody_is_believed(plane, path) -> None:
    headers = service_headers(OPERATOR) | {"authorization": f"Bearer {JOIN_TOKEN}"}
    answer = await plane.http.get(path, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")


async def test_tokens_act_for_their_own_node_and_only_the_newest(plane) -> None:
    one, two = await plane.agent("n1"), await plane.agent("n2")
    for token in ("", "nonsense", JOIN_TOKEN, two.token):
        for path, body in (("heartbeat", one.heartbeat()), ("energy", {"intervals": []})):
            answer = await one.post(f"/v1/nodes/n1/{path}", body, token=token)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    old = one.token
    await one.register()
    assert (await one.post("/v1/nodes/n1/heartbeat", one.heartbeat(), token=old)).status_code == 401
    await one.beat()
    refused = await one.post("/v1/nodes/register", one.registration, token=one.token)
    assert refused.status_code == 401, "a node's token does not let it register others"


async def test_a_reply_names_the_live_gangs_of_this_node(plane) -> None:
    agent, other = await plane.agent("n1"), await plane.agent("n2")
    one = await allocate(plane.database, await accept_job(plane.database), {"n1": [0, 1], "n2": [0]})
    two = await allocate(plane.database, await accept_job(plane.database), {"n2": [1]})
    assert (await agent.beat()).allocations == [one]
    assert (await other.beat()).allocations == sorted([one, two])
    await end_allocation(plane.database, one)
    assert (await agent.beat()).allocations == []
    await agent.register()
    assert (await agent.beat()).allocations == [], "registering brings nothing back"


async def test_ranks_only_advance_whatever_the_order_of_heartbeats(plane) -> None:
    agent = await plane.agent()
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    agent.say(gang, RankState.RUNNING, progress_done=5, progress_total=10)
    running = agent.heartbeat()
    agent.say(gang, RankState.EXITED, code=3, progress_done=9)
    await agent.beat()
    for _ in range(2):
        assert (await agent.post("/v1/nodes/n0/heartbeat", running)).status_code == 200
    agent.say(gang, RankState.EXITED, code=0, ended_by=EndedBy.STOP)
    await agent.beat()
    assert await ranks_of(plane, gang) == [("n0", "exited", 3, "itself")]
    assert await progress_of(plane, job) == (9, 10)


async def test_one_heartbeat_may_name_a_gang_twice_and_the_furthest_word_counts(plane) -> None:
    agent = await plane.agent()
    gang = await allocate(plane.database, await accept_job(plane.database), {"n0": [0]})
    body = agent.heartbeat()
    body["ranks"] = [
        {"allocation_id": gang, "state": "exited", "exit_code": 1},
        {"allocation_id": gang, "state": "running"},
    ]
    assert (await agent.post("/v1/nodes/n0/heartbeat", body)).status_code == 200
    assert await ranks_of(plane, gang) == [("n0", "exited", 1, None)]


async def test_a_node_says_nothing_about_gangs_it_has_no_share_of(plane) -> None:
    agent, stranger = await plane.agent("n1"), await plane.agent("n2")
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n1": [0]})
    stranger.say(gang, RankState.EXITED, code=0, progress_done=1e9)
    stranger.say("no-such-gang", RankState.RUNNING)
    assert (await stranger.beat()).allocations == []
    assert await ranks_of(plane, gang) == []
    assert await progress_of(plane, job) is None
    agent.say(gang, RankState.RUNNING, progress_done=1)
    await agent.beat()
    assert await ranks_of(plane, gang) == [("n1", "running", None, None)]


LOSE = """
UPDATE nodes SET state = 'lost' WHERE id = $1 AND state = 'up'
    AND lease_until + make_interval(secs => $2) < now() RETURNING id
"""


async def test_a_heartbeat_that_races_with_the_loss_never_renews_a_gang_that_was_given_up(plane) -> None:
    """Whoever takes the node's row first decides, for lease and gangs together."""
    agent = await plane.agent()
    for _ in range(20):
        gang = await allocate(plane.database, await accept_job(plane.database), {"n0": [0]})
        await agent.beat()
        async with plane.database.connection() as connection:
            await connection.execute("UPDATE nodes SET lease_until = now() - interval '1 ms'")

        async def give_up(gang=gang) -> bool:
            async with plane.database.transaction() as connection:
                lost = await connection.fetchval(LOSE, "n0", 0.0)
                if lost:
                    await asyncio.sleep(0.005)
                    await connection.execute("UPDATE allocations SET state = 'ended' WHERE id = $1", gang)
                    await connection.execute("DELETE FROM device_claims WHERE allocation_id = $1", gang)
            return lost is not None

        replies = await asyncio.gather(give_up(), agent.beat(), give_up(), agent.beat())
        lost, named = replies[0] or replies[2], {*replies[1].allocations, *replies[3].allocations}
        assert lost == (gang not in named), "either the lease was renewed, or nobody was told to go on"
        assert lost != await gang_lives(plane, gang)
        await end_allocation(plane.database, gang)


async def gang_lives(plane, gang) -> bool:
    async with plane.database.connection() as connection:
        return await connection.fetchval("SELECT state <> 'ended' FROM allocations WHERE id = $1", gang)


async def test_draining_is_audited_once(plane) -> None:
    await plane.agent()
    for command, draining in (("drain", True), ("drain", True), ("resume", False)):
        answer = await plane.http.post(f"/v1/nodes/n0/{command}", headers=service_headers(OPERATOR))
        assert answer.json()["draining"] is draining
    assert (await plane.http.post("/v1/nodes/n0/drain", headers=service_headers(USER))).status_code == 403
    assert (await plane.http.post("/v1/nodes/n9/drain", headers=service_headers(OPERATOR))).status_code == 404
    async with plane.database.connection() as connection:
        rows = await connection.fetch("SELECT action, target, key_id FROM audit_log ORDER BY sequence")
    assert [tuple(row) for row in rows] == [("node.drain", "n0", "key-ops"), ("node.resume", "n0", "key-ops")]


BAD_REGISTRATIONS = [
    {"node_id": "bad name"},
    {"labels": {"a": "x\x00"}},
    {"devices": [{"index": -1}]},
    {"driver": "magic"},
]


@pytest.mark.parametrize("wrong", BAD_REGISTRATIONS)
async def test_a_bad_registration_is_one_problem_and_changes_nothing(plane, wrong) -> None:
    agent = FakeAgent(plane.http, "n0")
    answer = await agent.post("/v1/nodes/register", agent.registration | wrong, token=JOIN_TOKEN)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    found = await plane.http.get("/v1/nodes", headers=service_headers(OPERATOR))
    assert found.json()["items"] == []


@pytest.mark.parametrize(
    "rank",
    [
        {"state": "running"},
        {"allocation_id": "a\x00", "state": "running"},
        {"allocation_id": "a", "state": "dancing"},
        {"allocation_id": "a", "state": "exited", "exit_code": 2**40},
        {"allocation_id": "a", "state": "exited", "ended_at": "0001-01-01T00:00:00+14:00"},
        {"allocation_id": "a", "state": "running", "progress_done": 1e300},
    ],
)
async def test_a_bad_heartbeat_is_one_problem(plane, rank) -> None:
    agent = await plane.agent()
    answer = await agent.post("/v1/nodes/n0/heartbeat", agent.heartbeat() | {"ranks": [rank]})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


async def test_without_the_database_everything_is_unavailable_and_nothing_is_a_server_error(redis_url: str) -> None:
    settings = telemetry_settings("postgresql://nobody@127.0.0.1:1/none", redis_url)
    async with running_telemetry(settings) as http:
        agent = FakeAgent(http)
        answers = [
            await agent.post("/v1/nodes/register", agent.registration, token=JOIN_TOKEN),
            await agent.post("/v1/nodes/n0/heartbeat", agent.heartbeat(), token="any"),
            await http.get("/v1/invariants", headers=service_headers(OPERATOR)),
        ]
        assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(503, "unavailable")}
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/healthz")).status_code == 200


async def test_a_share_that_its_node_has_forgotten_is_gone(plane) -> None:
    agent = await plane.agent("n1")
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n1": [0]})
    await agent.beat()
    assert await ranks_of(plane, gang) == [], "a share never reported may still have to start"
    agent.say(gang, RankState.RUNNING)
    await agent.beat()
    forgetful = await plane.agent("n1")
    assert await ranks_of(plane, gang) == [("n1", "running", None, None)], "its lease may not be over yet"

    async def is_gone() -> bool:
        await forgetful.beat()
        return await ranks_of(plane, gang) == [("n1", "exited", None, "host")]

    await eventually(is_gone)


async def test_a_share_is_not_gone_for_a_heartbeat_that_is_older_and_came_late(plane) -> None:
    agent = await plane.agent("n1")
    async with plane.database.connection() as connection:
        await connection.execute("UPDATE nodes SET registered_at = registered_at - interval '1 day'")
    gang = await allocate(plane.database, await accept_job(plane.database), {"n1": [0]})
    before = agent.heartbeat()
    agent.say(gang, RankState.STARTING)
    await agent.beat()
    assert (await agent.post("/v1/nodes/n1/heartbeat", before)).status_code == 200
    assert await ranks_of(plane, gang) == [("n1", "starting", None, None)]


async def test_what_devices_were_set_to_is_recorded_once_per_change(plane) -> None:
    agent = await plane.agent("n1")
    gang = await allocate(plane.database, await accept_job(plane.database), {"n1": [0]})
    noon = "2026-11-21T12:00:00Z"
    set_to = {"revision": 1, "power_limit_w": 200.0, "refused": {}, "enforced_w": [200.0]}
    agent.say(gang, RankState.RUNNING, settings=set_to)
    await agent.beat()
    for revision in (1, 1, 2):
        agent.say(gang, RankState.RUNNING, settings=set_to | {"revision": revision, "since": noon})
        await agent.beat()
        await agent.beat()
    async with plane.database.connection() as connection:
        rows = await connection.fetch("SELECT * FROM settings_in_force ORDER BY revision")
    found = [(row["allocation_id"], row["node_id"], row["revision"], row["power_limit_w"]) for row in rows]
    assert found == [(gang, "n1", 1, 200.0), (gang, "n1", 2, 200.0)], "and nothing of what was not in force yet"
    assert rows[0]["enforced_w"] == [200.0]


def a_minute(decisions: int, **changes) -> dict:
    return {
        "start_at": "2026-03-01T12:00:00Z",
        "policy": "miad",
        "dry_run": False,
        "decisions": decisions,
        "exceeded": 1,
        "mean_mhz": 900.5,
        "lowest_mhz": 600,
        "highest_mhz": 1200,
        "last_mhz": 600.0 + decisions,
        **changes,
    }


async def test_who_listens_on_a_server_s_port_is_known_from_its_own_node_alone(plane) -> None:
    agent, stranger = await plane.agent("n1"), await plane.agent("n2")
    gang = await allocate(plane.database, await accept_job(plane.database), {"n1": [0]})

    async def known() -> str | None:
        async with plane.database.connection() as connection:
            return await connection.fetchval("SELECT listener FROM rank_statuses WHERE allocation_id = $1", gang)

    agent.say(gang, RankState.RUNNING)
    await agent.beat()
    assert await known() is None, "an older agent does not say"
    for listener in ("none", "own", "foreign", "own"):
        agent.say(gang, RankState.RUNNING, listener=listener)
        await agent.beat()
        assert await known() == listener
    stranger.say(gang, RankState.RUNNING, listener="foreign")
    await stranger.beat()
    assert await known() == "own"


async def clocks_of(plane) -> list[tuple]:
    async with plane.database.connection() as connection:
        query = """
            SELECT job_id, node_id, decisions, last_mhz, unused, unobserved FROM server_clocks ORDER BY start_at, job_id
        """
        return [tuple(row) for row in await connection.fetch(query)]


async def test_of_a_minute_of_clocks_the_fullest_report_is_kept(plane) -> None:
    agent, stranger = await plane.agent("n1"), await plane.agent("n2")
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n1": [0]})
    later = a_minute(3, start_at="2026-03-01T12:01:00Z", policy="learned", unused="few_clocks")
    for minutes in ([a_minute(5)], [a_minute(9, unobserved=4), later], [a_minute(7)]):
        agent.say(gang, RankState.RUNNING, clocks=minutes)
        await agent.beat()
    stranger.say(gang, RankState.RUNNING, clocks=[a_minute(50)])
    await stranger.beat()

    assert await clocks_of(plane) == [(job, "n1", 9, 609, None, 4), (job, "n1", 3, 603, "few_clocks", 0)]


@pytest.mark.parametrize(
    "minutes", [[a_minute(0)], [a_minute(1, mean_mhz=0)], [a_minute(1, policy="fast")], [a_minute(1)] * 3]
)
async def test_clocks_that_cannot_be_are_refused(plane, minutes) -> None:
    agent = await plane.agent()
    agent.say("gang", RankState.RUNNING, clocks=minutes)

    assert (await agent.post("/v1/nodes/n0/heartbeat", agent.heartbeat())).status_code == 422


async def test_a_node_says_why_it_takes_no_new_work(plane) -> None:
    agent = await plane.agent("n0")
    full = "Its disk is nearly full."
    for closed in (full, None):
        await agent.beat(closed=closed)
        shown = (await plane.http.get("/v1/nodes/n0", headers=service_headers(OPERATOR))).json()
        assert (shown["state"], shown["closed"]) == ("up", closed)


async def test_a_node_that_was_silent_beyond_its_lease_has_been_so_since_its_end(plane) -> None:
    agent = await plane.agent("n1")

    async def silence() -> tuple[float | None, float]:
        async with plane.database.transaction(readonly=True) as connection:
            query = "SELECT extract(epoch FROM now() - silent_at)::float8, extract(epoch FROM now())::float8 FROM nodes"
            return tuple(await connection.fetchrow(query))

    await agent.beat()
    assert (await silence())[0] is None
    async with plane.database.transaction() as connection:
        await connection.execute("UPDATE nodes SET lease_until = now() - interval '1 h', state = 'lost'")
    await agent.beat()
    since_s, at_s = await silence()
    assert since_s == pytest.approx(3_600, abs=300)
    async with plane.database.transaction() as connection:
        await connection.execute("UPDATE nodes SET lease_until = now() + interval '1 h'")
    await agent.beat()
    later_s, later_at_s = await silence()
    assert later_at_s - later_s == pytest.approx(at_s - since_s)


async def test_a_lease_counts_from_now_though_the_clock_was_set_back(plane) -> None:
    agent = await plane.agent("n1")
    await agent.beat()
    async with plane.database.transaction() as connection:
        await connection.execute("UPDATE nodes SET lease_until = now() + interval '1 h'")
    reply = await agent.beat()
    async with plane.database.transaction(readonly=True) as connection:
        left_s = await connection.fetchval("SELECT extract(epoch FROM lease_until - now())::float8 FROM nodes")
    assert 0 < left_s <= reply.lease_ttl_s


async def test_what_no_device_can_show_is_refused_and_the_list_of_nodes_is_read(plane):
    agent = await plane.agent("n0")
    for odd in ({"power_w": 1e308}, {"index": 2**64}, {"clock_mhz": 2**63}, {"energy_j": -1e300}):
        reading = {"index": 0, "power_w": 50, "utilization": 0, **odd}
        answer = await agent.post("/v1/nodes/n0/heartbeat", agent.heartbeat(devices=[reading] * 2))
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    listed = await plane.http.get("/v1/nodes", headers=service_headers(OPERATOR))
    assert listed.status_code == 200


async def test_saves_are_kept_with_how_often_they_come(plane) -> None:
    agent = await plane.agent()
    job = await accept_job(plane.database)
    gang = await allocate(plane.database, job, {"n0": [0]})
    async with plane.database.connection() as connection:
        began = await connection.fetchval(
            "UPDATE allocations SET running_at = now() - interval '1 h' RETURNING running_at"
        )
    found = list[tuple[float, float | None, float | None]]()
    for minutes, save_s in ((20, 4.0), (30, None), (30, None), (25, 9.0)):
        saved_at = began + timedelta(minutes=minutes)
        agent.say(gang, RankState.RUNNING, progress_done=5, saved_at=saved_at.isoformat(), save_s=save_s)
        await agent.beat()
        async with plane.database.connection() as connection:
            row = await connection.fetchrow("SELECT * FROM job_progress WHERE job_id = $1", job)
        found.append(((row["saved_at"] - began).total_seconds() / 60, row["save_every_s"], row["save_s"]))
    assert found == [(20, 1_200, 4), (30, 600, 4), (30, 600, 4), (30, 600, 4)]
