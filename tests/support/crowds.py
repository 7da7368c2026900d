"""Connections as a process counts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from services.kit.crowd import CONNECTION, CROWD, Crowd


class Transport:
    """Of a client at an address; at a Unix socket without one."""

    def __init__(self, host: str | None) -> None:
        self._host = host

    def get_extra_info(self, name: str) -> Any:
        return None if self._host is None else (self._host, 1)


class Guest:
    """A connection; one that does not wait is worked on."""

    def __init__(self, crowd: Crowd, host: str | None = "192.0.2.1", *, waits: bool = True, **options: Any) -> None:
        self.held_bytes = 0
        self.waits_for_client = self.is_unused = waits
        self.is_known = self.is_ended = self.is_unread = False
        self.number = crowd.enter(self, Transport(host), **options)

    def become_known(self) -> None:
        self.is_known = True

    def end_now(self) -> None:
        self.is_ended = True


@contextmanager
def a_guest() -> Iterator[Guest]:
    """Yield a connection of this process."""
    guest = Guest(CROWD)
    assert guest.number is not None
    try:
        yield guest
    finally:
        CROWD.leave(guest.number)


def asked_by(guest: Guest, app: ASGIApp) -> ASGIApp:
    """Return an app whose requests come by that connection."""

    async def ask(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {CONNECTION: guest.number}}, receive, send)

    return ask


def known_connections() -> int:
    """Return how many of this process's connections have shown a valid key."""
    return len(CROWD._known)  # pyright: ignore[reportPrivateUsage]
