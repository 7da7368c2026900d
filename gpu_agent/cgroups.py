"""Control groups for jobs: memory, number of processes, weights, accessible GPUs. Version 2, else version 1.

All ranks of this node share a parent group, whose name is derived from the node's state folder; each rank has its own
group in it. ``sweep`` kills and removes what finished ranks and killed agents leave behind.
"""

import errno
import hashlib
import os
import signal
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpu_agent import bpf, network
from gpu_agent.bpf import op
from services.kit.logging import Log

log = Log(__name__)

ROOT = Path("/sys/fs/cgroup")
PROCESSES = "cgroup.procs"
_WANTED = ("memory", "pids", "devices", "cpu", "io")
_V1_NAMES = {"io": "blkio"}
_SHARES, _MOST_SHARES = 1024, 262_144
"""``cpu.shares`` of a process that is in no group of its own, and the most there may be."""
_DISKS = Path("/sys/block")


@dataclass(frozen=True)
class Limits:
    """What one job may use on this node."""

    memory_bytes: int  #: The memory of this job alone
    all_memory_bytes: int  #: The memory of all jobs together, so that some is left for the system and the agent
    processes: int  #: The number of processes and threads


class Cgroups:
    """The groups of one node's jobs; ``state_folder``: the node's state folder; no two nodes have the same."""

    def __init__(self, state_folder: Path, limits: Limits, root: Path = ROOT) -> None:
        self._name = f"wattshift-{hashlib.sha256(os.fsencode(state_folder)).hexdigest()[:16]}"
        self.limits = limits
        self._root = root
        self._is_unified = "memory" in _read(root / "cgroup.controllers").split()
        self._memory_file = "memory.max" if self._is_unified else "memory.limit_in_bytes"
        self._parents: dict[str, Path] = {}
        self._network: network.Network | None = None
        self.lacking: dict[str, str] = {}  #: Why there is none, by controller

    def prepare(self) -> None:
        """Make the parent groups where this process may."""
        for controller in _WANTED:
            try:
                if controller == "io" and (why := self._why_no_io()):
                    raise OSError(errno.ENOTSUP, why, str(_DISKS))
                prepare = self._prepare_unified if self._is_unified else self._prepare_v1
                self._parents[controller] = prepare(controller)
            except OSError as error:
                self.lacking[controller] = f"{error.filename or self._root}: {error.strerror or error}"
        self._set(self._parents.get("memory"), self._memory_file, str(self.limits.all_memory_bytes), "memory")
        if not self._is_unified:  # where it competes with single processes: all jobs together as one for each CPU
            self._set(self._parents.get("cpu"), "cpu.shares", _shares(os.cpu_count() or 1), "cpu")
        if self._is_unified and "devices" in self._parents and (why := _try_device_program(self._parents["devices"])):
            self.lacking["devices"] = why
            del self._parents["devices"]

    def prepare_network(self, rules: network.Rules, user_id: int) -> None:
        """Make the parent of the groups whose connections are filtered; ``user_id`` is a job's, to test the rules."""
        try:
            parent = (self._root if self._is_unified else network.hierarchy(self._root)) / self._name
            parent.mkdir(exist_ok=True)
            loaded = network.Network(rules)
            if why := network.lack(loaded, parent / "probe-network", user_id):
                self.lacking["network"] = why
            else:
                self._network, self._parents["network"] = loaded, parent
        except OSError as error:
            self.lacking["network"] = str(error)

    @property
    def version(self) -> str:
        return "cgroup v2" if self._is_unified else "cgroup v1"

    def has(self, controller: str) -> bool:
        return controller in self._parents

    def make(self, rank: str, denied: Sequence[tuple[int, int]], gpus: float = 1.0, port: int = 0) -> list[Path]:
        """Make the group of a rank and return the files that its processes must write themselves into.

        Args:
            denied: Major and minor numbers of character devices that it must not open.
            gpus: Its number of GPUs, which weighs it against other ranks when CPU or I/O is short.

        Raises:
            OSError: The group cannot be made, or a limit cannot be set.
        """
        groups = {controller: parent / rank for controller, parent in self._parents.items()}
        for group in groups.values():
            group.mkdir(exist_ok=True)
        if "memory" in groups:
            (groups["memory"] / self._memory_file).write_text(str(self.limits.memory_bytes))
        if "pids" in groups:
            (groups["pids"] / "pids.max").write_text(str(self.limits.processes))
        for controller, file, value in self._weight_files(gpus):
            if controller in groups and (groups[controller] / file).exists():
                self._set(groups[controller], file, value, controller)
        if "devices" in groups and denied:
            if self._is_unified:
                attach_device_program(groups["devices"], denied)
            else:
                for major, minor in denied:
                    (groups["devices"] / "devices.deny").write_text(f"c {major}:{minor} rwm")
        if self._network is not None:
            self._network.attach(groups["network"], port)
        return [group / PROCESSES for group in dict.fromkeys(groups.values())]

    def processes_of(self, rank: str) -> Path | None:
        """Return the file that lists the processes of a rank; None if it has no group."""
        files = (parent / rank / PROCESSES for parent in self._parents.values())
        return next((file for file in files if file.exists()), None)

    def sweep(self, running: Collection[str]) -> None:
        """Kill the remains of ranks that are not running and remove their groups."""
        for parent in dict.fromkeys(self._parents.values()):
            _sweep(parent, running)

    def close(self) -> None:
        """Remove the parent groups if no rank is running."""
        for parent in dict.fromkeys(self._parents.values()):
            with suppress(OSError):
                parent.rmdir()

    def sweep_everywhere(self, running: Collection[str]) -> None:
        """Sweep also the groups of an earlier agent that was started elsewhere in the hierarchy."""
        for parent in (*_found(self._root, self._name, depth=6), network.MOUNT / self._name):
            _sweep(parent, running)
            if parent not in self._parents.values():
                with suppress(OSError):
                    parent.rmdir()

    def _weight_files(self, gpus: float) -> list[tuple[str, str, str]]:
        weight = max(round(100 * gpus), 1)
        of_bfq = ("io", "io.bfq.weight" if self._is_unified else "blkio.bfq.weight", str(min(weight, 1_000)))
        if self._is_unified:
            return [(each, f"{each}.weight", str(min(weight, 10_000))) for each in ("cpu", "io")] + [of_bfq]
        return [("cpu", "cpu.shares", _shares(gpus)), of_bfq]

    def _set(self, parent: Path | None, file: str, value: str, controller: str) -> None:
        if parent is None:
            return
        try:
            (parent / file).write_text(value)
        except OSError as error:
            log.warning("cgroup.not_limited", controller=controller, error=str(error))

    def _why_no_io(self) -> str:
        """Return why no disk of this host honours I/O weights; empty if one does."""
        schedulers = [_read(path) for path in _DISKS.glob("*/queue/scheduler")]
        by_cost = self._is_unified and "enable=1" in _read(self._root / "io.cost.qos")
        return "" if by_cost or any("[bfq]" in each for each in schedulers) else "no disk's scheduler weighs jobs (bfq)"

    def _prepare_unified(self, controller: str) -> Path:
        """Make the parent below the root of the hierarchy, with a controller enabled for ranks."""
        wanted = {"memory", "pids", controller} - {"devices"}  # for those there is none, but a program
        control = self._root / "cgroup.subtree_control"
        if not wanted <= set(_read(control).split()):
            control.write_text(" ".join(f"+{name}" for name in sorted(wanted)))
        parent = self._root / self._name
        parent.mkdir(exist_ok=True)
        (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(wanted)))
        return parent

    def _prepare_v1(self, controller: str) -> Path:
        """Make the parent below this process's own group, so that this group's limits hold for jobs too."""
        controller = _V1_NAMES.get(controller, controller)
        hierarchy = self._root / controller
        if not hierarchy.is_dir():
            raise OSError(errno.ENOENT, "there is no such control group hierarchy", str(hierarchy))
        own = hierarchy / _own_group(controller).lstrip("/")
        parent = (own if own.is_dir() else hierarchy) / self._name
        parent.mkdir(exist_ok=True)
        return parent


def _shares(processes: float) -> str:
    return str(min(max(round(_SHARES * processes), 2), _MOST_SHARES))


def _own_group(controller: str) -> str:
    """Return this process's version 1 group, without a trailing group of ours."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path.partition("/wattshift-")[0]
    return "/"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as found:  # which knows what is a folder: a host may have ten thousands of groups
            return [parent / each.name for each in found if each.is_dir()]
    except OSError:
        return []


def _found(folder: Path, name: str, depth: int) -> Iterable[Path]:
    for path in _folders(folder):
        if path.name == name:
            yield path
        elif depth:
            yield from _found(path, name, depth - 1)


def _sweep(parent: Path, running: Collection[str]) -> None:
    """Kill all processes of the groups in a group, and remove those in which none is still exiting."""
    for group in _folders(parent):
        if group.name not in running:
            _sweep(group, ())  # a job cannot make groups in its own, but a container engine could
            with suppress(OSError):
                (group / "cgroup.kill").write_text("1")
            for pid in _read(group / PROCESSES).split():
                with suppress(OSError, ValueError):
                    os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):
                group.rmdir()


# --- version 2 has no file for devices: a program decides


def device_program(denied: Iterable[tuple[int, int]]) -> bytes:
    """Return the BPF program that denies the character devices with these numbers and allows all others."""
    # r2: type in the low half, 2 is a character device; r3: major; r4: minor
    code = [op(bpf.LOAD, 2, 1, 0), op(bpf.AND_VALUE, 2, value=0xFFFF), op(bpf.IF_NOT, 2, 0, "yes", 2)]
    code += [op(bpf.LOAD, 3, 1, 4), op(bpf.LOAD, 4, 1, 8)]
    for major, minor in denied:
        code += [op(bpf.IF_NOT, 3, 0, 1, major), op(bpf.IF_EQUAL, 4, 0, "no", minor)]
    return bpf.assembled([*code, *bpf.YES_OR_NO])


def attach_device_program(group: Path, denied: Sequence[tuple[int, int]]) -> None:
    """Let a BPF program decide which devices a group may open; it lives as long as the group."""
    loaded = bpf.load(15, 6, device_program(denied))  # BPF_PROG_TYPE_CGROUP_DEVICE, BPF_CGROUP_DEVICE
    try:
        bpf.attach(group, 6, loaded)
    finally:
        os.close(loaded)


def _try_device_program(parent: Path) -> str:
    """Return why no program can be attached here; empty if one can."""
    group = parent / "probe"
    try:
        group.mkdir(exist_ok=True)
        attach_device_program(group, [(1, 11)])
    except OSError as error:
        return f"bpf: {error.strerror}"
    finally:
        with suppress(OSError):
            group.rmdir()
    return ""
