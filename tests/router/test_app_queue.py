"""The queue of an application: its order, and that nothing waits while an instance that could serve it is free."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from services.router.apps.queue import AppQueue, NotAssignedError, Outcome, Ticket


@dataclass
class Stage:
    """A queue, the tickets in it, and the order in which they were given instances."""

    queue: AppQueue = field(default_factory=lambda: AppQueue(100, 60.0))
    now_s: float = 0.0
    given: list[tuple[Ticket, str]] = field(default_factory=list[tuple[Ticket, str]])
    refused: list[tuple[Ticket, str]] = field(default_factory=list[tuple[Ticket, str]])
    ids: itertools.count[int] = field(default_factory=itertools.count)

    def instances(self, *names: str, limit: int = 1, draining: tuple[str, ...] = ()) -> None:
        self.queue.adopt([(name, limit, name not in draining, 0.01) for name in names], self.now_s)

    def arrive(self, tenant: str = "acme") -> Ticket:
        def decided(result: str | NotAssignedError) -> None:
            if isinstance(result, str):
                self.given.append((ticket, result))
            else:
                self.refused.append((ticket, result.reason))

        ticket = Ticket(next(self.ids), "images", tenant, decided)
        self.queue.take(ticket, self.now_s)
        return ticket

    def leave(self, ticket: Ticket, outcome: Outcome = Outcome.ANSWERED) -> None:
        self.queue.leave(ticket, outcome, self.now_s)

    @property
    def served(self) -> list[int]:
        return [ticket.id for ticket, _ in self.given]


def test_of_several_free_instances_the_one_that_has_been_free_the_longest_serves() -> None:
    stage = Stage()
    stage.instances("one", "two", "three")
    first, second = stage.arrive(), stage.arrive()
    stage.leave(second)
    stage.leave(first)
    for _ in range(3):
        stage.arrive()
    assert [instance for _, instance in stage.given[2:]] == ["three", "two", "one"]


def test_a_tenant_that_holds_more_than_its_part_comes_after_the_others() -> None:
    stage = Stage()
    stage.instances("one", "two", "three", "four")
    greedy = [stage.arrive("acme") for _ in range(10)]
    late = stage.arrive("umbra")
    stage.leave(greedy[0])
    assert stage.given[-1][0] is late


def test_a_request_whose_instance_failed_goes_to_another_one_before_those_that_came_later() -> None:
    stage = Stage()
    stage.instances("one", "two")
    first, second, third = (stage.arrive() for _ in range(3))
    stage.leave(first, Outcome.BUSY)
    assert stage.given[-1] == (third, "one")  # it was the head then
    first.excluded = frozenset({"one"})
    stage.queue.take(first, stage.now_s)
    later = stage.arrive()
    stage.leave(third)
    assert stage.given[-1] == (later, "one")  # the first one does not want it, and nothing is left unused
    stage.leave(second)
    assert stage.given[-1] == (first, "two")


def test_an_instance_that_cannot_be_reached_is_left_alone_for_a_while_and_the_request_waits_for_it() -> None:
    stage = Stage()
    stage.instances("one")
    ticket = stage.arrive()
    stage.leave(ticket, Outcome.UNREACHABLE)
    ticket.excluded = frozenset({"one"})
    stage.queue.take(ticket, stage.now_s)
    assert len(stage.given) == 1
    stage.now_s = 0.9
    stage.queue.pump(stage.now_s)
    assert len(stage.given) == 1
    stage.now_s = 1.1
    stage.queue.pump(stage.now_s)
    assert stage.given[1:] == [(ticket, "one")]


def test_requests_wait_for_an_instance_that_was_there_a_moment_ago_and_for_no_other() -> None:
    stage = Stage()
    with pytest.raises(NotAssignedError, match="no_instance"):
        stage.arrive()
    stage.instances("one")
    stage.instances()
    stage.now_s = 59.0
    ticket = stage.arrive()
    stage.instances("two")
    assert stage.given == [(ticket, "two")]
    stage.leave(ticket)
    stage.instances()
    stage.now_s = 59.0 + 61.0
    with pytest.raises(NotAssignedError, match="no_instance"):
        stage.arrive()


def test_a_request_that_asks_twice_waits_once_and_in_its_place() -> None:
    stage = Stage()
    stage.instances("one")
    served, first, second = (stage.arrive() for _ in range(3))
    stage.queue.take(first, stage.now_s)
    assert stage.queue.waiting == 2
    stage.leave(served)
    assert stage.given[-1][0] is first
    stage.leave(first)
    assert stage.given[-1][0] is second
    assert (stage.queue.waiting, len(stage.given)) == (0, 3)


def test_beyond_the_bound_requests_are_refused_with_a_time_that_follows_the_queue() -> None:
    stage = Stage(AppQueue(3, 60.0))
    stage.queue.adopt([("one", 1, True, 2.0)], 0.0)
    for _ in range(4):
        stage.arrive()
    with pytest.raises(NotAssignedError, match="queue_full") as refused:
        stage.arrive()
    assert refused.value.retry_after_s == 8  # four requests of 2 s each
