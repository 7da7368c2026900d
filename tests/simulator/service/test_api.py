"""What-if runs by HTTP: submitted, read, listed, cancelled, and refused."""

from __future__ import annotations

import base64
import gzip
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from services.cli.main import app
from services.contracts.identity import Role
from services.db.database import Database
from services.db.engine import create_engine
from services.simulator.repository import SimulationRepository
from services.simulator.settings import SimulatorSettings
from tests.simulator.service.installation import a_long_run, a_run
from tests.support.background import Installation
from tests.support.control_plane import accept_job, allocate

JOBS = """job_id,submitted_at,started_at,ended_at,gpus
a,2023-08-01T00:00:00Z,2023-08-01T00:00:00Z,2023-08-01T01:00:00Z,2
b,2023-08-01T00:10:00Z,2023-08-01T01:00:00Z,2023-08-01T03:00:00Z,4
"""
GRID = "time,gco2_per_kwh\n" + "\n".join(f"2023-08-0{day}T{hour:02}:00:00Z,100" for day in (1, 2) for hour in range(24))


async def refused(simulator: Installation, body: dict[str, Any], **options: Any) -> tuple[int, str, str, str]:
    """Return status, code, the first pointer and detail of a refusal."""
    answer = await simulator.submit(body, **options)
    document = answer.json()
    return answer.status_code, document["code"], document["errors"][0]["pointer"], document["detail"]


def without_time(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "wall_s"}


async def test_the_result_is_the_command_lines(simulator: Installation, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policy", "green", "--jobs", "green-day", "--carbon", "GB", "--start", "2023-08-01", "--days", "0.2"]
    app(["simulate", "training", *words, "--param", "mu=1.5", "--json"], standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)

    run = await simulator.ended(await simulator.accepted(a_run(policy="green", params={"mu": 1.5})))

    assert run["status"] == "succeeded"
    assert without_time(run["result"]) == without_time(printed)
    assert run["progress"] == {"done": printed["completed"], "total": printed["jobs"]}
    assert run["request"]["jobs"] == "green-day"
    assert run["request"]["params"] == {"mu": 1.5}


async def test_several_policies_are_a_list_in_order(simulator: Installation) -> None:
    run = await simulator.ended(await simulator.accepted(a_run(policy=["las", "fifo"])))

    assert [each["policy"] for each in run["result"]] == ["las", "fifo"]
    assert run["policies"] == ["las", "fifo"]
    assert run["progress"]["total"] == 2 * run["result"][0]["jobs"]


@pytest.mark.parametrize("packed", [False, True])
async def test_files_come_inline(simulator: Installation, packed: bool) -> None:
    def inline(name: str, text: str) -> dict[str, str]:
        zipped = base64.b64encode(gzip.compress(text.encode())).decode()
        return {"name": name, **({"gzip_base64": zipped} if packed else {"text": text})}

    files = {"jobs": inline("mine.csv", JOBS), "carbon": inline("grid.csv", GRID)}
    body = {"policy": "fifo", "cluster": f"{2 + packed}x4:A100", "format": "wattshift", **files}
    run = await simulator.ended(await simulator.accepted(body))

    assert run["status"] == "succeeded", run
    assert (run["result"]["jobs"], run["result"]["completed"], run["result"]["workload"]) == (2, 2, "mine.csv")
    assert run["request"]["jobs"]["size"] == len(JOBS)
    assert run["result"]["zone"] == "grid"


async def test_files_are_kept_while_a_run_names_them(simulator: Installation) -> None:
    body = {"policy": "fifo", "cluster": "2x4:A100", "jobs": {"text": JOBS + "\n"}, "carbon": {"text": GRID}}
    first, last = [await simulator.ended(await simulator.accepted({**body, "seed": seed})) for seed in (60, 61)]
    file = first["request"]["jobs"]["sha256"]
    engine = create_engine(simulator.stack.environment["DATABASE_URL"])
    repository = SimulationRepository(engine)
    async with simulator.database() as connection:
        await connection.execute("UPDATE simulation_inputs SET stored_at = now() - interval '2 hours'")
        for run in (first, last):
            assert await repository.fetch([file])
            await connection.execute(
                "UPDATE simulations SET ended_at = now() - interval '40 days' WHERE id = $1", run["id"]
            )
            await repository.forget_ended(30)
    assert not await repository.fetch([file])
    await engine.dispose()


async def test_the_past_of_this_installation(simulator: Installation) -> None:
    database = await Database.open(simulator.stack.environment["DATABASE_URL"], size=2)
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=3)
    for number, tenant in enumerate(["acme", "acme", "other"]):
        job_id = await accept_job(database, tenant=tenant)
        gang = await allocate(database, job_id, {})
        began, ended = midnight + timedelta(hours=number), midnight + timedelta(hours=number + 1)
        async with database.connection() as connection:
            await connection.execute(
                "UPDATE allocations SET gpus = 2, state = 'ended', started_at = $2, ended_at = $3 WHERE id = $1",
                *(gang, began, ended),
            )
            await connection.execute(
                "UPDATE jobs SET state = 'succeeded', submitted_at = $2, started_at = $2, ended_at = $3 WHERE id = $1",
                *(job_id, began, ended),
            )
    await database.close()
    body = {"policy": "fifo", "jobs": "history", "carbon": "US-CAL-CISO", "cluster": "1x4:A100"}
    body |= {"start": midnight.date().isoformat(), "days": 2}

    mine = await simulator.ended(await simulator.accepted(body))
    everyones = await simulator.ended(await simulator.accepted(body, role=Role.OPERATOR), role=Role.OPERATOR)

    assert (mine["status"], mine["result"]["completed"], mine["result"]["zone"]) == ("succeeded", 2, "US-CAL-CISO")
    assert everyones["result"]["completed"] == 3
    assert 4 <= mine["result"]["gpu_hours"] < 4.2
    assert mine["request"]["jobs"]["name"] == "history"
    refusal = await refused(simulator, {**body, "carbon": "NOWHERE"})
    assert (refusal[0], refusal[2]) == (422, "/carbon")
    assert (await refused(simulator, {**body, "start": "2001-01-01"}))[2:] == (
        "/jobs",
        "no job was submitted here from 2001-01-01 00:00 to 2001-01-03 00:00 UTC",
    )


async def test_the_past_ends_now_and_is_as_long_as_it_was(simulator: Installation) -> None:
    """The first day of an installation is a past day too, as is the day that a request has not reached yet."""
    database = await Database.open(simulator.stack.environment["DATABASE_URL"], size=2)
    job_id = await accept_job(database, tenant="new")
    gang = await allocate(database, job_id, {})
    now = datetime.now(UTC)
    began = max(now - timedelta(minutes=1), now.replace(hour=0, minute=0, second=0, microsecond=0))
    async with database.connection() as connection:
        await connection.execute(
            "UPDATE allocations SET gpus = 2, state = 'ended', started_at = $2, ended_at = now() WHERE id = $1",
            gang,
            began,
        )
        await connection.execute(
            "UPDATE jobs SET state = 'succeeded', submitted_at = $2, started_at = $2, ended_at = now() WHERE id = $1",
            *(job_id, began),
        )
    await database.close()
    most = int(SimulatorSettings.model_fields["max_days"].default)
    body = {"policy": "fifo", "jobs": "history", "carbon": "US-CAL-CISO", "cluster": "1x4:A100"}
    for days in (7, most - 0.01):
        start = now - timedelta(days=days)
        refusal = await simulator.submit({**body, "start": start.isoformat(), "days": days + 1}, tenant="none")
        assert f"from {start:%Y-%m-%d %H:%M} to {datetime.now(UTC):%Y-%m-%d}" in refusal.json()["detail"]

    run = await simulator.ended(
        await simulator.accepted(
            {**body, "start": (now - timedelta(days=7)).date().isoformat(), "days": 8}, tenant="new"
        ),
        tenant="new",
    )

    assert (run["status"], run["result"]["completed"]) == ("succeeded", 1)
    too_long = {**body, "start": (now - timedelta(days=most + 2)).date().isoformat(), "days": most + 3}
    assert (await refused(simulator, too_long))[2] == "/days"


async def test_the_same_key_and_the_same_run(simulator: Installation) -> None:
    key = {"headers": {"idempotency-key": "once"}}
    first = await simulator.accepted(a_run(seed=7), **key)
    assert (await simulator.submit(a_run(seed=7), **key)).json()["id"] == first
    assert (await refused(simulator, a_run(seed=8), **key))[1] == "idempotency_key_reused"
    await simulator.ended(first)

    again = await simulator.submit(a_run(seed=7))

    assert (again.status_code, again.json()["id"]) == (200, first)
    assert (await simulator.submit(a_run(seed=7), tenant="other")).json()["id"] != first


async def test_a_tenant_sees_its_own(simulator: Installation) -> None:
    mine = await simulator.accepted(a_run(seed=20))

    assert (await simulator.call("GET", f"/v1/simulations/{mine}", tenant="other")).status_code == 404
    assert (await simulator.call("DELETE", f"/v1/simulations/{mine}", tenant="other")).status_code == 404
    listed = (await simulator.call("GET", "/v1/simulations?limit=500", tenant="other")).json()["items"]
    assert mine not in [run["id"] for run in listed]
    assert (await simulator.read(mine, tenant="ops", role=Role.OPERATOR))["id"] == mine
    await simulator.ended(mine)


async def test_pages_and_filters(simulator: Installation) -> None:
    made = [await simulator.accepted(a_run(seed=30 + n), tenant="pages") for n in range(3)]
    for each in made:
        await simulator.ended(each, tenant="pages")

    first = (await simulator.call("GET", "/v1/simulations?limit=2&status=succeeded", tenant="pages")).json()
    rest = (await simulator.call("GET", f"/v1/simulations?cursor={first['next_cursor']}", tenant="pages")).json()

    assert [run["id"] for run in first["items"] + rest["items"]] == made[::-1]
    assert (await simulator.call("GET", "/v1/simulations?status=failed", tenant="pages")).json()["items"] == []
    assert (await simulator.call("GET", "/v1/simulations?cursor=x")).json()["code"] == "invalid_cursor"


async def test_a_run_is_cancelled(simulator: Installation) -> None:
    made = await simulator.running(a_long_run(seed=1))

    cancelled = await simulator.call("DELETE", f"/v1/simulations/{made}")

    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    assert (await simulator.call("DELETE", f"/v1/simulations/{made}")).status_code == 200
    ended = await simulator.ended(await simulator.accepted(a_run(seed=40)))
    assert ended["status"] == "succeeded", "the worker goes on with the next"
    assert (await simulator.read(made))["result"] is None
    refusal = await simulator.call("DELETE", f"/v1/simulations/{ended['id']}")
    assert (refusal.status_code, refusal.json()["code"]) == (409, "invalid_transition")


async def test_progress_is_told(simulator: Installation) -> None:
    made = await simulator.accepted(a_long_run(seed=2))

    halfway = await simulator.until(made, lambda run: run["progress"]["done"] > 0)

    assert halfway["progress"]["total"] == 3 * 1600
    await simulator.ended(made)


async def test_so_many_at_once_and_no_more(simulator: Installation) -> None:
    made = [await simulator.accepted(a_long_run(seed=50 + n), tenant="busy") for n in range(5)]

    answer = await simulator.submit(a_run(), tenant="busy")

    assert (answer.status_code, answer.json()["code"]) == (429, "quota_exceeded")
    for each in made:
        await simulator.call("DELETE", f"/v1/simulations/{each}", tenant="busy")


BOMB = base64.b64encode(gzip.compress(b"0" * 50_000_000)).decode()


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"policy": "gree"}, "/policy", "unknown policy 'gree'"),
        ({"policy": []}, "/policy", ""),
        ({"policy": "fifo,fifo"}, "/policy", "more than once"),
        ({"policy": " ,"}, "/policy", "must name a policy"),
        ({"policy": "green", "params": {"mu": 0}}, "/params", "at least 1"),
        ({"params": {"nu": 1}}, "/params", "sets no parameter"),
        ({"jobs": "/etc/passwd"}, "/jobs", "unknown job trace"),
        ({"carbon": "/etc/passwd"}, "/carbon", "there is no grid"),
        ({"forecast": "/etc/passwd"}, "/forecast", ""),
        ({"jobs": {"text": "a,b\n1,2\n"}}, "/jobs", "not a known job trace"),
        ({"jobs": {"text": JOBS}, "format": "swf"}, "/jobs", ""),
        ({"jobs": {"name": "../x", "text": JOBS}}, "/jobs", ""),
        ({"jobs": {"gzip_base64": "aGVsbG8="}}, "/jobs", "not a text, packed with gzip"),
        ({"jobs": {"gzip_base64": BOMB}}, "/jobs", "larger than 100000 bytes"),
        ({"jobs": {"text": "PAR1 table"}}, "/jobs", "Parquet"),
        ({"jobs": {"text": "x", "gzip_base64": "eA=="}}, "/jobs", ""),
        ({"jobs": "green-year", "days": 60}, "/jobs", "24000 jobs are more than a run may have (20000)"),
        ({"days": 400}, "/days", "400 days are more"),
        ({"days": -1}, "/days", ""),
        ({"cluster": "999999x999:A100"}, "/cluster", "GPUs are more than a run may have (5000)"),
        ({"cluster": "2by2"}, "/cluster", "not a node group"),
        ({"start": "soon"}, "/carbon", "start is not a date"),
        *(({"start": far}, "/carbon", "known only from") for far in ("0001-01-01", "2024-01-01", "9999-12-31")),
        ({"start": None, "days": None, "jobs": {"text": JOBS.replace("2023", "9999")}}, "/start", "9999-"),
        ({"recipe": "soup"}, "/jobs", "unknown recipe"),
        ({"signal": "smoke"}, "/carbon", "unknown signal"),
        ({"jobs": "history", "days": None}, "", "needs start and days"),
        ({"jobs": "history", "start": "2200-01-01"}, "/start", "is in the future"),
        ({"colour": "blue"}, "/colour", ""),
    ],
)
async def test_bad_input_is_reported_by_field(
    simulator: Installation, change: dict[str, Any], pointer: str, words: str
) -> None:
    before = len((await simulator.call("GET", "/v1/simulations?limit=500")).json()["items"])

    status, code, where, detail = await refused(simulator, a_run(**change))

    assert (status, code) == (422, "invalid_request")
    assert where.startswith(pointer)
    assert words in detail
    assert "/wattshift-" not in detail  # the folder that the server unpacked a file in
    assert len((await simulator.call("GET", "/v1/simulations?limit=500")).json()["items"]) == before
