"""``profile pool``: a server of a mode's own under ever more load, and what is written of it into the pool's file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from services.cli.jobs import following
from services.cli.main import app
from services.cli.serving import load_sweep, profile_pool
from services.cli.serving.load_sweep import keeps
from services.cli.serving.profiling import printed, program
from services.contracts.serving import PoolSpec
from tests.support.servers import ROOT

STAND_IN = [sys.executable, str(ROOT / "examples" / "pools" / "stand_in_server.py"), "--load-s", "0.2", "--model", "m"]
GPU_W = 150.0
PLAN = {
    "command": [*STAND_IN, "--ttft-ms", "20", "--tbt-ms", "5"],
    "model": "m",
    "classes": [{"partition": "all", "name": "any", "input_tokens": 50, "output_tokens": 20, "max_tbt_ms": None}],
    "levels": [1, 4],
    "seconds": 0.3,
    "warmup_s": 0.1,
    "ready_timeout_s": 60,
    "timeout_s": 60,
    "grace_s": 10,
    "health_path": "/health",
}


def a_pool(*modes: dict[str, Any], **terms: Any) -> dict[str, Any]:
    mode = {"name": "two", "gpu_model": "A100-SXM4-40GB", "gpus": 2, "command": PLAN["command"]}
    return {
        "models": ["m"],
        "places": [{"name": "here", "zone": "GB", "gpus": {"A100-SXM4-40GB": 4}}],
        "modes": [mode, *modes],
        "partitions": [{"name": "all", "classes": [{"name": "any", "profiles": [], **terms}]}],
    }


def sweep(**changes: Any) -> tuple[int, list[dict[str, Any]]]:
    """Run the program of a profiling job as a node does; return its exit status and what it printed."""
    argv = [sys.executable, "-I", "-c", program(load_sweep), json.dumps(PLAN | changes)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    return ended.returncode, printed(ended.stdout)


def test_more_requests_at_once_are_measured_until_a_limit_is_broken() -> None:
    code, found = sweep()
    ready, idle, one, four = found
    assert code == 0
    assert ready["ready_s"] > 0.2
    assert idle["end_s"] > idle["start_s"] > 0
    assert [one["at_once"], four["at_once"]] == [1, 4]
    for each in (one, four):
        # Little's law: however fast the machine is, so many were there at once.
        assert each["qps"] * each["latency_s"] == pytest.approx(each["at_once"], rel=0.4)
        assert each["requests"] == pytest.approx(each["qps"] * (each["end_s"] - each["start_s"]))
        assert each["ttft_ms"] >= 20
        assert each["tbt_ms"] >= 5
        assert 1e3 * each["latency_s"] >= 20 + 5 * (each["output_tokens"] - 1)
        assert each["input_tokens"] > 50 / 4
    limited = [{**PLAN["classes"][0], "max_tbt_ms": 1.0}]  # type: ignore[index]
    _, found = sweep(classes=limited)
    assert [each["at_once"] for each in found if "qps" in each] == [1], "the first one breaks it"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"command": ["false"]}, "the server ended with exit status 1 before it was ready"),
        ({"model": "other"}, "the server answers 404"),
    ],
)
def test_a_server_that_cannot_be_measured_says_why(changes: dict[str, Any], why: str) -> None:
    code, found = sweep(**changes)
    assert code == 1
    assert why in found[-1]["error"]


def test_a_measurement_keeps_the_limits_that_are_stated() -> None:
    measured = {"latency_s": 2.0, "ttft_ms": 100.0, "tbt_ms": 50.0}
    assert keeps(measured, {})
    assert keeps(measured, {"max_latency_s": 2.0, "max_ttft_ms": 100.0, "max_tbt_ms": None})
    for broken in ({"max_latency_s": 1.9}, {"max_ttft_ms": 99.0}, {"max_tbt_ms": 49.0}):
        assert not keeps(measured, broken)


class Cluster:
    """A node of two GPUs that draw ``GPU_W`` each; a job's program runs here."""

    def __init__(self) -> None:
        self.jobs: list[subprocess.Popen[str]] = []
        self.specs: list[Any] = []
        self.nodes: tuple[str, ...] = ("n", "n")
        self.cancelled: list[str] = []
        self.printed: dict[int, bytes] = {}

    def call(self, method: str, path: str, *, body: Any = None, **_: Any) -> Any:
        if path.endswith("/cancel"):
            self.cancelled.append(path)
            self.jobs[int(path.split("/")[3])].kill()
            self.jobs[int(path.split("/")[3])].communicate()
            return None
        assert (method, path) == ("POST", "/v1/jobs")
        self.specs.append(body)
        self.jobs.append(subprocess.Popen(body.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        return {"id": str(len(self.jobs) - 1)}

    def get(self, path: str) -> Any:
        if path == "/v1/nodes":
            now_s = time.time()
            of = {"read_at": datetime.fromtimestamp(now_s, UTC).isoformat(), "power_w": GPU_W}
            readings = [{"index": gpu, "energy_j": GPU_W * now_s, **of} for gpu in (0, 1)]
            return {"items": [{"id": "n", "readings": readings}]}
        job = self.jobs[int(path.rsplit("/", 1)[1])]
        state = {None: "running", 0: "succeeded"}.get(job.poll(), "failed")
        shares = [{"node_id": node, "devices": [gpu]} for gpu, node in enumerate(self.nodes)]
        return {"id": path, "state": state, "detail": None, "placement": shares}

    def text(self, path: str, *, offset: int, **_: Any) -> httpx.Response:
        """Return a piece of a job's output, which never comes all at once."""
        number = int(path.split("/")[3])
        if number not in self.printed:
            self.printed[number] = self.jobs[number].communicate()[0].encode()
        return httpx.Response(200, content=self.printed[number][offset : offset + 300])


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(profile_pool, "Gateway", lambda: made)
    monkeypatch.setattr(following, "POLL_S", 0.05)
    return made


def profiled(file: Path, document: dict[str, Any], *options: str) -> Any:
    file.write_text(json.dumps(document))
    usual = ("--seconds", "1", "--warmup", "0", "--levels", "1,2", "--python", sys.executable)
    return CliRunner().invoke(app, ["profile", "pool", str(file), *usual, *options], catch_exceptions=True)


def test_a_pools_file_gets_what_was_measured(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "pool.json"
    result = profiled(file, a_pool(max_tbt_ms=500))
    assert result.exit_code == 0, result.exception
    spec = PoolSpec.model_validate_json(file.read_text())
    (mode,), (terms,) = spec.modes, spec.partitions[0].classes
    (profile,) = terms.profiles
    assert (mode.idle_w, profile.power_w) == (pytest.approx(2 * GPU_W, rel=0.01),) * 2
    assert mode.start_s > 0
    assert profile.mode == "two"
    assert profile.max_qps > 1
    assert profile.tbt_ms is not None
    assert profile.tbt_ms >= 5
    (job,) = cluster.specs
    assert (job.gpus.min, job.gpus.max, job.gpus.model, job.preemptible) == (2, 2, "A100-SXM4-40GB", False)
    assert job.processes == "per_node", "one server, whatever its GPUs"


def test_a_class_that_no_load_can_keep_gets_a_rate_of_zero(cluster: Cluster, tmp_path: Path) -> None:
    file, out = tmp_path / "pool.json", tmp_path / "out.json"
    other = {"mode": "other", "max_qps": 3, "power_w": 9}
    others = {"name": "other", "gpu_model": "A100-SXM4-40GB", "gpus": 1, "image": "x"}
    before = a_pool(others, max_tbt_ms=1, profiles=[other, {"mode": "two", "max_qps": 7, "power_w": 1}])
    result = profiled(file, before, "--mode", "two", "--out", str(out))
    assert result.exit_code == 0, result.exception
    assert json.loads(file.read_text()) == before, "--out leaves the file as it was"
    kept, profile = json.loads(out.read_text())["partitions"][0]["classes"][0]["profiles"]
    assert kept == other, "what was not measured stays"
    assert (profile["mode"], profile["max_qps"]) == ("two", 0)
    assert profile["power_w"] == pytest.approx(2 * GPU_W, rel=0.01)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--mode", "three"), "has no mode three"),
        (("--levels", "1_0"), "--levels are numbers from 1 to 1024"),
        (("--lengths", "any=5_0,6"), "--lengths is CLASS=INPUT,OUTPUT in tokens"),
        (("--lengths", "SL=5,6"), "--lengths names class SL; classes are any"),
    ],
)
def test_what_cannot_be_measured_changes_nothing(
    cluster: Cluster, tmp_path: Path, options: tuple[str, ...], why: str
) -> None:
    file = tmp_path / "pool.json"
    result = profiled(file, a_pool(), *options)
    assert why in str(result.exception)
    assert json.loads(file.read_text()) == a_pool()
    assert cluster.specs == []


def test_a_job_that_fails_is_told_with_its_reason(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "pool.json"
    document = a_pool()
    document["modes"][0]["command"] = ["false"]
    result = profiled(file, document)
    assert "two: the server ended with exit status 1 before it was ready" in str(result.exception)
    assert json.loads(file.read_text()) == document


def test_an_instance_on_two_nodes_is_not_measured(cluster: Cluster, tmp_path: Path) -> None:
    cluster.nodes = ("n", "o")
    result = profiled(tmp_path / "pool.json", a_pool())
    assert "two: its job's GPUs are on several nodes" in str(result.exception)
    assert cluster.cancelled == ["/v1/jobs/0/cancel"]


def test_a_mode_without_a_command_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    other = {"name": "other", "gpu_model": "A100-SXM4-40GB", "gpus": 1, "image": "x"}
    result = profiled(tmp_path / "pool.json", a_pool(other), "--mode", "other")
    assert "mode other has no command to start a server with" in str(result.exception)
    assert cluster.specs == []


def test_lengths_of_classes_follow_the_thresholds() -> None:
    classes = [{"name": name, "profiles": []} for name in ("SS", "SL", "LS", "LL")]
    part = {"name": "a", "thresholds": {"input_tokens": 184, "output_tokens": 444}, "classes": classes}
    spec = PoolSpec.model_validate(a_pool() | {"partitions": [part]})
    found = profile_pool._classes(spec, ["LL=1000,900"])
    lengths = [(each["name"], each["input_tokens"], each["output_tokens"]) for each in found]
    assert lengths == [("SS", 92, 222), ("SL", 92, 888), ("LS", 368, 222), ("LL", 1_000, 900)]
