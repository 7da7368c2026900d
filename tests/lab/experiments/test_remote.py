"""An experiment by Celery workers: the tables of a local run, whoever dies meanwhile, and no finished cell twice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from lab.experiments.plan import Experiment, load_experiment
from lab.experiments.remote import PREFIX, Client
from lab.experiments.runner import run_experiment
from lab.report.tables import write_csv
from services.simulator.queue import simulator_celery
from services.simulator.settings import SimulatorSettings
from services.standalone.processes import PYTHON, WORKERS
from tests.support.servers import ROOT, fresh_database, wait_until

FILE = """
zones = ["SE", "GB"]
cluster = "8x2:RTX3090"
traces = [
    {{ label = "hours", jobs = "green-year", start = "2023-08-01", days = 1, tail_days = 2 }},
    {{ label = "mine", jobs = "{jobs}", start = "2023-08-01", days = 1, tail_days = 2 }},
]
policies = [
    {{ policy = "las" }}, {{ policy = "green" }}, {{ label = "green 2", policy = "green", params = {{ mu = 2.0 }} }}
]
"""
JOBS = "job_id,submitted_at,started_at,ended_at,gpus\n" + "".join(
    f"j{number},2023-08-01T{number % 24:02}:00Z,2023-08-01T00:00Z,2023-08-01T02:00Z,2\n" for number in range(48)
)


@pytest.fixture
def plan(tmp_path: Path) -> Experiment:
    (tmp_path / "mine.csv").write_text(JOBS)
    (tmp_path / "one.toml").write_text(FILE.format(jobs=tmp_path / "mine.csv"))
    return load_experiment(tmp_path / "one.toml")


@pytest.fixture
def broker(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as redis:
        redis.flushdb()
        yield redis


@pytest.fixture
def client(broker: Redis, redis_url: str) -> Client:
    settings = SimulatorSettings(redis_url=redis_url, service_token="x" * 16)  # type: ignore[call-arg]
    return Client(broker, simulator_celery(settings), poll_s=0.02, resend_s=0.3)


@contextmanager
def workers(count: int, database_url: str, redis_url: str, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run worker processes in folders where the experiment's files are not."""
    environment = {**os.environ, "DATABASE_URL": database_url, "REDIS_URL": redis_url, "SIMULATOR_LEASE_S": "1.5"}
    environment |= {"WATTSHIFT_SERVICE_TOKEN": "x" * 16, "PYTHONPATH": str(ROOT)}
    command = [*PYTHON, *WORKERS["simulator-worker"]]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            with (folder / f"worker-{number}.log").open("wb") as log:
                process = subprocess.Popen(
                    [*command, "-n", f"w{number}@%h"], env=environment, stdout=log, stderr=log, start_new_session=True
                )
            started.append(process)
        yield started
    finally:
        for process in started:
            kill(process)
        print(*((folder / f"worker-{number}.log").read_text() for number in range(count)), file=sys.stderr)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and its pool with -9, as a machine that loses power."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()


def table(results: list[dict[str, Any]], file: Path) -> bytes:
    write_csv(file, results)
    return file.read_bytes()


def test_a_worker_and_the_client_die_and_the_tables_are_those_of_a_local_run(
    plan: Experiment, client: Client, broker: Redis, postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    local = table(run_experiment(plan, tmp_path / "local"), tmp_path / "local.csv")
    out, told = tmp_path / "out", []
    with workers(2, fresh_database(postgres_url), redis_url, tmp_path) as (first, _):
        running = threading.Thread(
            target=lambda: run_experiment(plan, out, elsewhere=client.run, report=lambda *each: told.append(each))
        )
        running.start()
        wait_until(lambda: bool(broker.keys(f"{PREFIX}lease:*")), 60)
        kill(first)
        running.join(120)
        assert not running.is_alive()
        assert told[-1][:2] == (12, 12)

        attempts = {key: int(broker.get(key) or 0) for key in broker.keys(f"{PREFIX}attempts:*")}
        again = run_experiment(plan, tmp_path / "again", elsewhere=client.run)
    remote = table(run_experiment(plan, out), tmp_path / "remote.csv")

    assert remote == local
    assert table(again, tmp_path / "again.csv") == local
    assert {key: int(broker.get(key) or 0) for key in attempts} == attempts, "what was finished did not run again"
    assert sum(attempts.values()) <= len(attempts) + 1, "only what the dead worker held ran twice"


def test_a_client_that_comes_back_collects_what_was_finished(
    plan: Experiment, client: Client, broker: Redis, postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    groups = [[cell] for cell in plan.cells()[:3]]
    gone = client.run(groups, tmp_path)
    with workers(1, fresh_database(postgres_url), redis_url, tmp_path):
        next(gone)  # and never again: the client is dead
        wait_until(lambda: len(broker.keys(f"{PREFIX}result:*")) == 3, 60)

    assert [error for _, error in client.run(groups, tmp_path)] == [None] * 3, "with no worker left"


def test_a_cell_that_breaks_is_told_and_tried_anew(
    plan: Experiment, client: Client, broker: Redis, postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.csv").write_text("no trace\n")
    group = [cell for cell in plan.cells() if cell.trace.label == "mine"][:1]
    with workers(1, fresh_database(postgres_url), redis_url, tmp_path):
        ((_, error),) = client.run([group], tmp_path)

    assert "not a known job trace" in str(error)
    assert not broker.keys(f"{PREFIX}result:*")
