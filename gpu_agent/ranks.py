"""The folder of one rank: files through which the agent and the shim communicate, even after the agent restarts."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple

from gpu_agent import files, shim
from gpu_agent.account import Account, shim_user
from gpu_agent.processes import kill_marked
from gpu_agent.secrets import remove_secrets
from services.contracts.nodes import OUT_OF_MEMORY, EndedBy
from services.kit.logging import Log

log = Log(__name__)

COMMAND = "gang.json"
PROGRESS, POSTED, DEVICES, SETTINGS = "progress.jsonl", "posted.json", "device.json", "settings.json"
SCRATCH, ENV_FILE, SHIM_LOG, RELEASED = "scratch", "container.env", "shim.log", "released"
HOSTFILE, LEAVES = "hostfile", "leaves"

# Not by its file name: that way it is compiled once, which saves 8 ms and a megabyte for each rank.
_LAUNCH = "import sys; sys.path.append(sys.argv[1]); import shim; sys.exit(shim.main(sys.argv[2]))"


@dataclass(frozen=True)
class Process:
    """One of several processes of a rank."""

    name: str
    environment: dict[str, str]
    argv: list[str] = field(default_factory=list[str])  #: Its command; empty for the command that all share


@dataclass(frozen=True)
class Launch:
    """What a shim is to run."""

    argv: list[str]
    environment: dict[str, str]
    working_dir: str
    grace_s: float
    time_limit_s: float | None = None  #: How long it may run; None for no limit
    processes: list[Process] = field(default_factory=list[Process])
    """Several processes instead of one. The first that fails ends the others."""
    cleanup: list[str] = field(default_factory=list[str])
    """A command to run afterwards, for what does not end with the processes."""
    make_dir: str = ""  #: A folder to make first, as the command's user
    account: Account | None = None  #: The command's user; None for the agent's own
    confinement: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """What confines its processes, as entries of its spec."""
    secrets_dir: str = ""  #: Where the shim puts secrets that are files
    secrets: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]], repr=False)
    """What the shim reads from a pipe instead of the disk, as entries of its spec."""

    def spec(self) -> bytes:
        """Return the spec in the format that the shim reads."""
        entries = [("working_dir", self.working_dir), ("grace_s", str(self.grace_s)), ("make_dir", self.make_dir)]
        entries.append(("time_limit_s", str(self.time_limit_s or 0.0)))
        entries += [("secrets_dir", self.secrets_dir)] if self.secrets else []
        entries += [("cleanup", word) for word in self.cleanup] + shim_user(self.account) + self.confinement
        for process in (self, *self.processes):
            entries += [("process", process.name)] if isinstance(process, Process) else []
            entries += [("argv", word) for word in process.argv]
            entries += [("env", f"{name}={value}") for name, value in process.environment.items()]
        return shim.spec_bytes(entries)


@dataclass(frozen=True)
class Exit:
    code: int
    ended_by: EndedBy
    detail: str
    ended_at: datetime


class Leaving(NamedTuple):
    """A rank that is to end when its job next saves its work."""

    grace_s: float
    asked_at: float  #: UTC seconds
    until: float  #: When it ends at the latest, on the clock of leases


class RankFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress_file = path / PROGRESS  #: In which the job reports its progress
        self.device_file = path / DEVICES  #: In which the job finds the speed of its simulated devices
        self.stop_at_file = path / shim.STOP_AT  #: Which tells the job when it will be killed, once that is known
        self.settings_file = path / SETTINGS  #: Of the controls for the gang's devices

    def create(self, command: bytes) -> None:
        """Make the folder with the command in it, completely or not at all; it is on disk when this returns."""
        draft = self.path.with_name(f".{self.path.name}")
        draft.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(draft / COMMAND, command)
        draft.rename(self.path)
        shim.sync_folder(str(self.path.parent))

    def launch(self, launch: Launch, deadline: float, lease_s: float) -> subprocess.Popen[bytes]:
        """Start a shim in its own session, with nothing of this process's environment."""
        scratch = self.path / SCRATCH
        scratch.mkdir(mode=0o700, exist_ok=True)
        if launch.account is not None:
            self.path.chmod(0o711)
            self.progress_file.touch(mode=0o600)
            launch.account.own(self.progress_file)
            launch.account.own(scratch)
        files.replace(self.path / shim.SPEC, launch.spec(), durable=False)
        self.renew(deadline, lease_s)
        with (self.path / SHIM_LOG).open("ab") as output:
            started = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, os.path.dirname(shim.__file__), str(self.path)],
                stdin=subprocess.PIPE if launch.secrets else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )
        if started.stdin is not None:
            # Beside the event loop: more than a pipe holds goes through only as fast as the shim reads.
            threading.Thread(
                target=_pass_on, args=(started.stdin, shim.spec_bytes(launch.secrets)), daemon=True
            ).start()
        return started

    def renew(self, deadline: float, lease_s: float) -> None:
        shim.write_lease(str(self.path / shim.LEASE), deadline, lease_s)

    def request_stop(self, cause: EndedBy, grace_s: float, detail: str = "") -> None:
        """Ask the shim durably to end the rank; a repeated request may shorten the grace period.

        With a ``detail``, the rank itself is to blame and counts as failed, however its processes end.

        Raises:
            OSError: The request cannot be stored. The shim is still signalled, with the grace period of its spec.
        """
        try:
            shim.write_facts(
                str(self.path / shim.STOP), {"cause": cause.value, "grace_s": grace_s, "detail": detail or None}
            )
        finally:
            started = self.started()
            if started is not None and self.is_held():
                with suppress(ProcessLookupError):
                    os.kill(int(started["shim"]), signal.SIGTERM)

    def leave(self, grace_s: float, wait_s: float) -> None:
        """Note durably that the rank is to end when its job next saves its work, or after so long."""
        facts: dict[str, object] = {"grace_s": grace_s, "asked_at": time.time(), "until": shim.clock() + wait_s}
        shim.write_facts(str(self.path / LEAVES), facts)

    def leaves(self) -> Leaving | None:
        """Return when the rank is to end; None if nothing waits for that."""
        facts = shim.read_facts(str(self.path / LEAVES))
        return None if facts is None else Leaving(*(float(facts[name]) for name in ("grace_s", "asked_at", "until")))

    def stop_requested(self) -> bool:
        return (self.path / shim.STOP).exists()

    def stop_cause(self) -> EndedBy | None:
        """Return on whose behalf the end was requested; None if it was not."""
        facts = shim.read_facts(str(self.path / shim.STOP))
        return None if facts is None else EndedBy(facts.get("cause", EndedBy.STOP))

    def stop_asked(self) -> tuple[float, float] | None:
        """Return when the end was requested, UTC seconds, and its grace period; None if it was not."""
        path = self.path / shim.STOP
        facts = shim.read_facts(str(path))
        return None if facts is None else (path.stat().st_mtime, float(facts.get("grace_s", 0.0)))

    def started(self) -> dict[str, str] | None:
        """Return what the shim wrote before it let the command run; None if it has not."""
        return shim.read_facts(str(self.path / shim.STARTED))

    def exit(self) -> Exit | None:
        """Return how the rank ended; None while anything of it is running, or before it has run."""
        facts = shim.read_facts(str(self.path / shim.EXITED))
        if facts is None:
            return None
        code = int(facts.get("code", -signal.SIGKILL))
        detail = " ".join(filter(None, (facts.get("detail", ""), _memory_words(facts, code))))
        return Exit(
            code=code,
            ended_by=EndedBy(facts.get("ended_by", EndedBy.HOST)),
            detail=detail or (f"ended by {shim.signal_name(-code)}" if code < 0 else ""),
            ended_at=datetime.fromtimestamp(float(facts.get("ended_at", time.time())), UTC),
        )

    def is_held(self) -> bool:
        """Return whether a shim runs here. Only for started ranks, because checking takes the lock for a moment."""
        with self._locked() as is_free:
            return not is_free

    def end_unstarted(self, code: int, ended_by: EndedBy, detail: str) -> bool:
        """Write an end for a rank that has not started, so that it never will; return False if a shim runs it."""
        with self._locked() as is_free:
            if not is_free or self.started() is not None:
                return False
            self._write_exit(code, ended_by, detail)
            return True

    def end_after_dead_shim(self) -> None:
        """Kill what a dead shim has left running, remove its secret files, and write the end in its place."""
        with self._locked() as is_free:
            if not is_free or self.exit() is not None:
                return
            killed = kill_marked(f"WATTSHIFT_PROGRESS_FILE={self.progress_file}")
            remove_secrets(self.path)
            started = self.started() or {}
            if not started:  # its log says why: it prints only when it fails
                said = _content(self.path / SHIM_LOG).decode(errors="replace").strip()[-500:]
                why = f"the process that supervises the rank did not start: {said}"
            elif started.get("kernel_boot", "") != shim.kernel_boot():
                why = "the host restarted"
            else:
                why = "the process that supervises the rank was killed"
            log.warning("rank.shim_dead", folder=self.path.name, leftovers=killed, why=why)
            self._write_exit(-signal.SIGKILL, EndedBy.HOST, why)

    def keep_posted(self, report: bytes) -> None:
        """Store what the job posted, for the next agent; if it is lost, the job will post again."""
        with suppress(OSError):
            files.replace(self.path / POSTED, report, durable=False)

    def posted(self) -> bytes:
        """Return what the job posted last; empty if it has posted nothing."""
        return _content(self.path / POSTED)

    def release(self) -> None:
        """Remove the rank's secrets, and then mark it as finished; its folder is kept only for its logs."""
        remove_secrets(self.path)
        for path in (self.path / shim.SPEC, *self.path.glob(f"{ENV_FILE}*")):  # the job's own secrets
            path.unlink(missing_ok=True)
        (self.path / RELEASED).touch()

    def is_released(self) -> bool:
        """Return whether the folder is kept only for its logs."""
        return (self.path / RELEASED).exists()

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock, and yield whether that is possible: the shim holds it for as long as it lives."""
        descriptor = os.open(self.path / shim.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        is_free = False
        try:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            yield is_free
        finally:
            os.close(descriptor)

    def _write_exit(self, code: int, ended_by: EndedBy, detail: str) -> None:
        facts = {"code": code, "ended_by": ended_by.value, "detail": detail, "ended_at": time.time()}
        shim.write_facts(str(self.path / shim.EXITED), facts)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _pass_on(pipe: IO[bytes], data: bytes) -> None:
    with suppress(OSError), pipe:  # a shim that has ended reads nothing, and its log says why
        pipe.write(data)


def _memory_words(facts: Mapping[str, str], code: int) -> str:
    """Return a sentence on processes killed for lack of memory, and whose limit was the cause; empty if none was."""
    if "memory_peak" not in facts:
        return ""
    is_alone = code == -signal.SIGKILL and not facts.get("detail")
    who = "It was killed" if is_alone else "One of its processes was killed"
    peak, limit = (int(facts.get(name, 0)) / 2**30 for name in ("memory_peak", "memory_limit"))
    peak_words = f"peak {peak:,.1f} GiB" if peak else "peak unknown"
    if limit:
        return f"{who} because it {OUT_OF_MEMORY} of {limit:,.1f} GiB ({peak_words})."
    return f"{who} because its node was short of memory; its own limit was not reached ({peak_words})."
