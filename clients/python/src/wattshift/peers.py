"""Who answers on this machine's own addresses, so that no secret goes to somebody who merely took a free port.

TLS proves who answers. With plain HTTP, the kernel is asked (on Linux) which account holds the other end of a
connection, if that is on this machine, before anything is sent: root, system accounts and the caller's own are trusted.
To other machines, and on other systems, plain HTTP means that the network is trusted.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import pwd
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from wattshift.errors import WattshiftError

ACCOUNT = "WATTSHIFT_CONTROL_ACCOUNT"
"""The variable that names an account which runs the control plane on this machine, if it is an ordinary one."""

SYSTEM_ACCOUNTS = range(1_000)
"""Root, and those that root made for services: no user's, and no job's."""

_SOCK_DIAG, _LISTENS = 20, 10
_OPENED = "connection.connect_tcp.complete"
_ANY_STATE = 0xFFFFFFFF
_NO_COOKIE = b"\xff" * 8

Address = tuple[str, int]


class StrangerError(WattshiftError):
    """A port of this machine is held by an account that is not trusted; nothing was sent to it."""


def check_peer(here: Address, there: Address, trusted: Collection[int] = ()) -> None:
    """Check that the other end of a connection is held by a trusted account, or is not on this machine.

    Args:
        here: This end's address and port.
        there: The other end's.
        trusted: Further user ids to trust.

    Raises:
        StrangerError: The other end belongs to somebody else.
    """
    if sys.platform != "linux":
        return
    # The listener first: a connection that nobody has accepted yet has no owner, and is whoever's listens.
    listener, connection = _holder(there, None), _holder(there, here)
    if connection is None:  # on another machine, or wherever root has this address lead
        return
    holder = connection if connection.inode else listener
    if holder is None:  # it was closed, and nobody can read from it
        return
    account = holder.user
    if account in SYSTEM_ACCOUNTS or account in (os.geteuid(), *trusted) or account == _named():
        return
    try:
        name = f"the account {pwd.getpwuid(account).pw_name}"
    except KeyError:
        name = f"the user id {account}"
    raise StrangerError(
        f"{name} listens on port {there[1]} of this machine, and nothing was sent there: it is not root's, the "
        f"system's or yours. If it runs the control plane, set {ACCOUNT} to it"
    )


class Guard:
    """Has an httpx client check whom it has reached before it sends a request by plain HTTP."""

    def __init__(self, trusted: Collection[int] = ()) -> None:
        self._trusted = trusted

    def __call__(self, request: Any) -> None:
        """Watch over the connection that a request may open; a hook of httpx."""
        if request.url.scheme == "http":
            request.extensions["trace"] = self._look

    def _look(self, event: str, found: dict[str, Any]) -> None:
        if event == _OPENED:
            try:
                _check(found["return_value"], self._trusted)
            except BaseException:
                found["return_value"].close()
                raise


class AsyncGuard:
    """``Guard`` for an asynchronous client."""

    def __init__(self, trusted: Collection[int] = ()) -> None:
        self._trusted = trusted

    async def __call__(self, request: Any) -> None:
        """Do what ``Guard`` does."""
        if request.url.scheme == "http":
            request.extensions["trace"] = self._look

    async def _look(self, event: str, found: dict[str, Any]) -> None:
        if event == _OPENED:
            try:
                _check(found["return_value"], self._trusted)
            except BaseException:
                await found["return_value"].aclose()
                raise


def _check(stream: Any, trusted: Collection[int]) -> None:
    here, there = (stream.get_extra_info(name) for name in ("client_addr", "server_addr"))
    check_peer(here[:2], there[:2], trusted)


def _named() -> int | None:
    name = os.environ.get(ACCOUNT, "")
    if not name or name.isdecimal():
        return int(name) if name else None
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise StrangerError(f"{ACCOUNT}={name}: this machine has no such account") from None


@dataclass(frozen=True)
class Holder:
    """The account of a socket, and its inode: 0 while no process has it."""

    user: int
    inode: int


def _holder(at: Address, other: Address | None) -> Holder | None:
    """Return who holds a socket on this machine; None if there is none, or the kernel cannot say.

    Args:
        at: Its own address.
        other: That of the other end; None for a socket that listens.
    """
    is_v6 = ":" in at[0]
    ends = [(_packed(host), port) for host, port in (at, other or ("::" if is_v6 else "0.0.0.0", 0))]
    sockets = struct.pack("!HH", ends[0][1], ends[1][1]) + ends[0][0] + ends[1][0] + bytes(4) + _NO_COOKIE
    for message in _told(socket.AF_INET6 if is_v6 else socket.AF_INET, _ANY_STATE, sockets):
        if (message[1] == _LISTENS) == (other is None):  # the kernel falls back to whoever listens
            return Holder(*struct.unpack_from("=II", message, 64))
    return None


def listening() -> dict[int, set[int]]:
    """Return the inodes of the TCP sockets that listen on this machine, by port.

    Raises:
        OSError: The kernel does not say.
    """
    found: dict[int, set[int]] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for message in _told(family, 1 << _LISTENS, bytes(48), is_list=True):
            (port,) = struct.unpack_from("!H", message, 4)
            found.setdefault(port, set()).add(struct.unpack_from("=I", message, 68)[0])
    return found


def _told(family: int, states: int, sockets: bytes, *, is_list: bool = False) -> Iterator[bytes]:
    """Yield what the kernel says about TCP sockets (``inet_diag_msg``); nothing if it knows none or cannot say."""
    question = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, states) + sockets
    flags = 0x301 if is_list else 1  # a request; NLM_F_ROOT and NLM_F_MATCH: for all that match
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:  # NETLINK_SOCK_DIAG
            kernel.settimeout(1)
            kernel.send(struct.pack("=IHHII", 16 + len(question), _SOCK_DIAG, flags, 1, 0) + question)
            while True:
                answer = kernel.recv(65_536)
                while answer:
                    size, kind = struct.unpack_from("=IH", answer)
                    if kind != _SOCK_DIAG:
                        return
                    yield answer[16:size]
                    answer = answer[(size + 3) & ~3 :]
                if not is_list:
                    return
    except OSError as error:
        if is_list or error.errno not in (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.EPERM, errno.EACCES):
            raise


def _packed(host: str) -> bytes:
    return ipaddress.ip_address(host.partition("%")[0]).packed.ljust(16, b"\0")
