"""A home and its cell: two admissions on databases of their own, and what a gateway does between them."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import ValidationError
from sqlalchemy import event
from sqlalchemy.exc import DataError

from services.admission.cells import placing, remote
from services.admission.cells.placing import EstimateHere, Placing, offer_of
from services.admission.cells.remote import COPY_LABEL, RemoteJob
from services.admission.repository.cells import SETTLES_S
from services.contracts.cells import GIVEN_BACK
from services.contracts.explanations import StartEstimate
from services.contracts.jobs import JobSpec, SubmissionEntry
from services.db.engine import create_engine
from services.scheduler.repository.snapshots import fixed_quotas
from tests.admission.conftest import admission_on
from tests.admission.installation import SPEC, Admission, an_entry
from tests.support.servers import fresh_database

USED = """
INSERT INTO job_footprints (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s)
VALUES ($1, 100, 60, 10, 5, 2)
"""
CELL_TENANT = {"tenant_id": "home", "role": "user", "key_id": "key_of_home", "project": "home"}
KEYS = {"user": CELL_TENANT, "admin": {"tenant_id": "default", "role": "admin", "key_id": "key_of_admin"}}


def estimate(gco2_per_hour: float, *, suits: bool = True, free: int = 1, intensity: float = 100.0) -> StartEstimate:
    at = {"starts_at": "2026-01-01T00:00:00Z", "zone": "SE", "signal": "average_direct"}
    now = {**at, "intensity_gco2_per_kwh": intensity}
    counts = {"gpus": 1, "free_gpus": free, "suitable_gpus": int(suits), "waiting_jobs": 0}
    run = {**now, "carbon_gco2_per_hour": gco2_per_hour}
    return StartEstimate.model_validate(
        {"policy": "joint", "starts_now": free > 0, "placement": [], "assumptions": [], "now": run, **counts}
    )


class Door:
    """What a cell's gateway does: it knows keys, and passes requests on to admission and others."""

    def __init__(self, cell: Admission) -> None:
        self.cell = cell
        self.gco2_per_hour = 1.0
        self.intensity = 1.0
        self.lacks = ""
        self.is_cut_off = False
        self.loses_answers = False
        self.refuses = ""
        self.garbles = ""
        self.fails_at = ""
        self.is_one = False  #: Or as many installations as it is asked which it is
        self.delays = self.is_too_fast = False
        self.repeats: Callable[[], str] | None = None
        self.free_gpus: int | None = None
        self.asked = Counter[str]()
        self.under_way: list[SubmissionEntry] = []

    async def answer(self, request: web.Request) -> web.Response:
        if self.is_cut_off:
            return web.Response(status=503)
        caller: dict[str, Any] = dict(KEYS[request.headers["authorization"].removeprefix("Bearer ")])
        path, body = request.path, await request.text()
        self.asked[f"{request.method} {path}"] += 1
        if self.lacks and path.endswith(self.lacks):
            problem = {
                "type": "t",
                "title": "t",
                "status": 404,
                "code": "not_found",
                "detail": "There is no such path.",
            }
            return web.json_response(problem, status=404)
        if self.fails_at and path.endswith(self.fails_at):
            problem = {"type": "t", "title": "t", "status": 500, "code": "internal", "detail": "An internal error."}
            return web.json_response(problem, status=500)
        if path == "/v1/jobs:estimate":
            waiting = await self.cell.count("jobs", "ended_at IS NULL")
            free = 1 if self.free_gpus is None else max(self.free_gpus - waiting, 0)
            offer = estimate(self.gco2_per_hour, free=free, intensity=self.intensity)
            return web.Response(text=offer.model_dump_json())
        if path.endswith("/footprint"):
            told = {"job_id": "j", "footprint": {}, "zone": "SE", "signal": "average_direct", "pue": 1.5}
            return web.json_response({**told, "intervals": []})
        if request.method == "POST" and path == "/v1/jobs":
            entry = SubmissionEntry(
                tenant_id=caller["tenant_id"],
                key_id=caller["key_id"],
                project=caller["project"],
                idempotency_key=request.headers["idempotency-key"],
                batch=False,
                body=body,
            )
            if self.is_too_fast:
                problem = {"type": "t", "title": "t", "status": 429, "code": "rate_limited", "detail": "Too fast."}
                return web.json_response(problem, status=429)
            if self.refuses:
                problem = {"type": "t", "title": "t", "status": 422, "code": "gang_impossible", "detail": self.refuses}
                return web.json_response(problem, status=422)
            if self.delays:
                self.under_way.append(entry)
                return web.Response(status=503)
            (found,) = await self.cell.submit_all(entry)
            return web.Response(status=503 if self.loses_answers else found.status, text=found.body)
        asked = f"{path}?{request.query_string}".partition("&cursor=")[0]
        passed = await self.cell.ask(request.method, asked, caller=caller, content=body)
        body = passed.content
        if path == "/v1/whoami" and not self.is_one:
            body = json.dumps({**json.loads(body), "installation": str(sum(self.asked.values()))}).encode()
        if self.repeats and path == "/v1/jobs" and request.method == "GET":
            listed = json.loads(body)
            items = [{**each, "id": self.repeats()} for each in listed["items"]]
            body = json.dumps({**listed, "items": items, "next_cursor": "again"}).encode()
        if self.garbles and self.garbles in body.decode():
            document = json.loads(body)
            for job in document.get("items", [document]):
                if self.garbles in json.dumps(job):
                    job["generation"] = 1 << 40
            body = json.dumps(document).encode()
        return web.Response(status=passed.status_code, body=body, content_type="application/json")


class Pair:
    """A home and its cell."""

    def __init__(self, home: Admission, cell: Admission, door: Door, url: str) -> None:
        self.home, self.cell, self.door, self.url = home, cell, door, url
        self.here = estimate(100.0)
        reach = home.app.state.cells._reach

        self.engine, self._connect = create_engine(home.database_url), reach.cell
        self.placing = self.new_placing()

    def new_placing(self, again_s: float = 0.0) -> Placing:
        return Placing(self.engine, self._connect, self.offer_here, lambda: None, again_s)

    async def offer_here(self, tenant_id: str, body: bytes) -> StartEstimate:
        return self.here

    def offer_to(self, name: str) -> EstimateHere:
        """Return what this home offers to jobs of a name alone."""

        async def offer(tenant_id: str, body: bytes) -> StartEstimate:
            return estimate(100.0, suits=json.loads(body)["name"] == name)

        return offer

    async def turns(self, count: int = 1) -> None:
        for _ in range(count):
            await self.placing.turn()

    async def job(self, job_id: str) -> dict[str, Any]:
        return (await self.home.ask("GET", f"/v1/jobs/{job_id}")).json()

    async def copies(self) -> list[dict[str, Any]]:
        return [dict(row) for row in await self.cell.database.fetch("SELECT * FROM jobs ORDER BY id")]

    async def add(self, key: str = "user", name: str = "north") -> Any:
        spec = {"name": name, "url": self.url, "key": key}
        return await self.home.ask("POST", "/v1/cells", role="admin", json=spec)

    async def end(self) -> None:
        """Forget all jobs and cells, so that the next test begins with none."""
        await self.engine.dispose()
        for each in (self.home, self.cell):
            await each.database.execute("UPDATE tenants SET limits = '{}'")
            await each.database.execute(
                "TRUNCATE allocations, jobs, cells, cell_jobs, cell_energy, job_footprints CASCADE"
            )


@pytest.fixture(scope="module")
async def both(
    postgres_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Admission, Admission]]:
    quiet = {"secrets_key": "k" * 40, "cells_poll_s": 60, "capacity_max_age_s": 0.001}
    urls = [fresh_database(postgres_url) for _ in range(2)]
    folder = tmp_path_factory.mktemp("cells")
    homes = [admission_on(url, redis_url, _folder(folder, name), **quiet) for url, name in zip(urls, "hc", strict=True)]
    async with homes[0] as home, homes[1] as cell:
        await cell.make_tenant("home")
        yield home, cell


def _folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


@pytest.fixture
async def pair(both: tuple[Admission, Admission]) -> AsyncIterator[Pair]:
    home, cell = both
    door = Door(cell)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", door.answer)
    async with TestServer(app) as server:
        found = Pair(home, cell, door, str(server.make_url("")).rstrip("/"))
        yield found
        await found.end()


async def test_a_cell_is_named_by_a_users_key_alone(pair: Pair) -> None:
    refused = await pair.add("admin")
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/key")
    made = await pair.add()
    assert (made.status_code, made.json()["tenant_id"], made.json()["project"]) == (201, "home", "home")
    assert "user" not in made.text.replace("user_", "")  # the key
    assert (await pair.add()).status_code == 409
    assert (await pair.add(name="any")).status_code == 422
    pair.door.is_cut_off = True
    assert (await pair.add(name="south")).status_code == 503
    assert (await pair.home.ask("GET", "/v1/cells")).status_code == 403
    listed = await pair.home.ask("GET", "/v1/cells", role="operator")
    assert [each["name"] for each in listed.json()["items"]] == ["north"]


async def test_no_installation_is_a_cell_of_itself_or_two_cells(pair: Pair) -> None:
    """Whatever its address and its key: each has a door and a proxy."""
    pair.door.is_one = True
    assert (await pair.add()).status_code == 201
    before = await pair.home.database.fetch("SELECT * FROM cells")
    for admission, said in ((pair.home, "It is this installation itself."), (pair.cell, "It is cell north already.")):
        door, app = Door(admission), web.Application()
        door.is_one = True
        app.router.add_route("*", "/{path:.*}", door.answer)
        async with TestServer(app) as proxy:
            spec = {"name": "south", "url": str(proxy.make_url("/")).rstrip("/"), "key": "user"}
            refused = await pair.home.ask("POST", "/v1/cells", role="admin", json=spec)
        (error,) = refused.json()["errors"]
        assert (refused.status_code, error["pointer"], error["detail"]) == (422, "/url", said)
    assert await pair.home.database.fetch("SELECT * FROM cells") == before
    pair.door.is_one = False
    assert (await pair.add(name="south")).status_code == 201, "another one"


async def test_a_job_runs_where_it_is_cleanest_and_is_followed_there(pair: Pair) -> None:
    await pair.add()
    job_id = await pair.home.submit({"cells": ["any"], "labels": {"kind": "k"}, "project": "vision"})
    assert (await pair.home.database.fetchval("SELECT cell FROM jobs WHERE id = $1", job_id)) == ""
    await pair.turns()
    job = await pair.job(job_id)
    assert (job["cell"], job["state"], job["reason"]) == ("north", "queued", "in_cell")
    (copy,) = await pair.copies()
    spec = json.loads(copy["spec"])
    assert (copy["tenant_id"], copy["project"], spec["labels"]["kind"]) == ("home", "home", "k")
    assert spec["command"] == SPEC["command"]
    assert "cells" not in spec
    await pair.cell.start(copy["id"])
    await pair.cell.database.execute(USED, copy["id"])
    await pair.turns(2)
    job = await pair.job(job_id)
    assert (job["state"], job["gpus"], job["footprint"]["energy_j"]) == ("running", 2, 100)
    refused = await pair.home.ask("POST", f"/v1/jobs/{job_id}/exec", json={"command": ["true"]})
    assert (refused.status_code, "in cell north" in refused.json()["detail"]) == (409, True)
    await pair.cell.database.execute("UPDATE job_footprints SET energy_j = 130, carbon_gco2 = 7")
    await pair.cell.end(copy["id"])
    pair.door.asked.clear()
    await pair.turns(4)
    assert pair.door.asked[f"GET /v1/jobs/{copy['id']}"] == 1, "asked once, and again when its energy is settled"
    job = await pair.job(job_id)
    assert (job["state"], job["cell"], job["footprint"]["carbon_gco2"]) == ("succeeded", "north", 7)
    (line,) = await pair.home.database.fetch("SELECT * FROM cell_lines")
    assert (line["node_id"], line["zone"], line["pue"], line["energy_j"]) == ("cell:north", "SE", 1.5, 130)
    booked = await pair.home.database.fetchrow("SELECT * FROM booked_energy WHERE job_id = $1", job_id)
    assert booked is not None
    assert (booked["energy_j"], booked["facility_energy_j"]) == (130, 195)
    events = await pair.home.database.fetch("SELECT type FROM job_events WHERE job_id = $1 ORDER BY sequence", job_id)
    assert [each["type"] for each in events] == ["job.submitted", "job.in_cell", "job.running", "job.succeeded"]
    settled = f"UPDATE jobs SET ended_at = now() - interval '{SETTLES_S + 1} s'"
    await pair.cell.database.execute(settled)
    await pair.home.database.execute("UPDATE cell_jobs SET seen = seen - 'ended_at'")  # as a minute later
    await pair.turns()
    assert (await pair.home.ask("DELETE", "/v1/cells/north", role="admin")).status_code == 204


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({}, "names no cells"),
        ({"cells": ["any"], "gpus": {"zone": "DE"}}, "zone"),
        ({"cells": ["any"], "array": "0-1"}, "array"),
    ],
)
async def test_what_may_not_travel_stays(pair: Pair, spec: dict[str, Any], why: str) -> None:
    await pair.add()
    await pair.home.submit(spec)
    assert set(await pair.home.database.fetch("SELECT cell FROM jobs")) == {(None,)}, why
    await pair.turns(2)
    assert not await pair.copies()


async def test_a_job_stays_at_home_where_home_is_cleaner_or_no_cell_is_named(pair: Pair) -> None:
    alone = await pair.home.submit({"cells": ["any"]})
    await pair.turns()
    assert (await pair.home.database.fetchval("SELECT cell FROM jobs WHERE id = $1", alone)) is None
    await pair.add()
    pair.here = estimate(0.5)
    for cells in (["any"], ["north"]):
        job_id = await pair.home.submit({"cells": cells})
        await pair.turns()
        assert (await pair.home.database.fetchval("SELECT cell FROM jobs WHERE id = $1", job_id)) is None
    pair.here = estimate(100)
    assert (await pair.add(name="south")).status_code == 201
    other = await pair.home.submit({"cells": ["south"]})
    assert (await pair.home.ask("DELETE", "/v1/cells/south", role="admin")).status_code == 204
    await pair.turns()
    assert (await pair.job(other))["cell"] is None


async def test_a_cell_that_there_is_not_is_no_place_for_a_job(pair: Pair) -> None:
    await pair.add()
    before = await pair.home.database.fetchval("SELECT count(*) FROM jobs")
    (refused,) = await pair.home.submit_all(an_entry({"cells": ["north", "nroth"]}))
    (error,) = json.loads(refused.body)["errors"]
    assert (refused.status, error["pointer"]) == (422, "/cells/1")
    assert "nroth" in error["detail"]
    assert await pair.home.database.fetchval("SELECT count(*) FROM jobs") == before


async def test_lost_answers_submit_nothing_twice_and_a_cell_that_is_cut_off_keeps_its_jobs(pair: Pair) -> None:
    await pair.add()
    pair.door.loses_answers = True
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns(3)
    assert len(await pair.copies()) == 1
    pair.door.is_cut_off = True
    assert (await pair.home.ask("POST", f"/v1/jobs/{job_id}/cancel")).json()["state"] == "queued"
    await pair.turns(2)
    assert (await pair.job(job_id))["cell"] == "north"
    (cell,) = (await pair.home.ask("GET", "/v1/cells", role="operator")).json()["items"]
    assert "does not answer" in cell["problem"]
    pair.door.is_cut_off = pair.door.loses_answers = False
    await pair.turns(3)
    assert (await pair.job(job_id))["state"] == "cancelled"
    assert [each["state"] for each in await pair.copies()] == ["cancelled"]


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_refusal_counts_once_nothing_is_under_way_any_more(pair: Pair, arrives: bool) -> None:
    await pair.add()
    pair.door.delays = True
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns(2)
    pair.door.refuses = "No such GPU."
    await pair.turns(2)
    assert (await pair.job(job_id))["cell"] == "north"
    if arrives:
        await pair.cell.submit_all(pair.door.under_way[0])
        await pair.turns(2)
    await pair.home.database.execute("UPDATE cell_jobs SET doubt_until = now() - interval '1 s'")
    pair.here = estimate(100.0 if arrives else 0.5)
    await pair.turns(2)
    assert (await pair.job(job_id))["cell"] == ("north" if arrives else None)
    assert [each["state"] for each in await pair.copies()] == (["queued"] if arrives else [])


async def test_a_job_that_waits_moves_and_one_that_was_started_stays(pair: Pair) -> None:
    await pair.add()
    waits, runs = [await pair.home.submit({"cells": ["any"]}) for _ in range(2)]
    await pair.turns()
    await pair.cell.start((await pair.copies())[1]["id"])
    await pair.turns()
    pair.door.gco2_per_hour = 99.0
    await pair.turns(2)
    assert (await pair.job(waits))["cell"] == "north"  # it saves less than a tenth
    pair.door.gco2_per_hour = 200.0
    await pair.turns(3)
    assert (await pair.job(waits))["cell"] is None
    assert (await pair.job(runs))["cell"] == "north"
    assert [each["state"] for each in await pair.copies()] == ["cancelled", "running"]
    started = await pair.cell.ask("POST", f"/v1/jobs/{(await pair.copies())[1]['id']}/withdraw", caller=CELL_TENANT)
    assert started.status_code == 409


USES = """
INSERT INTO job_footprints (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s)
VALUES ($1, 36e6, 3e7, 0, 5, 36000)
"""
MAY_MOVE = {"cells": ["any"], "may_move": True, "checkpoint_dir": "/shared/j", "work": {"total": 100, "unit": "steps"}}


async def _running(pair: Pair, spec: dict[str, Any], done: float = 10.0) -> tuple[str, str]:
    """Return a job that runs in the cell, and has done so much of its work, and its copy."""
    job_id = await pair.home.submit(spec)
    await pair.turns()
    copy = (await pair.copies())[-1]["id"]
    await pair.cell.start(copy)
    await pair.cell.database.execute("INSERT INTO reported_work (job_id, done) VALUES ($1, $2)", copy, done)
    await pair.cell.database.execute(USES, copy)
    await pair.turns()
    return job_id, copy


async def _given_back(pair: Pair, copy: str) -> None:
    """Have the cell's scheduler end a copy as it ends those that are marked."""
    row = await pair.cell.database.fetchrow("SELECT cancel_requested, hold_requested FROM jobs WHERE id = $1", copy)
    assert tuple(row or ()) == (True, True)
    await pair.cell.end(copy, state="cancelled")
    await pair.cell.database.execute("UPDATE jobs SET detail = $2 WHERE id = $1", copy, GIVEN_BACK)


async def test_a_job_that_runs_and_may_move_does_where_that_pays_once_it_is_stopped_and_settled(pair: Pair) -> None:
    await pair.add()
    moves, copy = await _running(pair, MAY_MOVE)
    stays, _ = await _running(pair, {**MAY_MOVE, "may_move": False, "name": "stays"})
    ends, _ = await _running(pair, {**MAY_MOVE, "name": "ends"}, done=99.9)
    pair.door.intensity = 10.0
    await pair.turns(3)
    assert (await pair.job(moves))["state"] == "running", "the rest of it emits less than a tenth more"
    pair.door.intensity = pair.door.gco2_per_hour = 200.0
    await pair.turns(3)
    marked = await pair.cell.database.fetch("SELECT id FROM jobs WHERE hold_requested")
    assert [row["id"] for row in marked] == [copy]
    assert (await pair.job(moves))["cell"] == "north", "it may still run there"
    await _given_back(pair, copy)
    await pair.turns(2)
    assert [each["state"] for each in await pair.copies()] == ["cancelled", "running", "running"]
    assert ((await pair.job(moves))["cell"], (await pair.job(moves))["state"]) == ("north", "running")
    await pair.cell.database.execute("UPDATE job_footprints SET energy_j = 37e6 WHERE job_id = $1", copy)
    since = "jsonb_build_object('ended_at', now() - interval '61 s')"
    await pair.cell.database.execute("UPDATE jobs SET ended_at = now() - interval '61 s' WHERE id = $1", copy)
    await pair.home.database.execute(f"UPDATE cell_jobs SET seen = seen || {since} WHERE job_id = $1", moves)
    await pair.turns(3)
    job = await pair.job(moves)
    assert (job["cell"], job["state"], job["footprint"]["energy_j"]) == (None, "queued", 37e6)
    assert [(await pair.job(each))["cell"] for each in (stays, ends)] == ["north", "north"]
    pair.door.gco2_per_hour = 1.0
    await pair.turns(3)
    assert (await pair.job(moves))["cell"] is None, "one that has come home stays there"


@pytest.mark.parametrize("wish", ["", "cancel", "hold"])
async def test_a_job_that_runs_at_home_moves_where_that_pays_once_it_is_stopped(pair: Pair, wish: str) -> None:
    await pair.add()
    pair.door.gco2_per_hour = pair.door.intensity = 200.0
    moves, stays = [await pair.home.submit({**MAY_MOVE, "may_move": may_move}) for may_move in (True, False)]
    await pair.turns()
    for job_id in (moves, stays):
        await pair.home.start(job_id)
        await pair.home.database.execute("INSERT INTO reported_work (job_id, done) VALUES ($1, 10)", job_id)
        await pair.home.database.execute(USES, job_id)
    await pair.home.database.execute("UPDATE allocations SET running_at = now()")
    await pair.turns(2)
    leaving = "SELECT id FROM jobs WHERE cell = ''"
    assert not await pair.home.database.fetch(leaving), "home is the cleaner one"
    pair.door.gco2_per_hour = pair.door.intensity = 1.0
    await pair.turns(3)
    assert [row["id"] for row in await pair.home.database.fetch(leaving)] == [moves]
    assert ((await pair.job(moves))["state"], await pair.copies()) == ("running", []), "it is stopped first"
    if wish:
        await pair.home.ask("POST", f"/v1/jobs/{moves}/{wish}")
    await pair.home.stop(moves, {"": "queued", "cancel": "cancelled", "hold": "held"}[wish])
    await pair.turns(3)
    assert len(await pair.copies()) == (not wish)
    if wish == "hold":
        await pair.home.ask("POST", f"/v1/jobs/{moves}/release")
        await pair.turns()
    if wish == "cancel":
        return
    (copy,) = await pair.copies()
    await pair.cell.start(copy["id"])
    await pair.cell.database.execute("INSERT INTO reported_work (job_id, done) VALUES ($1, 30)", copy["id"])
    await pair.cell.database.execute(USED, copy["id"])
    await pair.turns(2)
    job = await pair.job(moves)
    assert (job["cell"], job["progress"]["done"], job["footprint"]["energy_j"]) == ("north", 30.0, 36e6 + 100)
    assert await pair.home.database.fetchval("SELECT moves FROM cell_jobs WHERE job_id = $1", moves) == 1


async def test_a_job_that_ends_while_it_is_to_move_has_ended(pair: Pair) -> None:
    await pair.add()
    job_id, copy = await _running(pair, MAY_MOVE)
    pair.door.intensity = 200.0
    await pair.turns(3)
    await pair.cell.end(copy)
    await pair.turns(3)
    assert ((await pair.job(job_id))["state"], (await pair.job(job_id))["cell"]) == ("succeeded", "north")


async def test_a_job_that_is_to_move_and_is_cancelled_ends_so(pair: Pair) -> None:
    await pair.add()
    job_id, copy = await _running(pair, MAY_MOVE)
    pair.door.intensity = 200.0
    await pair.turns(3)
    await pair.home.ask("POST", f"/v1/jobs/{job_id}/cancel")
    await _given_back(pair, copy)
    await pair.turns(2)
    await pair.home.database.execute("UPDATE cell_jobs SET seen = '{}'")
    await pair.cell.database.execute("UPDATE jobs SET ended_at = now() - interval '61 s'")
    await pair.turns(2)
    assert (await pair.job(job_id))["state"] == "cancelled"


@pytest.mark.parametrize("restored", ["asked", "stopped", "settled", "placed"])
async def test_a_home_that_was_restored_while_a_job_was_given_back_has_it_run_on(pair: Pair, restored: str) -> None:
    """The backup was made when the job ran in the cell: nobody but the cell knows what was asked since."""
    await pair.add()
    job_id, copy = await _running(pair, MAY_MOVE)
    tables = ("jobs", "cell_jobs", "cell_energy")
    for each in tables:
        await pair.home.database.execute(f"CREATE TABLE of_{each} AS SELECT * FROM {each}")
    pair.door.intensity = pair.door.gco2_per_hour = 200.0
    await pair.turns(3)
    if restored != "asked":
        await _given_back(pair, copy)
        await pair.turns()
    if restored in ("settled", "placed"):
        await pair.cell.database.execute("UPDATE jobs SET ended_at = now() - interval '61 s' WHERE id = $1", copy)
        await pair.home.database.execute("UPDATE cell_jobs SET seen = '{}'")
    if restored == "placed":
        pair.door.gco2_per_hour = 1.0
        await pair.turns(2)
        assert len(await pair.copies()) == 2
    for each in reversed(tables):
        await pair.home.database.execute(f"DELETE FROM {each}")
    for each in tables:
        await pair.home.database.execute(f"INSERT INTO {each} SELECT * FROM of_{each}; DROP TABLE of_{each}")
    await pair.home.database.execute("UPDATE jobs SET generation = generation + 1000")
    pair.placing, pair.door.intensity = pair.new_placing(), 1.0
    await pair.turns(2)
    if restored == "asked":
        await _given_back(pair, copy)
    await pair.cell.database.execute("UPDATE jobs SET ended_at = now() - interval '61 s' WHERE id = $1", copy)
    await pair.home.database.execute("UPDATE cell_jobs SET seen = '{}' WHERE remote_id = $1", copy)
    await pair.turns(3)
    job, live = await pair.job(job_id), [each["id"] for each in await pair.copies() if each["state"] != "cancelled"]
    assert (job["state"], job["cell"], len(live)) == ("queued", *(("north", 1) if live else (None, 0)))
    assert restored != "placed" or live, "what the cell has already is not placed again"


async def test_a_cell_of_an_earlier_release_keeps_what_runs_there(pair: Pair) -> None:
    await pair.add()
    job_id, copy = await _running(pair, MAY_MOVE)
    pair.door.intensity, pair.door.lacks = 200.0, "/give-back"
    await pair.turns(2)
    pair.door.intensity = 1.0
    await pair.turns()
    assert pair.door.asked[f"POST /v1/jobs/{copy}/give-back"] >= 1
    handing = await pair.home.database.fetchval("SELECT state FROM cell_jobs WHERE job_id = $1", job_id)
    assert (handing, (await pair.job(job_id))["state"]) == ("there", "running")


@pytest.mark.parametrize("lacks", ["cells", "checkpoint_dir", "preemptible"])
async def test_what_may_move_says_where_its_checkpoint_is(pair: Pair, lacks: str) -> None:
    refused = {**MAY_MOVE, lacks: False if lacks == "preemptible" else None}
    with pytest.raises(ValidationError, match="may_move needs cells"):
        JobSpec.model_validate({**SPEC, **refused})


async def test_a_job_does_not_move_before_its_cell_could_start_it(pair: Pair) -> None:
    await pair.add()
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns()
    pair.door.free_gpus = 0
    pair.placing = pair.new_placing(again_s=300.0)
    await pair.turns(2)
    assert (await pair.job(job_id))["cell"] == "north"
    await pair.home.database.execute("UPDATE jobs SET queued_at = now() - interval '301 s'")
    pair.placing = pair.new_placing(again_s=300.0)
    await pair.turns(2)
    assert (await pair.job(job_id))["cell"] is None


def test_a_job_begins_when_there_is_room_for_it_and_not_when_it_would_displace_others() -> None:
    at, reason = datetime(2026, 1, 2, tzinfo=UTC), "waiting_for_round"
    waits = estimate(1.0, free=0).model_copy(update={"reason": reason, "expected_start_at": at})
    starts_s = [(waits, math.inf), (waits.model_copy(update={"room_at": at}), at.timestamp())]
    for found, start_s in starts_s:
        offer = offer_of("north", found)
        assert offer is not None
        assert offer.start_s == start_s


async def test_a_cell_is_drained_and_removed_or_lost(pair: Pair) -> None:
    await pair.add()
    waits, runs = [await pair.home.submit({"cells": ["any"]}) for _ in range(2)]
    await pair.turns()
    await pair.cell.start((await pair.copies())[1]["id"])
    await pair.turns()
    drained = await pair.home.ask("PATCH", "/v1/cells/north", role="admin", json={"draining": True})
    assert (drained.json()["waiting"], drained.json()["running"]) == (1, 1)
    await pair.turns(3)
    assert (await pair.job(waits))["cell"] is None
    assert (await pair.home.ask("DELETE", "/v1/cells/north", role="admin")).status_code == 409
    assert (await pair.job(runs))["state"] == "running"
    assert (await pair.home.ask("DELETE", "/v1/cells/north?lost=true", role="admin")).status_code == 204
    job = await pair.job(runs)
    assert (job["state"], job["cell"], job["reason"]) == ("queued", None, "choosing_cell")
    await pair.turns()
    assert (await pair.home.database.fetchval("SELECT cell FROM jobs WHERE id = $1", runs)) is None


async def test_holds_go_to_the_cell_and_come_back(pair: Pair) -> None:
    await pair.add()
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns(2)
    for command, state in (("hold", "held"), ("release", "queued"), ("cancel", "cancelled")):
        await pair.home.ask("POST", f"/v1/jobs/{job_id}/{command}")
        await pair.turns(2)
        assert ((await pair.job(job_id))["state"], (await pair.copies())[0]["state"]) == (state, state)
    assert (await pair.job(job_id))["detail"] == "Cell north had it."


@pytest.mark.parametrize("settled", [True, False])
async def test_a_copy_whose_job_has_ended_is_cancelled_in_a_cell_that_was_restored(pair: Pair, settled: bool) -> None:
    """And what it used meanwhile is in this installation's report, up to the end."""
    await pair.add()
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns(2)
    await pair.cell.database.execute(USED, (await pair.copies())[0]["id"])
    await pair.cell.start((await pair.copies())[0]["id"])
    await pair.cell.end((await pair.copies())[0]["id"])
    if settled:
        await pair.cell.database.execute(f"UPDATE jobs SET ended_at = now() - interval '{SETTLES_S + 1} s'")
    await pair.turns(2)
    await pair.cell.database.execute("UPDATE jobs SET state = 'queued', ended_at = NULL, generation = 1000")
    await pair.turns(2)
    assert [each["state"] for each in await pair.copies()] == ["cancelled"]
    await pair.cell.database.execute(f"UPDATE jobs SET ended_at = now() - interval '{SETTLES_S + 1} s'")
    await pair.cell.database.execute("UPDATE job_footprints SET energy_j = 170")
    await pair.home.database.execute("UPDATE cell_jobs SET seen = seen - 'ended_at'")  # as a minute later
    await pair.turns(2)
    job = await pair.job(job_id)
    assert (job["state"], job["footprint"]["energy_j"]) == ("succeeded", 170)
    assert await pair.home.database.fetchval("SELECT state FROM cell_jobs") == "over"


async def withdrawn(pair: Pair) -> str:
    """Return a job that was in the cell until that offered worse than home."""
    await pair.add()
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns()
    pair.door.gco2_per_hour = 200.0
    await pair.turns(3)
    assert (await pair.job(job_id))["cell"] is None
    return job_id


async def test_a_copy_that_was_withdrawn_does_not_run_in_a_cell_that_was_restored(pair: Pair) -> None:
    job_id = await withdrawn(pair)
    await pair.cell.database.execute("UPDATE jobs SET state = 'queued', ended_at = NULL, cancel_requested = false")
    await pair.turns(2)
    assert [each["state"] for each in await pair.copies()] == ["cancelled"]
    assert (await pair.job(job_id))["state"] == "queued"


async def test_a_copy_of_a_job_that_is_not_known_is_told_and_left_alone(pair: Pair) -> None:
    await pair.add()
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns()
    await pair.home.database.execute("TRUNCATE jobs, cell_jobs CASCADE")
    await pair.turns()
    (cell,) = (await pair.home.ask("GET", "/v1/cells", role="operator")).json()["items"]
    assert job_id in cell["problem"]
    assert [each["state"] for each in await pair.copies()] == ["queued"]


async def test_a_job_that_its_cell_has_forgotten_can_be_cancelled(pair: Pair) -> None:
    await pair.add()
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns(2)
    await pair.cell.database.execute("TRUNCATE jobs CASCADE")
    await pair.turns(2)
    assert (await pair.job(job_id))["state"] == "queued"
    (cell,) = (await pair.home.ask("GET", "/v1/cells", role="operator")).json()["items"]
    assert job_id in cell["problem"]
    await pair.home.ask("POST", f"/v1/jobs/{job_id}/cancel")
    await pair.turns(2)
    job = await pair.job(job_id)
    assert (job["state"], job["detail"]) == ("cancelled", "Cell north does not know it any more.")


async def test_a_ledger_that_has_less_than_before_leaves_no_hour_with_less_than_nothing(pair: Pair) -> None:
    await pair.add()
    await pair.home.submit({"cells": ["any"]})
    await pair.turns()
    (copy,) = await pair.copies()
    await pair.cell.start(copy["id"])
    await pair.cell.database.execute(USED, copy["id"])
    lines = "SELECT energy_j, carbon_gco2 FROM cell_lines ORDER BY hour"
    await pair.turns(2)
    await pair.cell.database.execute("UPDATE job_footprints SET energy_j = 90")
    await pair.turns()
    assert [tuple(row) for row in await pair.home.database.fetch(lines)] == [(90, 5)]
    await pair.home.database.execute("UPDATE cell_energy SET hour = hour - interval '1 h'")
    for energy_j, since_j in ((20, 0), (130, 40)):
        await pair.cell.database.execute("UPDATE job_footprints SET energy_j = $1", energy_j)
        await pair.turns()
        assert [tuple(row) for row in await pair.home.database.fetch(lines)] == [(90, 5), (since_j, 0)]


async def test_what_cannot_be_kept_of_one_cell_keeps_no_other_from_its_turn(pair: Pair) -> None:
    await pair.add(name="a-mad-one")
    await pair.add(name="north")
    mad = await pair.home.submit({"cells": ["a-mad-one"]})
    await pair.turns()
    pair.door.garbles = mad
    sound = await pair.home.submit({"cells": ["north"]})
    await pair.turns(2)
    assert (await pair.job(sound))["cell"] == "north"
    cells = {each["name"]: each for each in (await pair.home.ask("GET", "/v1/cells", role="operator")).json()["items"]}
    assert "does not answer as an installation" in cells["a-mad-one"]["problem"]


async def test_a_job_that_cannot_be_read_keeps_no_other_of_its_cell_from_its_turn(pair: Pair) -> None:
    await pair.add()
    mad, sound = [await pair.home.submit({"cells": ["any"]}) for _ in range(2)]
    await pair.turns()
    pair.door.garbles = mad
    await pair.home.ask("POST", f"/v1/jobs/{sound}/cancel")
    await pair.turns(3)
    assert (await pair.job(sound))["state"] == "cancelled"
    assert (await pair.job(mad))["state"] == "queued"
    (cell,) = (await pair.home.ask("GET", "/v1/cells", role="operator")).json()["items"]
    assert cell["problem"].startswith(f"{mad}: ")
    pair.door.garbles = ""
    await pair.turns()
    (cell,) = (await pair.home.ask("GET", "/v1/cells", role="operator")).json()["items"]
    assert cell["problem"] is None


async def test_an_amount_that_no_report_can_add_up_is_not_kept() -> None:
    document = {"id": "j", "state": "running", "generation": 1, "footprint": {"energy_j": 1e308}}
    with pytest.raises(ValidationError, match="footprint"):
        RemoteJob.as_stored(document)


async def test_a_fault_of_a_cell_over_one_job_keeps_no_other_job_from_its_turn(pair: Pair) -> None:
    await pair.add()
    first, second = [await pair.home.submit({"cells": ["any"]}) for _ in range(2)]
    await pair.turns()
    query = "SELECT remote_id FROM cell_jobs WHERE job_id = $1"
    pair.door.fails_at = f"{await pair.home.database.fetchval(query, min(first, second))}/cancel"
    for job_id in (first, second):
        await pair.home.ask("POST", f"/v1/jobs/{job_id}/cancel")
    await pair.turns(3)
    assert (await pair.job(max(first, second)))["state"] == "cancelled"
    (cell,) = (await pair.home.ask("GET", "/v1/cells", role="operator")).json()["items"]
    assert cell["problem"] == f"{min(first, second)}: An internal error."
    pair.door.fails_at = ""
    await pair.turns(3)
    assert (await pair.job(min(first, second)))["state"] == "cancelled"


async def test_a_job_that_any_statement_fails_over_keeps_no_other_from_its_turn(pair: Pair) -> None:
    """A job is placed, followed and cancelled beside others; each statement that names it is refused in turn."""
    await pair.add()
    seen, bad, refused = dict[str, None](), "", ""

    def watch(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if bad and bad in repr(parameters):
            seen[statement] = None
            if statement == refused:
                raise DataError(statement, None, Exception("value out of range"))

    async def a_life() -> list[Any]:
        nonlocal bad
        mad, sound = [await pair.home.submit({"cells": ["any"]}) for _ in range(2)]
        bad = mad
        await pair.turns()
        cell = (await pair.job(sound))["cell"]
        for each in (mad, sound):
            await pair.home.ask("POST", f"/v1/jobs/{each}/cancel")
        await pair.turns(2)
        bad = ""
        return [cell, (await pair.job(sound))["state"]]

    event.listen(pair.engine.sync_engine, "before_cursor_execute", watch)
    well = await a_life()
    assert well == ["north", "cancelled"]
    assert len(seen) > 5
    failed = dict[str, Any]()
    for refused in [each for each in seen if "LIMIT" not in each]:  # pages begin behind an id that the table gave
        try:
            if (found := await a_life()) != well:
                failed[refused] = found
        except Exception as error:
            failed[refused] = error
    assert not failed


async def test_a_refusal_is_told_whatever_characters_it_has(pair: Pair) -> None:
    await pair.add()
    pair.door.refuses = "No such\0GPU."
    job_id = await pair.home.submit({"cells": ["north"]})
    await pair.turns(3)
    assert "No such\\x00GPU." in (await pair.job(job_id))["detail"]


async def test_a_job_that_a_cell_refused_is_not_offered_to_it_again_at_once(pair: Pair) -> None:
    await pair.add()
    pair.placing = pair.new_placing(300.0)
    pair.here = estimate(100.0, suits=False)
    pair.door.refuses = "The tenant may have no more jobs."
    job_id = await pair.home.submit({"cells": ["north"]})
    await pair.turns(5)
    sent = "SELECT count(*) FROM job_events WHERE job_id = $1 AND type = 'job.in_cell'"
    assert await pair.home.database.fetchval(sent, job_id) == 1
    pair.here = estimate(100.0)
    await pair.turns()
    assert (await pair.job(job_id))["cell"] is None, "home takes it"


@pytest.mark.parametrize("ids", [itertools.repeat("job_1"), map(str, itertools.count())], ids=["same", "ever new"])
async def test_a_cell_whose_pages_have_no_end_does_not_hold_up_the_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, ids: Iterator[str]
) -> None:
    monkeypatch.setattr(remote, "MOST_PAGES", 5)
    await pair.add()
    job_id = await pair.home.submit({"cells": ["north"]})
    await pair.turns(2)
    pair.door.repeats = ids.__next__
    pair.door.asked.clear()
    async with asyncio.timeout(20):
        await pair.turns()
    assert pair.door.asked["GET /v1/jobs"] <= 5
    assert (await pair.job(job_id))["cell"] == "north"


async def test_a_cell_that_has_too_many_requests_has_refused_nothing(pair: Pair) -> None:
    await pair.add()
    pair.door.is_too_fast = True
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns(3)
    assert (await pair.job(job_id))["reason"] == "in_cell"
    pair.door.is_too_fast = False
    await pair.turns(2)
    assert len(await pair.copies()) == 1


@pytest.mark.parametrize(("state", "cell"), [("queued", ""), ("running", ""), ("running", None)])
async def test_a_home_that_was_restored_takes_its_cells_word_for_what_it_has(
    pair: Pair, state: str, cell: str | None
) -> None:
    """What it knew of the copy is lost with the database, and home is cleaner by now: the job stays in the cell."""
    await pair.add()
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns()
    (copy,) = await pair.copies()
    if state == "running":
        await pair.cell.start(copy["id"])
    await pair.home.database.execute("TRUNCATE cell_jobs")
    await pair.home.database.execute("UPDATE jobs SET cell = $1, generation = 1000", cell)
    pair.here, pair.door.is_cut_off = estimate(0.5), True
    pair.placing = pair.new_placing()
    await pair.turns(2)
    job = await pair.job(job_id)
    assert (job["cell"], job["state"]) == (None, "queued"), "it is placed nowhere before the cell has answered"
    pair.door.is_cut_off = False
    await pair.turns(2)
    job = await pair.job(job_id)
    assert (job["cell"], job["state"]) == ("north", state)
    assert [each["state"] for each in await pair.copies()] == [state]
    await pair.cell.end(copy["id"])
    await pair.turns(2)
    assert (await pair.job(job_id))["state"] == "succeeded"


async def test_a_copy_that_was_withdrawn_before_home_was_restored_cancels_no_job(pair: Pair) -> None:
    job_id = await withdrawn(pair)
    await pair.home.database.execute("TRUNCATE cell_jobs")
    await pair.home.database.execute("UPDATE jobs SET cell = '', generation = 1000")
    pair.door.gco2_per_hour = 1.0
    await pair.turns(3)
    job = await pair.job(job_id)
    assert (job["cell"], job["state"]) == ("north", "queued")
    assert [each["state"] for each in await pair.copies()] == ["cancelled", "queued"]


async def test_a_restored_home_keeps_what_it_has_started_since_and_no_cell_may_take_what_is_not_for_it(
    pair: Pair,
) -> None:
    """What a cancelled copy used is in the report of home, up to a minute after its end."""
    await pair.add()
    runs, later = [await pair.home.submit({"cells": ["any"]}) for _ in range(2)]
    await pair.turns()
    await pair.home.database.execute("TRUNCATE cell_jobs")
    await pair.home.database.execute("UPDATE jobs SET cell = NULL")
    await pair.home.start(runs)
    await pair.home.database.execute('UPDATE jobs SET spec = spec || \'{"cells": ["south"]}\' WHERE id = $1', later)
    await pair.cell.database.execute(
        "UPDATE jobs SET spec = jsonb_set(spec, '{labels}', spec -> 'labels' || $2) WHERE id = $1",
        (await pair.copies())[1]["id"],
        json.dumps({COPY_LABEL: f"{later}.99"}),
    )
    await pair.cell.database.execute(USED, (await pair.copies())[0]["id"])
    await pair.turns(2)
    assert {(await pair.job(each))["cell"] for each in (runs, later)} == {None}
    assert [each["state"] for each in await pair.copies()] == ["cancelled", "queued"]
    for energy_j, ended_s, noted_j in (
        (170, SETTLES_S - 30, 170),
        (180, SETTLES_S + 1, 180),
        (190, SETTLES_S + 9, 180),
    ):
        await pair.cell.database.execute("UPDATE job_footprints SET energy_j = $1", energy_j)
        await pair.cell.database.execute(
            "UPDATE jobs SET ended_at = now() - make_interval(secs => $1) WHERE state = 'cancelled'", ended_s
        )
        await pair.turns(2)
        assert (await pair.job(runs))["footprint"]["energy_j"] == noted_j
    assert [tuple(row) for row in await pair.home.database.fetch("SELECT DISTINCT node_id FROM cell_lines")] == [
        ("cell:north",)
    ]


async def test_what_a_tenant_may_hold_spans_the_cells(pair: Pair) -> None:
    await pair.add()
    await pair.home.database.execute("UPDATE tenants SET limits = '{\"max_gpus\": 4}' WHERE id = 'default'")
    at_home = await pair.home.submit()
    await pair.home.start(at_home)  # with two GPUs
    wide = await pair.home.submit({"cells": ["any"], "gpus": {"min": 1, "max": 5}})
    jobs = [await pair.home.submit({"cells": ["any"]}) for _ in range(3)]
    await pair.turns(2)
    found = [await pair.job(each) for each in jobs]
    assert [each["cell"] for each in found[:2]] == ["north", "north"]
    assert (found[2]["reason"], "may hold at once" in found[2]["detail"]) == ("choosing_cell", True)
    assert (await pair.job(wide))["cell"] is None, "no cell would keep it to its tenant's limit"
    await pair.home.end(at_home)
    await pair.turns()
    assert (await pair.job(jobs[2]))["cell"] == "north"


async def test_a_cell_is_given_no_job_while_a_start_at_home_takes_the_last_gpus(pair: Pair) -> None:
    """A round's transaction has started a gang, and is not over when the job's place is chosen."""
    await pair.add()
    await pair.home.database.execute("UPDATE tenants SET limits = '{\"max_gpus\": 2}' WHERE id = 'default'")
    at_home, job_id = await pair.home.submit(), await pair.home.submit({"cells": ["any"]})
    waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    async with pair.home.database.transaction():
        await fixed_quotas(pair.home.database)
        await pair.home.start(at_home)
        turn = asyncio.create_task(pair.placing.turn())
        while not turn.done() and not await pair.home.database.fetchval(waits):
            await asyncio.wait([turn], timeout=0.01)
    await turn
    assert (await pair.job(job_id))["cell"] is None


async def test_cells_are_asked_once_about_equal_jobs_and_take_no_more_than_they_have_free(pair: Pair) -> None:
    """Home and the cell together have room for all of them, and none waits."""
    await pair.add()
    pair.door.free_gpus, pair.here = 16, estimate(100.0, free=1_000)
    jobs = [await pair.home.submit({"name": f"run-{at}", "cells": ["any"]}) for at in range(30)]
    await pair.turns()
    cells = [(await pair.job(each))["cell"] for each in jobs]
    assert cells == ["north"] * 16 + [None] * 14
    assert pair.door.asked["POST /v1/jobs:estimate"] < 10


async def test_jobs_that_nobody_takes_keep_no_other_from_its_turn(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "PLACED_AT_ONCE", 2)
    await pair.add()
    pair.door.is_cut_off, pair.here = True, estimate(100.0, suits=False)
    stuck = [await pair.home.submit({"name": "stuck", "cells": ["north"]}) for _ in range(3)]
    await pair.turns(2)
    pair.here = estimate(100.0)
    monkeypatch.setattr(pair.placing, "_here", pair.offer_to("later"))
    later = await pair.home.submit({"name": "later", "cells": ["any"]})
    await pair.turns(3)
    assert (await pair.job(later))["reason"] != "choosing_cell"
    assert {(await pair.job(job_id))["reason"] for job_id in stuck} == {"choosing_cell"}


async def test_a_slow_cell_holds_up_no_other_for_long(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "FOLLOWED_S", 0.0)
    await pair.add()
    job_id = await pair.home.submit({"cells": ["any"]})
    await pair.turns(1)
    (copy,) = await pair.copies()
    await pair.cell.start(copy["id"])
    await pair.turns(2)
    assert (await pair.job(job_id))["state"] == "queued"
    monkeypatch.setattr(placing, "FOLLOWED_S", 30.0)
    await pair.turns(1)
    assert (await pair.job(job_id))["state"] == "running"
