"""Pools as operators and their tenants see them: made, changed, listed, deleted, refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from services.contracts.identity import Role
from services.contracts.problems import Problem
from services.kit.ids import new_id
from tests.support.pools import PoolApi, a_partition, a_pool, pool_api, windows_ago

USER: dict[str, Any] = {"role": Role.USER}


@pytest.fixture(scope="module")
async def api(database_url: str) -> AsyncIterator[PoolApi]:
    """The API of pools; tests use a pool of their own each."""
    async with pool_api(database_url) as made:
        yield made


async def refused(api: PoolApi, method: str, path: str, **options: Any) -> Problem:
    answer = await api.call(method, path, **options)
    assert answer.status_code >= 400, answer.text
    return Problem.model_validate_json(answer.content)


async def test_a_pool_is_made_once_and_the_same_again_changes_nothing(api: PoolApi) -> None:
    answer = await api.call("PUT", "/chat", json=a_pool(), tenant="acme")
    assert (answer.status_code, answer.headers["location"], answer.headers["etag"]) == (
        *(201, "/v1/pools/chat"),
        '"1-automatic"',
    )
    pool = answer.json()
    assert (pool["tenant_id"], pool["revision"], pool["is_deleted"], pool["plan_id"]) == ("acme", 1, False, None)
    assert (pool["is_plan_stale"], pool["instances"]) == (False, {})
    assert pool["spec"]["probes"]["health_path"] == "/health"
    again = await api.call("PUT", "/chat", json=a_pool(), tenant="umbra")
    assert (again.status_code, again.json()) == (200, pool)
    assert (await api.call("GET", "/chat")).json() == pool
    assert await api.audited("chat") == ["pool.created"]


async def test_another_spec_is_another_revision_and_another_mode_is_none(api: PoolApi) -> None:
    await api.made("revised")
    changed = (await api.call("PUT", "/revised", json=a_pool(min_up_s=60.0))).json()
    assert (changed["revision"], changed["spec"]["min_up_s"]) == (2, 60)
    fixed = (await api.call("PATCH", "/revised", json={"mode": "fixed"})).json()
    assert (fixed["revision"], fixed["spec"]["mode"], fixed["spec"]["min_up_s"]) == (2, "fixed", 60)
    again = (await api.call("PATCH", "/revised", json={"mode": "fixed"})).json()
    assert again == fixed
    back = (await api.call("PUT", "/revised", json=a_pool(min_up_s=60.0))).json()
    assert (back["revision"], back["spec"]["mode"]) == (2, "automatic")
    assert await api.audited("revised") == ["pool.created", *["pool.changed"] * 3]


async def test_who_names_a_state_replaces_no_other(api: PoolApi) -> None:
    await api.made("guarded")
    tag = (await api.call("GET", "/guarded")).headers["etag"]
    await api.call("PATCH", "/guarded", json={"mode": "fixed"})
    late = await refused(api, "PUT", "/guarded", json=a_pool(min_up_s=1.0), headers={"if-match": tag})
    assert (late.status, late.code) == (412, "conflict")
    tag = (await api.call("GET", "/guarded")).headers["etag"]
    answer = await api.call("PUT", "/guarded", json=a_pool(min_up_s=1.0), headers={"if-match": tag})
    assert (answer.status_code, answer.json()["revision"]) == (200, 2)
    assert (await refused(api, "PUT", "/unmade", json=a_pool(), headers={"if-match": tag})).status == 404


async def test_of_many_who_make_a_pool_at_once_one_does(api: PoolApi) -> None:
    answers = await asyncio.gather(*(api.call("PUT", "/race", json=a_pool()) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert await api.audited("race") == ["pool.created"]


async def test_a_deleted_pool_stays_until_it_is_drained_and_its_plans_are_called_off(api: PoolApi) -> None:
    await api.made("leaving")
    for state, outcome in (("queued", None), ("succeeded", "proposed"), ("succeeded", "applied")):
        await a_plan(api, "leaving", state, outcome)
    for _ in range(2):
        answer = await api.call("DELETE", "/leaving")
        assert (answer.status_code, answer.json()["is_deleted"]) == (202, True)
    rows = await api.database.fetch("SELECT state, outcome FROM pool_plans WHERE pool = 'leaving' ORDER BY id")
    assert [tuple(row) for row in rows] == [
        ("cancelled", "superseded"),
        ("succeeded", "superseded"),
        ("succeeded", "applied"),
    ]
    for method, body in (("PUT", a_pool()), ("PATCH", {"mode": "fixed"})):
        problem = await refused(api, method, "/leaving", json=body)
        assert (problem.status, problem.code) == (409, "conflict")
    assert await api.audited("leaving") == ["pool.created", "pool.deleted"]


async def a_plan(api: PoolApi, pool: str, state: str, outcome: str | None, slot_at: datetime | None = None) -> str:
    plan_id, at = new_id("plan"), slot_at or datetime.now(UTC)
    await api.database.execute(
        """INSERT INTO pool_plans (id, tenant_id, key_id, pool, revision, trigger, slot_at, from_at, deadline_at,
                                   outcome, state, problem, problem_sha256)
           VALUES ($1::text, 'ops', 'key', $2, 1, 'clock', $3, $3, $3, $4, $5, '{}', sha256($1::text::bytea))""",
        *(plan_id, pool, at, outcome, state),
    )
    return plan_id


async def test_a_plan_is_stale_once_its_half_hour_is_over(api: PoolApi) -> None:
    await api.made("aging")
    now_s = datetime.now(UTC).timestamp()
    for ago_s, is_stale in ((0.0, False), (-1_800.0, False), (1_800.0, True)):
        slot_at = datetime.fromtimestamp(now_s // 1_800 * 1_800 - ago_s, UTC)
        plan_id = await a_plan(api, "aging", "succeeded", "applied", slot_at)
        await api.database.execute("UPDATE pools SET plan_id = $1 WHERE name = 'aging'", plan_id)
        pool = (await api.call("GET", "/aging")).json()
        assert (pool["plan_id"], pool["is_plan_stale"]) == (plan_id, is_stale)
    await api.database.execute("UPDATE pools SET plan_id = 'plan_swept_away' WHERE name = 'aging'")
    assert (await api.call("GET", "/aging")).json()["is_plan_stale"]


async def an_instance(api: PoolApi, pool: str, state: str, created_at: datetime | None = None) -> str:
    made_id = new_id("instance")
    await api.database.execute(
        """INSERT INTO pool_instances (id, pool, tenant_id, place, mode, request_class, terms, state, url, created_at)
           VALUES ($1, $2, 'ops', 'here', 'one', 'SS', '{}', $3, 'http://10.0.0.1:9000', $4)""",
        *(made_id, pool, state, created_at or datetime.now(UTC)),
    )
    return made_id


async def test_instances_are_listed_newest_first_and_counted(api: PoolApi) -> None:
    await api.made("fleet", tenant="acme")
    await an_instance(api, "fleet", "ended", datetime.now(UTC) - timedelta(days=1))  # of an earlier pool of that name
    made = [await an_instance(api, "fleet", state) for state in ("ready", "ended", "ready", "draining")]
    pool = (await api.call("GET", "/fleet", tenant="acme", **USER)).json()
    assert pool["instances"] == {"ready": 2, "draining": 1}
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        query = "?limit=2" + (f"&cursor={cursor}" if cursor else "")
        page = (await api.call("GET", f"/fleet/instances{query}", tenant="acme", **USER)).json()
        seen += [each["id"] for each in page["items"]]
        cursor = page["next_cursor"]
    assert seen == [made[3], made[2], made[0]]
    everything = "?" + "&".join(f"state={state}" for state in ("ready", "ended", "draining"))
    page = (await api.call("GET", f"/fleet/instances{everything}")).json()
    assert [each["id"] for each in page["items"]] == made[::-1]
    assert page["items"][0]["url"] == "http://10.0.0.1:9000"
    problem = await refused(api, "GET", "/fleet/instances?cursor=abc")
    assert (problem.status, problem.code) == (422, "invalid_cursor")


async def answered(api: PoolApi, plan_id: str) -> None:
    """Have a plan answered, as a worker would, and decided on, as the planner would."""
    await api.database.execute("UPDATE pool_plans SET state = 'succeeded', ended_at = now() WHERE id = $1", plan_id)
    await api.plans.decide(plan_id)


async def test_a_pool_is_planned_on_request_and_a_proposal_waits_for_an_operator(api: PoolApi) -> None:
    await api.made("asked", tenant="acme", mode="fixed")
    answer = await api.call("POST", "/asked/plans")
    plan = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (202, f"/v1/pools/asked/plans/{plan['id']}")
    assert (plan["trigger"], plan["state"], plan["outcome"], plan["revision"]) == ("request", "queued", None, 1)
    assert "result" not in plan
    assert (await api.call("POST", "/asked/plans")).json()["id"] == plan["id"]
    path = f"/asked/plans/{plan['id']}"
    early = await refused(api, "POST", f"{path}/apply")
    assert (early.status, early.code) == (409, "invalid_transition")
    await answered(api, plan["id"])
    assert (await api.call("GET", path, tenant="acme", **USER)).json()["outcome"] == "proposed"
    for _ in range(2):
        applied = (await api.call("POST", f"{path}/apply")).json()
        assert (applied["id"], applied["outcome"]) == (plan["id"], "applied")
    pool = (await api.call("GET", "/asked")).json()
    assert (pool["plan_id"], pool["is_plan_stale"]) == (plan["id"], False)
    asked = ["pool.plan_requested"] * 2
    assert await api.audited("asked") == ["pool.created", *asked, "pool.plan_applied"]


async def test_another_spec_supersedes_what_is_being_planned_and_another_mode_does_not(api: PoolApi) -> None:
    await api.made("moving")
    first = (await api.call("POST", "/moving/plans")).json()["id"]
    await api.call("PATCH", "/moving", json={"mode": "fixed"})
    assert (await api.call("POST", "/moving/plans")).json()["id"] == first
    await answered(api, first)
    assert (await api.call("GET", f"/moving/plans/{first}")).json()["outcome"] == "proposed"
    second = (await api.call("POST", "/moving/plans")).json()["id"]
    await api.call("PUT", "/moving", json=a_pool(min_up_s=9.0, mode="fixed"))
    await answered(api, second)
    listed = (await api.call("GET", "/moving/plans")).json()["items"]
    assert [(each["id"], each["outcome"]) for each in listed] == [(second, "superseded"), (first, "proposed")]
    listed = (await api.call("GET", "/moving/plans?outcome=proposed")).json()["items"]
    assert [each["id"] for each in listed] == [first]
    outdated = await refused(api, "POST", f"/moving/plans/{first}/apply")
    assert (outdated.status, outdated.code) == (409, "conflict")


async def test_a_plan_is_found_by_its_own_pool_alone(api: PoolApi) -> None:
    await api.made("owner", tenant="acme")
    await api.made("neighbour", tenant="acme")
    plan_id = (await api.call("POST", "/owner/plans")).json()["id"]
    for method, path in (
        ("GET", f"/neighbour/plans/{plan_id}"),
        ("POST", f"/neighbour/plans/{plan_id}/apply"),
        ("GET", "/owner/plans/plan_unheard"),
        ("POST", "/nobody/plans"),
    ):
        assert (await refused(api, method, path)).status == 404, path
    for path in ("/owner/plans", f"/owner/plans/{plan_id}"):
        assert (await refused(api, "GET", path, tenant="umbra", **USER)).status == 404, path
    for path in ("/owner/plans", f"/owner/plans/{plan_id}/apply"):
        assert (await refused(api, "POST", path, tenant="acme", **USER)).status == 403, path


async def test_tenants_see_their_own_and_only_operators_act(api: PoolApi) -> None:
    await api.made("mine", tenant="initech")
    whos: tuple[dict[str, Any], ...] = ({"tenant": "initech", **USER}, {"tenant": "elsewhere"})
    for who in whos:
        assert (await api.call("GET", "/mine", **who)).status_code == 200
        await api.report("mine", windows_ago(1, [[1, 1]]), **who)
    stranger: dict[str, Any] = {"tenant": "umbra", **USER}
    for method, path, body in (
        ("GET", "/mine", None),
        ("GET", "/mine/instances", None),
        ("POST", "/mine/traffic", {"source": "r", "windows": windows_ago(1, [])}),
    ):
        problem = await refused(api, method, path, json=body, **stranger)
        assert (problem.status, problem.code) == (404, "not_found"), path
    assert (await api.call("GET", "", **stranger)).json()["items"] == []
    for method, body in (("PUT", a_pool()), ("PATCH", {"mode": "fixed"}), ("DELETE", None)):
        problem = await refused(api, method, "/mine", json=body, tenant="initech", **USER)
        assert (problem.status, problem.code) == (403, "forbidden")
    assert (await api.call("GET", "/mine")).json()["revision"] == 1


async def test_lists_are_by_name_and_paged(api: PoolApi) -> None:
    for name in ("page-b", "page-c", "page-a"):
        await api.made(name, tenant="pager")
    first = (await api.call("GET", "?limit=2", tenant="pager", **USER)).json()
    rest = (await api.call("GET", f"?limit=2&cursor={first['next_cursor']}", tenant="pager", **USER)).json()
    assert [pool["name"] for pool in first["items"] + rest["items"]] == ["page-a", "page-b", "page-c"]
    assert rest["next_cursor"] is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"places": []}, "/places"),
    ({"places": [{"name": "a", "zone": "DE"}] * 2}, ""),
    ({"places": [{"name": "a", "zone": "DE"}, {"name": "b", "zone": "ATLANTIS"}]}, "/places/1/zone"),
    ({"places": [{"name": "a", "zone": "DE", "signal": "marginal"}]}, "/places/0/signal"),
    ({"objective": "cost"}, ""),
    ({"modes": [{"name": "one", "gpu_model": "A", "gpus": 0, "command": ["x"]}]}, "/modes/0/gpus"),
    ({"modes": [{"name": "one", "gpu_model": "A", "gpus": 1}]}, "/modes/0"),
    ({"modes": [{"name": "two", "gpu_model": "A", "gpus": 1, "command": ["x"]}]}, ""),
    ({"partitions": [a_partition(thresholds=(0, 1))]}, "/partitions/0/thresholds/input_tokens"),
    ({"partitions": [a_partition(assumed_qps={"XL": 1.0})]}, "/partitions/0"),
    ({"probes": {"health_path": "health"}}, "/probes/health_path"),
    ({"clocks": {"policy": "fast"}}, "/clocks/policy"),
    ({"clocks": {"policy": "miad", "factor": 1}}, "/clocks/factor"),
    ({"clocks": {"policy": "miad", "step_mhz": 0}}, "/clocks/step_mhz"),
    ({"clocks": {"policy": "learned"}, "partitions": [a_partition(thresholds=None)]}, ""),
    ({"unheard_of": 1}, "/unheard_of"),
]


@pytest.mark.parametrize(("change", "pointer"), BAD)
async def test_what_is_wrong_is_pointed_at_and_makes_no_pool(
    api: PoolApi, change: dict[str, Any], pointer: str
) -> None:
    problem = await refused(api, "PUT", "/bad", json=a_pool(**change))
    assert problem.status == 422
    assert [error.pointer for error in problem.errors] == [pointer]
    assert (await api.call("GET", "/bad")).status_code == 404


async def test_names_are_names(api: PoolApi) -> None:
    problem = await refused(api, "PUT", "/a:b", json=a_pool())
    assert (problem.status, problem.errors[0].pointer) == (422, "/pool")


async def test_zones_that_cannot_be_checked_now_are_taken(api: PoolApi) -> None:
    api.carbon_is_up = False
    try:
        await api.made("hopeful", places=[{"name": "a", "zone": "ATLANTIS"}])
    finally:
        api.carbon_is_up = True


async def a_running_instance(api: PoolApi, pool: str, readings: list[dict[str, Any]]) -> tuple[str, str]:
    """Return an instance that runs on GPUs 1 and 2 of a node, and its job."""
    instance, job, node = await an_instance(api, pool, "ready"), new_id("job"), new_id("node")
    await api.database.execute("UPDATE pool_instances SET job_id = $2 WHERE id = $1", instance, job)
    await api.database.execute(
        """INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, queued_at)
           VALUES ($1, 'ops', 'server', 'p', '{}', '{}', 'running', now())""",
        job,
    )
    await api.database.execute(
        """INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices,
                              readings)
           VALUES ($1, '', '', '', 'Z', 'nvml', false, 'rapl', '[]', $2)""",
        *(node, readings),
    )
    await api.database.execute(
        """INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port)
           VALUES ($1, $2, 1, 'running', 2, $3, 1)""",
        *(f"{job}.1", job, [{"node_id": node, "devices": [1, 2]}]),
    )
    return instance, job


async def a_clock_minute(api: PoolApi, job: str, start_at: datetime, last_mhz: float, policy: str = "learned") -> None:
    await api.database.execute(
        "INSERT INTO server_clocks VALUES ($1, $2, 'n', $4, true, 60, 15, 900, 800, 1000, $3, 0.02, 'few_clocks', 6)",
        *(job, start_at, last_mhz, policy),
    )


def a_reading(index: int, clock_mhz: int | None, wanted_mhz: int | None) -> dict[str, Any]:
    return {"index": index, "power_w": 1, "utilization": 0, "clock_mhz": clock_mhz, "latency_clock_mhz": wanted_mhz}


async def test_instances_show_their_clock_and_what_decides_it(api: PoolApi) -> None:
    await api.made("clocked")
    others = [a_reading(0, 210, None), a_reading(3, 210, 600)]
    following, job = await a_running_instance(
        api, "clocked", [*others, a_reading(1, 1_410, 800), a_reading(2, 1_395, 800)]
    )
    silent, ended_job = await a_running_instance(api, "clocked", [a_reading(1, None, None), a_reading(2, 900, None)])
    unread, _ = await a_running_instance(api, "clocked", [a_reading(1, 900, 700)])
    waiting = await an_instance(api, "clocked", "wanted")
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    for ago in (3, 2):
        await a_clock_minute(api, job, now - timedelta(minutes=ago), 100.0 * ago, "miad" if ago == 3 else "learned")
    await a_clock_minute(api, ended_job, now - timedelta(minutes=2), 900)

    items = (await api.call("GET", "/clocked/instances")).json()["items"]
    clocks = {each["id"]: each["clock"] for each in items}

    assert clocks[following] == {
        "policy": "learned",
        "dry_run": True,
        "clock_mhz": 1_395,
        "wanted_mhz": 800,
        "exceeded_share": 0.25,
        "unobserved_share": 0.1,
        "model_error": 0.02,
        "unused": "few_clocks",
    }
    unknown = dict.fromkeys(("exceeded_share", "unobserved_share", "model_error", "unused"))
    plain = {"dry_run": False, "policy": "default", **unknown}
    assert clocks[silent] == {**plain, "clock_mhz": 900, "wanted_mhz": None}
    assert clocks[unread] == {**plain, "clock_mhz": 900, "wanted_mhz": 700}
    assert clocks[waiting] is None


async def test_clocks_are_listed_minute_by_minute(api: PoolApi) -> None:
    await api.made("history", tenant="acme")
    pairs = [await a_running_instance(api, "history", []) for _ in range(2)]
    noon = datetime.now(UTC).replace(second=0, microsecond=0)
    for minute in range(3):
        for at, (_, job) in enumerate(pairs):
            await a_clock_minute(api, job, noon - timedelta(minutes=minute), 1_000 - 100 * minute - at)
    seen: list[tuple[str, float]] = []
    cursor: str | None = ""
    while cursor is not None:
        query = "?limit=4" + (f"&cursor={cursor}" if cursor else "")
        page = (await api.call("GET", f"/history/clocks{query}", tenant="acme", **USER)).json()
        seen += [(each["instance"], each["last_mhz"]) for each in page["items"]]
        cursor = page["next_cursor"]
    assert seen[0][0] == pairs[1][0]
    assert [mhz for _, mhz in seen] == [999, 1_000, 899, 900, 799, 800]
    since = (noon - timedelta(minutes=1)).isoformat().replace("+00:00", "Z")
    of_one = (await api.call("GET", f"/history/clocks?instance={pairs[0][0]}&since={since}")).json()["items"]
    assert [each["last_mhz"] for each in of_one] == [1_000, 900]
    until = (await api.call("GET", f"/history/clocks?until={since}")).json()["items"]
    assert [each["last_mhz"] for each in until] == [799, 800]
    assert (await refused(api, "GET", "/history/clocks", tenant="other", **USER)).status == 404
    assert (await refused(api, "GET", "/history/clocks?cursor=bm9uZQ")).status == 422
    assert (await refused(api, "GET", "/history/clocks?since=soon")).status == 422


async def test_the_clocks_of_an_earlier_pool_of_the_name_are_not_shown(api: PoolApi) -> None:
    await api.made("again")
    instance, job = await a_running_instance(api, "again", [])
    await a_clock_minute(api, job, datetime.now(UTC), 900)
    await api.database.execute("UPDATE pool_instances SET created_at = '2026-01-01' WHERE id = $1", instance)

    assert (await api.call("GET", "/again/clocks")).json()["items"] == []


async def test_what_a_later_release_adds_to_a_stored_spec_is_not_shown(api: PoolApi) -> None:
    made = await api.made("of-next-year")
    await api.database.execute("""UPDATE pools SET spec = spec || '{"more": 1}' WHERE name = 'of-next-year'""")
    found = await api.call("GET", "/of-next-year")
    assert (found.status_code, found.json()["spec"]) == (200, made["spec"])
    assert (await api.call("GET", "?limit=100")).status_code == 200
