"""Zeus: what it prints of its own tables, and what it adds to the plans of a policy."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.policies.zeus.cost import cost_per_work, least_cost
from services.core.cycle.plan import Plan, ProfileControls, SetControl, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.policies.registry import build_policy
from services.simulator.engine import EngineOptions, simulate
from services.simulator.workload import ANY_MODEL, Behaviour, ClusterSpec, JobProfile
from tests.support.builders import JobRow, a_job, a_node, a_snapshot
from tests.support.workloads import a_trace, a_workload

LIMIT = ControlKind.POWER_LIMIT
TABLE = Path(__file__).with_name("zeus_v100.csv")
"""Zeus' published measurements on a V100: per batch size and power limit; epochs to the target, mean of its runs."""


def measured(network: str) -> dict[int, tuple[ControlCurve, float]]:
    """Return, by batch size, speed (epochs per second) and power by limit, and the epochs to the target."""
    rows: dict[int, list[dict[str, float]]] = defaultdict(list)
    with TABLE.open(encoding="utf-8") as text:
        for row in csv.DictReader(text):
            if row.pop("network") == network:
                rows[int(row["batch"])].append({name: float(value) for name, value in row.items()})
    tables: dict[int, tuple[ControlCurve, float]] = {}
    for batch, of_batch in rows.items():
        of_batch.sort(key=lambda row: row["power_limit_w"])
        limits, seconds, watts = (
            np.array([row[name] for row in of_batch]) for name in ("power_limit_w", "epoch_s", "power_w")
        )
        tables[batch] = ControlCurve(limits, 1.0 / seconds, watts), of_batch[0]["epochs"]
    return tables


def best(network: str, eta: float) -> tuple[int, float, float]:
    """Return the batch size and power limit of least cost to the target, and that cost (J)."""
    choices = {
        (batch, float(limit)): float(cost) * epochs
        for batch, (curve, epochs) in measured(network).items()
        for limit, cost in zip(curve.values, cost_per_work(curve, eta), strict=True)
    }
    batch, limit = min(choices, key=lambda choice: choices[choice])
    return batch, limit, choices[batch, limit]


def test_deepspeech2_trains_with_least_energy_least_time_and_least_cost_in_three_places() -> None:
    """The ends of the frontier that the paper draws for DeepSpeech2 on a V100, and eta 0.5 between them."""
    assert best("deepspeech2", eta=1.0)[:2] == (32, 100.0)
    assert best("deepspeech2", eta=0.0)[:2] == (48, 250.0)
    assert best("deepspeech2", eta=0.5)[:2] == (48, 150.0)


def test_the_least_saving_of_the_papers_workloads_is_the_one_it_prints() -> None:
    """23.8 %, the lower end of the range in the paper's introduction, is ResNet-50's against batch 256 at 250 W."""
    curve, epochs = measured("resnet50")[256]
    default_j = float(cost_per_work(curve, 1.0)[-1]) * epochs

    assert 1.0 - best("resnet50", eta=1.0)[2] / default_j == pytest.approx(0.238, abs=0.0005)


def test_eta_moves_the_limit_from_the_fastest_to_the_thriftiest() -> None:
    curve, _ = measured("deepspeech2")[32]

    chosen = [least_cost(curve, eta) for eta in (0.0, 0.25, 0.5, 0.75, 1.0)]

    assert chosen[0] is None, "the default limit"
    limits = [250.0 if limit is None else limit for limit in chosen]
    assert limits == sorted(limits, reverse=True)
    assert limits[2] == 150.0
    assert limits[-1] == 100.0


CURVE = ControlCurve(np.array([100.0, 150.0, 250.0]), np.array([0.5, 0.9, 1.0]), np.array([95.0, 140.0, 240.0]))


def cluster(*jobs: JobRow, curve: bool = True, takes: bool = True, trigger: Trigger = Trigger.ACTIVE) -> Snapshot:
    snapshot = a_snapshot(jobs, [a_node("n0", gpus=4)], trigger=trigger)
    kinds = replace(snapshot.jobs, control_curve=np.zeros(len(jobs), dtype=np.int64))
    curves = ({(0, LIMIT): CURVE} if curve else {},)
    settable = (frozenset([LIMIT] if takes else []),)
    return replace(snapshot, jobs=kinds, control_curves=curves, settable=settable, measures=True)


def settings(plan: Plan) -> dict[str, float | str | None]:
    """Return what the plan sets each job to; ``profile`` where it measures."""
    found: dict[str, float | str | None] = {}
    for action in plan.actions:
        if isinstance(action, SetControl):
            found[action.job_id] = action.value
        elif isinstance(action, ProfileControls):
            found[action.job_id] = "profile"
    return found


def test_gangs_that_start_or_run_get_the_limit_of_least_cost_once() -> None:
    policy = build_policy("las+zeus", {})
    snapshot = cluster(a_job("new"), a_job("old", on={"n0": (0,)}), a_job("set", on={"n0": (1,)}))
    limits = np.array([np.nan, np.nan, 150.0])
    snapshot = replace(snapshot, jobs=replace(snapshot.jobs, power_limit_w=limits))

    result = run_cycle(policy, snapshot, policy.initial())

    assert policy.name == "zeus+las"
    assert settings(result.plan) == {"new": 150.0, "old": 150.0}
    assert [action.job_id for action in result.plan.actions if isinstance(action, Start)] == ["new"]


def test_a_limit_that_is_not_worth_it_any_more_goes_back_to_the_default() -> None:
    policy = build_policy("zeus+las", {"eta": 0.0})
    snapshot = cluster(a_job("a", on={"n0": (0,)}))
    snapshot = replace(snapshot, jobs=replace(snapshot.jobs, power_limit_w=np.array([150.0])))

    assert settings(run_cycle(policy, snapshot, policy.initial()).plan) == {"a": None}


def test_of_an_unknown_kind_one_gang_is_measured_and_only_once() -> None:
    policy = build_policy("zeus+las", {})

    first = run_cycle(policy, cluster(a_job("a"), a_job("b"), curve=False), policy.initial())
    held = cluster(a_job("a", on={"n0": (0,)}), a_job("b", on={"n0": (1,)}), curve=False)
    again = run_cycle(policy, held, policy.load(policy.dump(first.memory)))
    stopped = run_cycle(policy, cluster(a_job("a"), a_job("b", on={"n0": (1,)}), curve=False), again.memory)

    assert settings(first.plan) == {"a": "profile"}
    assert settings(again.plan) == {}
    assert settings(stopped.plan) == {"a": "profile"}, "its next gang is measured anew"


def test_devices_that_take_no_limit_are_planned_around() -> None:
    policy = build_policy("zeus+las", {})

    assert settings(run_cycle(policy, cluster(a_job("a"), takes=False), policy.initial()).plan) == {}


def test_in_a_simulation_the_first_job_of_a_kind_pays_for_its_measurement() -> None:
    """Five seconds at each limit for the first; its successor starts at 150 W, where its time is 1 / 0.9."""
    behaviour = Behaviour(np.array([1]), np.array([1.0]), np.array([240.0]), controls={LIMIT: CURVE})
    kind = JobProfile("k", {ANY_MODEL: behaviour}, restart_s=0.0, checkpoint_s=0.0)
    jobs = a_workload([(0.0, 3_600.0, 1), (7_200.0, 3_600.0, 1)], [kind])

    result = simulate(
        "zeus+las", jobs, ClusterSpec.parse("1x1:RTX3090"), a_trace(), options=EngineOptions(host_idle_w=0.0)
    )

    first, second = result.columns.jct_s
    assert first == pytest.approx(15.0 + (3_600.0 - 5.0 * (1.0 + 0.9 + 0.5)) / 0.9)
    assert second == pytest.approx(3_600.0 / 0.9)
    energy_j = 5.0 * (240 + 140 + 95) + 140.0 * (first - 15.0)
    assert result.columns.energy_j.tolist() == pytest.approx([energy_j, 140.0 * second])
