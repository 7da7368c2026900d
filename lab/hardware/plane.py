"""An installation on this host, as its administrator uses it."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.core.domain.jobs import JobState
from services.standalone.stack import read_status

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def settings_of_a_guest() -> Iterator[None]:
    """Let what is started here set nothing on any device, and begin with a policy that asks for nothing of them."""
    wanted = {"GPU_AGENT_PROBE_CONTROLS": "false", "SCHEDULER_POLICY": "las"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def wait_until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Return as soon as `condition` holds; raise `TimeoutError` if it does not in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {within_s} s: {condition}")
        time.sleep(0.1)


class Plane:
    """What is asked of the installation with its state in `folder`."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._url = url
        self._key = (folder / "admin.key").read_text().strip()

    def headers(self) -> dict[str, str]:
        """Return those of a request by the administrator."""
        return {"authorization": f"Bearer {self._key}", "content-type": "application/json"}

    def asked(self, path: str) -> Any:
        """Return the gateway's answer."""
        with urllib.request.urlopen(urllib.request.Request(self._url + path, headers=self.headers()), timeout=10) as it:
            return json.load(it)

    def router_url(self) -> str:
        """Return where the router listens."""
        router = next(each for each in read_status(self.folder).processes if each.name == "router")
        return f"http://127.0.0.1:{router.port}"

    def command(self, *words: str, folder: Path | None = None) -> str:
        """Return what a command of `wattshift` prints; raise `RuntimeError` with its error if it fails."""
        said = {"WATTSHIFT_URL": self._url, "WATTSHIFT_API_KEY": self._key, "HOME": str(self.folder)}
        path = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
        done = subprocess.run(
            [sys.executable, "-P", "-m", "services.cli.main", *words],
            cwd=folder or self.folder,
            env=path | said,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"wattshift {' '.join(words)}: {done.stderr}{done.stdout}")
        return done.stdout

    def submitted(self, folder: Path, *words: str) -> str:
        """Return the id of a job of one GPU, run in `folder`."""
        found = json.loads(self.command("submit", "--json", "--gpus", "1", *words, folder=folder))
        return str((found[0] if isinstance(found, list) else found)["id"])

    def ended(self, job: str, within_s: float = 180.0) -> str:
        """Return how a job ended."""
        wait_until(lambda: JobState(self.asked(f"/v1/jobs/{job}")["state"]).is_final, within_s)
        return str(self.asked(f"/v1/jobs/{job}")["state"])

    def logs(self, job: str) -> str:
        """Return what a job has printed."""
        return self.command("logs", job)

    def instances(self, pool: str) -> list[Any]:
        """Return the instances of a pool."""
        return list(self.asked(f"/v1/pools/{pool}/instances")["items"])

    def booked_j(self) -> float:
        """Return the energy of the GPUs in the ledger, idle included."""
        return float(self.asked("/v1/reports/footprint")["total"]["gpu_energy_j"])
