"""A Slurm that hangs, fails, answers half or changes its mind: a stated problem, and no job lost or doubled."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import BaseModel

from services.contracts.engines import EngineAction, EngineDecision, EngineJob, EngineNode, EngineReply, EngineReport
from services.engines.slurm.bridge import Bridge
from services.engines.slurm.commands import Commands
from services.engines.slurm.settings import SlurmSettings

NOW_S = 4_000_000_000
JOB: dict[str, Any] = {
    **{"job_id": 7, "name": "train", "user_name": "ann", "partition": "batch", "job_state": "PENDING", "requeue": True},
    **{"batch_flag": True, "tres_per_node": "gres:gpu:h200:2", "node_count": 1, "submit_time": 1_000, "priority": 9},
    **{"eligible_time": 1_000, "time_limit": 60, "comment": "", "admin_comment": "", "gres_detail": [], "nodes": ""},
}
NODE = {"name": "gpu1", "gres": "gpu:h200:8", "state": "idle", "partitions": ["batch"]}


class Told:
    """A control plane that remembers what it was told."""

    def __init__(self) -> None:
        self.jobs: dict[str, EngineJob] = {}
        self.problems: list[str] = []
        self.present: list[str] = []
        self.decisions: list[EngineDecision] = []
        self.ended: list[str] = []
        self.over: list[str] = []
        self.stopped: list[str] = []
        self.nodes: list[EngineNode] = []

    async def call(self, what: str, body: BaseModel, answer: type[EngineReply], timeout_s: float) -> EngineReply:
        if not isinstance(body, EngineReport):
            return answer.model_construct()
        self.jobs |= {job.external_id: job for job in body.jobs}
        self.over += [job.external_id for job in body.jobs if job.state.is_over]
        self.nodes = self.nodes if body.nodes is None else list(body.nodes)
        self.present = self.present if body.present is None else list(body.present)
        self.problems += [body.problem] if body.problem else []
        live = [name for name, job in self.jobs.items() if not job.state.is_over]
        told = [job.external_id for job in body.jobs if not job.state.is_over]
        ended, stopped = [name for name in told if name in self.ended], [name for name in told if name in self.stopped]
        missing = [] if body.present is None else [name for name in live if name not in body.present]
        return EngineReply(
            unreported=missing, ended=ended, stopped=stopped, decisions=self.decisions if body.wants_decisions else []
        )


@pytest.fixture
def lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that says what Slurm's commands answer."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("squeue", "sinfo", "scontrol", "scancel", "sacct"):
        shutil.copy(Path(__file__).with_name("lying_slurm.py"), commands / name)
        (tmp_path / name).write_text("")
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    monkeypatch.setenv("LIES", str(tmp_path))
    (tmp_path / "calls").touch()
    (tmp_path / "sinfo").write_bytes(orjson.dumps({"nodes": [NODE]}))
    return tmp_path


def say(lies: Path, *jobs: dict[str, Any]) -> None:
    (lies / "squeue").write_bytes(orjson.dumps({"jobs": [JOB | job for job in jobs]}))


async def test_a_node_that_no_node_can_be_costs_no_other_its_report(lies: Path) -> None:
    """Types of GPUs are any text, and names of hosts may be long."""
    long = "gpu-node-of-the-east-0001.cluster.internal.example.org"
    nodes = [NODE, NODE | {"name": long, "gres": "gpu:a100+80:4,gpu:h100_80gb_hbm3:4"}]
    nodes.append(NODE | {"name": "gpu3", "gres": "gpu:h200:2000"})
    (lies / "sinfo").write_bytes(orjson.dumps({"nodes": nodes}))
    say(lies, {})
    told = Told()
    await a_bridge(told).look()
    names = [node.name for node in told.nodes]
    assert names == ["gpu1", long, names[2]]
    assert names[2].startswith(long[:54])
    assert list(told.jobs) == ["7@1000"]


def a_bridge(told: Told, **settings: Any) -> Bridge:
    options = {"mode": "control", "energy": False, "missing_after_s": 0, "nodes_interval_s": 0.001, **settings}
    return Bridge(SlurmSettings(**options), Commands(timeout_s=5), told)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("command", "answer", "says"),
    [
        ("squeue", "fail: Unable to contact slurm controller", "Unable to contact"),
        ("squeue", '{"jobs": [', "no JSON"),
        ("squeue", "{}", "has no jobs"),
        ("squeue", '{"jobs": [{"job_id": 1}]}', "cannot be read"),
        ("squeue", '{"jobs": [], "errors": [{"error": "half of it is missing"}]}', "half of it"),
        ("squeue", '{"jobs": "none"}', "has no jobs"),
        ("sinfo", "fail: no", "sinfo failed"),
        ("sinfo", '{"nodes": [{"gres": "gpu:1"}]}', "cannot be read"),
    ],
)
async def test_what_cannot_be_read_is_a_stated_problem_and_changes_nothing(
    lies: Path, command: str, answer: str, says: str
) -> None:
    told = Told()
    bridge = a_bridge(told)
    say(lies, {})
    await bridge.look()
    (lies / command).write_text(answer)
    (lies / "calls").write_text("")

    for _ in range(3):
        await bridge.look()

    assert says in told.problems[-1]
    assert list(told.jobs) == ["7@1000"]
    assert not told.jobs["7@1000"].state.is_over
    assert "scontrol" not in (lies / "calls").read_text()


RUNS = {"job_state": "RUNNING", "nodes": "gpu1", "gres_detail": ["gpu:h200:2(IDX:0-1)"], "start_time": 1_100}


@pytest.mark.parametrize(
    "row",
    [{"job_state": "OF_A_LATER_RELEASE"}, {"priority": {"set": True, "number": "NaN"}}, {"submit_time": -1}],
    ids=["state", "number", "time"],
)
async def test_a_job_that_cannot_be_read_is_as_it_was_and_others_go_on(
    lies: Path, row: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.kit.bridges.talk.PRESENT_EVERY_S", 0.0)
    told = Told()
    told.decisions = [EngineDecision(external_id="7@1000", revision=1, action=EngineAction.REQUEUE)]
    tagged = {"admin_comment": "wattshift:7@1000"}
    say(lies, RUNS | tagged)
    await a_bridge(told, mode="dry_run").look()
    known = told.jobs["7@1000"]
    (lies / "sinfo").write_bytes(orjson.dumps({"nodes": [NODE, {"name": "gpu2"}]}))
    bridge = a_bridge(told)  # one that was started again, and has never read it
    say(lies, RUNS | tagged | row, {"job_id": 8})
    for _ in range(2):
        await bridge.look()
    say(lies, RUNS | tagged, {"job_id": 8})
    bridge_of_now = a_bridge(told)
    await bridge_of_now.look()
    say(lies, RUNS | tagged | row, {"job_id": 8}, {"job_id": 9})
    (lies / "calls").write_text("")
    for _ in range(2):
        await bridge_of_now.look()

    assert told.problems == []
    assert told.jobs["7@1000"].shares == known.shares != []
    assert list(told.jobs) == ["7@1000", "8@1000", "9@1000"]
    assert told.over == []
    if "submit_time" not in row:
        assert "requeue" not in (lies / "calls").read_text(), "nothing is done to what cannot be read"
    assert "7@1000" in told.present
    said = [record.message for record in caplog.records]
    assert said.count("slurm.rows_unread") + said.count("slurm.job_unreportable") == 4, "once per bridge and kind"


async def test_a_node_that_cannot_be_read_keeps_its_lease_and_takes_no_work(lies: Path) -> None:
    told = Told()
    bridge = a_bridge(told)
    say(lies, {})
    await bridge.look()
    (lies / "sinfo").write_bytes(orjson.dumps({"nodes": [{"name": "gpu1"}, NODE | {"name": "gpu2"}]}))
    await bridge.look()

    assert {node.name: (node.gpus, bool(node.closed)) for node in told.nodes} == {"gpu1": (8, True), "gpu2": (8, False)}


@pytest.mark.parametrize("option", ["gpus=99999999-99999999", "flexible=\u00b2", "signal=USR1,grace=\u00b2"])
async def test_no_comment_of_a_user_stops_the_bridge(lies: Path, option: str) -> None:
    told = Told()
    told.decisions = [EngineDecision(external_id="7@1000", revision=1, action=EngineAction.REQUEUE)]
    say(lies, RUNS | {"comment": f"wattshift:{option}"}, {"job_id": 8})
    bridge = a_bridge(told)
    for _ in range(3):
        await bridge.look()
    assert (list(told.jobs), told.jobs["7@1000"].gpus) == (["7@1000", "8@1000"], 2)


async def test_a_command_that_hangs_is_killed_and_said(lies: Path) -> None:
    told = Told()
    (lies / "squeue").write_text("hang")
    bridge = Bridge(SlurmSettings(mode="control"), Commands(timeout_s=0.5), told)  # pyright: ignore[reportArgumentType, reportCallIssue]

    await bridge.look()

    assert told.problems == ["squeue did not end within 0.5 s"]


async def test_a_number_that_is_used_again_is_another_job(lies: Path) -> None:
    told = Told()
    bridge = a_bridge(told)
    say(lies, {"admin_comment": "wattshift:7@1000"})
    await bridge.look()
    say(lies, {"submit_time": 2_000, "user_name": "bob"})
    for _ in range(3):
        bridge._talk.ask_again()
        await bridge.look()

    assert told.jobs["7@1000"].state == "missing"
    assert told.jobs["7@2000"].user == "bob"


async def test_a_requeued_job_is_still_the_same(lies: Path) -> None:
    told = Told()
    bridge = a_bridge(told)
    for state, submit, restarts in (("RUNNING", 1_000, 0), ("COMPLETING", 1_000, 0), ("PENDING", 2_000, 1)):
        say(lies, {"job_state": state, "submit_time": submit, "restart_cnt": restarts, "nodes": "gpu1"})
        await bridge.look()
    assert list(told.jobs) == ["7@1000"]

    say(lies, {"submit_time": 3_000, "restart_cnt": 2, "admin_comment": "a note wattshift:7@1000"})
    await a_bridge(told).look()  # a new bridge knows it by its comment
    assert list(told.jobs) == ["7@1000"]


@pytest.mark.parametrize(
    ("settings", "cancelled"),
    [({}, 1), ({"mode": "dry_run"}, 0), ({"cancel_ended": False}, 0), ({"partitions": "x"}, 0)],
)
async def test_what_has_ended_and_waits_again_after_a_crash_is_cancelled_and_not_started(
    lies: Path, settings: dict[str, Any], cancelled: int
) -> None:
    told = Told()
    bridge = a_bridge(told, **settings)
    told.decisions = [EngineDecision(external_id="7@1000", revision=1, action=EngineAction.RELEASE)]
    say(lies, {"job_state": "COMPLETED", "admin_comment": "wattshift:7@1000", "eligible_time": NOW_S})
    await bridge.look()
    bridge.take(told.decisions)
    told.ended = ["7@1000"]
    held_s = int(time.time()) + 60
    say(lies, {"eligible_time": held_s, "admin_comment": f"wattshift:7@1000 wattshift-hold:{held_s}"})
    for _ in range(2):
        await bridge.look()

    calls = (lies / "calls").read_text()
    assert calls.count("scancel 7") == cancelled
    assert "starttime=now" not in calls

    say(lies, {"admin_comment": "wattshift:7@1000", "restart_cnt": 1})  # its user has requeued it
    told.ended = []
    await bridge.look()
    assert (lies / "calls").read_text().count("scancel") == cancelled


async def test_a_run_that_was_stopped_and_is_shown_as_running_is_stopped_again(lies: Path) -> None:
    told = Told()
    bridge = a_bridge(told)
    told.stopped = ["7@1000"]
    say(lies, {"job_state": "RUNNING", "start_time": 1_500, "nodes": "gpu1"})
    for _ in range(2):
        await bridge.look()

    calls = (lies / "calls").read_text()
    assert calls.count("requeue incomplete 7") == 1
    assert "scancel" not in calls


async def test_a_job_that_vanishes_ended_as_accounting_says_or_is_missing(lies: Path) -> None:
    told = Told()
    bridge = a_bridge(told)
    say(lies, {}, {"job_id": 8})
    await bridge.look()
    say(lies)
    (lies / "sacct").write_text("7|1000|COMPLETED|0:0\n7|900|FAILED|1:0\nnonsense\n")
    for _ in range(3):
        bridge._talk.ask_again()
        await bridge.look()

    assert told.jobs["7@1000"].state == "succeeded"
    assert told.jobs["8@1000"].state == "missing"


async def test_a_refusal_is_repeated_three_times_and_then_said(lies: Path) -> None:
    told = Told()
    bridge = a_bridge(told)
    say(lies, {"job_state": "RUNNING", "nodes": "gpu1", "gres_detail": ["gpu:h200:2(IDX:0-1)"]})
    await bridge.look()
    assert "update jobid=7 admincomment=wattshift:7@1000\n" in (lies / "calls").read_text()  # before it is requeued
    bridge.take([EngineDecision(external_id="7@1000", revision=4, action=EngineAction.REQUEUE)])
    _refuse(lies, "Requested operation is presently disabled for job 7")
    for _ in range(6):
        await bridge.look()

    assert (told.jobs["7@1000"].revision, told.jobs["7@1000"].state) == (4, "running")
    assert "presently disabled" in told.jobs["7@1000"].refused
    assert (lies / "calls").read_text().count("requeue incomplete 7") == 3


TWO_NODES = {
    "job_state": "RUNNING",
    "node_count": 2,
    "nodes": "gpu[1-2]",
    "gres_detail": ["gpu:h200:2(IDX:0-1)", "gpu:h200:2(IDX:4-5)"],
    "admin_comment": "wattshift:7@1000",
    "comment": "wattshift:shrink,gpus=2-4,signal=USR1,grace=0",
}


async def test_a_running_job_loses_nodes_in_place_after_its_signal(lies: Path) -> None:
    told = Told()
    bridge = a_bridge(told)
    say(lies, TWO_NODES)
    await bridge.look()
    assert told.jobs["7@1000"].shrinkable
    bridge.take([EngineDecision(external_id="7@1000", revision=3, action=EngineAction.SHRINK, gpus=2, grace_s=60)])
    assert [len((await bridge.look()).shrinks) for _ in range(2)] == [0, 1]
    calls = (lies / "calls").read_text()
    assert calls.index("scancel --signal=USR1 --batch 7") < calls.index("scontrol update jobid=7 numnodes=1")

    say(lies, TWO_NODES | {"node_count": 1, "nodes": "gpu1", "gres_detail": ["gpu:h200:2(IDX:0-1)"]})
    changes = await bridge.look()

    assert changes.size == 0
    job = told.jobs["7@1000"]
    assert (job.revision, job.shrinkable, job.refused) == (3, False, "")
    assert [(share.node, share.devices) for share in job.shares] == [("gpu1", [0, 1])]


async def test_a_shrink_that_slurm_refuses_is_said(lies: Path) -> None:
    told = Told()
    bridge = a_bridge(told)
    say(lies, TWO_NODES | {"comment": "wattshift:shrink,gpus=2-4"})
    await bridge.look()
    bridge.take([EngineDecision(external_id="7@1000", revision=3, action=EngineAction.SHRINK, gpus=2)])
    _refuse(lies, "Requested operation not supported on this system for job 7")
    for _ in range(5):
        await bridge.look()

    assert (told.jobs["7@1000"].revision, told.jobs["7@1000"].refused) == (
        3,
        "Requested operation not supported on this system",
    )
    assert (lies / "calls").read_text().count("numnodes=1") == 3


def _refuse(lies: Path, words: str) -> None:
    script = lies / "bin" / "scontrol"
    script.write_text(script.read_text() + f"\nsys.stderr.write({words!r})\n")


async def test_old_decisions_do_not_follow_newer_ones(lies: Path) -> None:
    told = Told()
    bridge = a_bridge(told)
    say(lies, {"eligible_time": NOW_S, "admin_comment": "wattshift:7@1000"})
    newer = EngineDecision(external_id="7@1000", revision=9, action=EngineAction.CANCEL)
    older = EngineDecision(external_id="7@1000", revision=8, action=EngineAction.RELEASE)

    bridge.take([newer, older])

    assert bridge._talk.decisions == {"7@1000": newer}


@pytest.mark.parametrize(("took_s", "rests_s"), [(0.7, 6.3), (100.0, 300.0)])
async def test_slurm_is_left_in_peace_for_nine_times_as_long_as_it_took(
    lies: Path, monkeypatch: pytest.MonkeyPatch, took_s: float, rests_s: float
) -> None:
    """Whatever is decided meanwhile."""
    bridge = a_bridge(Told())
    slept: list[float] = []

    async def sleep(for_s: float) -> None:
        slept.append(for_s)
        raise asyncio.CancelledError

    async def look() -> None:
        await bridge.look()
        assert 0 < bridge._talk.engine_s < 60, "it is measured"
        bridge._talk.engine_s = took_s
        bridge._talk.woken.set()

    say(lies, {})
    monkeypatch.setattr("services.kit.bridges.talk.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await bridge._talk.keep_looking(look)
    assert slept == [pytest.approx(rests_s)]
