"""The folder with all state of an installation.

lock         held by the running supervisor
run.json     what runs now: addresses, process ids, states; for `status` and `down`
secrets/     passwords and tokens, created once
postgres     the database (a link, where the database's user cannot reach this folder)
valkey/      streams and task queues
nodes/       one folder per simulated node's agent
power/       which nodes are to run, once any was powered down
log/         one file per process
"""

import fcntl
import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from services.standalone.process import StackError

State = Literal["starting", "running", "restarting", "stopping", "stopped", "failed"]


@dataclass(frozen=True)
class ProcessStatus:
    """One process at the time when its state was read; `started_at_s` is UTC seconds, None before its first start."""

    name: str
    state: State
    pid: int | None
    port: int | None
    restarts: int
    started_at_s: float | None


@dataclass(frozen=True)
class StackStatus:
    """One installation: `pid` and `started_at_s` (UTC seconds) are the supervisor's, `urls` are by service name."""

    state: State
    gateway_url: str = ""
    pid: int | None = None
    started_at_s: float | None = None
    urls: dict[str, str] = field(default_factory=dict)
    processes: tuple[ProcessStatus, ...] = ()


class DataFolder:
    """The paths of one data folder, and its few small files."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser().absolute()
        self.log = self.path / "log"
        self._lock: int | None = None

    def make(self) -> None:
        """Make the folder if it is missing.

        Raises:
            StackError: it cannot be written.
        """
        try:
            # The database's own user has to pass through where root starts it; it can list nothing here.
            self.path.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
            for name in ("log", "secrets", "nodes"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            (self.path / "lock").touch(mode=0o600)
        except OSError as error:
            raise StackError(f"cannot use the data folder {self.path}: {error.strerror}") from error

    def is_one(self) -> bool:
        """Return whether the folder at this path was made by an installation."""
        return all((self.path / name).exists() for name in ("lock", "log", "secrets"))

    def open(self) -> None:
        """Make the folder if it is missing, and hold it until `close`.

        Raises:
            StackError: another supervisor holds it, or it cannot be written.
        """
        self.make()
        lock = os.open(self.path / "lock", os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            url = self.status().gateway_url
            raise StackError(f"already running{f' at {url}' if url else ''} (data folder {self.path})") from None
        self._lock = lock

    def close(self) -> None:
        """Release the folder for other supervisors."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def secret(self, name: str) -> str:
        """Return the secret of that name, made at the first call; only the owner of the folder can read it."""
        path = self.path / "secrets" / name
        if not path.exists():
            write_whole(
                path, secrets.token_urlsafe(32), durably=True
            )  # a password lost in a power cut locks the database
        return path.read_text()

    def write_status(self, status: StackStatus) -> None:
        """Write what runs, for `status` and `down`."""
        write_whole(self.path / "run.json", json.dumps(asdict(status), indent=1))

    def status(self) -> StackStatus:
        """Return what the supervisor wrote last, or `stopped` if it no longer runs."""
        status = self.last_status()
        if status.pid is None or not lives(status.pid, status.started_at_s):
            return StackStatus(state="failed" if status.state == "failed" else "stopped")
        return status

    def last_status(self) -> StackStatus:
        """Return what the last supervisor wrote, whether or not it still runs."""
        try:
            written = json.loads((self.path / "run.json").read_text())
            written["processes"] = tuple(ProcessStatus(**process) for process in written["processes"])
            return StackStatus(**written)
        except PermissionError as error:
            raise StackError(f"cannot read the data folder {self.path}: {error.strerror}") from error
        except (OSError, ValueError, TypeError, KeyError):  # never started, or started by another version
            return StackStatus(state="stopped")


def lives(pid: int, started_at_s: float | None) -> bool:
    """Return whether `pid` is still the process that started then: process ids are reused."""
    try:
        process = psutil.Process(pid)
        return (
            abs(process.create_time() - (started_at_s or 0)) < 2  # the system's idea of its own start shifts a little
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False


def write_whole(path: Path, text: str, *, durably: bool = False) -> None:
    """Write a file completely or not at all, even if killed in the middle; only its owner can read it."""
    draft = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        if durably:
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)
