"""Jobs on MIG slices in simulations: who gets which slice, how fast they are, and a cut GPU's energy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cycle import run_cycle as rounds
from services.core.cycle.plan import Start
from services.core.cycle.policy import Policy
from services.core.cycle.snapshot import Snapshot
from services.core.domain.errors import DomainError
from services.core.domain.mig import parent_of
from services.core.policies.registry import POLICIES, build_policy
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.engine.simulation import Simulation
from services.simulator.engine.slices import Slices
from services.simulator.workload import ClusterSpec, JobProfile, Workload
from tests.support.workloads import START_S, a_profile, a_trace, a_wave, a_workload

HOUR_S = 3_600.0
ONE = "1x1:A100[3g,2g,2g]"
PLAIN = EngineOptions(host_idle_w=0.0)


def on_slices(jobs: Sequence[tuple[float, float, int]], profile: JobProfile | None = None, **fields: Any) -> Workload:
    """Return jobs given as (arrival, work in seconds on a GPU, sevenths); 0 sevenths: a whole GPU."""
    rows = [(at, work, 1) for at, work, _ in jobs]
    made = a_workload(rows, [profile or a_profile(restart_s=0.0, checkpoint_s=0.0)])
    return replace(made, slice_sevenths=np.array([size for *_, size in jobs], dtype=np.int64), **fields)


def run(jobs: Workload, cluster: str = ONE, policy: str = "fifo", options: EngineOptions = PLAIN) -> SimulationResult:
    return simulate(policy, jobs, ClusterSpec.parse(cluster), a_wave(2), options=options)


def devices_of(jobs: Workload, cluster: str, policy: str = "fifo") -> dict[str, tuple[str, int]]:
    """Return where each job started."""
    found: dict[str, tuple[str, int]] = {}

    def noting(chosen: Policy[Any], snapshot: Snapshot, memory: Any) -> rounds.CycleResult[Any]:
        result = rounds.run_cycle(chosen, snapshot, memory)
        for action in result.plan.actions:
            if isinstance(action, Start):
                share = action.placement.shares[0]
                found[action.job_id] = (share.node_id, share.devices[0])
        return result

    with patch("services.simulator.engine.simulation.run_under_orders", noting):
        run(jobs, cluster, policy)
    return found


def test_a_job_on_a_slice_has_its_share_of_the_speed_and_pays_its_share_of_the_gpu() -> None:
    """An hour of 250 W on a 2g: 3.5 h at 2/7 of the idle 55 W, and of the 195 W above it."""
    result = run(on_slices([(0.0, HOUR_S, 2)]))

    assert result.columns.jct_s.tolist() == [3.5 * HOUR_S]
    assert result.columns.energy_j[0] == pytest.approx(3.5 * HOUR_S * (55 + 195) * 2 / 7)
    assert result.energy_kwh == pytest.approx(3.5 * (55 + 195 * 2 / 7) / 1_000)
    assert result.idle_energy_kwh == pytest.approx(3.5 * 55 * 5 / 7 / 1_000)
    assert result.slices["2g"] == {
        "slices": 2,
        "jobs": 1,
        "held_hours": pytest.approx(3.5),
        "energy_kwh": pytest.approx(result.columns.energy_j[0] / 3.6e6),
    }
    assert result.utilisation == pytest.approx(1 / 3)


def test_a_measured_speed_counts_and_power_stays_within_the_slice() -> None:
    """At 0.9 of the speed on 2/7 of the GPU: 0.9 x 195 W would be more than 2/7 of the board's 345 W above idle."""
    profile = a_profile(restart_s=0.0, checkpoint_s=0.0, slice_speeds={2: 0.9})

    result = run(on_slices([(0.0, HOUR_S, 2)], profile))

    assert result.avg_jct_s == pytest.approx(HOUR_S / 0.9)
    assert result.peak_power_w == pytest.approx(55 + 345 * 2 / 7)


def test_slices_go_by_priority_then_age_and_to_the_gpu_that_is_used_most() -> None:
    jobs = on_slices(
        [(0.0, 100.0, 3), (1.0, 100.0, 2), (2.0, 7_000.0, 2), (3.0, 100.0, 2), (4.0, 100.0, 2), (5.0, 100.0, 2)],
        priority=np.array([0, 0, 0, 0, 0, 1]),
    )

    where = devices_of(jobs, "1x2:A100[3g,2g,2g/2g,1g]")
    ended = run(jobs, "1x2:A100[3g,2g,2g/2g,1g]").columns

    gpus = {job: parent_of(device) for job, (_, device) in where.items()}
    assert [gpus[job] for job in ("j0000000", "j0000001", "j0000002", "j0000003")] == [0, 0, 0, 1]
    assert ended.started_s[5] < ended.started_s[4], "a higher priority comes before an earlier submission"
    assert ended.started_s[5] == pytest.approx(ended.ended_s[1])


def test_the_oldest_comes_first_also_before_those_that_ask_for_less() -> None:
    """The second job needs memory, so that it asks for something else than the first and the third."""
    jobs = on_slices([(0.0, 100.0, 2), (1.0, 100.0, 2), (2.0, 100.0, 2)], slice_memory_gib=np.array([0.0, 8.0, 0.0]))

    started_s = run(jobs, "1x1:A100[2g]").columns.started_s - START_S

    assert started_s.tolist() == [0.0, 350.0, 700.0]


def test_jobs_start_together_on_slices_that_are_free_together() -> None:
    result = run(on_slices([(0.0, 100.0, 2)] * 3))

    assert (result.columns.started_s - START_S).tolist() == [0.0, 0.0, 350.0]


def test_a_slice_has_the_memory_that_a_job_needs() -> None:
    jobs = on_slices([(0.0, 100.0, 2), (0.0, 100.0, 2)], slice_memory_gib=np.array([10.0, 20.0]))

    assert run(jobs).unrunnable == 1, "a 2g of an A100 of 40 GB has 10"
    assert run(jobs, "1x1:A100-SXM4-80GB[2g]").unrunnable == 0


def test_jobs_on_slices_and_on_gpus_do_not_get_in_each_others_way() -> None:
    jobs = on_slices([(0.0, HOUR_S, 0), (0.0, HOUR_S, 2), (0.0, HOUR_S, 7), (0.0, HOUR_S, 0)])

    result = run(jobs, "1x4:A100[3g,2g,2g/whole/7g/whole]")

    assert result.columns.started_s.tolist() == [START_S] * 4
    assert result.columns.jct_s.tolist() == [HOUR_S, 3.5 * HOUR_S, HOUR_S, HOUR_S]
    assert run(jobs, "1x4:A100").unrunnable == 2
    assert run(jobs, "1x4:A100[3g,2g,2g]").unrunnable == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_leaves_slices_alone(policy: str) -> None:
    random = np.random.default_rng(3)
    jobs = on_slices([(float(at) * 300, random.uniform(60, 4_000), int(random.choice([0, 1, 2]))) for at in range(24)])

    result = run(jobs, "2x2:A100[2g,1g,1g/whole]", policy)

    assert result.completed == 24
    assert result.columns.preemptions[jobs.slice_sevenths > 0].sum() == 0


@pytest.mark.parametrize("policy", ["fifo", "las", "green", "a-srpt"])
def test_jobs_that_are_not_shown_could_not_have_started(policy: str) -> None:
    """A round that sees all jobs that wait for slices starts the same ones."""
    random = np.random.default_rng(5)
    rows = [(random.uniform(0, 9_000), random.uniform(60, 2_000), int(random.choice([0, 1, 2, 3]))) for _ in range(60)]
    jobs = on_slices(sorted(rows), priority=random.integers(0, 2, 60))
    options = EngineOptions(node_mtbf_s=9_000.0, node_repair_s=600.0)
    cluster = "2x2:A100[3g,2g,1g/whole],1x1:H100[2g,2g,1g]"

    usual = run(jobs, cluster, policy, options)
    with patch.object(Slices, "_shows", lambda self, asked: len(self._queues[asked])):
        all_shown = run(jobs, cluster, policy, options)

    assert usual.columns.started_s.tolist() == all_shown.columns.started_s.tolist()
    assert usual.energy_kwh == pytest.approx(all_shown.energy_kwh)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 20_000), st.floats(1, 20_000), st.sampled_from([0, 1, 2, 3])), max_size=20),
    st.lists(st.floats(60, 500), min_size=2, max_size=2),
    st.sampled_from([None, 4_000.0]),
)
def test_the_parts_of_a_cut_gpu_are_the_whole(
    rows: list[tuple[float, float, int]], powers_w: list[float], mtbf_s: float | None
) -> None:
    """What jobs and free slices are charged is what their GPUs drew, through failures of nodes, too."""
    kinds = [a_profile(f"k{at}", gpu_w=watts, slice_speeds={1: 0.5}) for at, watts in enumerate(powers_w)]
    jobs = on_slices(sorted(rows))
    jobs = replace(jobs, profiles=tuple(kinds), profile=np.arange(len(rows), dtype=np.int64) % 2)
    options = EngineOptions(host_idle_w=0.0, node_mtbf_s=mtbf_s, node_repair_s=500.0)
    cluster = ClusterSpec.parse("2x1:A100[3g,2g,1g]")

    simulation = Simulation(build_policy("fifo", {}), jobs, cluster, a_trace([100.0, 400.0] * 40), options)
    slices, drawn_j = simulation._slices, list[float]()
    advance = simulation._advance

    def metered(time_s: float) -> None:
        drawn_j.append(sum(gpu.power_w for gpu in slices.gpus) * max(time_s - simulation.gangs.now_s, 0.0))
        advance(time_s)

    with patch.object(simulation, "_advance", metered):
        result = simulation.run({})

    drawn_kwh = sum(drawn_j) / 3.6e6
    charged_kwh = result.columns.energy_j.sum() / 3.6e6 + result.idle_energy_kwh
    assert result.energy_kwh == pytest.approx(drawn_kwh)
    assert charged_kwh == pytest.approx(drawn_kwh)
    assert result.columns.carbon_gco2.sum() / 1_000 + result.idle_carbon_kg == pytest.approx(result.carbon_kg)
    assert result.completed == sum(size > 0 for *_, size in rows)


def test_a_node_that_fails_throws_its_jobs_back_to_their_checkpoints() -> None:
    options = EngineOptions(
        seed=1, node_mtbf_s=6_000.0, node_repair_s=100.0, checkpoint_every_s=1_000.0, lease_s=60.0, host_idle_w=0.0
    )

    result = run(on_slices([(0.0, 1.2 * HOUR_S, 3)]), "1x1:A100[3g]", options=options)

    assert result.failures >= 1
    lost_s = float(result.columns.gpu_s[0]) - 1.2 * HOUR_S * 7 / 3
    assert 0 < lost_s <= result.failures * (1_000.0 + 60.0)
    assert result.completed == 1


def test_a_node_with_a_gpu_that_is_cut_stays_on() -> None:
    options = EngineOptions(power_down_after_s=60.0, host_idle_w=0.0)
    jobs = on_slices([(0.0, 60.0, 2), (4 * HOUR_S, 60.0, 2)])

    result = run(jobs, "1x2:A100[2g/whole],1x1:A100", options=options)

    seconds = float(result.columns.ended_s[1]) - START_S
    idle_j = seconds * 55.0 * 2 + 60.0 * 55.0 - float(result.columns.gpu_s.sum()) * 55.0
    assert result.idle_energy_kwh == pytest.approx(idle_j / 3.6e6), "the third GPU is off after a minute"


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ("1x2:RTX3090[1g]", "RTX3090 cannot be cut"),
        ("1x2:A100[4g,4g]", "do not fit on one GPU together"),
        ("1x2:A100[5g]", "there is no slice '5g'"),
        ("1x2:A100[1g/whole/whole]", "says how 3 GPUs are cut, and the nodes have 2"),
        ("1x2:A100[1g", "is not a node group"),
    ],
)
def test_a_cut_that_is_none_is_one_clear_error(cluster: str, says: str) -> None:
    with pytest.raises(DomainError, match=says):
        ClusterSpec.parse(cluster)


def test_a_cut_holds_for_all_gpus_or_for_each() -> None:
    spec = ClusterSpec.parse("2x4:A100[3g,2g,2g],1x2:H100[7g/whole],1x1:V100")

    assert [group.slices for group in spec.groups] == [12, 1, 0]
    assert [group.whole for group in spec.groups] == [(), (1,), (0,)]
    assert (spec.gpus, spec.devices) == (11, 2 * 12 + 2 + 1)


def test_a_job_on_a_slice_has_exactly_one() -> None:
    jobs = a_workload([(0.0, 60.0, 2)])

    with pytest.raises(DomainError, match="exactly one"):
        replace(jobs, slice_sevenths=np.array([2]))
    with pytest.raises(DomainError, match="sevenths"):
        replace(jobs, slice_sevenths=np.array([5]))
