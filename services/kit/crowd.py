"""Which connections this process keeps, both those that have not shown a valid key yet and all of them.

A newcomer is given the place of the oldest unknown connection that waits for its client, so that nobody can keep others
out by occupying places; a connection whose request is being processed is not ended for another. Nor is one whose
request has come and is to be read, which is the delay of this process, nor one that has just come: who opens a thousand
connections at once needs a moment until it has written to them all. Of these a peer may have more, within a bound. Half
of the files that the process may open are left to what it opens itself.

A peer is an address, for IPv6 a network of 64 bits; a proxy that uvicorn trusts (``FORWARDED_ALLOW_IPS``) stands for
many clients. On loopback, one address is everybody, including jobs of all tenants: once it has used up its share, each
user of the machine counts as a peer. A client of a Unix socket has come through a folder that others cannot enter.
"""

import itertools
import resource
import socket
import struct
import time
from collections.abc import Container, Iterator
from typing import Any, Protocol

from services.kit.logging import Log
from services.kit.networks import is_loopback, peer_network
from services.kit.sockets import BACKLOG

log = Log(__name__)

MOST_OF_PEER, MOST_UNKNOWN = 128, 1_024  #: Unknown connections that wait for their clients
MOST_AT_ONCE = BACKLOG  #: Of a peer, with those that have just come or wait for this process: what the kernel keeps
JUST_S = 10.0  #: As long as a head may take
MOST_UNKNOWN_BYTES = 16 * 1024 * 1024
"""Sent by all unknown connections together in the requests that are under way."""
CONNECTION = "wattshift.connection"  #: Where the state of a request has the number of its connection
LOOPBACK = "loopback"
TELL_S = 60.0
LOOKED_AT, UNREAD_LOOKED_AT = 256, 8  #: If the oldest are all worked on, or are to be read, so are the others
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1


class Guest(Protocol):
    """A connection, as ``services.kit.heads`` documents it."""

    held_bytes: int

    @property
    def waits_for_client(self) -> bool: ...
    @property
    def is_unread(self) -> bool: ...
    @property
    def is_unused(self) -> bool: ...
    def become_known(self) -> None: ...
    def end_now(self) -> None: ...


class Crowd:
    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers = itertools.count()
        self._unknown: dict[int, Guest] = {}
        self._came_s: dict[int, float] = {}
        self._known: dict[int, Guest] = {}
        self._of_peer: dict[str, dict[int, Guest]] = {}
        self._peer_of: dict[int, str] = {}
        self._held_bytes = 0
        self._all_busy_until_s = self._tell_at_s = 0.0
        self._ended = 0

    def enter(self, guest: Guest, transport: Any, proxies: Container[str] = ()) -> int | None:
        """Return the number of a new connection; None if there is no place for it."""
        peer = self._peer(transport, proxies)
        others = self._of_peer.get(peer, {})
        has_place = (
            (not peer or len(others) < MOST_OF_PEER or self._has_room(others, min(MOST_AT_ONCE, self._most // 2)))
            and (
                len(self._unknown) < MOST_UNKNOWN
                or self._has_room(self._unknown, MOST_UNKNOWN + MOST_AT_ONCE)
                or self._end_oldest(self._unknown)
            )
            and (len(self._unknown) + len(self._known) < self._most or self._end_oldest(self._unknown) or self._thin())
        )
        if not has_place:
            self._tell()
            return None
        number = next(self._numbers)
        self._unknown[number], self._came_s[number] = guest, time.monotonic()
        if peer:
            self._of_peer.setdefault(peer, others)[number] = guest
            self._peer_of[number] = peer
        return number

    def know(self, number: int | None) -> None:
        """Count a connection as known from now on, because it has shown a valid key."""
        if number is not None and (guest := self._unknown.get(number)) is not None:
            self.leave(number)
            self._known[number] = guest
            guest.become_known()

    def leave(self, number: int) -> None:
        self._known.pop(number, None)
        self._unknown.pop(number, None)
        self._came_s.pop(number, None)
        peer = self._peer_of.pop(number, None)
        if peer is not None:
            others = self._of_peer[peer]
            del others[number]
            if not others:
                del self._of_peer[peer]

    def hold(self, guest: Guest, held_bytes: int) -> None:
        """Record how much an unknown connection holds now; while the total is too much, end the oldest holding any."""
        self._held_bytes += held_bytes - guest.held_bytes
        guest.held_bytes = held_bytes
        while self._held_bytes > MOST_UNKNOWN_BYTES and self._end_oldest(
            {number: each for number, each in self._unknown.items() if each.held_bytes}
        ):
            pass

    def _has_room(self, others: dict[int, Guest], most: int) -> bool:
        """End the oldest of these that keeps us waiting; if there is none, return whether there may be more."""
        by_s = time.monotonic() - JUST_S
        old = itertools.takewhile(lambda each: self._came_s[each[0]] <= by_s, others.items())
        waiting = (n for n, each in itertools.islice(old, LOOKED_AT) if each.waits_for_client)
        read = (n for n in itertools.islice(waiting, UNREAD_LOOKED_AT) if not others[n].is_unread)
        return self._end(itertools.islice(read, 1)) or len(others) < most

    def _end_oldest(self, among: dict[int, Guest]) -> bool:
        return self._end(itertools.islice((n for n, guest in among.items() if guest.waits_for_client), 1))

    def _thin(self) -> bool:
        """End some known connections that are unused; if all are busy, look again after a second at the earliest."""
        if time.monotonic() < self._all_busy_until_s:
            return False
        unused = (number for number, guest in self._known.items() if guest.is_unused)
        if self._end(itertools.islice(unused, max(1, self._most // 16))):
            return True
        self._all_busy_until_s = time.monotonic() + 1
        return False

    def _end(self, numbers: Iterator[int]) -> bool:
        found = [(number, self._unknown.get(number) or self._known[number]) for number in numbers]
        for number, guest in found:
            self.leave(number)
            self._held_bytes -= guest.held_bytes
            guest.held_bytes = 0
            guest.end_now()
            self._tell()
        return bool(found)

    def _tell(self) -> None:
        self._ended += 1
        if time.monotonic() >= self._tell_at_s:
            self._tell_at_s = time.monotonic() + TELL_S
            fullest = max(self._of_peer, key=lambda peer: len(self._of_peer[peer]), default="")
            log.warning("connections.crowded", ended=self._ended, unknown=len(self._unknown), most_are_of=fullest)

    def _peer(self, transport: Any, proxies: Container[str]) -> str:
        address = transport.get_extra_info("peername")
        if not isinstance(address, tuple) or not address:
            return ""
        host = str(address[0])  # pyright: ignore[reportUnknownArgumentType]
        if is_loopback(host):
            if len(self._of_peer.get(LOOPBACK, ())) < MOST_OF_PEER:
                return LOOPBACK
            return _user_of(address, transport.get_extra_info("sockname"))  # pyright: ignore[reportUnknownArgumentType]
        return "" if host in proxies else peer_network(host)


CROWD = Crowd(resource.getrlimit(resource.RLIMIT_NOFILE)[0] % 2**63 // 2)  #: Of this process, at all ports


def show_known(scope: Any) -> None:
    """Record that the sender of a request has shown a valid key, token or session."""
    if state := scope.get("state"):
        CROWD.know(state.get(CONNECTION))


def _user_of(client: tuple[Any, ...], server: tuple[Any, ...]) -> str:
    """Return which user of this machine owns the client's socket, according to sock_diag(7), given both of its ends."""
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    ends = [socket.inet_pton(family, host).ljust(16, b"\0") for host in (client[0], server[0])]
    request = struct.pack("=BBxxI", family, socket.IPPROTO_TCP, 0xFFFFFFFF)
    request += struct.pack("!HH16s16sI8s", client[1], server[1], *ends, 0, b"\xff" * 8)
    head = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _SOCK_DIAG) as kernel:
            kernel.send(head + request)
            answer = kernel.recv(4_096)
    except (OSError, AttributeError):  # not Linux, or not to be had there
        return LOOPBACK
    found: tuple[int, ...] = struct.unpack_from("=I", answer, 80) if len(answer) >= 84 else ()
    return f"user {found[0]}" if answer[4:6] == head[4:6] and found else LOOPBACK
