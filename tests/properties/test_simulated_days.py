"""Physics of simulated days under every policy, on clusters, jobs and grids of all sizes and kinds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.core.cycle.plan import Plan
from services.core.domain.carbon import CarbonCurve, Signal
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.gpus import GPU_MODELS
from services.core.domain.prices import PriceCurve
from services.core.policies.registry import FAIR, POLICIES, build_policy
from services.simulator.engine import EngineOptions
from services.simulator.engine.live import FloatRow
from services.simulator.engine.simulation import Simulation
from services.simulator.workload import (
    ANY_MODEL,
    Behaviour,
    CarbonTrace,
    ClusterSpec,
    ForecastKind,
    JobProfile,
    NodeGroup,
    SitePrices,
    Workload,
)

BEGIN_S = 1_672_531_200.0
SEEDS = range(6)
NAMES = [*POLICIES, FAIR + "joint", FAIR + "las"]
SLACK = {"joint": {"slack_s": 40_000.0, "tonne_price": 80.0}, "green": {"slack_s": 40_000.0}}
SHARE = 1e-6


def some(random: np.random.Generator, *choices: Any) -> Any:
    return choices[int(random.integers(len(choices)))]


def a_cluster(random: np.random.Generator) -> ClusterSpec:
    """One to three groups of one to sixteen GPUs a node, one GPU to some hundred, in up to two zones."""
    zones, boards = some(random, ("",), ("",), ("A", "B")), list(GPU_MODELS.values())
    groups = [
        NodeGroup(
            int(random.choice([1, 2, 9])),
            int(random.integers(1, 17)),
            some(random, *boards),
            schedulable=bool(random.random() < 0.9),
            zone=zones[at % len(zones)],
        )
        for at in range(int(random.integers(1, 4)))
    ]
    return ClusterSpec(tuple(groups))


def a_profile(random: np.random.Generator, name: str) -> JobProfile:
    sizes = np.array([1, 2, 4, 8])
    speed, power_w = sizes ** random.uniform(0.0, 1.0), np.full(4, random.uniform(30.0, 300.0))
    values = np.linspace(100.0, 300.0, 5)
    curve = ControlCurve(values, (values / 300.0) ** 0.4, power_w[0] * values / 300.0)
    true = Behaviour(sizes, speed, power_w, 0.7 * speed, None, {ControlKind.POWER_LIMIT: curve})
    told = replace(true, speed=speed * random.uniform(0.5, 2.0)) if random.random() < 0.5 else true
    return JobProfile(name, {ANY_MODEL: true}, {ANY_MODEL: told}, some(random, 0.0, 60.0), some(random, 0.0, 300.0))


def a_load(random: np.random.Generator) -> Workload:
    """No job to forty, of seconds to weeks, some wider than the cluster."""
    n, profiles = int(random.choice([0, 1, 12, 40])), tuple(a_profile(random, f"k{at}") for at in range(3))
    work_s = np.exp(random.normal(some(random, 1.0, 7.0, 11.0), 1.0, n)).clip(0.01, 864_000.0)
    low, step = random.choice([1, 1, 2, 3, 20], n), random.choice([1, 2], n)
    high = low + step * random.choice([0, 1, 7], n)
    submitted_s = BEGIN_S + np.sort(random.uniform(0.0, some(random, 0.0, 90_000.0), n))
    return Workload(
        ids=tuple(f"j{at}" for at in range(n)),
        tenants=tuple(some(random, "t", "u") for _ in range(n)),
        submitted_s=submitted_s,
        work_s=work_s,
        requested_gpus=low,
        min_gpus=low,
        max_gpus=high,
        step_gpus=step,
        profile=random.integers(0, 3, n),
        profiles=profiles,
        predicted_work_s=some(random, None, np.where(random.random(n) < 0.3, np.nan, 2 * work_s)),
        priority=random.integers(-1, 2, n),
        preemptible=random.random(n) < 0.7,
        deadline_s=np.where(random.random(n) < 0.5, np.inf, submitted_s + work_s + 20_000.0),
    )


def a_grid(random: np.random.Generator, zone: str) -> CarbonTrace:
    """Constant, zero or wild, in steps of five minutes to an hour that may begin at any time; prices below zero too."""
    step_s, steps = some(random, 300.0, 1_800.0, 3_600.0), some(random, 1, 30, 400)
    times_s = BEGIN_S - some(random, 0.0, 2_700.0, 86_400.0) + step_s * np.arange(steps)
    values = some(random, np.full(steps, 300.0), np.zeros(steps), random.choice([0.0, 20.0, 900.0], steps))
    prices = SitePrices(PriceCurve(BEGIN_S, random.uniform(-0.3, 0.4, 48)), "EUR", bool(random.random() < 0.5))
    curve = CarbonCurve(times_s, values, float(times_s[-1]) + step_s)
    kind = some(random, ForecastKind.PERFECT, ForecastKind.PERSISTENCE)
    return CarbonTrace(zone, Signal.AVERAGE_DIRECT, curve, kind, prices=some(random, None, prices))


class Watched(Simulation):
    """A run whose devices are counted after every plan, and whose power is noted for every moment."""

    def __init__(self, *inputs: Any) -> None:
        super().__init__(*inputs)
        self.drawn: list[tuple[float, ...]] = []

    def _carry_out(self, plan: Plan) -> None:
        super()._carry_out(plan)
        live, nodes, holder = self.live, self.nodes, dict[tuple[int, int], str]()
        power_w = 0.0
        for slot, placement in enumerate(live.placements):
            power_w += live.floats.item(FloatRow.DRAW, slot)
            assert (placement is None) == (live.floats.item(FloatRow.DRAW, slot) == 0)
            for share in () if placement is None else placement.shares:
                for device in share.devices:
                    at = nodes.where[share.node_id], device
                    assert holder.setdefault(at, live.ids[slot]) == live.ids[slot], "a device with two holders"
                    assert device < nodes.gpus[at[0]]
        held = np.bincount([at for at, _ in holder], minlength=len(nodes.ids))
        free = np.where(nodes.up, np.array(nodes.gpus) - held, 0)
        assert free.tolist() == nodes.free_gpus.tolist()
        assert power_w == pytest.approx(self.gangs.power_w, rel=SHARE, abs=SHARE)
        if all(nodes.up):
            asleep = nodes.table().asleep
            assert not held[asleep].any()
            idle_w = float((free * nodes.idle_w_of[nodes.model])[~asleep].sum())
            assert idle_w == pytest.approx(nodes.idle_w, rel=SHARE, abs=SHARE)

    def _advance(self, time_s: float) -> None:
        zone_w = np.add(self.gangs.zone_w, self.nodes.zone_idle_w)
        if len(self.grids) == 1:
            zone_w = np.array([self.gangs.power_w + self.nodes.idle_w])
        self.drawn.append((self.gangs.now_s, time_s, *zone_w.tolist()))
        super()._advance(time_s)


def grams(trace: CarbonTrace, drawn: np.ndarray[Any, Any], zone: int) -> float:
    """Return the emissions of what was drawn, step by step, with the trace's last day over and over."""
    curve = trace.curve
    last = curve.times_s >= curve.end_s - 86_400.0
    day_s = curve.end_s - curve.times_s[last][0]
    times = max(math.ceil((drawn[-1, 1] - curve.end_s) / day_s), 0)
    starts_s = np.concatenate([curve.times_s, *(curve.times_s[last] + (at + 1) * day_s for at in range(times))])
    values = np.concatenate([curve.intensity_gco2_per_kwh, *[curve.intensity_gco2_per_kwh[last]] * times])
    edges_s = np.append(starts_s, curve.end_s + times * day_s)
    sums = np.append(0.0, np.cumsum(values * np.diff(edges_s)))
    until, since = (np.interp(drawn[:, column], edges_s, sums) for column in (1, 0))
    return float(drawn[:, 2 + zone] @ (until - since)) / 3.6e6


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_devices_energy_carbon_and_work_add_up(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    cluster, jobs = a_cluster(random), a_load(random)
    traces = [a_grid(random, zone or "A") for zone in cluster.zones]
    options = EngineOptions(
        node_mtbf_s=some(random, None, None, 50_000.0),
        power_down_after_s=some(random, None, 60.0),
        interval_jobs=some(random, 0.0, 0.5),
        min_run_s=some(random, 0.0, 1_200.0),
        tenant_gpu_quota=some(random, {}, {"t": 4}),
        settings_known=bool(random.random() < 0.5),
    )
    parameters = SLACK.get(name, {}) if seed % 2 else {}

    run = Watched(build_policy(name, parameters), jobs, cluster, traces[0], options, None, None, traces[1:])
    found = run.run(dict(parameters))

    columns, drawn = found.columns, np.array(run.drawn or [(BEGIN_S, BEGIN_S, *[0.0] * len(traces))])
    json.dumps(found.summary(), allow_nan=False)
    assert found.completed + found.unrunnable == found.jobs
    energy_j = drawn[:, 2:].sum(axis=1) @ (drawn[:, 1] - drawn[:, 0]) + run.gangs.transferred[0]
    carbon_g = sum(grams(trace, drawn, at) for at, trace in enumerate(traces)) + run.gangs.transferred[1]
    assert found.energy_kwh * 3.6e6 == pytest.approx(energy_j, rel=SHARE)
    assert found.carbon_kg * 1e3 == pytest.approx(carbon_g, rel=SHARE, abs=SHARE)
    assert columns.energy_j.sum() + found.idle_energy_kwh * 3.6e6 == pytest.approx(energy_j, rel=SHARE)
    assert columns.carbon_gco2.sum() + found.idle_carbon_kg * 1e3 == pytest.approx(carbon_g, rel=SHARE, abs=SHARE)
    for row in np.flatnonzero(np.isfinite(columns.ended_s)).tolist():
        sizes = np.arange(jobs.min_gpus[row], jobs.max_gpus[row] + 1)
        (truth,) = jobs.profiles[jobs.profile[row]].true.values()
        speed = truth.speed_at(sizes)
        assert columns.jct_s[row] >= jobs.work_s[row] / speed.max() - 1e-3, "no work is done faster than it can be"
        assert columns.gpu_s[row] >= jobs.work_s[row] * (sizes / speed).min() - 1e-3, "all of it is done"
