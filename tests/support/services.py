"""Services as processes of their own, as a supervisor would run them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from services.standalone.probes import HttpProbe
from services.standalone.process import Process
from tests.support.forked import Forked
from tests.support.ports import Ports
from tests.support.servers import ROOT, as_service, is_ready, wait_until
from tests.support.tokens import TOKEN as TOKEN

PREFIXES = {
    "gateway.app": "GATEWAY",
    "services.admission.app": "ADMISSION",
    "optimizer_service.app": "OPTIMIZER",
    "services.router.app": "ROUTER",
    "services.serving.app": "SERVING",
    "carbon_service.app": "CARBON",
    "services.telemetry.app": "TELEMETRY",
}


@dataclass
class Services:
    """Starts services that know each other's addresses; what was started is stopped at the end of the block."""

    folder: Path
    environment: dict[str, str]
    ports: Ports = field(default_factory=Ports)
    urls: dict[str, str] = field(default_factory=dict)

    def process(self, module: str, ready_path: str = "/readyz", **settings: str) -> Process:
        """Return a service to run; started again it has the same address."""
        prefix = PREFIXES[module]
        if prefix not in self.urls:
            port = self.ports.take(24_000 + os.getpid() % 5_000)
            self.urls[prefix] = f"http://127.0.0.1:{port}"
            self.environment |= {f"{prefix}_PORT": str(port), f"WATTSHIFT_{prefix}_URL": self.urls[prefix]}
        port = int(self.environment[f"{prefix}_PORT"])
        redis_url = as_service(self.environment["REDIS_URL"], prefix.lower())
        return Process(
            name=prefix.lower(),
            command=(sys.executable, "-m", module),
            environment={**self.environment, "REDIS_URL": redis_url, **settings},
            folder=ROOT,
            probe=HttpAnswer(port, ready_path),
            address=("127.0.0.1", port),
        )

    @contextlib.contextmanager
    def started(self, module: str, ready_path: str = "/readyz", **settings: str) -> Iterator["Running"]:
        """Run a service until the end of the block; ``Running.kill`` and ``start`` in between are for its tests."""
        process = self.process(module, ready_path, **settings)
        service = Running(process, self.folder / f"{process.name}.log")
        service.start()
        try:
            yield service
        finally:
            service.stop()

    def admin_key(self) -> str:
        """Return the key that admission made when it first started."""
        return (self.folder / "admin.key").read_text().strip()


class HttpAnswer(HttpProbe):
    """Says that a service is ready once it answers one path with 200."""

    def __init__(self, port: int, path: str) -> None:
        super().__init__(("127.0.0.1", port))
        self._path = path

    async def _works(self) -> bool:
        return (await self._get(self._path))[0] == 200


class Running:
    """A service that runs, or was killed and may be started again."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.log = log
        self._running: Forked | None = None

    def start(self) -> None:
        """Start it and return when it is ready; what it printed is part of the error if it does not get there."""
        process = self.process
        self._running = Forked(process.command[-1], env=process.environment, cwd=process.folder, output=self.log)
        probe = self.process.probe
        assert probe
        try:
            wait_until(lambda: self._has_ended() or is_ready(probe))
        except TimeoutError:
            self.kill()
            raise TimeoutError(f"{self.process.name} is not ready:\n{self.log.read_text()[-3000:]}") from None
        if self._has_ended():
            raise RuntimeError(f"{self.process.name} ended:\n{self.log.read_text()[-3000:]}")

    def _has_ended(self) -> bool:
        return self._running is None or self._running.poll() is not None

    def kill(self) -> None:
        """End it as the kernel does a process that is out of memory."""
        if self._running:
            self._running.kill()
            self._running.wait()

    def stop(self) -> None:
        """End it in good order."""
        if self._running and self._running.poll() is None:
            self._running.terminate()
            try:
                self._running.wait(timeout=self.process.stop_within_s)
            except subprocess.TimeoutExpired:
                self.kill()


@contextlib.contextmanager
def services(folder: Path, database_url: str, redis_url: str, **settings: str) -> Iterator[Services]:
    """Yield what starts services on these servers, with ``folder`` for their files."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WATTSHIFT_", "GATEWAY_"))},
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "WATTSHIFT_SERVICE_TOKEN": TOKEN,
        "WATTSHIFT_SECRETS_KEY": "a-key-that-seals-secrets-in-tests-only",
        "WATTSHIFT_DATA_DIR": str(folder),
        "PYTHONUNBUFFERED": "1",
        **settings,
    }
    found = Services(folder, environment)
    try:
        yield found
    finally:
        found.ports.release()
