"""Jobs that ran live, exported and replayed: the replay sees the same jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.commands import EXIT_USAGE
from services.cli.output import instant
from services.simulator.readers.jobs import read_raw
from tests.integration.conftest import Installation
from tests.integration.test_submission_to_footprint import TRAIN, wattshift
from tests.support.servers import wait_until

SIZES = [1, 2, 1, 3]


def run_jobs(installation: Installation) -> list[dict]:
    """Run a few rigid jobs of different sizes and lengths to their end."""
    ids = [
        installation.gateway.call(
            *("POST", "/v1/jobs"),
            body={
                "name": f"past-{number}",
                "project": "replay",
                "command": [*TRAIN, "--steps", str(20 + 10 * number), "--step-seconds", "0.1"],
                "gpus": {"min": gpus},
                "processes": "per_node",
                "work": {"total": 20 + 10 * number},
            },
        )["id"]
        for number, gpus in enumerate(SIZES)
    ]
    ended = installation.wait_for_ends(ids, 90)
    assert {job["state"] for job in ended} == {"succeeded"}
    wait_until(lambda: all(installation.job(each)["footprint"]["energy_j"] > 0 for each in ids))
    return ended


@pytest.fixture(scope="module")
def jobs(installation: Installation) -> list[dict]:
    return run_jobs(installation)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_what_ran_is_what_is_replayed(
    installation: Installation, jobs: list[dict], tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"past.{suffix}"
    start = jobs[0]["submitted_at"]
    exported = wattshift(installation, "export", "--start", start, "--end", "2100-01-01", "--out", str(file))
    assert exported.returncode == 0, exported.stderr

    raw = read_raw(file, "wattshift")
    mine = raw.take([raw.ids.index(job["id"]) for job in jobs])
    assert mine.submitted_s.tolist() == [instant(job["submitted_at"]).timestamp() for job in jobs]
    assert mine.gpus.tolist() == SIZES
    held_s = [(instant(job["ended_at"]) - instant(job["started_at"])).total_seconds() for job in jobs]
    assert mine.duration_s.tolist() == pytest.approx(held_s, abs=1)
    assert mine.energy_j.tolist() == pytest.approx([job["footprint"]["energy_j"] for job in jobs], rel=0.05)

    words = ["--jobs", str(file), "--format", "wattshift", "--carbon", "GB", "--start", "2023-08-01", "--days", "1"]
    ran = wattshift(installation, "simulate", "training", "--policy", "fifo", *words, "--json")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["jobs"] == result["completed"] == len(raw)
    assert result["gpu_hours"] * 3600 >= float((raw.duration_s * raw.gpus).sum())


def test_standard_output_and_refusals(installation: Installation, jobs: list[dict], tmp_path: Path) -> None:
    shown = wattshift(installation, "export", "--out", "-")
    assert {job["id"] for job in jobs} <= {line.split(",")[0] for line in shown.stdout.splitlines()[1:]}
    for words in (["--out", "x.xlsx"], ["--out", "-", "--start", "soon"], ["--out", str(tmp_path / "no" / "x.csv")]):
        refused = wattshift(installation, "export", *words)
        assert (refused.returncode, refused.stderr.count("\n")) == (EXIT_USAGE, 1), refused.stderr
    environment = {**os.environ, "WATTSHIFT_URL": "http://127.0.0.1:1", "WATTSHIFT_API_KEY": "x"}
    away = [str(Path(sys.executable).parent / "wattshift"), "export", "--out", str(tmp_path / "jobs.csv")]
    assert subprocess.run(away, env=environment, capture_output=True, timeout=60).returncode == 5
    assert list(tmp_path.iterdir()) == []
