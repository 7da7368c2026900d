"""The cloud week, the day and four weeks from both sides: ``python -m lab.reproductions.joint_certificate PAGE``.

What no schedule is below (``lab.bounds.modes``), a schedule that the simulator carries out (``lab.bounds.feasible``),
and ``joint`` with and without knowing lengths and the grid, for the same jobs, windows and levers: every job may end 24
hours later than at one GPU by itself. Makes ``joint-certificate``, ``joint-certificate-day`` and
``joint-certificate-weeks`` of PAGE anew, in some 25 minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from lab.bounds.feasible import Following, Place, plans_of
from lab.experiments.bound import Levers, Slack, least_of_run, lengths_s
from lab.reproductions.marked import fill
from services.core.domain.arrays import Floats
from services.core.domain.units import S_PER_HOUR
from services.core.policies.registry import build_policy
from services.kit.policies import load_policies
from services.simulator.engine import EngineOptions, SimulationResult
from services.simulator.engine.behaviour import who_tunes
from services.simulator.engine.grid import Grid
from services.simulator.engine.simulation import Simulation
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.training import predicted
from services.simulator.workload import CarbonTrace, ClusterSpec, ForecastKind, Workload

SLACK_S = 86_400.0
LEVERS = Levers(widths=True, batches=True, controls=True, sleep=True)
OPTIONS = EngineOptions(power_down_after_s=1.0, boot_s=0.0)  #: As joint-cloud's: idle machines cost nothing
TRIES, EARLIER_S = 4, 600.0
ALONE = {"hour_share": 0.0, "slack_s": SLACK_S, "slack_share": 1e6}


ROWS: tuple[tuple[str, bool, dict[str, bool]], ...] = (
    ("joint, lengths and grid known", True, {}),
    ("joint, both known, hours and sizes together", True, {"width_by_hour": True}),
    ("joint", False, {}),
    ("joint, hours and sizes together", False, {"width_by_hour": True}),
)


@dataclass(frozen=True)
class Problem:
    """Jobs on a cluster, and the zones in which they are asked for."""

    jobs: str
    start: str
    days: float
    grid_days: float
    cluster: str
    zones: tuple[str, ...]
    seed: int = 0
    options: EngineOptions = OPTIONS
    rows: tuple[tuple[str, bool, dict[str, bool]], ...] = ROWS
    label: str = ""


CLOUD = Problem("green-year", "2023-07-01", 7.0, 17.0, "128x2:RTX3090", ("GB", "SE", "US-CAL-CISO"))
BOOTS = EngineOptions(power_down_after_s=60.0)  #: Nodes sleep a minute after their last job, and take time to boot
DAY = Problem("green-day", "2023-08-08", 1.0, 8.0, "32x2:RTX3090", ("GB", "SE"), 1, BOOTS)
WEEKS = tuple(
    Problem("green-year", start, 7.0, 14.0, "32x2:RTX3090", ("GB", "SE"), 1, BOOTS, ROWS[1:2], f"{month}, ")
    for month, start in (
        ("January", "2023-01-09"),
        ("April", "2023-04-10"),
        ("July", "2023-07-10"),
        ("October", "2023-10-09"),
    )
)  #: As joint-year-bound's
TABLES = {"": (CLOUD,), "-day": (DAY,), "-weeks": WEEKS}


@dataclass(frozen=True)
class Sides:
    """Both sides of one problem."""

    least_kg: float  #: No schedule emits less
    feasible: SimulationResult  #: Carried out
    due_s: Floats  #: (n_jobs,) when each job must have ended, UTC seconds

    def late(self, result: SimulationResult) -> int:
        """Return how many jobs of a run end too late."""
        return int((result.columns.ended_s > self.due_s + 1.0).sum())


def both_sides(
    jobs: Workload, cluster: ClusterSpec, grid: CarbonTrace, slack_s: float = SLACK_S, options: EngineOptions = OPTIONS
) -> Sides:
    """Return the bound of these jobs on a cluster of one GPU model, and the best schedule found."""
    (group,) = cluster.groups
    due_s: Floats = jobs.submitted_s + lengths_s(jobs, cluster, options) + slack_s
    begin_s, end_s = float(jobs.submitted_s[0]), float(due_s.max())
    least = least_of_run(
        jobs,
        cluster,
        grid,
        options,
        LEVERS,
        jct_s=np.zeros(len(jobs)),
        makespan_s=end_s - begin_s,
        slack=Slack(slack_s),
        starts=True,
    )
    curve = Grid(grid, 1.0, 1.0).between(begin_s, end_s)
    idle_w = group.model.idle_w + options.host_idle_w
    place = Place(group.model.name, cluster.gpus, group.gpus, idle_w, curve, least.price_gco2[0])
    tunes, known = who_tunes(len(jobs), options).tolist(), replace(options, settings_known=True)
    named_s, planned_s, found = dict(zip(jobs.ids, due_s.tolist(), strict=True)), due_s, list[Sides]()
    for _ in range(TRIES):  # those that are late are planned anew, for earlier ends
        follows = Following(plans_of(jobs, place, options, tunes, planned_s), named_s)
        result = Simulation(follows, jobs, cluster, grid, replace(known, round_interval_s=S_PER_HOUR)).run({})
        found.append(Sides(least.carbon_gco2 / 1e3, result, due_s))
        over_s = result.columns.ended_s - due_s
        if not found[-1].late(result):
            break
        planned_s = np.where(over_s > 1.0, planned_s - over_s - EARLIER_S, planned_s)
    return min(found, key=lambda each: (each.late(each.feasible), each.feasible.carbon_kg))


def certificate_table(zones: Sequence[str] = (), problems: Sequence[Problem] = (CLOUD,)) -> str:
    """Return a row per problem, zone and schedule: its carbon, above the bound and above the one found."""
    lines = ["| zone | schedule | carbon, kg | above the bound | above the schedule found | mean JCT, h | late |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for of in problems:
        jobs, cluster = read_jobs(of.jobs, start=of.start, days=of.days, seed=of.seed), ClusterSpec.parse(of.cluster)
        for zone in zones or of.zones:
            grid, issued = (
                read_carbon(zone, start=of.start, days=of.grid_days, forecast=each)
                for each in (ForecastKind.PERFECT, "issued")
            )
            sides, where = both_sides(jobs, cluster, grid, options=of.options), of.label + zone
            lines.append(f"| {where} | bound | {sides.least_kg:.2f} | | | | |")
            lines.append(_row(where, "found, all known", sides.feasible, sides))
            for name, known, more in of.rows:
                asked, seen = (jobs, grid) if known else (predicted("none", jobs), issued)
                params = {**ALONE, **more}
                result = Simulation(build_policy("joint", params), asked, cluster, seen, of.options).run(params)
                lines.append(_row(where, name, result, sides))
    return "\n".join(lines)


def _row(zone: str, name: str, result: SimulationResult, sides: Sides) -> str:
    above = [100 * (result.carbon_kg / each - 1) for each in (sides.least_kg, sides.feasible.carbon_kg)]
    mine = "" if result is sides.feasible else f"{above[1]:+.1f} %"
    return (
        f"| {zone} | {name} | {result.carbon_kg:.2f} | {above[0]:+.1f} % | {mine} | "
        f"{result.avg_jct_s / S_PER_HOUR:.2f} | {sides.late(result)} |"
    )


if __name__ == "__main__":
    load_policies()
    fill(
        Path(sys.argv[1]),
        {f"joint-certificate{name}": partial(certificate_table, problems=of) for name, of in TABLES.items()},
    )
