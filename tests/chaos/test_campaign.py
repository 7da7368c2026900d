"""The campaign itself: a short one against a whole installation, and that each of its parts would see or do harm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos import job as job_program
from tests.chaos.__main__ import summary
from tests.chaos.campaign import Outcome, campaign
from tests.chaos.checks import breaches_of
from tests.chaos.client import Accepted, User
from tests.chaos.faults import AWAY, SHARES, draw
from tests.chaos.links import Link
from tests.chaos.visitors import APP, POOL
from tests.chaos.watch import Watch
from tests.support.forked import forked_by_the_supervisor
from tests.support.servers import scratch_folder

TARGETS = dict.fromkeys(SHARES, ("one", "two"))


async def test_a_short_campaign_breaches_nothing() -> None:
    with scratch_folder() as folder, forked_by_the_supervisor():
        outcome = await campaign(folder, seed=5, minutes=0, storm_s=12)
    assert outcome.breaches == []
    assert outcome.jobs > 0
    assert len(outcome.faults) > 5, "of several kinds"
    assert outcome.requests.keys() == {POOL, APP}


def test_a_seed_draws_the_same_storm_again() -> None:
    storms = [draw(random.Random(seed), 60, 0.25, TARGETS) for seed in (1, 1, 2)]
    assert storms[0] == storms[1] != storms[2]
    assert {fault.kind for fault in storms[0]} == set(SHARES)
    assert all(0 <= fault.at_s < 60 for fault in storms[0])


def test_one_node_is_away_at_a_time_and_nobody_wakes_it() -> None:
    targets = TARGETS | dict.fromkeys(("kill", "freeze", "lose"), ("agent-one", "agent-two"))
    storm = draw(random.Random(3), 600, 0.25, targets)
    absences = [fault for fault in storm if fault.kind in AWAY and fault.at_s + fault.lasts_s < 600]
    assert {fault.kind for fault in absences} == set(AWAY)
    for absence in absences:
        agent = f"agent-{absence.target.removeprefix('agent-')}"
        meanwhile = [each for each in storm if 0 < each.at_s - absence.at_s < absence.lasts_s]
        assert len(meanwhile) > 10
        assert not [each for each in meanwhile if each.kind in AWAY or each.target == agent]


def test_what_cannot_be_had_here_is_not_drawn() -> None:
    storm = draw(random.Random(1), 60, 0.25, TARGETS | {"fill": ()})
    assert {fault.kind for fault in storm} == set(SHARES) - {"fill"}


async def test_a_link_cuts_stalls_and_loses_answers() -> None:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while line := await reader.readline():
                heard.append(line)
                writer.write(line.upper())

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, Link("127.0.0.1", server.sockets[0].getsockname()[1]) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        link.begin("stall")
        writer.write(b"one\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readline(), 0.2)
        assert heard == []
        link.end("stall")
        assert await reader.readline() == b"ONE\n"
        link.begin("unanswered")
        writer.write(b"two\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readline(), 0.2)
        assert heard == [b"one\n", b"two\n"], "it was done, and nobody was told"
        link.end("unanswered")
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            assert await reader.readline() == b"", "closed, if it is not reset"
        link.begin("cut")
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            assert await reader.read() == b"", "closed at once, if it is not reset"
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def run_job(checkpoints: Path, notes: Path, ticks: int, *, generation: int = 1) -> subprocess.Popen[bytes]:
    checkpoints.mkdir(exist_ok=True)
    environment = {
        "WATTSHIFT_CHECKPOINT_DIR": str(checkpoints),
        "WATTSHIFT_PROGRESS_FILE": f"{checkpoints.parent}/node-1",
        "WATTSHIFT_ALLOCATION_ID": f"job.{generation}",
        "NODE_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    command = [sys.executable, "-I", "-S", job_program.__file__, str(ticks), "0.01", "0", str(notes)]
    return subprocess.Popen(command, env=environment)


def test_a_job_notices_its_twin_and_a_device_that_is_taken(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    first = run_job(tmp_path / "checkpoints", notes, 10_000)
    try:
        while not (tmp_path / "checkpoints" / "ticks").exists():
            assert first.poll() is None
        second = run_job(tmp_path / "checkpoints", notes, 1, generation=2)
        assert second.wait(30) == 0
    finally:
        first.kill()
        first.wait()
    assert " job.2 on node-1 rank-0.lock" in (notes / "twin").read_text()
    assert len((notes / "device-held-twice").read_text().splitlines()) == 2


async def test_the_watch_sees_two_gangs_of_a_job_and_what_outlives_it(tmp_path: Path) -> None:
    notes, watch = tmp_path / "notes", Watch(Path(job_program.__file__))
    notes.mkdir()
    first = run_job(tmp_path / "one", notes, 10_000)
    try:
        while not watch.look():
            assert first.poll() is None
        assert watch.twins == {}
        assert [(each.node, each.devices) for each in watch.look()] == [("node-1", ((0, 7, 0), (1, 7, 0)))]
        assert await watch.left({"job", "another"}, within_s=0.5) == ["job"]
        second = run_job(tmp_path / "two", notes, 10_000, generation=2)
        try:
            while not watch.twins:
                assert second.poll() is None
                watch.look()
        finally:
            second.kill()
            second.wait()
        assert watch.twins == {"job": "job.1 and job.2"}
        assert watch.overcommitted.keys() == {"GPU 0 of node-1", "GPU 1 of node-1"}
    finally:
        first.kill()
        first.wait()
    assert await watch.left({"job"}) == []


def test_a_job_goes_on_where_it_was_and_ends_once(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "notes")
    for _ in range(2):
        assert run_job(tmp_path / "checkpoints", tmp_path / "notes", 5).wait(30) == 0
    assert (tmp_path / "checkpoints" / "ticks").read_bytes() == b"....."
    assert (tmp_path / "notes" / "ran-again").exists()


def an_installation(request: httpx.Request) -> httpx.Response:
    """Answer as an installation with three jobs, of which one has ended twice and one nobody submitted."""
    if request.url.path.endswith("/events"):
        ends = ["job.failed", "job.succeeded"] if "/b/" in request.url.path else ["job.succeeded"]
        lines = [f'data: {{"type": "{word}"}}' for word in ["job.submitted", *ends]]
        return httpx.Response(200, text="\n".join(lines))
    answers: dict[str, Any] = {
        "/v1/jobs": {"items": [{"name": f"s-{name}"} for name in "abcef"], "next_cursor": None},
        "/v1/invariants": {"invariants": [{"name": "one_gang_per_job", "holds": False, "detail": "two of b"}]},
        "/v1/reports/footprint": {"idle": {"gpu_energy_j": 10.0}, "lines": [], "metered_gpu_energy_j": 11.0},
    }
    return httpx.Response(200, json=answers[request.url.path])


async def test_whatever_does_not_hold_is_told(tmp_path: Path) -> None:
    for name, ticks in (("a", 3), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ticks").write_bytes(b"." * ticks)
        (tmp_path / name / "done").touch()
    (tmp_path / "twin").write_text("0 b.2 on node-1\n")
    async with httpx.AsyncClient(transport=httpx.MockTransport(an_installation), base_url="http://world") as http:
        user = User(http, random.Random(1), tmp_path, tmp_path, "s")
        user.jobs = [Accepted(name, f"s-{name}", 3, fails=name == "c") for name in ("a", "b", "c", "d")]
        user.jobs += [Accepted(name, f"s-{name}", 3, fails=False, max_restarts=1) for name in ("e", "f")]
        ended = {name: {"state": "succeeded", "detail": None} for name in ("a", "b", "c")}
        ended |= {name: {"state": "failed", "detail": "killed"} for name in ("e", "f")}
        found = await breaches_of(user, ended, tmp_path, tmp_path, {"e": {"e.1"}, "f": {"f.1", "f.2"}})
    assert found == [
        "s-d has not moved on: it is not over",
        "s-b counts as done, with 2 of 3 ticks",
        "s-b has the events ['job.submitted', 'job.failed', 'job.succeeded']",
        "s-c succeeded (None), expected failed",
        "s-e failed (killed), expected succeeded",
        "twin: 0 b.2 on node-1",
        "there are the jobs ['s-a', 's-b', 's-c', 's-e', 's-f'], accepted were "
        "['s-a', 's-b', 's-c', 's-d', 's-e', 's-f']",
        "one_gang_per_job: two of b",
        "the ledger has 10.0 J where the devices counted 11.0 J",
    ]


def test_the_last_line_has_faults_breaches_and_seed() -> None:
    outcome = Outcome(jobs=3, breaches=["one"])
    outcome.faults.update(kill=2, wipe=1)
    outcome.requests.update(chat=4, photos=1)
    assert summary(outcome, 7) == (
        "chaos: 3 faults (2 kill, 1 wipe) while 3 jobs ran and 5 requests were made, 1 breaches, seed 7"
    )
