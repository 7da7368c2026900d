"""The whole control plane on this host's GPUs: what its ledger books is what their own counters counted."""

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_agent.devices.nvml import NvmlDriver
from services.core.domain.mig import is_gpu
from services.standalone.stack import down, up
from tests.hardware import load
from tests.hardware.test_nvml import a_whole_gpu, driver
from tests.support.servers import ROOT, scratch_folder, wait_until

__all__ = ["driver"]

pytestmark = pytest.mark.hardware

MEMORY_MIB = 2_048
SECONDS = 30
REPORTED_S = 15.0
"""Within which the agent's last interval is in the ledger."""


class Plane:
    """An installation on this host, as its administrator uses it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._url = url
        self._key = (folder / "admin.key").read_text().strip()

    def asked(self, path: str) -> Any:
        """Return the gateway's answer."""
        request = urllib.request.Request(f"{self._url}{path}", headers={"authorization": f"Bearer {self._key}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def submitted(self, folder: Path, *words: str) -> str:
        """Return the id of a job of one GPU with this command, run in `folder`."""
        command = [sys.executable, "-P", "-m", "services.cli.main", "submit", "--json", "--gpus", "1", *words]
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(self.folder)}
        said = {"WATTSHIFT_URL": self._url, "WATTSHIFT_API_KEY": self._key}
        done = subprocess.run(command, cwd=folder, env=environment | said, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return str((found[0] if isinstance(found, list) else found)["id"])

    def job(self, job_id: str) -> Any:
        """Return the job."""
        return self.asked(f"/v1/jobs/{job_id}")

    def booked_j(self) -> float:
        """Return the energy of the GPUs in the ledger, idle included."""
        return float(self.asked("/v1/reports/footprint")["total"]["gpu_energy_j"])


@pytest.fixture
def plane(driver: NvmlDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    for name in ("DATABASE_URL", "REDIS_URL", "WATTSHIFT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPU_AGENT_PROBE_CONTROLS", "false")  # so that nothing is ever set
    monkeypatch.setenv("SCHEDULER_POLICY", "las")
    a_whole_gpu(driver)
    with scratch_folder() as folder:
        status = up(folder)
        assert status.gateway_url is not None
        yield Plane(folder, status.gateway_url)
        down(folder)


def counted_j(driver: NvmlDriver) -> float:
    """Return the sum of the GPUs' energy counters."""
    counters = [driver.read(device.index).energy_j for device in driver.devices() if is_gpu(device.index)]
    if None in counters:
        pytest.skip("a device here has no energy counter")
    return sum(counter for counter in counters if counter is not None)


def test_the_ledger_books_what_the_counters_count(driver: NvmlDriver, plane: Plane, tmp_path: Path) -> None:
    shutil.copy(load.__file__, tmp_path / "load.py")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    wait_until(lambda: plane.booked_j() > 0)
    began, counted, booked = time.monotonic(), counted_j(driver), plane.booked_j()
    script = f"exec {sys.executable} load.py $CUDA_VISIBLE_DEVICES {MEMORY_MIB} {SECONDS}"
    job_id = plane.submitted(tmp_path, "--command", script)
    wait_until(lambda: plane.job(job_id)["state"] not in ("queued", "starting", "running"), within_s=SECONDS + 60)
    job = plane.job(job_id)
    assert job["state"] == "succeeded", job
    time.sleep(REPORTED_S)
    seconds, counted, booked = (
        time.monotonic() - began,
        counted_j(driver) - counted,
        plane.booked_j() - booked,
    )
    of_job = plane.job(job_id)["footprint"]
    print(f"{seconds:.1f} s: counted {counted:.0f} J, booked {booked:.0f} J, of that the job {of_job}")
    late_j = 3.0 * 1_000  # an interval that is under way at either end, at what a board can draw
    assert booked == pytest.approx(counted, abs=late_j)
    idle_w = driver.read(0).power_w
    assert of_job["gpu_energy_j"] == pytest.approx(counted - idle_w * (seconds - SECONDS), rel=0.15)
    assert of_job["estimated_energy_j"] < of_job["energy_j"]
