"""Who keeps a place when there are too many, by address, in all, and by what they hold."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from services.kit import crowd
from services.kit.crowd import MOST_AT_ONCE, MOST_OF_PEER, MOST_UNKNOWN, MOST_UNKNOWN_BYTES, Crowd
from tests.support.crowds import Guest


def ended(guests: list[Guest]) -> list[int]:
    return [at for at, guest in enumerate(guests) if guest.is_ended]


@pytest.fixture(autouse=True)
def nobody_has_just_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "JUST_S", 0.0)


def test_who_has_just_come_gives_way_to_none_within_the_bound_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "JUST_S", 10.0)
    found = Crowd(1_000)
    guests = [Guest(found) for _ in range(501)]
    assert ended(guests) == []
    assert [at for at, guest in enumerate(guests) if guest.number is None] == [500], "of half the places of all"
    monkeypatch.setattr(crowd, "JUST_S", 0.0)
    assert Guest(found).number is not None
    assert ended(guests) == [0]


def test_the_oldest_of_a_peer_that_waits_gives_way_and_other_peers_keep_theirs() -> None:
    crowd = Crowd(20_000)
    other = Guest(crowd, "192.0.2.2")
    busy = Guest(crowd, waits=False)
    guests = [Guest(crowd) for _ in range(MOST_OF_PEER + 2)]
    assert ended(guests) == [0, 1, 2], "one place is that of the busy one"
    assert not busy.is_ended
    assert not other.is_ended


def test_a_peer_whose_connections_are_all_worked_on_has_no_more_of_them_than_its_bound() -> None:
    crowd = Crowd(20_000)
    guests = [Guest(crowd, waits=False) for _ in range(MOST_AT_ONCE)]
    assert Guest(crowd).number is None
    assert Guest(crowd, "192.0.2.2").number is not None
    assert guests[0].number is not None
    crowd.leave(guests[0].number)
    assert Guest(crowd).number is not None, "its place is free"


def test_what_has_come_and_is_to_be_read_gives_way_to_none_and_a_peer_has_no_more_of_it_than_its_bound() -> None:
    crowd = Crowd(20_000)
    guests = list[Guest]()
    for _ in range(MOST_AT_ONCE + 3):
        guests.append(Guest(crowd))
        guests[-1].is_unread = True
    assert ended(guests) == []
    assert [guest.number is None for guest in guests] == [False] * MOST_AT_ONCE + [True] * 3
    for guest in guests:
        guest.is_unread = False
    assert Guest(crowd).number is not None
    assert ended(guests) == [0, 1], "one for those of the peer, and one for those of all"
    assert Guest(crowd, "192.0.2.2").number is not None
    assert ended(guests) == [0, 1, 2]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
    ],
)
def test_a_peer_is_an_address_or_a_network_of_64_bits(one: str, other: str, is_same: bool) -> None:
    crowd = Crowd(20_000)
    first = Guest(crowd, one)
    for _ in range(MOST_OF_PEER):
        Guest(crowd, other)
    assert first.is_ended is is_same


@pytest.mark.parametrize("options", [{"host": None}, {"proxies": {"192.0.2.1"}}], ids=["unix socket", "proxy"])
def test_proxies_and_unix_sockets_are_limited_in_all_alone(options: dict[str, Any]) -> None:
    crowd = Crowd(20_000)
    guests = [Guest(crowd, **options) for _ in range(MOST_UNKNOWN + 1)]
    assert ended(guests) == [0]


def test_who_has_shown_a_key_counts_no_longer_as_unknown() -> None:
    crowd = Crowd(20_000)
    known = [Guest(crowd) for _ in range(2 * MOST_OF_PEER)]
    for guest in known[-MOST_OF_PEER:]:
        crowd.know(guest.number)
    guests = [Guest(crowd) for _ in range(MOST_OF_PEER)]
    assert not ended(guests)
    assert all(guest.is_known and not guest.is_ended for guest in known[-MOST_OF_PEER:])


def test_when_all_places_are_taken_unknown_ones_go_first_then_unused_known_ones_and_none_that_is_used() -> None:
    crowd = Crowd(20)
    known = [Guest(crowd, f"192.0.2.{at}", waits=at > 4) for at in range(10)]
    for guest in known:
        crowd.know(guest.number)
    unknown = [Guest(crowd, f"198.51.100.{at}") for at in range(10)]
    for at in range(10):
        crowd.know(Guest(crowd, f"203.0.113.{at}", waits=False).number)
    assert ended(unknown) == list(range(10))
    assert not ended(known)
    assert all(Guest(crowd, f"203.0.114.{at}", waits=False).number is not None for at in range(5))
    assert ended(known) == [5, 6, 7, 8, 9]
    assert Guest(crowd, "203.0.115.1").number is None


def test_what_unknown_clients_hold_together_is_bounded() -> None:
    crowd = Crowd(20_000)
    idle, busy = Guest(crowd, "192.0.2.1"), Guest(crowd, "192.0.2.2", waits=False)
    crowd.hold(busy, 1_000)
    guests = [Guest(crowd, f"198.51.100.{at}") for at in range(10)]
    for guest in guests:
        crowd.hold(guest, MOST_UNKNOWN_BYTES // 8)
    assert ended(guests) == [0, 1, 2]
    assert not idle.is_ended
    assert not busy.is_ended
    crowd.know(guests[3].number)
    crowd.hold(guests[3], 0)
    crowd.hold(guests[4], MOST_UNKNOWN_BYTES // 4)
    assert ended(guests) == [0, 1, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_on_loopback_a_user_of_the_machine_who_takes_all_places_leaves_others_theirs(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "MOST_OF_PEER", 4)
    found = Crowd(20_000)
    made: list[Guest] = []

    class Entering(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            guest = Guest.__new__(Guest)
            guest.held_bytes, guest.waits_for_client, guest.is_ended, guest.is_unread = 0, True, False, False
            guest.number = found.enter(guest, transport)
            made.append(guest)

    server = await asyncio.get_running_loop().create_server(Entering, host, 0)
    address = server.sockets[0].getsockname()[:2]
    program = (
        "import os, socket, sys\nos.setuid(65534)\nheld = [socket.socket(int(sys.argv[3])) for _ in range(12)]\n"
        "for each in held:\n    each.connect((sys.argv[1], int(sys.argv[2])))\n"
        "print('held', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, host, str(address[1]), str(int(server.sockets[0].family))]
    taking = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            assert taking.stdout is not None
            assert await taking.stdout.readline() == b"held\n"
            while len(made) < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            held = [socket.create_connection((host, address[1])) for _ in range(4)]
            while len(made) < 16:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        taking.kill()
        await taking.wait()
        server.close()
    assert ended(made) == [4, 5, 6, 7], "of the user who came with too many, the oldest beyond those on all of loopback"
    for each in held:
        each.close()
