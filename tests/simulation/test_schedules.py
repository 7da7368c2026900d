"""Every scenario under some thousand schedules: always the same ones, and others each day."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import pytest

from services.router.lanes import Lane, Ticket
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.search import play_once, search, unpack

FIXED, TODAYS = 400, 600


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_no_schedule_breaches_anything(name: str) -> None:
    today = datetime.datetime.now(datetime.UTC).date().toordinal() * 100_000
    for seeds in (range(FIXED), range(today, today + TODAYS)):
        found = search(name, SCENARIOS[name], seeds)
        assert found is None, f"{found.breach}\n./test --simulate --token {found.token}"


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_a_schedule_repeats_to_the_last_step(name: str) -> None:
    for seed in range(20):
        first, _ = play_once(SCENARIOS[name], seed)
        second, _ = play_once(SCENARIOS[name], first.choices.made)
        assert second.choices.made == first.choices.made
        assert (second.loop.steps, second.loop.time()) == (first.loop.steps, first.loop.time())


def pump_the_head_alone(self: Lane) -> set[frozenset[str]]:
    """Stop at the first request that no server may take."""
    while (head := self.queue.peek()) is not None:
        ticket = self._tickets[head.id]
        server = self.choose(ticket, time.monotonic())
        if server is None or ticket.given is None or ticket.given.done():
            break
        self.queue.remove(head.id)
        self._begin(ticket, server)
        ticket.given.set_result(server)
    return set()


def withdraw_without_giving_back(self: Lane, ticket: Ticket) -> None:
    """Forget that a place may have been given in the same turn."""
    self.queue.remove(ticket.request.id)


@pytest.mark.parametrize(
    ("method", "planted"), [("_withdraw", withdraw_without_giving_back), ("pump", pump_the_head_alone)]
)
def test_a_planted_fault_is_found_and_its_token_repeats_it(
    monkeypatch: pytest.MonkeyPatch, method: str, planted: Callable[..., object]
) -> None:
    monkeypatch.setattr(Lane, method, planted)
    found = search("router", SCENARIOS["router"], range(2_000))
    assert found is not None
    name, _, packed = found.token.partition(":")
    simulation, breach = play_once(SCENARIOS[name], unpack(packed))
    assert breach is not None
    assert (breach.name, simulation.loop.steps) == (found.breach.name, found.steps)
    assert found.steps < 80, "shortened"
