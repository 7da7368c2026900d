"""The bridge to Ray against a stand-in of its head, with ``wattshift.ray`` as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from aiohttp import web

from services.contracts.engines import EngineAction, EngineDecision, EngineJobState, EngineMode
from services.engines.ray import bridge as bridges
from services.engines.ray import steering
from services.engines.ray.bridge import Bridge
from services.engines.ray.entries import Entry, listening
from services.engines.ray.head import Head
from services.engines.ray.reading import RayNode, read_jobs, read_nodes
from services.engines.ray.settings import RaySettings
from services.engines.ray.steering import devices_of, told_of
from services.kit.problems import ProblemError
from tests.engines.plane import Plane
from tests.engines.ray_head import RayHead, a_node, listed
from tests.support.ports import Ports
from tests.support.servers import ROOT

STAND_IN = Path(__file__).with_name("stand_in_ray")
COUNTS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with open(sys.argv[1], "a") as file:
    print(os.environ["WATTSHIFT_GPUS"], os.environ["WATTSHIFT_RUN"], os.getpid(), file=file, flush=True)
while not pathlib.Path(sys.argv[1] + ".done").exists():
    time.sleep(0.02)
sys.exit(7)
"""


class Site:
    """Ray's head, the bridge, the control plane, and jobs of ``wattshift.ray``."""

    def __init__(self, head: RayHead, plane: Plane, url: str, folder: Path) -> None:
        self.head, self.plane, self.url, self.folder = head, plane, url, folder
        self.ports = Ports()
        self.address = f"127.0.0.1:{self.ports.take(29_267)}"
        self.entries: list[subprocess.Popen[bytes]] = []
        self._running: asyncio.Task[None] | None = None

    def start(self, **options: Any) -> None:
        """Start a bridge, in place of the one before."""
        given: dict[str, Any] = {"mode": EngineMode.CONTROL, "interval_s": 0.05, "nodes_interval_s": 0.05, **options}
        settings = RaySettings(
            address=self.url, listen_address=self.address, state_dir=self.folder, energy=False, **given
        )

        self._ending = asyncio.Event()

        async def run() -> None:
            async with Head.connected(settings) as head:
                bridge = Bridge(settings, head, self.plane)  # pyright: ignore[reportArgumentType]
                async with listening(self.address, bridge.told):
                    while not self._ending.is_set():
                        with contextlib.suppress(ProblemError):
                            await bridge._talk.look_once(bridge.look)
                        await asyncio.sleep(0.05)

        self._running = asyncio.create_task(run())

    async def kill(self) -> None:
        """End the bridge, between two looks: the client of a test must not leave a connection half open."""
        if self._running:
            self._ending.set()
            await self._running

    def submit(self, name: str, *words: str, command: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Have a job of the stand-in, and its entry point as a process."""
        self.head.submit(name)
        command = command or (sys.executable, "-c", COUNTS, str(self.folder / name))
        config = {"metadata": {"job_submission_id": name}}
        environment = {
            **os.environ,
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(config),
            "PYTHONPATH": f"{ROOT / 'clients' / 'python' / 'src'}:{STAND_IN}",
            "STAND_IN_RAY": str(self.folder),
            "WATTSHIFT_RAY_BRIDGE": f"http://{self.address}",
        }
        entry = subprocess.Popen([sys.executable, "-m", "wattshift.ray", *words, "--", *command], env=environment)
        self.entries.append(entry)
        return entry

    def runs(self, name: str) -> list[tuple[int, int]]:
        """Return the GPUs and the number of each run that has begun."""
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines]

    def groups(self) -> list[Any]:
        """Return the placement groups that there are."""
        return [json.loads(path.read_text())["bundles"] for path in sorted(self.folder.glob("*.group"))]

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Return once it is so."""
        async with asyncio.timeout(12):
            while not is_so():  # noqa: ASYNC110  files and other processes wake nobody
                await asyncio.sleep(0.02)

    async def until_state(self, name: str, state: str) -> Any:
        """Return the last report of a job once that says so."""
        await self.until(lambda: self.said(name) == state)
        return self.plane.last(name)

    def said(self, name: str) -> str | None:
        """Return the state that was last reported of a job."""
        found = [each.state.value for report in self.plane.reports for each in report.jobs if each.number == name]
        return found[-1] if found else None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points ask often, and jobs are looked for at once."""
    monkeypatch.setattr(steering, "_AGAIN_S", 0.05)
    monkeypatch.setattr(bridges, "FIRST_ASKS_S", 0.0)
    monkeypatch.setattr("services.kit.bridges.talk.PRESENT_EVERY_S", 0.0)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    head = RayHead()
    async with head.listening() as url:
        made = Site(head, Plane(), url, tmp_path)
        try:
            yield made
        finally:
            await made.kill()
            for entry in made.entries:
                entry.terminate()
                entry.wait(20)
            made.ports.release()


async def test_a_job_waits_runs_in_its_zone_stops_and_runs_at_another_size(site: Site) -> None:
    site.start()
    entry = site.submit("train", "--gpus", "1-4", "--stoppable", "--gpu-model", "A100")
    waiting = await site.until_state("train", "pending")
    assert (waiting.gpus, waiting.max_gpus, waiting.stoppable, waiting.user) == (1, 4, True, "ann")
    site.plane.decide("train", EngineAction.HOLD, note="waits:greener_hour")
    await asyncio.sleep(0.3)
    assert not site.runs("train")

    site.plane.decide("train", EngineAction.RELEASE, gpus=1, zone="SE")
    running = await site.until_state("train", "running")
    assert [(share.node, len(share.devices)) for share in running.shares] == [("gpu-1", 1)]
    assert site.groups() == [[{"GPU": 1.0, "CPU": 1.0, "zone:SE": 0.001}]]

    site.plane.decide("train", EngineAction.REQUEUE, grace_s=20)
    stopped = await site.until_state("train", "pending")
    assert (stopped.requeues, stopped.shares, site.groups()) == (1, [], [])
    site.plane.decide("train", EngineAction.RELEASE, gpus=9)  # more than it can use
    await site.until_state("train", "running")
    await site.until(lambda: site.runs("train") == [(1, 1), (4, 2)])
    assert "zone:SE" not in site.groups()[0][0]

    (site.folder / "train.done").touch()
    assert await asyncio.to_thread(entry.wait, 20) == 7, "the job's exit status is its command's"
    site.head.jobs["train"] |= {"status": "FAILED", "driver_exit_code": 7, "end_time": 1_795_000_000_000}
    over = await site.until_state("train", "failed")
    assert over.exit_code == 7


async def test_a_release_that_finds_no_room_is_taken_back(site: Site) -> None:
    (site.folder / "full").touch()
    site.start()
    site.submit("train")
    await site.until_state("train", "pending")
    site.plane.decide("train", EngineAction.RELEASE)
    await site.until(lambda: bool(site.groups()))
    site.plane.decide("train", EngineAction.HOLD)
    await site.until(lambda: not site.groups())
    assert not site.runs("train")
    (site.folder / "full").unlink()
    site.plane.decide("train", EngineAction.RELEASE)
    await site.until_state("train", "running")
    await site.until(lambda: site.runs("train") == [(1, 1)])


async def test_a_job_outlives_its_bridge_and_the_next_one_finds_it(site: Site) -> None:
    site.start()
    site.submit("train", "--gpus", "2")
    await site.until_state("train", "pending")
    site.plane.decide("train", EngineAction.RELEASE)
    before = await site.until_state("train", "running")
    await site.kill()
    site.plane.reports.clear()
    site.plane.wanted.clear()
    site.start()
    after = await site.until_state("train", "running")
    assert (after.external_id, after.started_at, after.shares) == (before.external_id, before.started_at, before.shares)
    assert site.runs("train") == [(2, 1)], "it runs once"


async def test_a_job_that_lives_is_not_over_because_its_entry_point_has_not_asked_yet(site: Site) -> None:
    site.start()
    site.submit("train")
    waiting = await site.until_state("train", "pending")
    await site.kill()
    site.entries[0].kill()  # and its Ray job is not over: it hangs
    said = len(site.plane.reports)
    site.start(missing_after_s=0)
    await site.until(lambda: len(site.plane.reports) > said + 10)
    assert all(not report.jobs for report in site.plane.reports[said:])
    site.head.jobs.clear()
    assert (await site.until_state(waiting.external_id, "missing")).external_id == waiting.external_id


async def test_without_a_bridge_a_job_starts_by_itself(site: Site) -> None:
    site.start(hold_s=1)
    site.submit("train", "--gpus", "2-4")
    await site.until_state("train", "pending")
    await site.kill()
    await site.until(lambda: site.runs("train") == [(2, 1)])


async def test_without_a_control_plane_every_job_starts(site: Site) -> None:
    site.start(silence_s=0.5)
    site.submit("train")
    await site.until_state("train", "pending")
    site.plane.silent = True
    await site.until(lambda: site.runs("train") == [(1, 1)])


async def test_a_dry_run_and_an_opt_out_start_at_once_and_are_only_watched(site: Site) -> None:
    site.start(mode=EngineMode.DRY_RUN)
    site.submit("watched", "--gpus", "1-2")
    assert (await site.until_state("watched", "running")).steered
    site.plane.decide("watched", EngineAction.CANCEL)
    said = len(site.plane.reports)
    await site.until(lambda: len(site.plane.reports) > said + 5)
    await site.kill()
    site.plane.decide("watched", EngineAction.HOLD)
    site.start()
    site.submit("left", "--steer", "off")
    left = await site.until_state("left", "running")
    assert (left.steered, left.why_not) == (False, "its user opted out")
    site.plane.decide("left", EngineAction.CANCEL)
    said = len(site.plane.reports)
    await site.until(lambda: len(site.plane.reports) > said + 5)
    assert (site.head.stopped, site.runs("left"), site.runs("watched")) == ([], [(1, 1)], [(1, 1)])


async def test_a_cancelled_job_is_stopped_by_ray(site: Site) -> None:
    site.start()
    site.submit("train")
    await site.until_state("train", "pending")
    site.plane.decide("train", EngineAction.CANCEL)
    await site.until_state("train", "cancelled")
    assert (site.head.stopped, site.runs("train")) == (["train"], [])


async def test_jobs_of_others_are_accounted_for_and_left_alone(site: Site) -> None:
    site.head.submit("theirs", entrypoint="python serve.py")
    site.head.submit("cpus", entrypoint="python etl.py")
    bundle = {"unit_resources": {"GPU": 1.0}, "node_id": "n2"}
    site.head.groups = [
        {"name": "", "state": "CREATED", "creator_job_id": "driver-theirs", "bundles": [bundle, bundle]},
        {"name": "", "state": "REMOVED", "creator_job_id": "driver-theirs", "bundles": [bundle]},
    ]
    actor = {"state": "ALIVE", "job_id": "driver-theirs", "node_id": "n1", "placement_group_id": None}
    site.head.actors = [actor | {"required_resources": {"GPU": 0.5}}, actor | {"required_resources": None}]
    site.start()
    theirs = await site.until_state("theirs", "running")
    assert not theirs.steered
    assert {share.node: share.devices for share in theirs.shares} == {"gpu-1": [0], "gpu-2": [0, 1]}
    assert site.said("cpus") is None, "it has no GPUs"
    site.head.groups, site.head.actors = [], []
    await site.until_state("theirs", "succeeded")


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/api/jobs/", lambda: web.Response(status=500, text="Traceback")),
        ("/api/jobs/", lambda: web.Response(text="<html>")),
        ("/api/jobs/", lambda: web.json_response({"jobs": []})),
        ("/api/jobs/", lambda: web.json_response([{"submission_id": "train"}])),
        ("/api/jobs/", lambda: web.json_response([RayHead().submit("train", "UNHEARD_OF")])),
        ("/api/jobs/", lambda: web.json_response([RayHead().submit("x", start_time=1)] * 2)),
        ("/api/v0/nodes", lambda: web.json_response(listed([], total=20_000))),
        ("/api/v0/nodes", lambda: web.json_response(listed([], partial_failure_warning="1 of 2 answered"))),
        ("/api/v0/nodes", lambda: web.json_response(listed([{"state": "ALIVE"}]))),
        ("/api/v0/actors", lambda: web.json_response({"result": False, "msg": "overloaded", "data": None})),
    ],
)
async def test_a_head_that_lies_loses_no_job(site: Site, path: str, answer: Callable[[], web.Response]) -> None:
    site.start(missing_after_s=0)
    site.submit("train")
    await site.until_state("train", "pending")
    site.plane.decide("train", EngineAction.RELEASE)
    await site.until_state("train", "running")
    site.head.wrong[path] = answer
    await site.until(lambda: site.plane.reports[-1].problem is not None)
    said = len(site.plane.reports)
    await site.until(lambda: len(site.plane.reports) > said + 3)
    site.head.wrong.clear()
    await site.until(lambda: site.plane.reports[-1].problem is None)
    assert site.said("train") == "running"
    assert site.runs("train") == [(1, 1)]


async def test_a_head_that_was_killed_and_forgot_its_jobs_has_lost_them(site: Site) -> None:
    site.start(missing_after_s=0.2)
    site.submit("train")
    first = await site.until_state("train", "pending")
    site.entries[0].kill()
    site.head.jobs.clear()
    assert (await site.until_state("train", "missing")).external_id == first.external_id
    site.submit("train")  # the name is free again, and this is another job
    second = await site.until_state("train", "pending")
    assert second.external_id != first.external_id


async def test_what_an_entry_point_may_not_say_is_refused(site: Site) -> None:
    site.start()
    good = {"state": "waits", "run": 0, "nodes": {}, "gpus": 1, "max_gpus": 1}
    await site.until(lambda: bool(site.plane.reports))
    async with httpx.AsyncClient(base_url=f"http://{site.address}") as client:
        for bad in (
            {"state": "flies"},
            {"gpus": 0},
            {"max_gpus": 0},
            {"gpus": 4},
            {"run": -1},
            {"deadline": "soon"},
            {"run": 2**31},
            {"state": "runs"},
        ):
            answer = await client.post("/v1/entries/x", json=good | bad)
            assert answer.status_code == 422, bad
        assert (await client.post("/v1/entries/x", content=b"{")).status_code == 422
        told = (await client.post("/v1/entries/x", json=good)).json()
    assert told["action"] == "hold", "Ray has no such job, and nothing is decided"


async def test_a_command_dies_with_its_entry_point(site: Site) -> None:
    site.start(mode=EngineMode.DRY_RUN)
    entry = site.submit("train")
    await site.until(lambda: bool(site.runs("train")))
    pid = int((site.folder / "train").read_text().split()[2])
    entry.send_signal(signal.SIGKILL)
    entry.wait()
    await site.until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def test_a_command_that_will_not_stop_is_killed_after_its_grace(site: Site) -> None:
    site.start()
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    site.submit("train", command=(sys.executable, "-c", stubborn))
    await site.until_state("train", "pending")
    site.plane.decide("train", EngineAction.RELEASE)
    await site.until_state("train", "running")
    await asyncio.sleep(0.3)  # until it is stubborn
    site.plane.decide("train", EngineAction.REQUEUE, grace_s=0.3)
    assert (await site.until_state("train", "pending")).requeues == 1


async def test_a_time_limit_ends_a_job_for_good(site: Site) -> None:
    site.start(mode=EngineMode.DRY_RUN)
    entry = site.submit("train", "--time-limit", "0.5", "--flexible", "60")
    assert (await site.until_state("train", "running")).deadline is not None
    assert await asyncio.to_thread(entry.wait, 20) == 124
    site.head.jobs["train"] |= {"status": "FAILED", "driver_exit_code": 124, "end_time": 1_795_000_000_000}
    await site.until_state("train", "timeout")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--gpus", "4-1", "--", "true"), "GPUs are N, LOW-HIGH or LOW-HIGH/STEP"),
        (("--gpus", "two", "--", "true"), "GPUs are N, LOW-HIGH or LOW-HIGH/STEP"),
        (("--gpus", "1-4/2", "--", "true"), "GPUs are N, LOW-HIGH or LOW-HIGH/STEP"),
        ((), "there is no command"),
        (("--flexible", "60", "--", "true"), "--flexible counts from a --time-limit"),
        (("--", "true"), "submit it by `ray job submit`"),
    ],
)
def test_a_bad_command_line_says_why(words: tuple[str, ...], problem: str) -> None:
    environment = {"PYTHONPATH": str(ROOT / "clients" / "python" / "src")}
    command = [sys.executable, "-m", "wattshift.ray", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert problem in done.stderr


def an_entry(state: str, **fields: Any) -> Entry:
    return Entry.model_validate({"state": state, "run": 1, "nodes": {}, "gpus": 1, "max_gpus": 4, **fields})


@pytest.mark.parametrize(
    ("action", "expected"),
    [("hold", "hold"), ("release", "run"), ("requeue", "stop"), ("cancel", "hold"), (None, "hold")],
)
def test_what_is_told_depends_on_the_decision_alone(action: str | None, expected: str) -> None:
    decision = EngineDecision(external_id="x", revision=1, action=EngineAction(action)) if action else None
    settings = RaySettings(mode=EngineMode.CONTROL)
    for state in ("waits", "starts", "runs", "stops"):
        told = told_of(an_entry(state), decision, settings, {"DE"}, 1, heard=True)
        assert told.action == expected
        for free in (
            told_of(an_entry(state), decision, settings, {"DE"}, 1, heard=False),
            told_of(an_entry(state, steer=False), decision, settings, {"DE"}, 1, heard=True),
            told_of(an_entry(state), decision, RaySettings(), {"DE"}, 1, heard=True),
        ):
            assert (free.action, free.gpus) == ("run", None)


def test_many_ask_seldom_and_a_zone_that_no_node_names_binds_nobody() -> None:
    settings = RaySettings(mode=EngineMode.CONTROL)
    decision = EngineDecision(external_id="x", revision=1, action=EngineAction.RELEASE, zone="SE")
    told = told_of(an_entry("waits"), decision, settings, {"DE"}, 5_000, heard=True)
    assert (told.zone, told.again_s) == (None, 25.0)


def test_a_job_keeps_its_devices_and_no_device_is_given_twice() -> None:
    nodes = [RayNode("n1", "a", 2, "", None), RayNode("n2", "b", 2, "", None)]
    first = devices_of({"x": {"n1": 1, "n2": 0.5}}, nodes, {})
    assert first == {"x": {"a": [0], "b": [0]}}
    then = devices_of({"w": {"n1": 1, "gone": 1}, "x": {"n1": 1, "n2": 0.5}, "y": {"n1": 1}}, nodes, first)
    assert then == {"x": {"a": [0], "b": [0]}, "w": {"a": [1]}}, "there is none left for y"
    assert devices_of({"w": {"n1": 1}}, nodes, then) == {"w": {"a": [1]}}
    assert devices_of({"v": {"n1": -1}, "w": {"n1": 1 << 70}}, nodes, {}) == {"w": {"a": [0, 1]}}


def test_a_zone_that_is_no_name_counts_as_none() -> None:
    nodes = read_nodes(listed([a_node("n1", "gpu-1", 4, "the far north"), a_node("n2", "gpu-2", 4, "SE")]))
    assert [node.zone for node in nodes] == [None, "SE"]


def test_half_of_a_character_in_a_name_stops_no_report() -> None:
    (job,) = read_jobs([RayHead().submit("\ud800" * 200)])
    assert job.external_id.encode()


def test_two_nodes_of_one_name_have_names_of_their_own() -> None:
    twins = [a_node("abc", "10.0.0.1", 2), a_node("def", "10.0.0.1", 2)]
    found = read_nodes(listed([*twins, a_node("d", "dead", 8, state="DEAD"), a_node("c", "cpu", 0)]))
    assert [node.name for node in found] == ["10.0.0.1-abc", "10.0.0.1-def"]


def test_states_of_ray_are_states_of_engines() -> None:
    names = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED")
    found = read_jobs([RayHead().submit(name, name, start_time=5) for name in names])
    wanted = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")
    assert [job.state for job in found] == [EngineJobState[name] for name in wanted]
