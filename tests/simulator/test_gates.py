"""Arrays and dependencies under every policy: simulated jobs wait as live ones would, and no limit is exceeded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cycle import run_cycle as rounds
from services.core.cycle.gates import GatedJob, Need, withheld
from services.core.cycle.plan import Start
from services.core.cycle.policy import Policy
from services.core.cycle.snapshot import QUEUED, Snapshot
from services.core.domain.dependencies import Condition, Ends
from services.core.domain.errors import DomainError
from services.core.policies.registry import POLICIES
from services.simulator.engine import EngineOptions, simulate
from services.simulator.engine.gates import Turns
from services.simulator.readers.jobs import read_jobs
from services.simulator.workload import ClusterSpec, Gates, Workload
from tests.support.workloads import a_profile, a_wave, a_workload


@st.composite
def gated_jobs(draw: st.DrawFn) -> Workload:
    """Return single jobs and arrays, some with limits, that wait for what was submitted before them."""
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows: list[tuple[float, float, int]] = []
    array: list[str] = []
    after: list[tuple[str, ...]] = []
    limits: dict[str, int] = {}
    names: list[str] = []
    for number, at_s in enumerate(sorted(random.integers(0, 6, draw(st.integers(1, 7))) * 900.0)):
        tasks = int(random.choice([1, 1, 3, 6]))
        name = f"A{number}" if tasks > 1 else ""
        if name and random.random() < 0.7:
            limits[name] = int(random.integers(1, 4))
        needed = tuple(random.choice(names, 2).tolist()) if names and random.random() < 0.4 else ()
        names.append(name or f"j{len(rows):07}")
        size = int(random.choice([1, 1, 2, 3]))
        rows += [(float(at_s), float(random.integers(1, 40) * 100), size) for _ in range(tasks)]
        array += [name] * tasks
        after += [needed] * tasks
    jobs = a_workload(rows, [a_profile(scaling=0.9)], most=draw(st.sampled_from([None, 8])))
    return replace(jobs, gates=Gates(tuple(array), limits, tuple(after)))


@pytest.mark.parametrize("name", list(POLICIES))
@settings(deadline=None, max_examples=6)
@given(jobs=gated_jobs(), mtbf_s=st.sampled_from([None, 4_000.0]))
def test_every_policy_keeps_limits_and_order_and_sees_what_it_would_live(
    name: str, jobs: Workload, mtbf_s: float | None
) -> None:
    gates = jobs.gates
    assert gates is not None
    row_of = {job_id: row for row, job_id in enumerate(jobs.ids)}
    arrived: set[int] = set()
    over: set[int] = set()
    ran: set[int] = set()

    class Watched(Turns):
        def arrives(self, row: int) -> list[int]:
            arrived.add(row)
            return super().arrives(row)

        def ended(self, row: int) -> list[int]:
            over.add(row)
            return super().ended(row)

    def checked(policy: Policy[Any], snapshot: Snapshot, memory: Any) -> rounds.CycleResult[Any]:
        phase = {row_of[job_id]: int(code) for job_id, code in zip(snapshot.jobs.ids, snapshot.jobs.phase, strict=True)}
        live = sorted(arrived - over)
        holding = {row for row, code in phase.items() if code != QUEUED}
        all_jobs = [
            GatedJob(jobs.ids[row], gates.array[row] or None, row, row in holding, row in ran | holding) for row in live
        ]
        found = {each.id for each in withheld(all_jobs, gates.max_running, _needs(jobs, gates, over))}
        assert set(snapshot.jobs.ids) == {jobs.ids[row] for row in live} - found

        result = rounds.run_cycle(policy, snapshot, memory)
        ran.update(row_of[action.job_id] for action in result.plan.actions if isinstance(action, Start))
        held = Counter(gates.array[row] for row in holding | (ran & phase.keys() & _started(result, row_of)))
        assert all(held[array] <= limit for array, limit in gates.max_running.items())
        return result

    options = EngineOptions(node_mtbf_s=mtbf_s, node_repair_s=1_000.0, until_s=float(jobs.submitted_s[0]) + 86_400.0)
    with (
        patch("services.simulator.engine.simulation.run_under_orders", checked),
        patch("services.simulator.engine.simulation.Turns", Watched),
    ):
        simulate(name, jobs, ClusterSpec.parse("2x2:RTX3090,1x4:RTX3090"), a_wave(2), options=options)
    assert arrived == set(range(len(jobs)))


def _started(result: rounds.CycleResult[Any], row_of: dict[str, int]) -> set[int]:
    return {row_of[action.job_id] for action in result.plan.actions if isinstance(action, Start)}


def _needs(jobs: Workload, gates: Gates, over: set[int]) -> list[Need]:
    found: list[Need] = []
    for row, names in enumerate(gates.after):
        for name in names:
            named = [at for at in range(len(jobs)) if name in (jobs.ids[at], gates.array[at])]
            live = sum(at not in over for at in named)
            found.append(Need(jobs.ids[row], name, Condition.ANY, name, Ends(live, 0)))
    return found


def test_an_array_with_a_limit_takes_its_turns_by_index() -> None:
    jobs = replace(a_workload([(0.0, 3_600.0, 1)] * 4), gates=Gates(("A",) * 4, {"A": 2}, ((),) * 4))
    result = simulate("fifo", jobs, ClusterSpec.parse("1x4:RTX3090"), a_wave(2))
    assert (np.diff(np.sort(result.columns.started_s)) > 0).tolist() == [False, True, False]


def test_jobs_that_wait_for_each_other_are_refused() -> None:
    jobs = replace(a_workload([(0.0, 3_600.0, 1)] * 2), gates=Gates(("", ""), {}, (("j0000001",), ("j0000000",))))
    with pytest.raises(DomainError, match="2 jobs of the workload wait for each other"):
        simulate("fifo", jobs, ClusterSpec.parse("1x4:RTX3090"), a_wave(2))


def test_what_can_never_run_is_not_waited_for() -> None:
    jobs = a_workload([(0.0, 3_600.0, 8), (0.0, 3_600.0, 1)])
    gated = replace(jobs, gates=Gates(("", ""), {}, ((), ("j0000000",))))
    result = simulate("fifo", gated, ClusterSpec.parse("1x4:RTX3090"), a_wave(2))
    assert np.isfinite(result.columns.ended_s).sum() == 1


def test_history_keeps_arrays_and_dependencies(tmp_path: Path) -> None:
    file = tmp_path / "past.csv"
    head = "job_id,submitted_at,started_at,ended_at,gpus,array,max_running,after"
    at, end = "2026-03-01T00:00:00Z", "2026-03-01T01:00:00Z"
    file.write_text(f"{head}\na,{at},{at},{end},1,S,2,\nb,{at},{at},{end},1,S,2,\nc,{at},{at},{end},1,,,S x\n")
    jobs = read_jobs(file, format="wattshift")
    assert jobs.gates == Gates(("S", "S", ""), {"S": 2}, ((), (), ("S", "x")))


def test_a_large_array_waits_for_another_by_its_name() -> None:
    """Every pair of tasks would be twenty-five million."""
    half = 5_000
    jobs = a_workload([(0.0, 60.0, 1)] * (2 * half))
    gates = Gates(("A",) * half + ("B",) * half, {}, ((),) * half + (("A", "A", "gone"),) * half)
    turns = Turns(replace(jobs, gates=gates), range(2 * half))

    assert [turns.arrives(row) for row in (0, half - 1, half, half + 7)] == [[0], [half - 1], [], []]
    assert not any(turns.ended(row) for row in range(half - 1))
    assert turns.ended(half - 1) == [half, half + 7]
    assert turns.arrives(half + 8) == [half + 8]
