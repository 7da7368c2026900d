"""The whole control plane on this host's GPUs: what its ledger books is what their own counters counted."""

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_agent.devices.nvml import NvmlDriver
from lab.hardware.plane import Plane, settings_of_a_guest, wait_until
from services.core.domain.mig import is_gpu
from services.standalone.stack import down, up
from tests.hardware import load
from tests.hardware.test_nvml import a_whole_gpu, driver
from tests.support.servers import scratch_folder

__all__ = ["driver"]

pytestmark = pytest.mark.hardware

MEMORY_MIB = 2_048
SECONDS = 30
REPORTED_S = 15.0
"""Within which the agent's last interval is in the ledger."""


@pytest.fixture
def plane(driver: NvmlDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    for name in ("DATABASE_URL", "REDIS_URL", "WATTSHIFT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    a_whole_gpu(driver)
    with scratch_folder() as folder, settings_of_a_guest():
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
    assert plane.ended(job_id) == "succeeded", plane.logs(job_id)
    time.sleep(REPORTED_S)
    seconds, counted, booked = (time.monotonic() - began, counted_j(driver) - counted, plane.booked_j() - booked)
    of_job = plane.asked(f"/v1/jobs/{job_id}")["footprint"]
    print(f"{seconds:.1f} s: counted {counted:.0f} J, booked {booked:.0f} J, of that the job {of_job}")
    gpus = [device.index for device in driver.devices() if is_gpu(device.index)]
    late_j = 3.0 * 1_000 * len(gpus)  # an interval that is under way at either end, at what a board can draw
    assert booked == pytest.approx(counted, abs=late_j)
    idle_w = sum(driver.read(gpu).power_w for gpu in gpus)
    expected_j = counted - idle_w * (seconds - SECONDS / len(gpus))
    assert of_job["gpu_energy_j"] == pytest.approx(expected_j, rel=0.15)
    assert of_job["estimated_energy_j"] < of_job["energy_j"]
