"""What each lever of a policy saved: the same jobs replayed from a named baseline, adding one lever each time.

The baseline is ``fifo``: every job at the size that its user asked for, in order of submission, with its own batch, at
the boards' own power limits, on nodes that never sleep. The steps from there, in this order:

=============== =======================================================================================================
lever           what the replay adds to the one before it
=============== =======================================================================================================
``order``       the policy, with its other levers off
``width``       gangs of other sizes than those asked for
``batch``       batches that follow the gang
``power_limit`` power limits
``hours``       time to wait for greener hours
``sleep``       nodes that are powered down
=============== =======================================================================================================

A saving is a difference between two replays, so that nothing counts twice and the savings add up to the difference
between the baseline and the policy as it is in force. How levers share what they save together depends on the order. A
policy without a lever skips that lever's step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from services.core.policies.levers import Lever
from services.core.policies.parameters import accepted_names
from services.core.policies.registry import policy_entry
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.engine.grid import Grid
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload

BASELINE = "fifo"
SLACK_S = 43_200.0
"""What is replayed beside the policy in force: that every job may end this much later, as far as its length allows."""
OFF: Mapping[Lever, tuple[str, Any]] = {Lever.POWER_LIMIT: ("limits", False), Lever.HOURS: ("slack_s", 0.0)}
"""Parameters, and their values with which policies do without a lever."""
SLEEP = "sleep_after_s"

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Rung:
    """One replay with all levers up to ``lever``, which is None for the baseline."""

    lever: Lever | None
    policy: str
    parameters: Mapping[str, Any]
    engine: EngineOptions


def steps_of(policy: str, parameters: Mapping[str, Any], engine: EngineOptions) -> list[Rung]:
    """Return the replays from the baseline to the policy with these parameters, adding one lever each time."""
    entry = policy_entry(policy)
    names = {*accepted_names(entry.config).values()}
    options = replace(engine, rigid=True, batch_tuning="none", power_down_after_s=None)
    given = {**parameters, **{name: value for name, value in OFF.values() if name in names}}
    steps = [Rung(None, BASELINE, {}, options), Rung(Lever.ORDER, policy, given, options)]
    if entry.elastic:
        options = replace(options, rigid=False)
        steps.append(Rung(Lever.WIDTH, policy, given, options))
    if entry.tunes_batch:
        options = replace(options, batch_tuning=engine.batch_tuning)
        steps.append(Rung(Lever.BATCH, policy, given, options))
    for lever, (name, _) in OFF.items():
        if name in names:
            given = {key: value for key, value in given.items() if key != name}
            given |= {name: parameters[name]} if name in parameters else {}
            steps.append(Rung(lever, policy, given, options))
    if SLEEP in names:
        usual = next(each.default for each in fields(entry.config) if each.name == SLEEP)
        options = replace(options, power_down_after_s=parameters.get(SLEEP, usual) or None)
        steps.append(Rung(Lever.SLEEP, policy, given, options))
    return steps


def lever_savings(
    policy: str,
    parameters: Mapping[str, Any],
    workload: Workload,
    cluster: ClusterSpec,
    trace: CarbonTrace,
    engine: EngineOptions,
    report: Report,
) -> dict[str, Any]:
    """Return the replays of all steps, and of the policy with slack, as JSON values; energies without PUE.

    ``spread_gco2`` of a step estimates the standard deviation of its saving over sets of similar jobs: that of the
    differences between jobs, times the square root of their number.
    """
    steps = steps_of(policy, parameters, engine)
    has_hours = any(step.lever is Lever.HOURS for step in steps)
    last = steps[-1]
    slack_s = float(last.parameters.get("slack_s", 0.0) or 0.0)
    asked = [*steps, replace(last, parameters={**last.parameters, "slack_s": SLACK_S})] if has_hours else steps
    results: list[SimulationResult] = []
    for step in asked:
        options = {"parameters": step.parameters, "options": step.engine, "progress": None}
        results.append(simulate(step.policy, workload, cluster, trace, **options))
        report(len(results), len(asked))
    drawn = _until_one_end(results, asked, cluster, trace, engine)
    job_gco2 = [np.nan_to_num(result.columns.carbon_gco2) for result in results]
    found: dict[str, Any] = {
        "policy": policy,
        "baseline": BASELINE,
        "jobs": len(workload),
        "zone": trace.zone,
        "slack_in_force_s": slack_s,
        "steps": [
            {
                "lever": None if step.lever is None else step.lever.value,
                "gco2": drawn[at][0],
                "energy_j": drawn[at][1],
                "mean_s": _known(results[at].avg_jct_s),
                "completed": results[at].completed,
                "spread_gco2": _spread(job_gco2[max(at - 1, 0)] - job_gco2[at]),
            }
            for at, step in enumerate(steps)
        ],
        "spread_gco2": _spread(job_gco2[0] - job_gco2[len(steps) - 1]),
        "slack": None,
        "notes": [*workload.notes, *trace.notes],
    }
    if has_hours:
        found["slack"] = {"slack_s": SLACK_S, "gco2": drawn[-1][0], "mean_s": _known(results[-1].avg_jct_s)}
    return found


def _until_one_end(
    results: list[SimulationResult], steps: list[Rung], cluster: ClusterSpec, trace: CarbonTrace, engine: EngineOptions
) -> list[tuple[float, float]]:
    """Return the gCO2 and J of each replay's whole cluster, without PUE, up to the time the last one ended.

    A cluster that is done earlier continues to draw power.
    """
    ends_s = [float(np.nanmax(result.columns.ended_s, initial=-math.inf)) for result in results]
    last_s = max(ends_s)
    idle_w = sum(group.count * group.gpus * (group.model.idle_w + engine.host_idle_w) for group in cluster.groups)
    grid = Grid(trace, engine.history_s, engine.horizon_s)
    found: list[tuple[float, float]] = []
    for result, step, end_s in zip(results, steps, ends_s, strict=True):
        awake_s = step.engine.power_down_after_s
        until_s = last_s if awake_s is None else min(last_s, end_s + awake_s)
        known = math.isfinite(end_s)
        rest_j = idle_w * (until_s - end_s) if known else 0.0
        rest_g = idle_w * (grid.integral(until_s) - grid.integral(end_s)) / 3.6e6 if known else 0.0
        found.append((result.carbon_kg * 1e3 + rest_g, result.energy_kwh * 3.6e6 + rest_j))
    return found


def _spread(differences: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return float(np.std(differences) * math.sqrt(len(differences))) if len(differences) else 0.0


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
