"""Footprints in experiment trackers: the figures, and with ``--slow`` the real MLflow and W&B (offline)."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.contracts.jobs import JobFootprint
from services.contracts.reports import IntensityUse, JobFootprintReport
from services.core.domain.signal import Signal
from tests.support.servers import ROOT
from wattshift import Client, job
from wattshift.integrations.tracking import read_record

PACKAGE = ROOT / "clients" / "python"
PROGRAM = Path(__file__).parent / "programs" / "track.py"
USED = JobFootprint(energy_j=7.2e6, gpu_energy_j=6e6, carbon_gco2=600.0, gpu_s=7_200.0, estimated_energy_j=1.8e6)


def a_report(job_id: str, footprint: JobFootprint = USED) -> JobFootprintReport:
    at = datetime(2026, 11, 1, tzinfo=UTC)
    use = IntensityUse(
        start_at=at, end_at=at, energy_j=7.2e6, intensity_gco2_per_kwh=200, carbon_gco2=600, estimated=False
    )
    is_priced = footprint.energy_j > 0
    return JobFootprintReport(
        job_id=job_id,
        footprint=footprint,
        zone="DE" if is_priced else None,
        signal=Signal.AVERAGE_DIRECT if is_priced else None,
        pue=1.5 if is_priced else None,
        intervals=[use] if is_priced else [],
    )


class ControlPlane(http.server.BaseHTTPRequestHandler):
    """Answers footprints: job_1 used 2 kWh, job_2 twice that, job_3 none."""

    asked: list[str]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        job_id = self.path.split("/")[3]
        doubled = USED.model_copy(update={"energy_j": 2 * USED.energy_j, "carbon_gco2": 2 * USED.carbon_gco2})
        footprint = {"job_1": USED, "job_2": doubled, "job_3": JobFootprint()}[job_id]
        body = a_report(job_id, footprint).model_dump_json().encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def control_plane() -> Iterator[str]:
    ControlPlane.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ControlPlane)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_footprint_becomes_figures_with_units_and_labels(control_plane: str) -> None:
    with Client(control_plane, "ws_key") as client:
        record, empty = read_record("job_1", client), read_record("job_3", client)
    assert record.metrics == {
        "wattshift/energy_kwh": 2.0,
        "wattshift/gpu_hours": 2.0,
        "wattshift/carbon_gco2": 600.0,
        "wattshift/estimated_share": 0.25,
        "wattshift/intensity_gco2_per_kwh": pytest.approx(200.0),
    }
    assert record.labels == {
        "wattshift/job_id": "job_1",
        "wattshift/zone": "DE",
        "wattshift/signal": "average_direct",
        "wattshift/pue": "1.5",
    }
    assert (empty.metrics["wattshift/energy_kwh"], empty.labels) == (0.0, {"wattshift/job_id": "job_3"})
    assert "wattshift/intensity_gco2_per_kwh" not in empty.metrics


def test_nothing_is_asked_where_nothing_is_tracked(control_plane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("JOB_ID", "job_1"), ("URL", control_plane), ("API_KEY", "ws_key")):
        monkeypatch.setenv(f"WATTSHIFT_{name}", value)
    assert not {"mlflow", "wandb"} & sys.modules.keys()
    assert job.log_footprint() is False
    assert ControlPlane.asked == []
    monkeypatch.delenv("WATTSHIFT_JOB_ID")
    with pytest.raises(ValueError, match="job_id is missing"):
        read_record(None, None)


@pytest.fixture(scope="module")
def python_with_trackers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with both trackers: in the folder ``TRACKERS_ENVIRONMENT``, or one made here."""
    if made := os.environ.get("TRACKERS_ENVIRONMENT"):
        return Path(made) / "bin" / "python"
    folder = tmp_path_factory.mktemp("trackers") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wanted = [f"{PACKAGE}[mlflow,wandb]", "sqlalchemy", "alembic"]  # mlflow-skinny's store on this machine
    done = subprocess.run([folder / "bin" / "pip", "install", "-q", *wanted], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"the trackers cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin" / "python"


@pytest.mark.slow
def test_mlflow_and_wandb_hold_the_footprint(python_with_trackers: Path, control_plane: str, tmp_path: Path) -> None:
    environment = {
        "PATH": os.defpath,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(PACKAGE / "src"),
        "WATTSHIFT_JOB_ID": "job_1",
        "WATTSHIFT_URL": control_plane,
        "WATTSHIFT_API_KEY": "ws_key",
    }
    command = [str(python_with_trackers), str(PROGRAM), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.splitlines()[-1])

    assert (found["before"], found["recorded"]) == (False, True), "only into a run that is active"
    assert found["energies"] == [2.0, 4.0], "job_1 while the run was active, job_2 afterwards"
    assert found["metrics"]["wattshift/carbon_gco2"] == 1_200.0
    assert (found["tags"]["wattshift/zone"], found["tags"]["wattshift/job_id"]) == ("DE", "job_2")
    assert found["summary"]["wattshift/energy_kwh"] == 2.0
    assert found["config"]["wattshift/job_id"] == "job_1"
    assert found["refused"] == "no MLflow run is active: give run_id"
