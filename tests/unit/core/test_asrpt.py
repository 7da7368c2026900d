"""A-SRPT's queue: order, heads of the line, gangs that wait for better servers, and what it remembers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.core.cycle.plan import Hold
from services.core.cycle.run_cycle import CycleResult, run_cycle
from services.core.cycle.snapshot import Phase, Snapshot
from services.core.domain.ids import JobId
from services.core.parallel.graph import JobGraph, Stage, data_parallel
from services.core.parallel.iteration import Network
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, JobRow, NodeRow, a_job, a_node, a_snapshot, story

SERVERS = [a_node("n0", gpus=4), a_node("n1", gpus=4)]
HEAVY = data_parallel(4, 4e8, 0.1)
LIGHT = data_parallel(4, 1e3, 0.1)


def shown(
    jobs: Sequence[JobRow],
    nodes: Sequence[NodeRow] = SERVERS,
    *,
    at_s: float = 0.0,
    needs_s: Mapping[str, float] | None = None,
    graphs: Mapping[str, JobGraph] | None = None,
) -> Snapshot:
    """Return a snapshot ``at_s`` after noon; ``needs_s``: predicted seconds, NaN where not given."""
    snapshot = a_snapshot(jobs, nodes, now_s=NOON_S + at_s)
    predicted = np.array([(needs_s or {}).get(job.name, np.nan) for job in jobs])
    table = replace(snapshot.jobs, remaining_s=predicted)
    by_id = {JobId(name): graph for name, graph in (graphs or {}).items()}
    return replace(snapshot, jobs=table, graphs=by_id, network=Network(server_gpus=4))


def waiting(name: str, gpus: int = 1, *, at_s: float = 0.0, **columns: Any) -> JobRow:
    """Return a job that waits since ``at_s`` after noon."""
    since = NOON_S + at_s
    return a_job(name, min_gpus=gpus, submitted_s=since, waiting_since_s=since, **columns)


def rounds(snapshots: Sequence[Snapshot], **parameters: object) -> list[CycleResult[Any]]:
    """Return the outcome of one round after the other."""
    policy = build_policy("a-srpt", parameters)
    memory, found = policy.initial(), list[CycleResult[Any]]()
    for snapshot in snapshots:
        found.append(run_cycle(policy, snapshot, memory))
        memory = found[-1].memory
    return found


def test_a_job_waits_until_the_virtual_machine_has_done_it() -> None:
    """Four GPUs of eight for 100 s are 50 s of the virtual machine."""
    jobs, needs = [waiting("a", 4)], {"a": 100.0}

    early, due = rounds([shown(jobs, at_s=at, needs_s=needs) for at in (10.0, 50.0)])

    assert story(early.plan) == {"a": "hold shorter_first"}
    assert early.plan.look_again_s == NOON_S + 50.0
    assert story(due.plan) == {"a": "start n0:0,1,2,3"}
    assert due.plan.look_again_s is None


def test_a_job_without_a_prediction_runs_at_once() -> None:
    (result,) = rounds([shown([waiting("a"), waiting("b")], needs_s={"b": 80.0})])

    assert story(result.plan) == {"a": "start n0:0", "b": "hold shorter_first"}


def test_a_shorter_job_passes_on_the_virtual_machine_and_nobody_in_the_queue() -> None:
    """a (30 s) is put aside for b (10 s); when both are through, two GPUs are free: b's. c does not pass a."""
    running = a_job("r", gpus=6)
    at_first, later = [running, waiting("a", 6)], waiting("b", 2, at_s=5.0)
    needs = {"a": 40.0, "b": 40.0}

    _, passed, both = rounds(
        [
            shown(at_first, at_s=0.0, needs_s=needs),
            shown([*at_first, later], at_s=15.0, needs_s=needs),
            shown([*at_first, waiting("c", 2, at_s=50.0)], at_s=60.0, needs_s=needs),
        ]
    )

    assert story(passed.plan) == {"a": "hold shorter_first", "b": "start n1:2,3"}
    assert story(both.plan) == {"a": "hold not_enough_free_gpus", "c": "hold not_enough_free_gpus"}


@pytest.mark.parametrize(("parameters", "order"), [({}, "bca"), ({"machine": "runs"}, "abc")])
def test_the_machine_stands_still_while_the_head_of_the_queue_is_held_up(
    parameters: dict[str, str], order: str
) -> None:
    """h holds up the queue from 10 s on; meanwhile a machine that runs ends a (40 s), before b and c come."""
    full = [a_job("r", on={"n0": (0, 1, 2, 3)}), waiting("h", 8), waiting("a", 8, at_s=15.0)]
    jobs = [*full, waiting("b", 8, at_s=60.0), waiting("c", 8, at_s=60.0)]
    needs = {"h": 10.0, "a": 40.0, "b": 20.0, "c": 30.0}
    times = (0.0, 10.0, 15.0, 55.0)

    *_, last = rounds(
        [*(shown(full, at_s=at_s, needs_s=needs) for at_s in times), shown(jobs, at_s=60.0, needs_s=needs)],
        **parameters,
    )

    machine_at_60, queue = last.memory.machine, sorted(last.memory.queue)
    _, later = machine_at_60.run([], NOON_S + 1_000)
    assert [job.job_id for job in (*queue, *later)] == ["h", *order]


def test_the_machine_runs_for_a_job_of_higher_priority_than_the_one_that_is_held_up() -> None:
    full = [a_job("r", on={"n0": (0, 1, 2, 3)}), waiting("h", 8)]
    jobs = [*full, waiting("u", 4, at_s=20.0, priority=1)]
    needs = {"h": 10.0, "u": 20.0}

    _, asked, due = rounds(
        [shown(full, at_s=10.0, needs_s=needs), *(shown(jobs, at_s=at_s, needs_s=needs) for at_s in (20.0, 30.0))],
        machine="waits",
    )

    assert asked.plan.look_again_s == NOON_S + 30.0
    assert story(due.plan) == {"u": "start n1:0,1,2,3", "h": "hold not_enough_free_gpus"}


def test_priorities_come_before_lengths() -> None:
    jobs = [waiting("long", priority=1), waiting("short")]

    (result,) = rounds([shown(jobs, at_s=8.0, needs_s={"long": 64.0, "short": 8.0})])

    assert story(result.plan) == {"long": "start n0:0", "short": "hold shorter_first"}


def test_a_light_gang_takes_what_the_emptiest_servers_leave_and_a_heavy_one_the_fullest() -> None:
    nodes = [a_node("n0", gpus=2), a_node("n1", gpus=2), a_node("n2", gpus=4)]
    for graph, placed in ((LIGHT, "start n0:0,1 n1:0,1"), (HEAVY, "start n2:0,1,2,3")):
        (result,) = rounds([shown([waiting("a", 4)], nodes, graphs={"a": graph})])
        assert story(result.plan) == {"a": placed}


def spread_out(at_s: float, *, freed: bool = False) -> Snapshot:
    """Return a cluster with two GPUs free on each server, where gang ``a`` and then ``b`` wait; or n1 as well."""
    holders = [a_job("r0", on={"n0": (0, 1)}), *([] if freed else [a_job("r1", on={"n1": (0, 1)})])]
    jobs = [*holders, waiting("a", 4), waiting("b", 1, at_s=30.0)]
    return shown(jobs, at_s=at_s, needs_s={"a": 60.0, "b": 8.0}, graphs={"a": HEAVY})


def test_a_heavy_gang_waits_for_better_servers_and_holds_up_the_queue() -> None:
    """On the virtual machine a ends at 30 s, b at 31 s; a may wait tau times its 30 s, until 60 s."""
    shown_at = [spread_out(30.0), spread_out(40.0), spread_out(45.0, freed=True)]
    first, second, in_time = rounds(shown_at, machine="runs")

    assert story(first.plan) == {"a": "hold better_placement", "b": "hold shorter_first"}
    assert story(second.plan) == {"a": "hold better_placement", "b": "hold not_enough_free_gpus"}
    assert [hold.expected_start_s for hold in second.plan.actions if isinstance(hold, Hold)] == [NOON_S + 60.0, None]
    assert second.plan.look_again_s == NOON_S + 60.0
    assert story(in_time.plan) == {"a": "start n1:0,1,2,3", "b": "start n0:2"}
    assert not in_time.memory.offers

    *_, later = rounds(shown_at, machine="waits")

    assert story(later.plan) == {"a": "start n1:0,1,2,3", "b": "hold shorter_first"}
    assert later.plan.look_again_s == NOON_S + 46.0


def test_a_heavy_gang_takes_what_there_is_when_its_time_is_over() -> None:
    _, over = rounds([spread_out(30.0), spread_out(60.0)])
    (at_once,) = rounds([spread_out(30.0)], tau=0.0)

    assert story(over.plan)["a"] == "start n0:2,3 n1:2,3"
    assert story(at_once.plan)["a"] == "start n0:2,3 n1:2,3"


def test_a_gang_that_fits_no_server_holds_up_nobody() -> None:
    """A tensor group of eight on servers of four, and a gang wider than the cluster."""
    graph = JobGraph((Stage(1, tensor_parallel=8, tensor_bytes=1e6),))
    jobs = [waiting("torn", 8), waiting("wide", 9), waiting("a"), waiting("z")]

    (result,) = rounds([shown(jobs, graphs={"torn": graph})])

    nowhere = "hold no_eligible_node"
    assert story(result.plan) == {"torn": nowhere, "wide": nowhere, "a": "start n0:0", "z": "start n0:1"}


def test_a_tensor_group_waits_for_a_whole_server_and_holds_up_the_queue() -> None:
    graph = JobGraph((Stage(1, tensor_parallel=4, tensor_bytes=1e6),))
    jobs = [a_job("r0", on={"n0": (0,)}), a_job("r1", on={"n1": (0,)}), waiting("a", 4), waiting("b", at_s=1.0)]

    (result,) = rounds([shown(jobs, at_s=1.0, graphs={"a": graph})])

    assert story(result.plan) == {"a": "hold better_placement", "b": "hold shorter_first"}


def test_jobs_that_leave_are_forgotten_and_one_that_comes_back_is_new() -> None:
    needs = {"a": 100.0, "b": 200.0}
    gone = shown([waiting("b", 4)], at_s=20.0, needs_s=needs)
    back = shown([waiting("a", 4, at_s=30.0), waiting("b", 4)], at_s=30.0, needs_s=needs)

    _, without, again = rounds([shown([waiting("a", 4), waiting("b", 4)], needs_s=needs), gone, back])

    assert without.memory.machine.running.job_id == "b"
    assert without.memory.machine.ends_s == NOON_S + 120.0  # b begins where a's going was noticed
    assert again.memory.machine.running.job_id == "a"
    assert again.memory.machine.ends_s == NOON_S + 80.0


@pytest.mark.parametrize(("priority", "looks"), [(-1, False), (0, False), (1, True)])
def test_a_round_is_asked_for_only_where_the_machines_job_would_come_before_the_queue(
    priority: int, looks: bool
) -> None:
    """``a`` waits for GPUs: whoever the virtual machine ends next starts before it only with a higher priority."""
    full = [a_job("r0", on={"n0": (0, 1, 2, 3)}), a_job("r1", on={"n1": (0, 1, 2, 3)})]
    needs = {"a": 10.0, "b": 100.0}
    later = [*full, waiting("a", 8), waiting("b", 8, at_s=20.0, priority=priority)]

    _, (result) = rounds([shown([*full, waiting("a", 8)], needs_s=needs), shown(later, at_s=20.0, needs_s=needs)])

    assert result.memory.machine.running.job_id == "b"
    assert result.plan.look_again_s == (result.memory.machine.ends_s if looks else None)


def test_the_machine_goes_on_with_its_job_where_another_would_take_as_long() -> None:
    needs = {"first": 50.0, "second": 40.0}
    jobs = [waiting("first", 8), waiting("second", 8, at_s=10.0)]

    _, (result) = rounds([shown(jobs[:1], needs_s=needs), shown(jobs, at_s=10.0, needs_s=needs)])

    assert result.memory.machine.running.job_id == "first"
    assert result.memory.machine.ends_s == NOON_S + 50.0


def test_memory_goes_through_json_with_offers_and_a_machine_at_work() -> None:
    policy = build_policy("a-srpt", {})
    (result,) = rounds([spread_out(30.5)])

    assert result.memory.offers
    assert result.memory.machine.running is not None
    assert policy.load(json.loads(json.dumps(policy.dump(result.memory)))) == result.memory


def test_a_job_that_is_stopping_is_not_in_the_queue() -> None:
    jobs = [a_job("p", on={"n0": (0, 1, 2, 3)}, phase=Phase.PREEMPTING), waiting("a", 8), waiting("b", 2, at_s=1.0)]

    (result,) = rounds([shown(jobs, at_s=1.0)])

    assert story(result.plan) == {"a": "hold waiting_for_release", "b": "hold not_enough_free_gpus"}


def test_others_may_pass_a_gang_that_waits_for_better_servers() -> None:
    """Until 60 s it has the first choice in each round. b leaves the machine at 31 s."""
    at = [(30.0, False), (40.0, False), (45.0, True)]
    first, second, in_time = rounds([spread_out(at_s, freed=freed) for at_s, freed in at], others="pass")

    assert story(first.plan) == {"a": "hold better_placement", "b": "hold shorter_first"}
    assert first.plan.look_again_s == NOON_S + 31.0
    assert story(second.plan) == {"a": "hold better_placement", "b": "start n0:2"}
    assert [hold.expected_start_s for hold in second.plan.actions if isinstance(hold, Hold)] == [NOON_S + 60.0]
    assert set(second.memory.offers) == {"a"}
    assert second.memory.held_up is None
    assert story(in_time.plan) == {"a": "start n1:0,1,2,3", "b": "start n0:2"}
    assert not in_time.memory.offers


def test_a_gang_that_was_passed_holds_up_the_queue_when_its_time_is_over() -> None:
    """Others have taken two of its four GPUs by then: it waits for room like any head, and takes bad seats at once."""
    holders = [a_job("r0", on={"n0": (0, 1, 2)}), a_job("r1", on={"n1": (0, 1)})]
    needs = {"a": 60.0, "b": 8.0, "c": 8.0}

    def at(at_s: float, *others: JobRow) -> Snapshot:
        jobs = [*others, waiting("a", 4), waiting("c", 1, at_s=50.0)]
        return shown(jobs, at_s=at_s, needs_s=needs, graphs={"a": HEAVY})

    late = at(61.0, *holders, a_job("r2", on={"n1": (2,)}))
    _, passed, held = rounds([spread_out(30.0), at(55.0, *holders), late], others="pass")

    assert story(passed.plan) == {"a": "hold better_placement", "c": "start n0:3"}
    assert story(held.plan) == {"a": "hold not_enough_free_gpus", "c": "hold not_enough_free_gpus"}
    assert held.memory.held_up == 0
    assert set(held.memory.offers) == {"a"}

    again = run_cycle(build_policy("a-srpt", {"others": "pass"}), spread_out(70.0), held.memory)

    assert story(again.plan)["a"] == "start n0:2,3 n1:2,3"
