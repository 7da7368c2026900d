"""The virtual machine is optimal, does not care how often it is looked at, and its heap is a heap."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.ids import JobId
from services.core.policies.asrpt.virtual_machine import EndedJob, Heap, VirtualJob, VirtualMachine

Arrivals = list[tuple[float, VirtualJob]]
LATE_S = 10_000.0


def the_arrivals(rows: list[tuple[int, int]], unit_s: float = 1.0) -> Arrivals:
    """Return jobs given as (arrival, length), in units."""
    jobs = [
        (at * unit_s, VirtualJob(0, length * unit_s, at * unit_s, JobId(f"j{number}"), length * unit_s))
        for number, (at, length) in enumerate(rows)
    ]
    return sorted(jobs)


def unit_schedules(rows: list[tuple[int, int]]) -> int:
    """Return the least sum of completion times of any preemptive schedule in whole units, by trying all.

    Some best schedule serves, whenever it serves, by one fixed order of preference: the order of completions.
    """
    best = 10**9
    for preference in permutations(range(len(rows))):
        left = [length for _, length in rows]
        time = total = 0
        while any(left):
            present = [job for job in preference if left[job] and rows[job][0] <= time]
            time += 1
            if present:
                left[present[0]] -= 1
                total += time if not left[present[0]] else 0
        best = min(best, total)
    return best


@given(rows=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=5))
def test_no_schedule_has_a_smaller_sum_of_completion_times(rows: list[tuple[int, int]]) -> None:
    _, ended = VirtualMachine().run(the_arrivals(rows), LATE_S)

    assert sum(job.ended_s for job in ended) == unit_schedules(rows)


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=30),
    looks=st.lists(st.floats(0.0, 60.0), max_size=20),
)
def test_how_often_it_is_looked_at_changes_nothing(rows: list[tuple[int, int]], looks: list[float]) -> None:
    arrivals = the_arrivals(rows, unit_s=1 / 3)
    machine, ended = VirtualMachine(), list[EndedJob]()
    for now_s in sorted([*looks, LATE_S]):
        new = [each for each in arrivals if each[0] <= now_s]
        arrivals = arrivals[len(new) :]
        machine, more = machine.run(new, now_s)
        ended += more

    assert ended == VirtualMachine().run(the_arrivals(rows, unit_s=1 / 3), LATE_S)[1]
    assert machine == VirtualMachine(LATE_S)


@given(rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=30), data=st.data())
def test_jobs_that_leave_take_no_time_from_then_on(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    machine, ended = VirtualMachine().run(the_arrivals(rows), 40.0)
    gone = data.draw(st.sets(st.sampled_from([f"j{at}" for at in range(len(rows))])))
    left = machine.without(map(JobId, gone))

    _, more = left.run([], LATE_S)
    names = {job.job_id for job in more}

    assert names == machine.job_ids() - gone
    assert names.isdisjoint(job.job_id for job in ended)


def test_one_that_was_not_seen_in_time_comes_when_it_is_seen() -> None:
    machine, _ = VirtualMachine().run([], 100.0)
    _, ended = machine.run([(50.0, VirtualJob(0, 5.0, 50.0, JobId("late"), 5.0))], 200.0)

    assert [job.ended_s for job in ended] == [105.0]


@given(items=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1_000))), taken=st.integers(0, 10))
def test_the_heap_gives_its_items_in_order_and_never_changes(items: list[tuple[int, int]], taken: int) -> None:
    heap = Heap(items)
    given_out: list[tuple[int, int]] = []
    rest = heap
    for _ in range(min(taken, len(items))):
        given_out.append(rest.first)
        rest = rest.without_first()

    assert given_out == sorted(items)[: len(given_out)]
    assert sorted(rest) == sorted(items)[len(given_out) :]
    assert sorted(heap) == sorted(items)
    assert len(heap) == len(items)
    assert rest == Heap(reversed(list(rest)))
    assert (rest == heap) == (not given_out)


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=20),
    stands=st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=12),
)
def test_by_its_own_clock_a_machine_that_stands_still_at_times_loses_nothing(
    rows: list[tuple[int, int]], stands: list[tuple[int, bool]]
) -> None:
    """What Theorem 1 needs of it: less the time it stood still, its sum is at most that of one that always runs."""
    machine, ended, idle_s, clock_s = VirtualMachine(), 0.0, 0.0, 0.0
    arrivals = the_arrivals(rows)
    for duration_s, still in [*stands, (int(LATE_S), False)]:
        began_s, clock_s = clock_s, clock_s + duration_s
        new = [each for each in arrivals if began_s <= each[0] < clock_s]
        if still:
            idle_s += duration_s
            machine = machine.stood_still(clock_s)
        machine, done = machine.run(new, clock_s)
        assert not (still and done)
        ended += sum(job.ended_s - idle_s for job in done)

    _, always = VirtualMachine().run(arrivals, LATE_S)

    assert ended <= sum(job.ended_s for job in always)
    assert not machine.job_ids()
