"""Whose process listens on a server's port: one of its rank, or somebody else's. Linux only.

The kernel lists the sockets that listen, each with its inode; a process holds a socket if one of its file descriptors
leads to that inode. A rank's processes are those of its control group or, where it has none, the descendants of its
shim, which adopts orphans, and those of its container. Who holds a socket is remembered: while that is still true, a
look costs no walk through the node's processes.
"""

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpu_agent.containers import Engine, container_name
from gpu_agent.gangs import Gang
from services.contracts.nodes import Listener, RankState
from wattshift.peers import listening

PROC = Path("/proc")
_TABLES = ("net/tcp", "net/tcp6")
_LISTENS = "0A"
_INSPECT_S = 5.0

Known = dict[str, dict[int, Path]]
"""By the name of a port, the file of the process that holds each of its sockets, by inode."""


@dataclass(frozen=True)
class Port:
    """A port that belongs to a rank."""

    number: int
    roots: frozenset[int]  #: Processes from which all the rank's processes outside its group descend
    group: Path | None = None  #: The file that lists the processes of the rank's control group; None if it has none


class Ports:
    """Finds the ports of the servers that run on this node."""

    def __init__(self, engine: Engine | None, group_of: Callable[[str], Path | None]) -> None:
        """Take a function that returns the file with the processes of a rank's control group."""
        self._engine = engine
        self._group_of = group_of
        self._containers: dict[str, int] = {}
        self._known: Known = {}

    def who_listens(self, gangs: Iterable[Gang]) -> dict[str, Listener]:
        """Return who listens on the servers' ports, by allocation."""
        return who_listens(self.of(gangs), known=self._known)

    def of(self, gangs: Iterable[Gang]) -> dict[str, Port]:
        """Return the ports by allocation; the engine is asked once about each container."""
        found: dict[str, Port] = {}
        known, self._containers = self._containers, {}  # of those that are gone, nothing is kept
        for gang in gangs:
            start = gang.start
            if start is None or not gang.serves or gang.state is not RankState.RUNNING:
                continue
            group = self._group_of(gang.allocation_id)
            roots = {gang.shim_pid} - {0} if group is None else set[int]()
            if start.spec.image is not None and self._engine is not None:
                name = container_name(start)
                first = known.get(name) or _first_process(self._engine, name)
                if first is None:  # what is not known of its processes cannot be held against whoever listens
                    roots, group = set(), None
                else:
                    self._containers[name] = first
                    roots.add(first)
            found[gang.allocation_id] = Port(start.master_port, frozenset(roots), group)
        return found


def who_listens(ports: Mapping[str, Port], proc: Path = PROC, known: Known | None = None) -> dict[str, Listener]:
    """Return who listens on each port. What looks foreign is checked twice, since processes come and go meanwhile.

    Args:
        known: Who was found to hold which socket the last time; it is updated.
    """
    known = {} if known is None else known
    found = _look(ports, proc, known) if ports else {}
    doubtful = {name: ports[name] for name, who in found.items() if who in (Listener.FOREIGN, Listener.UNCHECKED)}
    found |= _look(doubtful, proc, known) if doubtful else {}
    for name in [name for name in known if found.get(name) is not Listener.OWN]:
        del known[name]
    return found


def is_taken(port: int) -> bool:
    """Return whether somebody listens on a port, as far as the kernel says."""
    return bool((_listening(PROC) or {}).get(port))


def _look(ports: Mapping[str, Port], proc: Path, known: Known) -> dict[str, Listener]:
    sockets = _listening(proc)
    if sockets is None:
        return dict.fromkeys(ports, Listener.UNCHECKED)
    found: dict[str, Listener] = {}
    children: dict[int, list[int]] | None = None
    for name, port in ports.items():
        inodes = sockets.get(port.number, set())
        if not inodes:
            found[name] = Listener.NONE
        elif all(_is_held(inode, known.get(name, {}).get(inode), port) for inode in inodes):
            found[name] = Listener.OWN
        else:
            known[name] = {}
            try:
                children = _children(proc) if children is None and port.roots else children
                found[name] = _who(port, inodes, children or {}, proc, known[name])
            except OSError:
                found[name] = Listener.UNCHECKED
    return found


def _is_held(inode: int, holder: Path | None, port: Port) -> bool:
    """Return whether the known holder of a socket still holds it and belongs to the rank."""
    try:
        if holder is None or os.readlink(holder) != f"socket:[{inode}]":
            return False
        return port.group is None or bool(port.roots) or int(holder.parts[-3]) in _members(port.group)
    except OSError:
        return False


def _who(
    port: Port, inodes: set[int], children: Mapping[int, list[int]], proc: Path, holders: dict[int, Path]
) -> Listener:
    """Return whose the sockets of a port are, and add their holders to ``holders``."""
    is_hidden = False
    waiting = [*port.roots, *(() if port.group is None else _members(port.group))]
    while waiting and inodes - holders.keys():
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            held = _sockets(proc / str(pid) / "fd")
        except PermissionError:
            is_hidden = True
        except OSError:
            continue  # it has ended
        else:
            holders |= {inode: held[inode] for inode in inodes & held.keys()}
    if not inodes - holders.keys():
        return Listener.OWN
    return Listener.UNCHECKED if is_hidden or not (port.roots or port.group) else Listener.FOREIGN


def _members(group: Path) -> set[int]:
    return {int(pid) for pid in group.read_text().split()}


def _listening(proc: Path) -> dict[int, set[int]] | None:
    """Return the inodes of the sockets that listen, by port; None if the kernel does not say."""
    if proc is PROC:
        with suppress(OSError):  # its files cost some ms, and more for each connection
            return listening()
    found: dict[int, set[int]] | None = None
    for table in _TABLES:
        with suppress(OSError):
            lines = (proc / table).read_text().splitlines()[1:]
            found = found or {}
            for fields in map(str.split, lines):
                if len(fields) > 9 and fields[3] == _LISTENS:
                    found.setdefault(int(fields[1].rpartition(":")[2], 16), set()).add(int(fields[9]))
    return found


def _children(proc: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir(proc)):
        with suppress(OSError):
            fields = (proc / name / "stat").read_bytes().rpartition(b")")[2].split()
            found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _sockets(folder: Path) -> dict[int, Path]:
    """Return the file descriptors of a process's sockets, by inode."""
    found: dict[int, Path] = {}
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            if (target := os.readlink(folder / name)).startswith("socket:["):
                found[int(target[8:-1])] = folder / name
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
