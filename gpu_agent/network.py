"""What a job may connect to on this host, and which ports it may bind: BPF programs on its version 2 control group.

Jobs are on the host's network, as gangs that span nodes, NCCL and RDMA need; traffic that leaves the host is not
filtered. Of the traffic that stays on it (routed to the loopback device by the kernel), a job may open connections and
send datagrams or other packets only to sockets of jobs of the same account, and to ports that jobs may reach. Each
socket of a job is marked with its account when it is made, in a map that all agents of the host share; the map lasts as
long as any job runs whose programs use it, even while no agent does.
"""

import ctypes
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from gpu_agent import bpf
from gpu_agent.bpf import Instruction, op

MARKS = "wattshift_jobs"
MOUNT = Path("/run/wattshift/cgroup")
"""Where an agent mounts control groups of version 2 if the host does not: root's alone, shared by the host's agents."""
_SKB, _SOCK, _SOCK_ADDRESS = 8, 9, 18
_EGRESS, _SOCK_CREATE, _BINDS, _CONNECTS = 1, 2, (8, 9), {4: 10, 6: 11}
_LOAD_BYTES, _WHO, _LOOKUP, _RELEASE, _MARK = 26, 15, {"tcp": 84, "udp": 85}, 86, 107
_TCP, _UDP, _MPTCP, _ICMP = 6, 17, 262, {4: 1, 6: 58}
_LOOPBACK_DEVICE = 1
_STACK = 10
_TUPLE = -48
_TRY_S = 20.0
# Its arguments: the file with the processes of a group, a port where a process outside of it listens, and a user id.
_TRY = """
import os, socket, sys
with open(sys.argv[1], "w") as group:
    group.write("0")
os.setuid(int(sys.argv[3]))
own = socket.create_server(("127.0.0.1", 0))
socket.socket().connect(own.getsockname())
other = socket.socket()
other.settimeout(1)
try:
    other.connect(("127.0.0.1", int(sys.argv[2])))
except PermissionError:
    sys.exit(0)
sys.exit("connections of jobs are not stopped")
"""


@dataclass(frozen=True)
class Rules:
    """The rules for all jobs of a node."""

    reachable: tuple[int, ...]  #: Ports of this host that jobs may reach, whoever listens there
    kept: tuple[int, ...]  #: Ports that no job may bind
    of_gangs: tuple[int, int]  #: First and last of the gangs' ports; each gang gets one, which only it may bind


class Network:
    def __init__(self, rules: Rules) -> None:
        """Load what all jobs share; ``OSError`` if the kernel has no such programs, or not for this process."""
        self._rules = rules
        marks = bpf.socket_map(MARKS)
        ports = sorted(set(rules.reachable))
        programs = [(_SOCK, _SOCK_CREATE, mark_program(marks)), (_SKB, _EGRESS, egress_program(marks, ports))]
        connects = _CONNECTS.items()
        programs += [(_SOCK_ADDRESS, kind, connect_program(marks, ports, version)) for version, kind in connects]
        self._programs = [(kind, bpf.load(group, kind, bpf.assembled(code))) for group, kind, code in programs]
        os.close(marks)  # the programs have it

    def attach(self, group: Path, own: int) -> None:
        for kind, program in self._programs:
            bpf.attach(group, kind, program)
        code = bpf.assembled(bind_program(self._rules.kept, own, self._rules.of_gangs))
        for kind in _BINDS:
            program = bpf.load(_SOCK_ADDRESS, kind, code)
            try:
                bpf.attach(group, kind, program)
            finally:
                os.close(program)


def hierarchy(root: Path, mount: Path = MOUNT) -> Path:
    """Return the version 2 hierarchy of control groups on a host with version 1, mounting it if need be."""
    if os.access(root / "unified" / "cgroup.procs", os.W_OK):
        return root / "unified"
    mount.parent.mkdir(mode=0o700, exist_ok=True)
    mount.mkdir(mode=0o700, exist_ok=True)
    if not os.path.ismount(mount):
        library = ctypes.CDLL(None, use_errno=True)
        failed = library.mount(b"none", os.fsencode(mount), b"cgroup2", ctypes.c_ulong(0), None)
        number = ctypes.get_errno()
        if failed and not os.path.ismount(mount):  # by another agent that began at the same time
            raise OSError(number, f"control groups of version 2 cannot be mounted: {os.strerror(number)}", str(mount))
    return mount


def lack(network: Network, group: Path, user_id: int) -> str:
    """Return why the rules, although loaded, do not hold on this host, found out by trying; empty if they do."""
    group.mkdir(exist_ok=True)
    try:
        network.attach(group, 0)
        with socket.create_server(("127.0.0.1", 0)) as outside:
            facts = [str(group / "cgroup.procs"), str(outside.getsockname()[1]), str(user_id)]
            words = [sys.executable, "-I", "-S", "-c", _TRY, *facts]
            tried = subprocess.run(words, capture_output=True, text=True, env={}, timeout=_TRY_S, check=False)
        said = tried.stderr.strip().rpartition("\n")[2]
        return (said or f"who tries to connect ends with {tried.returncode}") if tried.returncode else ""
    except subprocess.TimeoutExpired:
        return f"who tries to connect gets no answer within {_TRY_S:g} s"
    finally:
        group.rmdir()


def mark_program(marks: int) -> list[Instruction]:
    """Return the program that marks a new socket with the account that makes it.

    It refuses MPTCP sockets: those listen and connect through others, which the kernel makes without a mark.
    """
    return [
        op(bpf.LOAD, 2, 1, 12),  # protocol
        op(bpf.IF_EQUAL, 2, 0, "no", _MPTCP),
        op(bpf.MOVE, 6, 1),
        op(bpf.CALL, value=_WHO),
        op(bpf.STORE, _STACK, 0, -8),  # the user id is the lower half
        *bpf.load_map(1, marks),
        op(bpf.MOVE, 2, 6),
        op(bpf.MOVE, 3, _STACK),
        op(bpf.ADD_VALUE, 3, value=-8),
        op(bpf.MOVE_VALUE, 4, value=1),  # make it
        op(bpf.CALL, value=_MARK),
        *bpf.YES_OR_NO,
    ]


def egress_program(marks: int, reachable: Iterable[int]) -> list[Instruction]:
    """Return the program that decides on each packet that a job's socket sends."""
    ports = list(reachable)
    return [
        op(bpf.LOAD, 2, 1, 40),  # ifindex
        op(bpf.IF_NOT, 2, 0, "yes", _LOOPBACK_DEVICE),
        op(bpf.MOVE, 6, 1),
        op(bpf.LOAD, 2, 1, 16),  # protocol
        op(bpf.TO_NETWORK, 2, value=16),
        op(bpf.IF_EQUAL, 2, 0, "6", 0x86DD),
        op(bpf.IF_NOT, 2, 0, "no", 0x0800),
        *_packet(marks, ports, 4),
        "6",
        *_packet(marks, ports, 6),
        *bpf.YES_OR_NO,
    ]


def connect_program(marks: int, reachable: Iterable[int], version: int) -> list[Instruction]:
    """Return the program that refuses forbidden connections at once, which the egress program would merely stall.

    It knows only the loopback addresses.
    """
    code = [op(bpf.MOVE, 6, 1), op(bpf.LOAD, 2, 6, 36), op(bpf.IF_NOT, 2, 0, "yes", _TCP)]
    words = _tuple_bytes(version) // 4
    code += [op(bpf.STORE_VALUE, _STACK, 0, _TUPLE + 4 * word) for word in range(words)]
    if version == 4:
        loopback = struct.unpack("I", socket.inet_aton("127.0.0.1"))[0]
        code += [
            op(bpf.LOAD, 2, 6, 4),
            op(bpf.IF_NOT, 2, 0, "named", 0),
            op(bpf.MOVE_VALUE, 2, value=loopback),
            "named",
            op(bpf.STORE, _STACK, 2, _TUPLE + 4),
            op(bpf.AND_VALUE, 2, value=0xFF),
            op(bpf.IF_NOT, 2, 0, "yes", 127),
        ]
    else:
        one = struct.unpack("I", b"\0\0\0\1")[0]
        for at in (8, 12, 16):
            code += [op(bpf.LOAD, 2, 6, at), op(bpf.IF_NOT, 2, 0, "yes", 0)]
        code += [
            op(bpf.LOAD, 2, 6, 20),
            op(bpf.IF_EQUAL, 2, 0, "local", 0),
            op(bpf.IF_NOT, 2, 0, "yes", one),
            "local",
            op(bpf.STORE_VALUE, _STACK, 0, _TUPLE + 28, one),
        ]
    code += [op(bpf.LOAD, 2, 6, 24), op(bpf.STORE_HALF, _STACK, 2, _TUPLE + _tuple_bytes(version) - 2)]
    return code + _destination(marks, list(reachable), version, "tcp", sender_at=64) + [*bpf.YES_OR_NO]


def bind_program(kept: Collection[int], own: int, others: tuple[int, int]) -> list[Instruction]:
    """Return the program that refuses to bind reserved ports, and gangs' ports other than the gang's own."""
    first, last = others
    return [
        op(bpf.LOAD, 2, 1, 24),
        op(bpf.TO_NETWORK, 2, value=16),
        *(op(bpf.IF_EQUAL, 2, 0, "no", port) for port in sorted(kept)),
        op(bpf.IF_EQUAL, 2, 0, "yes", own),
        op(bpf.IF_BELOW, 2, 0, "yes", max(first, 1)),
        op(bpf.IF_ABOVE, 2, 0, "yes", last),
        op(bpf.GO, at="no"),
        *bpf.YES_OR_NO,
    ]


def _tuple_bytes(version: int) -> int:
    return 12 if version == 4 else 36


def _packet(marks: int, ports: list[int], version: int) -> list[Instruction]:
    """Return the instructions that decide on a packet of one IP version that stays on this host.

    Addresses and ports are placed side by side, as the kernel's lookup expects them.
    """
    header, addresses_at, protocol_at = (20, 12, 9) if version == 4 else (40, 8, 6)
    return [
        *_bytes(0, 1, -8),
        op(bpf.LOAD_BYTE, 2, _STACK, -8),
        *([op(bpf.IF_NOT, 2, 0, "no", 0x45)] if version == 4 else []),  # with options, the ports are elsewhere
        *_bytes(protocol_at, 1, -8),
        op(bpf.LOAD_BYTE, 7, _STACK, -8),
        op(bpf.IF_EQUAL, 7, 0, "yes", _ICMP[version]),
        *_bytes(addresses_at, _tuple_bytes(version), _TUPLE),
        op(bpf.IF_EQUAL, 7, 0, f"udp{version}", _UDP),
        op(bpf.IF_NOT, 7, 0, "no", _TCP),
        *_bytes(header + 13, 1, -8),
        op(bpf.LOAD_BYTE, 2, _STACK, -8),
        op(bpf.AND_VALUE, 2, value=0x12),
        op(bpf.IF_NOT, 2, 0, "yes", 0x02),  # it begins no connection
        *_destination(marks, ports, version, "tcp", sender_at=168),
        f"udp{version}",
        *_destination(marks, ports, version, "udp", sender_at=168),
    ]


def _destination(marks: int, ports: list[int], version: int, protocol: str, sender_at: int) -> list[Instruction]:
    """Return the instructions that allow a destination socket if there is none, or if the sender's account owns it."""
    mark = f"mark{version}{protocol}"
    return [
        op(bpf.LOAD_HALF, 2, _STACK, _TUPLE + _tuple_bytes(version) - 2),
        op(bpf.TO_NETWORK, 2, value=16),
        *(op(bpf.IF_EQUAL, 2, 0, "yes", port) for port in ports),
        op(bpf.MOVE, 1, 6),
        op(bpf.MOVE, 2, _STACK),
        op(bpf.ADD_VALUE, 2, value=_TUPLE),
        op(bpf.MOVE_VALUE, 3, value=_tuple_bytes(version)),
        op(bpf.MOVE_VALUE, 4, value=-1),
        op(bpf.MOVE_VALUE, 5),
        op(bpf.CALL, value=_LOOKUP[protocol]),
        op(bpf.IF_EQUAL, 0, 0, "yes", 0),
        op(bpf.MOVE, 7, 0),
        op(bpf.MOVE_VALUE, 8),
        *_mark_of(marks, 7),
        op(bpf.IF_EQUAL, 0, 0, mark, 0),
        op(bpf.LOAD, 8, 0, 0),
        mark,
        op(bpf.MOVE, 1, 7),
        op(bpf.CALL, value=_RELEASE),
        op(bpf.IF_EQUAL, 8, 0, "no", 0),
        op(bpf.LOAD_LONG, 7, 6, sender_at),
        op(bpf.IF_EQUAL, 7, 0, "no", 0),
        *_mark_of(marks, 7),
        op(bpf.IF_EQUAL, 0, 0, "no", 0),
        op(bpf.LOAD, 0, 0, 0),
        op(bpf.IF_SAME, 0, 8, "yes"),
        op(bpf.GO, at="no"),
    ]


def _mark_of(marks: int, sock: int) -> list[Instruction]:
    return [
        *bpf.load_map(1, marks),
        op(bpf.MOVE, 2, sock),
        op(bpf.MOVE_VALUE, 3),
        op(bpf.MOVE_VALUE, 4),
        op(bpf.CALL, value=_MARK),
    ]


def _bytes(at: int, count: int, to: int) -> list[Instruction]:
    return [
        op(bpf.MOVE, 1, 6),
        op(bpf.MOVE_VALUE, 2, value=at),
        op(bpf.MOVE, 3, _STACK),
        op(bpf.ADD_VALUE, 3, value=to),
        op(bpf.MOVE_VALUE, 4, value=count),
        op(bpf.CALL, value=_LOAD_BYTES),
        op(bpf.IF_NOT, 0, 0, "no", 0),
    ]
