"""Whose process listens on the port of a server: that of its rank, or somebody else's. Linux only.

The kernel lists the sockets that listen, each with its inode; a process holds a socket if one of its file descriptors
leads to that inode. A rank's processes are the descendants of its shim, which takes in those whose parents end, and
those of its container.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_agent.containers import Engine, container_name
from gpu_agent.gangs import Gang
from services.contracts.nodes import Listener, RankState

PROC = Path("/proc")
_TABLES = ("net/tcp", "net/tcp6")
_LISTENS = "0A"
_INSPECT_S = 5.0


@dataclass(frozen=True)
class Port:
    """A port that is a rank's, and the processes from which all of the rank's descend."""

    number: int
    roots: frozenset[int]


class Ports:
    """Finds the ports of the servers that run on this node."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine
        self._containers: dict[str, int] = {}

    def who_listens(self, gangs: Iterable[Gang]) -> dict[str, Listener]:
        """Return who listens on their ports, by allocation."""
        return who_listens(self.of(gangs))

    def of(self, gangs: Iterable[Gang]) -> dict[str, Port]:
        """Return them by allocation; the engine is asked once about each container."""
        found: dict[str, Port] = {}
        for gang in gangs:
            start = gang.start
            if start is None or start.spec.service is None or start.node_rank or gang.state is not RankState.RUNNING:
                continue
            roots = {gang.shim_pid} - {0}
            if start.spec.image is not None and self._engine is not None:
                name = container_name(start)
                first = self._containers.get(name) or _first_process(self._engine, name)
                if first is None:  # what is not known of its processes cannot be held against whoever listens
                    roots = set()
                else:
                    self._containers[name] = first
                    roots.add(first)
            found[gang.allocation_id] = Port(start.master_port, frozenset(roots))
        return found


def who_listens(ports: Mapping[str, Port], proc: Path = PROC) -> dict[str, Listener]:
    """Return who listens on each port. What looks foreign is looked at twice: processes come and go meanwhile."""
    found = _look(ports, proc)
    doubtful = {name: ports[name] for name, who in found.items() if who in (Listener.FOREIGN, Listener.UNCHECKED)}
    return found | _look(doubtful, proc) if doubtful else found


def _look(ports: Mapping[str, Port], proc: Path) -> dict[str, Listener]:
    sockets = _listening(proc)
    if sockets is None:
        return dict.fromkeys(ports, Listener.UNCHECKED)
    try:
        children = _children(proc) if any(port.number in sockets for port in ports.values()) else {}
    except OSError:
        return dict.fromkeys(ports, Listener.UNCHECKED)
    return {name: _who(port, sockets.get(port.number, set()), children, proc) for name, port in ports.items()}


def _who(port: Port, inodes: set[str], children: Mapping[int, list[int]], proc: Path) -> Listener:
    if not inodes:
        return Listener.NONE
    missing, is_hidden = set(inodes), False
    waiting = list(port.roots)
    while waiting and missing:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            missing -= _sockets(proc / str(pid) / "fd")
        except PermissionError:
            is_hidden = True
        except OSError:
            continue  # it has ended
    if not missing:
        return Listener.OWN
    return Listener.UNCHECKED if is_hidden or not port.roots else Listener.FOREIGN


def _listening(proc: Path) -> dict[int, set[str]] | None:
    """Return the inodes of the sockets that listen, by port; None if the kernel does not say."""
    found: dict[int, set[str]] = {}
    read = 0
    for table in _TABLES:
        try:
            lines = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        read += 1
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENS:
                found.setdefault(int(fields[1].rpartition(":")[2], 16), set()).add(fields[9])
    return found if read else None


def _children(proc: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in os.listdir(proc):
        if name.isdecimal():
            try:
                fields = (proc / name / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _sockets(folder: Path) -> set[str]:
    """Return the inodes of a process's sockets.

    Raises:
        OSError: They cannot be read.
    """
    found: set[str] = set()
    for name in os.listdir(folder):
        try:
            target = os.readlink(folder / name)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _first_process(engine: Engine, name: str) -> int | None:
    """Return the first process of a container; None if its engine does not say."""
    command = [engine.program, "inspect", "--format", "{{.State.Pid}}", name]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_INSPECT_S, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return None
    pid = answer.stdout.strip()
    return int(pid) if answer.returncode == 0 and pid.isdecimal() and pid != "0" else None
