"""``from wattshift import job``: inside a job, and harmless outside one."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.clients.test_package import PACKAGE
from wattshift import job


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a job."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "JOB_ID",
        "CHECKPOINT_DIR",
        "PROGRESS_FILE",
        "PROGRESS_URL",
        "RANK_OFFSET",
        "LOCAL_WORLD_SIZE",
        "STOP_AT",
    ):
        monkeypatch.delenv(f"WATTSHIFT_{name}", raising=False)
    for name in ("BATCH_SIZE", "BASE_BATCH_SIZE"):
        monkeypatch.delenv(f"WATTSHIFT_{name}", raising=False)
    monkeypatch.setattr(job._reported, "local_batch", None)


def test_outside_a_job_nothing_happens() -> None:
    job.progress(3, total=10, local_batch=4)

    assert job.world == job.World(rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0)
    assert (job.checkpoint_dir, job.is_inside()) == (None, False)


def test_a_job_finds_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4, "NODE_RANK": 1}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("WATTSHIFT_JOB_ID", "job_1")
    monkeypatch.setenv("WATTSHIFT_CHECKPOINT_DIR", "/checkpoints/job_1")

    assert job.world == job.World(rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1)
    assert (job.checkpoint_dir, job.is_inside()) == (Path("/checkpoints/job_1"), True)


def test_one_process_for_a_node_stands_for_its_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WATTSHIFT_RANK_OFFSET": 4, "WATTSHIFT_LOCAL_WORLD_SIZE": 4, "NODE_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))

    assert (job.world.rank, job.world.local_world_size, job.world.node_rank) == (4, 4, 1)


def test_progress_is_a_line_in_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    monkeypatch.setenv("WATTSHIFT_PROGRESS_FILE", str(file))
    job.progress(1)
    job.progress(2, total=10, local_batch=8)

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{"done": 1}, {"done": 2, "total": 10, "local_batch": 8}]


def test_the_process_of_rank_0_reports_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WATTSHIFT_PROGRESS_FILE", str(tmp_path / "progress.jsonl"))
    monkeypatch.setenv("RANK", "1")
    job.progress(1)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"done": -1}, "done must be finite and not negative"),
        ({"done": float("nan")}, "done must be finite"),
        ({"done": 1, "total": float("inf")}, "total must be finite"),
        ({"done": 1, "local_batch": 0}, "local_batch must be at least 1"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job.progress(**arguments)  # type: ignore[arg-type]


@pytest.fixture
def posted() -> Iterator[tuple[str, list[bytes]]]:
    """An agent's address, and what is posted there."""
    bodies: list[bytes] = []

    class Agent(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Agent)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/progress/x", bodies
    server.shutdown()
    serving.join()
    server.server_close()


def test_without_the_file_progress_is_posted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, posted: tuple[str, list[bytes]]
) -> None:
    url, bodies = posted
    monkeypatch.setenv("WATTSHIFT_PROGRESS_FILE", str(tmp_path / "not" / "there"))
    monkeypatch.setenv("WATTSHIFT_PROGRESS_URL", url)
    job.progress(7)

    assert [json.loads(body) for body in bodies] == [{"done": 7}]


def test_an_agent_that_is_away_does_not_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTSHIFT_PROGRESS_URL", "http://127.0.0.1:1/")
    job.progress(7)
    monkeypatch.setenv("WATTSHIFT_PROGRESS_URL", "nonsense")
    job.progress(8)


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a program that may be killed by a signal; it finds the package and nothing else that is installed."""
    head = (
        f"import os, signal, sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
        "from wattshift import job\n"
        "def stop(): os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    return subprocess.run([sys.executable, "-I", "-S", "-c", head + script], capture_output=True, text=True)


def test_sigterm_is_noticed_once_it_is_asked_for() -> None:
    done = run("print(job.should_checkpoint()); stop(); print(job.should_checkpoint())")

    assert (done.returncode, done.stdout.split()) == (0, ["False", "True"])


def test_a_job_trains_on_as_long_as_saving_still_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(job.time, "time", lambda: now)
    monkeypatch.setattr(job, "notice_stop", lambda: None)
    assert (job.stop_at(), job.should_checkpoint(20)) == (None, False)

    file = tmp_path / "stop-at"
    monkeypatch.setenv("WATTSHIFT_STOP_AT", str(file))
    assert job.stop_at() is None
    monkeypatch.setattr(job._stop, "asked", True)
    assert job.should_checkpoint(20), "SIGTERM, and nobody knows how long"
    file.write_text(f"{now + 60}\n")

    assert job.stop_at() == now + 60
    assert [job.should_checkpoint(save_s) for save_s in (None, 20, 59, 60, 90)] == [True, False, False, True, True]
    monkeypatch.setattr(job._stop, "asked", False)
    assert [job.should_checkpoint(save_s) for save_s in (None, 20, 60)] == [False, False, True]
    file.write_text("")
    assert not job.should_checkpoint(60)


def test_a_program_that_never_asks_ends_as_always() -> None:
    assert run("job.progress(1); stop()").returncode == -15


@pytest.mark.parametrize(
    ("begin", "said"), [("job.should_checkpoint()", ["mine", "True"]), ("job.notice_stop(replace=True)", ["True"])]
)
def test_a_handler_that_was_there_before_is_called_too_unless_it_is_replaced(begin: str, said: list[str]) -> None:
    mine = "signal.signal(signal.SIGTERM, lambda *_: print('mine'))"

    assert run(f"{mine}\n{begin}; stop(); print(job.should_checkpoint())").stdout.split() == said


def test_a_forked_child_ends_by_sigterm_unless_it_asks_itself() -> None:
    done = run(
        "job.should_checkpoint()\n"
        "for asks in (False, True):\n"
        "    if not (child := os.fork()):\n"
        "        if asks: job.should_checkpoint()\n"
        "        stop(); os._exit(7 if job.should_checkpoint() else 8)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )

    assert done.stdout.split() == ["-15", "7"]


def test_without_a_chosen_batch_the_codes_own_is_kept() -> None:
    assert job.batch(256) == job.Batch(total=256, base=256, per_rank=256, at_once=256, passes=1)
    assert job.batch(256).learning_rate_factor("linear") == 1.0


def test_a_chosen_batch_is_shared_out_to_ranks_and_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = {"WATTSHIFT_BATCH_SIZE": 1_030, "WATTSHIFT_BASE_BATCH_SIZE": 128, "WORLD_SIZE": 4}
    for name, value in chosen.items():
        monkeypatch.setenv(name, str(value))
    batches = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        batches.append(job.batch(999, at_most=100))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WATTSHIFT_PROGRESS_FILE", str(tmp_path / "progress.jsonl"))
    job.progress(1, noise_scale=640)

    assert [each.per_rank for each in batches] == [258, 258, 257, 257]
    assert {(each.total, each.base, each.passes, each.at_once) for each in batches} == {(1_030, 128, 3, 86)}
    assert json.loads((tmp_path / "progress.jsonl").read_text()) == {
        "done": 1, "local_batch": 257.5, "noise_scale": 640,
    }  # fmt: skip


def test_the_learning_rate_follows_the_rule_that_the_user_names() -> None:
    batch = job.Batch(total=512, base=128, per_rank=512, at_once=512, passes=1)

    assert (batch.learning_rate_factor("linear"), batch.learning_rate_factor("square_root")) == (4.0, 2.0)
    assert batch.learning_rate_factor("adascale", noise_scale=128) == pytest.approx(4 * 256 / 640)
    assert batch.gain(1e-9) == pytest.approx(1.0), "without noise a larger batch teaches nothing more"
    assert batch.gain(1e12) == pytest.approx(4.0)
    for rule, noise_scale in (("adascale", None), ("adascale", 0.0), ("cubic", 1.0)):
        with pytest.raises(ValueError, match=r"noise_scale|unknown rule"):
            batch.learning_rate_factor(rule, noise_scale)  # type: ignore[arg-type]
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            job.batch(wrong)


def test_the_noise_scale_comes_from_two_batches() -> None:
    """A gradient of squared length 2 with noise of variance 300 per sample has a scale of 150 samples."""
    assert job.noise_scale(2 + 300 / 10, 10, 2 + 300 / 100, 100) == pytest.approx(150)
    assert job.noise_scale(1.0, 10, 2.0, 100) is None, "too noisy to tell"
    with pytest.raises(ValueError, match="large_batch must be larger"):
        job.noise_scale(1.0, 10, 2.0, 10)


def test_a_save_is_said_with_every_report_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress"
    monkeypatch.setenv("WATTSHIFT_PROGRESS_FILE", str(file))
    monkeypatch.setattr(job, "_reported", job._Reported())
    monkeypatch.setattr(job.time, "time", lambda: 1_700_000_000.5)

    job.progress(1, 8, 4, 150)
    job.saved(2.5)
    job.progress(2)
    monkeypatch.setenv("RANK", "1")
    job.saved()

    saved = {"saved_at": 1_700_000_000.5, "save_s": 2.5}
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        first := {"done": 1, "total": 8, "local_batch": 4, "noise_scale": 150},
        first | saved,  # whoever reads the last line alone knows the batch of the progress in it
        {"done": 2} | saved,
    ]
    with pytest.raises(ValueError, match="not negative"):
        job.saved(-1)
