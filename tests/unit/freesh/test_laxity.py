"""The order of waiting requests: the paper's worked example, and the heap against a plain sort."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.errors import DomainError
from services.core.policies.freesh.laxity import (
    Order,
    ServiceTimes,
    ServingRequest,
    is_too_late,
    laxity_s,
    order_key_s,
    preempted_by,
)
from services.core.policies.freesh.request_queue import RequestQueue, over_share

TIMES = ServiceTimes(ttft_s=0.2, tbt_s=0.05)
ORDERS = list(Order)
lengths = st.integers(1, 40)
requests = st.lists(
    st.tuples(st.integers(0, 50), lengths, st.sampled_from(["x", "y", "z"]), st.integers(0, 30)), max_size=40
).map(
    lambda rows: [
        ServingRequest(f"r{at}", float(arrival), float(tokens), tokens_done=float(min(done, tokens)), tenant=tenant)
        for at, (arrival, tokens, tenant, done) in enumerate(rows)
    ]
)


def by_hand(waiting: list[ServingRequest], order: Order, times: ServiceTimes) -> list[str]:
    return [r.id for r in sorted(waiting, key=lambda r: (order_key_s(r, order, times), r.arrival_s, r.id))]


def popped(queue: RequestQueue, behind: Collection[str] = ()) -> ServingRequest | None:
    request = queue.peek(behind=behind)
    return None if request is None else queue.remove(request.id)


def drained(queue: RequestQueue) -> list[str]:
    found: list[str] = []
    while (request := popped(queue)) is not None:
        found.append(request.id)
    return found


@dataclass
class Served:
    first_s: float = 0.0
    finish_s: float = 0.0


def toy(order: Order) -> dict[str, Served]:
    """Serve the example's three requests with one worker that makes a token a second, as algorithm 1 does."""
    times = ServiceTimes(ttft_s=0.0, tbt_s=1.0)
    todo = [ServingRequest(f"R{at}", float(at), tokens) for at, tokens in enumerate((10.0, 2.0, 1.0))]
    queue, running, served = RequestQueue(order, times), None, dict[str, Served]()
    for now in range(13):
        for request in [each for each in todo if each.arrival_s == now]:
            queue.push(request)
        head = queue.peek()
        if running is not None and head is not None and preempted_by(head, [running], order, times):
            queue.requeue(running)
            running = None
        running = running or popped(queue)
        assert running is not None
        running.tokens_done += 1
        served.setdefault(running.id, Served(first_s=now + 1))
        if running.tokens_done == running.output_tokens:
            served[running.id].finish_s, running = now + 1, None
    return served


@pytest.mark.parametrize(
    ("order", "latency", "ttft"),
    [
        (Order.LLF, {"R0": 1.3, "R1": 1.5, "R2": 1.0}, {"R0": 1, "R1": 1, "R2": 1}),
        (Order.SRTF, {"R0": 1.3, "R1": 1.0, "R2": 2.0}, {"R0": 1, "R1": 1, "R2": 2}),
        (Order.FCFS, {"R0": 1.0, "R1": 5.5, "R2": 11.0}, {"R0": 1, "R1": 10, "R2": 11}),
    ],
)
def test_the_papers_figure_4(order: Order, latency: dict[str, float], ttft: dict[str, float]) -> None:
    """Appendix C.3 gives R1 under LLF as (4 - 1) / 2 = 1.5 s per token; the rest follows from its definitions."""
    tokens, arrival = {"R0": 10, "R1": 2, "R2": 1}, {"R0": 0, "R1": 1, "R2": 2}

    served = toy(order)

    assert {name: (each.finish_s - arrival[name]) / tokens[name] for name, each in served.items()} == latency
    assert {name: each.first_s - arrival[name] for name, each in served.items()} == ttft


def test_laxity_is_equation_6() -> None:
    request = ServingRequest("r", arrival_s=10.0, output_tokens=100.0)
    latency = 100 * 0.05 + 0.2

    assert laxity_s(request, TIMES, 12.0) == pytest.approx(10 + 1.4 * latency - 12 - latency)
    assert laxity_s(replace(request, tokens_done=40.0), TIMES, 12.0) == pytest.approx(
        10 + 1.4 * latency - 12 - (60 * 0.05 + 0.2)
    )
    assert laxity_s(replace(request, tokens_done=40.0), TIMES, 12.0, is_running=True) == pytest.approx(
        10 + 1.4 * latency - 12 - 60 * 0.05
    )


@given(requests, st.sampled_from(ORDERS), st.randoms())
def test_the_heap_gives_the_order_of_a_plain_sort(
    waiting: list[ServingRequest], order: Order, random: np.random.Generator
) -> None:
    queue = RequestQueue(order, TIMES)
    for request in waiting:
        queue.push(request)
    gone = [each for each in waiting if random.random() < 0.3]
    for request in gone:
        assert queue.remove(request.id) is request
    back = gone[: len(gone) // 2]
    for request in back:
        queue.requeue(request)
    here = [each for each in waiting if each.id not in {r.id for r in gone[len(back) :]}]

    assert [each.id for each in queue] == by_hand(here, order, TIMES)
    assert len(queue) == len(here)
    assert drained(queue) == by_hand(here, order, TIMES)


@given(requests, st.sampled_from(ORDERS), st.floats(0.01, 2), st.floats(0, 3))
def test_other_times_give_another_order(
    waiting: list[ServingRequest], order: Order, tbt_s: float, ttft_s: float
) -> None:
    queue, times = RequestQueue(order, TIMES), ServiceTimes(ttft_s, tbt_s)
    for request in waiting:
        queue.push(request)
    for request in waiting[::3]:
        queue.remove(request.id)
    left = [each for at, each in enumerate(waiting) if at % 3]

    queue.retime(times)

    assert drained(queue) == by_hand(left, order, times)


@given(st.data(), st.sampled_from(ORDERS))
def test_ranked_requests_and_later_ones_come_in_one_order(data: st.DataObject, order: Order) -> None:
    """Any sequence of arrivals, removals, starts, preemptions and other times leaves the order of a plain sort."""
    queue, times, here = RequestQueue(order, TIMES), TIMES, list[ServingRequest]()
    for at in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["push", "push", "remove", "pop", "again", "retime"])):
            case "push":
                arrival_s, tokens = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
                here.append(ServingRequest(f"r{at}", arrival_s, tokens, tenant=data.draw(st.sampled_from("ab"))))
                queue.push(here[-1])
            case "remove" if here:
                gone = here.pop(data.draw(st.integers(0, len(here) - 1)))
                assert queue.remove(gone.id) is gone
            case "pop" if here:
                first = popped(queue)
                assert first is not None
                assert first.id == by_hand(here, order, times)[0]
                here.remove(first)
            case "again" if here:
                back = data.draw(st.sampled_from(here))
                queue.remove(back.id)
                queue.requeue(back)
            case _:
                times = ServiceTimes(data.draw(st.integers(0, 2)), data.draw(st.sampled_from([0.5, 1.0])))
                queue.retime(times)
        assert [each.id for each in queue] == by_hand(here, order, times)
    assert drained(queue) == by_hand(here, order, times)


@pytest.mark.parametrize("order", ORDERS)
def test_hundreds_are_ranked_anew_as_one_by_one(order: Order) -> None:
    random = np.random.default_rng(1)
    waiting = [
        ServingRequest(f"r{at}", float(random.integers(0, 50)), float(tokens), tokens_done=float(tokens // 3))
        for at, tokens in enumerate(random.integers(0, 900, 400))
    ]
    queue, times = RequestQueue(order, TIMES), ServiceTimes(0.5, 0.02)
    for request in waiting:
        queue.push(request)

    queue.retime(times)

    assert drained(queue) == by_hand(waiting, order, times)


def test_equals_do_not_displace_each_other() -> None:
    waiting, running = (ServingRequest(name, 0.0, 10.0) for name in ("waits", "runs"))

    assert order_key_s(running, Order.LLF, TIMES, is_running=True) == order_key_s(waiting, Order.LLF, TIMES)
    assert preempted_by(waiting, [running], Order.LLF, TIMES) is None


@given(requests, st.floats(0, 100))
def test_least_laxity_stays_least_while_time_passes(waiting: list[ServingRequest], later_s: float) -> None:
    def ranked(now_s: float) -> np.ndarray:
        return np.array([laxity_s(each, TIMES, now_s) for each in waiting])

    assert ranked(later_s) - ranked(0.0) == pytest.approx(-later_s)


@given(requests, st.sampled_from(ORDERS))
def test_only_what_is_strictly_later_is_preempted(running: list[ServingRequest], order: Order) -> None:
    waiting = ServingRequest("new", 30.0, 10.0)

    victim = preempted_by(waiting, running, order, TIMES)

    keys = {each.id: order_key_s(each, order, TIMES, is_running=True) for each in running}
    own = order_key_s(waiting, order, TIMES)
    assert (victim is None) == (not keys or max(keys.values()) <= own)
    if victim is not None:
        assert keys[victim.id] == max(keys.values())
        assert preempted_by(waiting, running, order, TIMES, margin_s=keys[victim.id] - own + 1) is None


@given(st.lists(st.tuples(st.floats(0, 20), lengths), min_size=1, max_size=20), lengths)
def test_llf_lets_nothing_pass_that_arrives_after_a_requests_window(
    others: list[tuple[float, int]], tokens: int
) -> None:
    """What arrives 0.4 Lat or more after a waiting request comes behind it: none starves. SRTF has no such bound."""
    first = ServingRequest("first", 0.0, float(tokens))
    slack_s = 0.4 * TIMES.latency_s(first.output_tokens)
    late = [ServingRequest(f"r{at}", slack_s + after, float(n)) for at, (after, n) in enumerate(others)]
    queue = RequestQueue(Order.LLF, TIMES)
    for request in [*late, first]:
        queue.push(request)

    assert popped(queue) is first

    short = RequestQueue(Order.SRTF, TIMES)
    for request in (first, ServingRequest("short", 1e6, 0.5)):
        short.push(request)
    assert popped(short) is not first


def test_a_full_queue_refuses_and_takes_back_what_it_had_accepted() -> None:
    queue = RequestQueue(Order.FCFS, TIMES, capacity=1)

    assert queue.push(ServingRequest("a", 1.0, 1.0))
    assert not queue.push(ServingRequest("b", 0.0, 1.0))
    queue.requeue(ServingRequest("c", 0.0, 1.0))

    assert [each.id for each in queue] == ["c", "a"]
    assert queue.remove("b") is None
    with pytest.raises(DomainError):
        queue.requeue(ServingRequest("c", 0.0, 1.0))


def test_who_cannot_be_in_time_any_more_waits_behind_the_others_by_arrival() -> None:
    queue = RequestQueue(Order.LLF, ServiceTimes(0.0, 0.1))
    rows = (
        ("old", 0.0, 100.0, 30.0),
        ("older", -5.0, 500.0, 70.0),
        ("new", 30.0, 10.0, 31.0),
        ("any", 30.0, 900.0, 1e9),
    )
    for name, arrival_s, tokens, due_s in rows:
        queue.push(ServingRequest(name, arrival_s, tokens, due_s=due_s))

    def served_next(now_s: float) -> str | None:
        found = queue.peek(now_s=now_s)
        return found and found.id

    assert (served_next(19.9), queue.late) == ("old", 0)
    assert (served_next(29.9), queue.late) == ("new", 2)
    assert [each.id for each in queue] == ["new", "any", "older", "old"]
    queue.retime(ServiceTimes(0.0, 0.0001))
    assert (served_next(29.9), queue.late) == ("older", 0), "they may be in time again"
    queue.retime(ServiceTimes(0.0, 0.1))
    assert (served_next(35.0), queue.late) == ("any", 3)
    queue.remove("older")
    queue.requeue(ServingRequest("preempted", 29.0, 10.0, due_s=40.0))
    assert served_next(35.0) == "preempted"
    assert [drained(queue), len(queue), queue.late] == [["preempted", "any", "old", "new"], 0, 0]


@given(requests, st.lists(st.floats(0, 100), min_size=40, max_size=40), st.floats(0, 120), st.sampled_from(ORDERS))
def test_nobody_in_time_waits_for_one_who_is_late_and_nobody_is_lost(
    waiting: list[ServingRequest], patience_s: list[float], now_s: float, order: Order
) -> None:
    queue, names = RequestQueue(order, TIMES), {each.id for each in waiting}
    for request, patience in zip(waiting, patience_s, strict=False):
        request.due_s = request.arrival_s + patience
        queue.push(request)
    late, found = list[bool](), set[str]()
    while (head := queue.peek(now_s=now_s)) is not None:
        assert popped(queue) is head
        late.append(is_too_late(head, TIMES, now_s))
        found.add(head.id)
    assert late == sorted(late)
    assert found == names


def test_an_empty_queue_has_nothing() -> None:
    queue = RequestQueue(Order.LLF, TIMES)

    assert (queue.peek(), popped(queue), queue.remove("a"), len(queue), queue.tenants) == (None, None, None, 0, [])


def test_many_that_leave_do_not_stay_in_memory() -> None:
    queue = RequestQueue(Order.LLF, TIMES)
    queue.push(ServingRequest("stays", 0.0, 1.0))
    for at in range(2_000):
        queue.push(ServingRequest(f"r{at}", 1.0 + at, 5.0))
        queue.remove(f"r{at}")

    assert sum(len(line.heap) for line in queue._lines.values()) < 150  # pyright: ignore[reportPrivateUsage]
    for at in range(2_000):
        queue.push(ServingRequest(f"r{at}", 1.0 + at, 5.0))
    queue.retime(ServiceTimes(0.5, 0.02))
    for at in range(2_000):
        queue.remove(f"r{at}")
    assert sum(len(line.heap) for line in queue._lines.values()) < 150  # pyright: ignore[reportPrivateUsage]
    assert drained(queue) == ["stays"]


def test_a_tenant_over_its_share_goes_behind_but_not_for_nobody() -> None:
    queue = RequestQueue(Order.FCFS, TIMES)
    for at, tenant in enumerate(("greedy", "greedy", "modest")):
        queue.push(ServingRequest(f"r{at}", float(at), 5.0, tenant=tenant))

    behind = over_share({"greedy": 6.0, "modest": 2.0}, queue.tenants)

    assert behind == {"greedy"}
    first = popped(queue, behind)
    assert first is not None
    assert first.id == "r2"
    assert over_share({"greedy": 6.0}, ["greedy"]) == set()
    assert over_share({"greedy": 6.0, "modest": 6.0}, ["greedy", "modest"]) == set()
    assert over_share({"greedy": 3.0, "modest": 1.0, "served": 1.0}, ["greedy", "modest"]) == {"greedy"}


@pytest.mark.parametrize(
    "wrong", [{"arrival_s": float("nan")}, {"output_tokens": -1.0}, {"tokens_done": float("inf")}, {"input_tokens": -1}]
)
def test_a_request_of_wrong_lengths_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(DomainError):
        ServingRequest(**{"id": "r", "arrival_s": 0.0, "output_tokens": 1.0, **wrong})  # type: ignore[arg-type]
    with pytest.raises(DomainError):
        ServiceTimes(0.1, 0.0)
