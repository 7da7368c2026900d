"""The folder with all state of an installation.

lock         held by the running supervisor; it contains its process id
run.json     what is running now: addresses, process ids, states; for `status` and `down`
options.json the options that the installation was made with: nodes, zones, port
secrets/     passwords and tokens, created once
postgres     the database (a link if the database's user cannot reach this folder)
valkey/      streams and task queues
nodes/       one folder per simulated node's agent
power/       which nodes should run, once any has been powered down
log/         one file per process
pulse/       files that the supervisor and the workers touch every second to show that they are alive
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

import psutil
from pydantic import PositiveInt, TypeAdapter

from services.kit import files
from services.kit.pulse import is_beating
from services.standalone.process import BadInputError, StackError
from services.standalone.watching import activity

State = Literal[
    "starting", "running", "degraded", "unresponsive", "restarting", "stopping", "stopped", "asleep", "failed"
]
"""`degraded`: it answers, but lacks something that it needs; of an installation: some process is not running. `asleep`:
it is started when there is work for it."""


@dataclass(frozen=True)
class ProcessStatus:
    """One process at the time its state was read.

    It listens on `port`, or at `socket`; `started_at_s` is UTC seconds, None before its first start; `detail` says what
    it lacks, or why it was replaced.
    """

    name: str
    state: State
    pid: PositiveInt | None
    port: int | None
    restarts: int
    started_at_s: float | None
    detail: str = ""
    socket: str = ""


@dataclass(frozen=True)
class StackStatus:
    """One installation: `pid` and `started_at_s` (UTC seconds) are the supervisor's, `urls` are by service name.

    `detail` says what is wrong with the supervisor itself, or why it could not start;
    `sockets` is the folder of its sockets, which jobs can enter if it `trusts_jobs`.
    """

    state: State
    gateway_url: str = ""
    pid: PositiveInt | None = None
    started_at_s: float | None = None
    urls: dict[str, str] = field(default_factory=dict)
    processes: tuple[ProcessStatus, ...] = ()
    detail: str = ""
    sockets: str = ""
    trusts_jobs: bool = False

    def socket_of(self, process: str) -> Path | None:
        """Return where one of this installation's own servers listens; None if it has none with that name."""
        return next((Path(each.socket) for each in self.processes if each.name == process and each.socket), None)

    def late(self) -> list[str]:
        """Return the names of the processes that are not ready yet."""
        return [process.name for process in self.processes if process.state not in ("running", "stopped", "asleep")]

    def runs(self) -> bool:
        """Return whether the supervisor that wrote this status is alive."""
        return self.pid is not None and lives(self.pid, self.started_at_s)


_LOCK_TRIES, _LOCK_PAUSE_S = 10, 0.05
_STATUS = TypeAdapter(StackStatus)
_STATUS_BYTES = 1 << 20  #: With less room on its disk, `run.json` may not be written any more


class DataFolder:
    """The paths of one data folder, and its few small files."""

    RESTORING = "restoring"  #: A file in a folder that is being restored from a backup, and is not complete

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser().absolute()
        self.log = self.path / "log"
        self.pulses = self.path / "pulse"
        self.pulse = self.pulses / "supervisor"
        self._lock: int | None = None

    def make(self) -> None:
        try:
            # The database's own user has to pass through where root starts it; it can list nothing here.
            self.path.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
            for name in ("log", "secrets", "nodes", "pulse"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            if os.geteuid() == 0:  # jobs run as their users' accounts, which have to pass through to them
                (self.path / "nodes").chmod(0o711)
            (self.path / "lock").touch(mode=0o600)
        except OSError as error:
            raise StackError(f"cannot use the data folder {self.path}: {error.strerror}") from error

    def is_one(self) -> bool:
        """Return whether the folder at this path was made by an installation."""
        return all((self.path / name).exists() for name in ("lock", "log", "secrets"))

    def existing(self) -> Self:
        """Return this folder; ``BadInputError`` if no installation made it."""
        if not self.is_one():
            raise BadInputError(f"{self.path} is not a data folder; give the right one by --data-dir")
        return self

    def open(self, *, restoring: bool = False) -> None:
        """Make the folder if it is missing, and hold it until `close`.

        Raises:
            BadInputError: a restore of it was interrupted, unless this is one.
            StackError: another supervisor holds it, or it cannot be written.
        """
        if not restoring and (self.path / self.RESTORING).exists():
            raise BadInputError(f"the restore of {self.path} was cut off: repeat `wattshift restore` with this folder")
        self.make()
        lock = os.open(self.path / "lock", os.O_RDWR)
        if not _locked(lock):
            os.close(lock)
            url = self.last_status().gateway_url
            raise StackError(f"already running{f' at {url}' if url else ''} (data folder {self.path})")
        self.pulse.unlink(missing_ok=True)  # of one that has ended
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        self._lock = lock

    def close(self) -> None:
        """Release the folder to other supervisors."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def holder(self) -> int | None:
        """Return the process id of the supervisor that holds the folder, or None if none does.

        A killed supervisor may hold its lock a moment longer, until all its threads are gone.
        """
        lock = self.path / "lock"
        try:
            with files.locked(lock, os.O_RDWR):
                return None
        except BlockingIOError:
            text = lock.read_bytes()
            return int(text) if text.isdigit() and _is_alive(int(text)) else None
        except OSError:
            return None

    def secret(self, name: str, *, made_with: Path | None = None) -> str:
        """Return the secret with that name, made at the first call; only the owner of the folder can read it.

        Args:
            made_with: A path that is useless without this very secret: while it exists, a lost secret is not replaced.

        Raises:
            BadInputError: the secret is lost or empty, or cannot be read.
        """
        path = self.path / "secrets" / name
        try:
            if not path.exists():
                if made_with is not None and made_with.exists():
                    raise BadInputError(
                        f"{path} is missing, and {made_with} opens with that password only: put the file back "
                        "from a backup, or start anew with another --data-dir"
                    )
                files.replace(path, secrets.token_urlsafe(32).encode())  # one lost in a power cut locks the database
            secret = path.read_text().strip()
        except OSError as error:
            raise BadInputError(f"cannot read the secret {path}: {error.strerror}") from error
        if not secret:
            raise BadInputError(f"the secret {path} is empty: put the file back from a backup")
        return secret

    def write_status(self, status: StackStatus) -> None:
        files.replace(self.path / "run.json", json.dumps(asdict(status), indent=1).encode(), durable=False)

    def status(self) -> StackStatus:
        """Return what the supervisor wrote last, or `stopped` if it no longer runs.

        Raises:
            BadInputError: what it wrote cannot be understood, or is gone although it is running.
            StackError: the folder belongs to another user.
        """
        try:
            status = self._read_status()
        except ValueError:
            raise self._misleads("corrupt or of another version", self.holder()) from None
        if not status.runs():
            # A backup, too, holds the folder of an installation that is down; only a supervisor has a pulse, and that
            # one of this start: it is removed before the holder is named, and begins after `run.json` is written.
            holder = self.holder()
            if holder is None or holder == os.getpid() or not is_beating(self.pulse):
                failed = StackStatus(state="failed", detail=status.detail)
                return failed if status.state == "failed" else StackStatus(state="stopped")
            status = self.last_status()  # it may have been written a moment ago
            if status.pid != holder or not status.runs():
                raise self._misleads("missing, or of an earlier start", holder)
        if status.state == "running" and status.pid and not self._supervisor_lives(status.pid):
            return replace(status, state="degraded", detail=f"the supervisor (process {status.pid}) does not answer")
        if status.state == "running" and shutil.disk_usage(self.path).free < _STATUS_BYTES:
            return replace(status, state="degraded", detail=f"the disk of {self.path} is full; this may be out of date")
        return status

    def _misleads(self, how: str, holder: int | None) -> BadInputError:
        stop = f"`wattshift down` stops what runs (process {holder}), and " if holder else ""
        return BadInputError(f"{self.path / 'run.json'} is {how}; {stop}`wattshift up` writes a new one")

    def _supervisor_lives(self, pid: int) -> bool:
        found = activity(pid)
        return (found is None or not found.is_stopped) and (not self.pulse.exists() or is_beating(self.pulse))

    def last_status(self) -> StackStatus:
        """Return what the last supervisor wrote, whether or not it is still running; `stopped` if unreadable."""
        try:
            return self._read_status()
        except ValueError:  # corrupt, or written by another version
            return StackStatus(state="stopped")

    def _read_status(self) -> StackStatus:
        try:
            written = (self.path / "run.json").read_bytes()
        except PermissionError as error:
            raise StackError(f"cannot read the data folder {self.path}: {error.strerror}") from error
        except OSError:  # never started
            return StackStatus(state="stopped")
        return _STATUS.validate_json(written, strict=True)


def _locked(lock: int) -> bool:
    """Take the lock, with retries: those who ask for its holder take it for an instant; a killed one keeps it a bit."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOCK_PAUSE_S)
    return False


def _is_alive(pid: int) -> bool:
    found = activity(pid)
    return found is not None and found.state != psutil.STATUS_ZOMBIE


def lives(pid: int, started_at_s: float | None) -> bool:
    """Return whether `pid` is still the process that started at that time: process ids are reused."""
    try:
        process = psutil.Process(pid)
        return (
            abs(process.create_time() - (started_at_s or 0)) < 2  # the system's idea of its own start shifts a little
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False
