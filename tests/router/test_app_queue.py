"""The queue of an application: its order, and that nothing waits while an instance that could serve it is free."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.apps.queue import AppQueue, NotAssignedError, Outcome, Ticket


@dataclass
class Stage:
    """A queue, the tickets in it, and the order in which they were given instances."""

    queue: AppQueue = field(default_factory=lambda: AppQueue(100, 60.0))
    now_s: float = 0.0
    given: list[tuple[Ticket, str]] = field(default_factory=list[tuple[Ticket, str]])
    refused: list[tuple[Ticket, str]] = field(default_factory=list[tuple[Ticket, str]])
    ids: itertools.count[int] = field(default_factory=itertools.count)

    def instances(
        self, *names: str, limit: int = 1, draining: tuple[str, ...] = (), accuracy_pct: float = 80.0
    ) -> None:
        self.queue.adopt([(name, limit, name not in draining, 0.01, accuracy_pct) for name in names], self.now_s)

    def arrive(self, tenant: str = "acme", least_pct: float = 0.0) -> Ticket:
        def decided(result: str | NotAssignedError) -> None:
            if isinstance(result, str):
                self.given.append((ticket, result))
            else:
                self.refused.append((ticket, result.reason))

        ticket = Ticket(next(self.ids), "images", tenant, decided, least_accuracy_pct=least_pct)
        self.queue.take(ticket, self.now_s)
        return ticket

    def leave(self, ticket: Ticket, outcome: Outcome = Outcome.ANSWERED) -> None:
        self.queue.leave(ticket, outcome, self.now_s)

    @property
    def served(self) -> list[int]:
        return [ticket.id for ticket, _ in self.given]


def test_an_instance_that_falls_free_takes_the_head() -> None:
    stage = Stage()
    stage.instances("one", "two")
    tickets = [stage.arrive() for _ in range(5)]
    assert [instance for _, instance in stage.given] == ["one", "two"]
    stage.leave(tickets[1])
    stage.leave(tickets[0])
    assert [(ticket.id, instance) for ticket, instance in stage.given[2:]] == [(2, "two"), (3, "one")]


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


def test_an_instance_on_trial_gets_one_request_until_that_one_ends() -> None:
    stage = Stage()
    stage.instances("one", limit=4)
    before, *others = (stage.arrive() for _ in range(3))
    for each in others:
        stage.leave(each, Outcome.UNREACHABLE)
    stage.now_s = 1.1
    trial, other = stage.arrive(), stage.arrive()
    stage.leave(before, Outcome.NOT_ASKED)
    assert stage.given[3:] == [(trial, "one")]
    stage.leave(trial, Outcome.NOT_ASKED)
    assert stage.given[4:] == [(other, "one")]


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
    stage.queue.adopt([("one", 1, True, 2.0, 80.0)], 0.0)
    for _ in range(4):
        stage.arrive()
    with pytest.raises(NotAssignedError, match="queue_full") as refused:
        stage.arrive()
    assert refused.value.retry_after_s == 8  # four requests of 2 s each


@dataclass(frozen=True)
class Event:
    kind: str
    number: int


EVENTS = st.lists(
    st.builds(Event, st.sampled_from(["arrive", "answer", "withdraw", "table", "fail"]), st.integers(0, 7)),
    min_size=20,
    max_size=60,
)


@given(events=EVENTS, limit=st.integers(1, 3))
def test_order_and_limits_hold_whatever_happens(events: list[Event], limit: int) -> None:
    stage = Stage()
    names = [f"i{number}" for number in range(4)]
    stage.instances(*names[:2], limit=limit)
    open_tickets: list[Ticket] = []
    ready = set(names[:2])
    for event in events:
        stage.now_s += 0.01
        waiting = [each for each in open_tickets if each.instance is None]
        held = [each for each in open_tickets if each.instance is not None]
        before = len(stage.given)
        match event.kind:
            case "arrive":
                open_tickets.append(stage.arrive())
            case "answer" | "fail" if held:
                ticket = held[event.number % len(held)]
                open_tickets.remove(ticket)
                stage.leave(ticket, Outcome.ANSWERED if event.kind == "answer" else Outcome.UNREACHABLE)
            case "withdraw" if waiting:
                ticket = waiting[event.number % len(waiting)]
                open_tickets.remove(ticket)
                stage.leave(ticket, Outcome.NOT_ASKED)
            case "table":
                ready = set(names[: 1 + event.number % 4])
                stage.instances(*names, limit=limit, draining=tuple(set(names) - ready))
            case _:
                pass
        by_instance = dict.fromkeys(names, 0)
        for each in open_tickets:
            if each.instance is not None:
                by_instance[each.instance] += 1
        assert max(by_instance.values()) <= limit
        assert {seat.id: seat.held for seat in stage.queue.seats.values()} == {
            name: count for name, count in by_instance.items() if name in stage.queue.seats
        }
        assert all(instance in ready for _, instance in stage.given[before:])
        left = sorted(each.id for each in open_tickets if each.instance is None)
        assert stage.queue.waiting == len(left)
        if left:  # nothing waits while an instance could serve it
            assert not [
                seat.id for seat in stage.queue.seats.values() if seat.has_room and seat.breaker.passes(stage.now_s)
            ]
            assert max(stage.served, default=-1) < left[0]
    assert stage.served == sorted(stage.served)


def test_a_request_waits_for_an_instance_that_is_accurate_enough_and_holds_up_no_other() -> None:
    stage = Stage()
    stage.queue.adopt([("small", 1, True, 0.01, 70.0), ("large", 1, True, 0.01, 90.0)], 0.0)
    held = [stage.arrive(least_pct=80.0), stage.arrive(least_pct=80.0), stage.arrive()]
    assert stage.given == [(held[0], "large"), (held[2], "small")]
    stage.leave(held[2])
    stage.leave(held[0], Outcome.FAILED)
    assert stage.given[2:] == [(held[1], "large")], "the free one is not accurate enough, whatever else failed"
    held[0].excluded = frozenset({"large"})
    stage.queue.take(held[0], 0.0)
    stage.leave(held[1])
    assert stage.given[3:] == [(held[0], "large")]
    with pytest.raises(NotAssignedError, match="no_instance"):
        stage.arrive(least_pct=95.0)
