"""A real Ray of two raylets, its bridge, and a grid that the test sets: held, started in its zone, stopped, resized."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.environments import programs_of
from tests.support.ray import RayLab, RaySite, a_ray_site

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray_lab() -> Iterator[RayLab]:
    """A Ray for this module."""
    programs = programs_of("ray", "ray[default]==2.60.0", variable="WATTSHIFT_RAY_ENVIRONMENT")
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # its sockets lie beneath it, and their names must be short
    lab = RayLab(programs, folder)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def ray_site(ray_lab: RayLab, postgres_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[RaySite]:
    """A control plane for it; its bridge is the test's to start."""
    async with a_ray_site(ray_lab, postgres_url, redis_url, tmp_path) as made:
        yield made


def program(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return str(folder / f"{name}.py")


COUNTS = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
step = int((folder / "step").read_text()) if (folder / "step").exists() else 0
while not told and not (folder / "done").exists():
    step += 1
    with (folder / "steps").open("a") as file:
        file.write(json.dumps({"step": step, "gpus": os.environ["WATTSHIFT_GPUS"]}) + chr(10))
    time.sleep(0.1)
(folder / "step").write_text(str(step))
"""


async def test_a_job_runs(ray_site: RaySite, tmp_path: Path) -> None:
    await ray_site.steered()
    script = program(tmp_path, "counts", COUNTS)
    ray_site.lab.submit("first", "--gpus", "2", "--", str(ray_site.lab.programs / "python"), script, str(tmp_path))
    await ray_site.until_state("first", "running")
    print(ray_site.lab.groups(), ray_site.lab.logs("first"))
    (tmp_path / "done").touch()
    await ray_site.until_state("first", "succeeded")
