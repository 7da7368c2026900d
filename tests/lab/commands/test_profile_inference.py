"""Measuring variants on slices: the program that times them, the file, and what happens to the GPU."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lab.bundles import path_of
from lab.commands import closed_loop, profile_inference
from lab.commands.profile_inference import Bench, Settings
from lab.commands.slice_profiles import COLUMNS, ProfileFile, Row, read_family, row_of, slice_sizes
from lab.inference.profiles import read_application
from services.cli.commands import CliError
from services.cli.serving.own_server import GaveUp, free_port
from services.cli.serving.profiling import Reading, mean_power_w, program
from services.core.domain.mig import placed, slice_index

SERVER = """
import os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(200 if self.path == "/ready" else 503)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.answer(200 if body == b'{"x": 1}' and self.path == "/infer" else 400)

    def answer(self, status):
        self.wfile.write(b"HTTP/1.1 %d OK\\r\\ncontent-length: 2\\r\\n\\r\\nok" % status)

    def log_message(self, *_):
        pass

print("on its standard output")
HTTPServer(("127.0.0.1", int(os.environ["WATTSHIFT_PORT"])), Handler).serve_forever()
"""
FAMILY = {
    "family": "images",
    "variants": [{"name": "small", "command": ["serve"]}, {"name": "large", "command": ["serve", "large"]}],
}
GPU = "simulated A100-SXM4-40GB"
ROW = Row(GPU, "images", "small", 14, "1", 100, 10.0, 9.0, 12.0, 100.0, 80.0, 0.8, 1410)


def run_loop(command: list[str], **changes: Any) -> tuple[int, dict[str, Any]]:
    """Run the program of a profiling job as a node does; return its exit status and what it printed."""
    request = {"method": "POST", "path": "/infer", "body": '{"x": 1}', "content_type": "text/x", "timeout_s": 20}
    plan = {
        "command": command,
        "health_path": "/ready",
        "request": request,
        "ready_timeout_s": 60,
        "warmup_s": 0,
        "seconds": 0.3,
        "grace_s": 20,
        **changes,
    }
    text = program(closed_loop)
    argv = [sys.executable, "-I", "-c", text, json.dumps(plan)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    return ended.returncode, json.loads(ended.stdout)


def test_a_server_is_asked_one_request_after_another() -> None:
    code, found = run_loop([sys.executable, "-c", SERVER])
    assert code == 0
    assert found["requests"] > 1
    assert 0 < found["p50_ms"] <= found["p95_ms"]
    assert found["end_s"] - found["start_s"] >= 0.3
    elapsed_ms = 1_000 * (found["end_s"] - found["start_s"])
    assert found["mean_ms"] * found["requests"] == pytest.approx(elapsed_ms, rel=0.01), "one after another"


@pytest.mark.parametrize(
    ("command", "changes", "why"),
    [
        (["false"], {}, "the server ended with exit status 1 before it was ready"),
        ([sys.executable, "-c", SERVER], {"health_path": "/no", "ready_timeout_s": 1}, "/no answers 503"),
        (["sleep", "60"], {"ready_timeout_s": 0.3}, "the server is not ready after 0.3 s: [Errno 111]"),
        (["no-such-program"], {}, "No such file or directory: 'no-such-program'"),
        (
            [sys.executable, "-c", SERVER],
            {"request": {"method": "POST", "path": "/infer", "body": "?", "content_type": "text/x", "timeout_s": 20}},
            "request 1 was answered with 400",
        ),
    ],
)
def test_a_server_that_cannot_be_measured_says_why(command: list[str], changes: dict[str, Any], why: str) -> None:
    code, found = run_loop(command, **changes)
    assert code == 1
    assert why in found["error"]


def test_instances_that_are_measured_together_begin_at_one_moment() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as executor, socket.socket() as stranger:
        begins = [executor.submit(closed_loop.meet, port, "token", 0, 3, 30.0)]
        while stranger.connect_ex(("127.0.0.1", port)):
            assert not begins[0].done()
        stranger.sendall(b"nobody")
        begins += [executor.submit(closed_loop.meet, port, "token", rank, 3, 30.0) for rank in (2, 1)]
    assert len({each.result() for each in begins}) == 1
    assert begins[0].result() > 0


def test_instances_do_not_wait_for_ever() -> None:
    port = free_port()
    with pytest.raises(GaveUp, match="only 1 of 2 instances were ready in time"):
        closed_loop.meet(port, "token", 0, 2, 0.05)
    with pytest.raises(GaveUp, match="the other instances were not ready in time"):
        closed_loop.meet(port, "token", 1, 2, 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(GaveUp, match=f"cannot meet at port {port}"):
            closed_loop.meet(port, "token", 0, 2, 5)


def test_each_of_several_instances_is_measured() -> None:
    together = {"port": free_port(), "token": "t", "instances": 2}
    with ThreadPoolExecutor(2) as executor:
        runs = [
            executor.submit(run_loop, [sys.executable, "-c", SERVER], together={**together, "rank": rank})
            for rank in (1, 0)
        ]
    for code, found in (each.result() for each in runs):
        assert code == 0
        assert found["requests"] > 1


def test_percentiles_lie_between_their_neighbours() -> None:
    assert closed_loop.percentile([1.0], 0.95) == 1.0
    assert closed_loop.percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert closed_loop.percentile([0.0, 10.0], 0.95) == 9.5


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"family": "x"}, "variants"),
        ({**FAMILY, "variants": []}, "variants"),
        ({**FAMILY, "variants": FAMILY["variants"] * 2}, "variant small is there twice"),
        ({**FAMILY, "variants": [{"name": "a b", "command": ["x"]}]}, "variants[0].name"),
        ({**FAMILY, "variants": [{"name": "a", "command": []}]}, "variants[0].command"),
        ({**FAMILY, "request": {"path": "infer"}}, "request.path"),
        ({**FAMILY, "request": {"timeout_s": float("nan")}}, "request.timeout_s: must be a finite number"),
    ],
)
def test_a_wrong_family_is_one_line_that_names_the_field(tmp_path: Path, document: dict[str, Any], why: str) -> None:
    (tmp_path / "family.json").write_text(json.dumps(document))
    with pytest.raises(CliError, match=r"family\.json: ") as refused:
        read_family(tmp_path / "family.json")
    assert why in str(refused.value)


def test_sizes_are_read_by_name() -> None:
    assert slice_sizes("7g, 1g,2g,1g") == [1, 2, 7]
    with pytest.raises(CliError, match="--slices: there is no slice '5g'"):
        slice_sizes("1g,5g")


def test_power_is_that_of_the_counter_while_requests_ran() -> None:
    readings = [Reading(at_s, 999.0, 200.0 * at_s, 1_000 + int(at_s)) for at_s in (0.0, 1.0, 2.0, 3.0, 4.0)]
    measured = {"start_s": 0.5, "end_s": 3.5, "requests": 300, "mean_ms": 10.0, "p50_ms": 9.0, "p95_ms": 12.0}
    row = row_of(GPU, "images", "small", 1, measured, readings)
    assert row == replace(ROW, requests=300, gpu_power_w=200.0, gpu_energy_j_per_own_request=2.0, sm_mhz=1_002)
    without = [replace(each, energy_j=None) for each in readings]
    assert mean_power_w(without, GPU) == 999.0
    for shown_j in (0.0, 9e6):  # a counter that starts anew for one reading, or leaps
        wrong = [
            replace(each, power_w=200.0, energy_j=shown_j if each.at_s == 2 else each.energy_j) for each in readings
        ]
        assert mean_power_w(wrong, GPU) == mean_power_w(wrong, "a board nobody knows") == 200.0
    with pytest.raises(CliError, match="read the GPU 1 times while it was measured; measure for longer with --seconds"):
        row_of(GPU, "images", "small", 1, {**measured, "end_s": 1.5}, readings)


def test_the_columns_are_those_of_the_bundled_profile() -> None:
    assert path_of("inference_slices.csv").read_text().splitlines()[0].split(",") == COLUMNS


def test_a_file_goes_on_where_a_killed_run_left_it(tmp_path: Path) -> None:
    path = tmp_path / "slices.csv"
    ProfileFile(path, GPU).add([ROW])
    with path.open("a") as file:
        file.write(f"{GPU},images,large,14,1,3")
    again = ProfileFile(path, GPU)
    assert (again.has("images", "small", [1]), again.has("images", "large", [1])) == (True, False)
    again.add([replace(ROW, variant="large")])
    assert path.read_text().count("\n") == 3
    with pytest.raises(CliError, match="is of simulated A100-SXM4-40GB, not of NVIDIA H200"):
        ProfileFile(path, "NVIDIA H200")
    path.write_text("a,b\n1,2\n")
    with pytest.raises(CliError, match="has other columns"):
        ProfileFile(path, GPU)


class Cluster:
    """A gateway in front of a cluster that is made up: one node, two GPUs, and jobs that end at once."""

    def __init__(self) -> None:
        self.cuts: list[list[int]] = []
        self.sizes: list[int] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.cancelled: list[str] = []
        self.fails: Callable[[dict[str, Any]], str | None] = lambda _: None
        self.place: list[dict[str, Any]] | None = None
        self.wanted: list[int] | None = None
        self.uncut: list[list[int]] = []
        self.state = "applied"
        self.now_s = 1_000.0

    def call(self, method: str, path: str, *, body: Any = None, key: str | None = None) -> Any:
        if path == "/v1/nodes/n1/gpus/0/partition":
            self.cuts.append(body["sizes"])
            self.wanted = list(body["sizes"])
            self.state = "failed" if self.wanted in self.uncut else "applied"
            if self.state == "applied":
                self.sizes = list(body["sizes"])
            return {}
        if path == "/v1/jobs":
            job = f"job_{len(self.jobs)}"
            spec = body.model_dump(mode="json")
            index = slice_index(0, 0) if spec["gpus"]["slice"] else 0
            place = self.place or [{"node_id": "n1", "devices": [index]}]
            self.jobs[job] = {
                "id": job,
                "state": "running",
                "spec": spec,
                "placement": place,
                "detail": None,
                "polls": 0,
            }
            return {"id": job}
        if path.endswith("/cancel"):
            self.cancelled.append(path.split("/")[3])
            self.jobs[self.cancelled[-1]]["state"] = "cancelled"
            return {}
        raise AssertionError((method, path))

    def get(self, path: str) -> Any:
        if path == "/v1/nodes":
            return {"items": [self._node()]}
        job = self.jobs[path.split("/")[3]]
        job["polls"] += 1
        self.now_s += 1
        if job["polls"] > 4 and job["state"] == "running":
            job["state"] = "failed" if self.fails(job) else "succeeded"
        return job

    def text(self, path: str, stream: str) -> Any:
        job = self.jobs[path.split("/")[3]]
        spec = job.get("spec", {"command": ["{}"]})
        instances = json.loads(spec["command"][-1]).get("together", {"instances": 1})["instances"]
        found = {"start_s": self.now_s - 3 * instances, "end_s": self.now_s, "requests": 60}
        found |= {"mean_ms": 5.0, "p50_ms": 5.0, "p95_ms": 6.0} if not self.fails(job) else {}
        printed = {"error": self.fails(job)} if self.fails(job) else found
        return type("Answer", (), {"text": json.dumps(printed) + "\n"})

    def _node(self) -> dict[str, Any]:
        gpus: list[dict[str, Any]] = [
            {"index": index, "model": "A100-SXM4-40GB", "sevenths": 7, "can_partition": index == 0} for index in (0, 1)
        ]
        slices = [
            {"index": slice_index(0, place.start), "parent": 0, "sevenths": place.sevenths}
            for place in placed(self.sizes)
        ]
        read_at = datetime.fromtimestamp(self.now_s, UTC).isoformat()
        readings = [
            {"index": gpu, "power_w": 70.0, "energy_j": watts * self.now_s, "clock_mhz": 1_410, "read_at": read_at}
            for gpu, watts in ((0, 80), (1, 160))
        ]
        row = {"gpu": 0, "state": self.state, "sizes": self.wanted, "detail": "In use by another client"}
        wanted = [] if self.wanted is None else [row]
        return {"id": "n1", "driver": "simulated", "devices": gpus + slices, "readings": readings, "partitions": wanted}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    """The cluster, behind the command's gateway."""
    made = Cluster()
    monkeypatch.setattr(profile_inference, "Gateway", lambda: made)
    monkeypatch.setattr(profile_inference, "POLL_S", 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "family.json").write_text(json.dumps(FAMILY))
    return made


def measure(gpu: int = 0, slices: str = "1g,2g,7g", **options: Any) -> None:
    values: dict[str, Any] = {"seconds": 3.0, "warmup": 1.0, "ready_timeout": 60.0, "python": "python3", "mps": False}
    values |= {"shared": False, "mixes": "1g+1g", "out": Path("slices.csv"), "as_json": True, **options}
    profile_inference.inference(Path("family.json"), "n1", gpu, slices=slices, **values)


def lines() -> list[str]:
    return Path("slices.csv").read_text().splitlines()[1:]


def test_each_variant_is_measured_on_each_size_and_the_gpu_ends_as_it_was(cluster: Cluster) -> None:
    cluster.sizes = [4, 3]
    measure()
    assert cluster.cuts == [[1], [2], [], [4, 3]]
    assert [line.split(",")[2:5] for line in lines()] == [
        [variant, percent, "1"] for percent in ("14", "28", "100") for variant in ("small", "large")
    ]
    assert lines()[0] == f"{GPU},images,small,14,1,60,5.0,5.0,6.0,20.0,80.0,4.0,1410"
    specs = [job["spec"] for job in cluster.jobs.values()]
    assert [(spec["gpus"]["slice"], spec["environment"]["WATTSHIFT_SLICE"]) for spec in specs[::2]] == [
        ("1g", "1g"),
        ("2g", "2g"),
        (None, "7g"),
    ]
    assert {spec["gpus"]["model"] for spec in specs} == {"A100-SXM4-40GB"}
    assert not Path("slices.csv.state").exists()


def test_the_simulator_reads_what_was_measured(cluster: Cluster) -> None:
    measure(slices="1g,7g")
    Path("accuracy.json").write_text('{"small": 70, "large": 80}')
    application = read_application("images", Path("slices.csv"), None, Path("accuracy.json"))
    assert application.variants == ("small", "large")
    assert application.service_s[0, 0] == 0.005
    assert application.busy_w[0, 0] == 80 - 55


def test_a_variant_that_fails_leaves_the_rest_for_the_next_run(cluster: Cluster) -> None:
    cluster.fails = lambda job: "out of memory" if "large" in job["spec"]["name"] else None
    with pytest.raises(CliError, match=r"large on 1g: out of memory; `wattshift logs job_1` has its output"):
        measure()
    assert (len(lines()), cluster.cuts) == (1, [[1], []])
    cluster.fails = lambda _: None
    measure()
    assert len(lines()) == 6
    assert len(cluster.jobs) == 2 + 5, "what was measured is not measured again"


def test_a_run_that_was_killed_ends_its_job_and_knows_how_the_gpu_was_cut(cluster: Cluster) -> None:
    cluster.sizes = [3, 3]
    settings = Settings(3.0, 1.0, 60.0, "python3", mps=False)
    killed = Bench(cluster, "n1", 0, settings, quiet=True)  # pyright: ignore[reportArgumentType]
    killed.begin(Path("slices.csv.state"))
    killed.cut([1])
    cluster.jobs["job_0"] = {"state": "running", "polls": 0}
    Path("slices.csv.state").write_text(json.dumps({"node": "n1", "gpu": 0, "before": [3, 3], "job": "job_0"}))
    measure(slices="1g")
    assert cluster.cancelled == ["job_0"]
    assert cluster.cuts == [[1], [3, 3]]
    assert not Path("slices.csv.state").exists()
    Path("slices.csv.state").write_text(json.dumps({"node": "n2", "gpu": 5, "before": [], "job": ""}))
    with pytest.raises(CliError, match=r"says that GPU 5 of n2 was left cut by a run that was killed"):
        measure()


def test_a_job_that_lands_elsewhere_is_not_measured(cluster: Cluster) -> None:
    cluster.place = [{"node_id": "n2", "devices": [slice_index(3, 4)]}]
    with pytest.raises(CliError, match="small on 1g: the job was placed on a slice of GPU 3 of n2; drain that node"):
        measure()
    assert cluster.cancelled == ["job_0"]
    assert cluster.sizes == []


def test_a_whole_gpu_may_be_any_of_its_model(cluster: Cluster) -> None:
    cluster.place = [{"node_id": "n1", "devices": [1]}]
    measure(slices="7g")
    assert lines()[0].endswith(",160.0,8.0,1410"), "the power of the GPU that it ran on"


def test_through_mps_nothing_is_cut(cluster: Cluster) -> None:
    measure(gpu=0, mps=True, slices="2g")
    assert cluster.cuts == []
    (spec, *_) = [job["spec"] for job in cluster.jobs.values()]
    assert (spec["gpus"]["slice"], spec["environment"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == (None, "28")


def test_instances_are_measured_at_once_on_slices_of_one_gpu(cluster: Cluster) -> None:
    measure(shared=True, mixes="1g+2g+4g,3g+3g")
    assert cluster.cuts == [[4, 2, 1], [3, 3], []]
    assert [line.split(",")[2:5] for line in lines()] == [
        [variant, percent, mix]
        for mix, sizes in (("57+28+14", ("57", "28", "14")), ("43+43", ("43", "43")))
        for variant in ("small", "large")
        for percent in sizes
    ]
    plans = [json.loads(job["spec"]["command"][-1])["together"] for job in cluster.jobs.values()]
    assert [(plan["rank"], plan["instances"]) for plan in plans[:3]] == [(0, 3), (1, 3), (2, 3)]
    assert len({(plan["port"], plan["token"]) for plan in plans}) == 4, "each mix meets at a place of its own"
    assert [job["spec"]["gpus"]["slice"] for job in cluster.jobs.values()][:3] == ["4g", "2g", "1g"]
    measure(shared=True, mixes="3g+3g,4g+2g+1g")
    assert len(cluster.jobs) == 10, "what was measured is not measured again"
    measure(slices="1g,2g,4g,7g", out=Path("alone.csv"))
    Path("accuracy.json").write_text('{"small": 70, "large": 80}')
    application = read_application("images", Path("alone.csv"), Path("slices.csv"), Path("accuracy.json"))
    assert application.busy_w[0, 0] == pytest.approx((80 - 55) / 7), "the GPU's power above idle, split by size"


def test_a_mix_that_was_written_in_part_is_measured_again(cluster: Cluster) -> None:
    measure(shared=True, mixes="4g+2g+1g")
    kept = Path("slices.csv").read_text().splitlines(keepends=True)
    Path("slices.csv").write_text("".join(kept[:6]))
    measure(shared=True, mixes="4g+2g+1g")
    assert len(cluster.jobs) == 9
    assert [line.split(",")[2:4] for line in lines()] == [
        [v, p] for v in ("small", "large") for p in ("57", "28", "14")
    ]


def test_an_instance_that_fails_ends_its_neighbours(cluster: Cluster) -> None:
    cluster.fails = lambda job: "out of memory" if job["spec"]["name"].endswith("2g") else None
    with pytest.raises(CliError, match=r"small on 4g\+2g\+1g: out of memory; `wattshift logs job_1`"):
        measure(shared=True, mixes="4g+2g+1g")
    assert set(cluster.cancelled) == {"job_0", "job_1", "job_2"}
    assert (lines(), cluster.sizes) == ([], [])


def test_a_run_that_was_killed_ends_all_its_jobs(cluster: Cluster) -> None:
    for job in ("job_0", "job_1"):
        cluster.jobs[job] = {"state": "running", "polls": 0}
    left = {"node": "n1", "gpu": 0, "before": [], "jobs": ["job_0", "job_1"]}
    Path("slices.csv.state").write_text(json.dumps(left))
    measure(shared=True, mixes="1g+1g")
    assert cluster.cancelled == ["job_0", "job_1"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mixes": "4g+4g"}, "--mixes: slices of 4g, 4g do not fit on one GPU together"),
        ({"mixes": "1g+9g"}, "--mixes: there is no slice '9g'"),
        ({"mixes": "1g+1g,7g"}, "--mixes: 7g is one slice alone, which --slices measures"),
        ({"mps": True}, "--shared needs slices of their own for instances: it does not go with --mps"),
    ],
)
def test_a_mix_that_cannot_be_measured_is_one_line(cluster: Cluster, options: dict[str, Any], why: str) -> None:
    with pytest.raises(CliError, match=re.escape(why)):
        measure(shared=True, **options)
    assert cluster.cuts == []
    assert not Path("slices.csv").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gpu": 7}, "node n1 has no GPU 7"),
        ({"gpu": 1}, "GPU 1 of n1 cannot be cut into slices; measure the whole GPU with --slices 7g"),
    ],
)
def test_a_gpu_that_cannot_be_measured_is_one_line(cluster: Cluster, options: dict[str, int], why: str) -> None:
    with pytest.raises(CliError, match=why):
        measure(**options)
    assert cluster.cuts == []


def test_a_cut_that_fails_is_told_with_its_reason(cluster: Cluster) -> None:
    cluster.uncut = [[1]]
    with pytest.raises(CliError, match="GPU 0 of n1 is not cut: In use by another client"):
        measure(slices="1g")
    assert cluster.cuts == [[1], []], "nothing is wanted any more that cannot be had"
    assert not Path("slices.csv.state").exists()


def test_a_gpu_that_cannot_be_cut_as_before_is_said_and_tried_by_the_next_run(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.sizes = [3, 3]
    cluster.uncut = [[3, 3]]
    cluster.fails = lambda _: "out of memory"
    with pytest.raises(CliError, match="small on 1g: out of memory"):
        measure(slices="1g")
    assert "GPU 0 of n1 is not cut: In use by another client; run this again" in capsys.readouterr().err
    cluster.uncut, cluster.fails = [], lambda _: None
    measure(slices="1g")
    assert cluster.sizes == [3, 3]
