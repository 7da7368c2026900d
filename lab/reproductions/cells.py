"""Five cells with a fifth of the GPUs each, behind one home: ``python -m lab.reproductions.cells PAGE``.

GREEN's week of ``joint_zones``. Each job is placed when it is submitted, and moved while it waits, by the code that a
home runs (``services.core.policies.cells``), from what cells say: whether it would start now, and what an hour there
emits by the forecast. In its cell the policy decides as ever; a job that was started stays. Makes the table ``cells``
of PAGE anew, in a minute.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lab.reproductions.joint_zones import START, ran
from lab.reproductions.marked import fill
from services.core.domain.units import J_PER_KWH, S_PER_HOUR
from services.core.policies.cells import Offer, Terms, is_worth_a_move, ranked
from services.kit.policies import load_policies
from services.simulator.bundles import BUNDLED_ZONES
from services.simulator.engine.live import FloatRow, IntRow
from services.simulator.engine.simulation import Simulation
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.workload import ClusterSpec

NODES, DAYS = "6x2:RTX3090", 7


class Home:
    """Places a simulation's jobs in its zones, each of which is a cell; ``moved`` counts the moves of waiting jobs."""

    def __init__(self, run: Simulation) -> None:
        self._run = run
        self._cell = dict[int, int]()  #: By the job's row
        self._moves = Counter[int]()
        self._at_s, self._gco2_per_kwh = -math.inf, [0.0] * len(run.grids)
        self._arrive: Callable[[int], int] = run._arrive  # pyright: ignore[reportPrivateUsage]
        self._round: Callable[[Any], None] = run._round  # pyright: ignore[reportPrivateUsage]
        run._arrive, run._round = self._placed, self._looked_at  # type: ignore[method-assign]
        run.live._all_eligible = False  # pyright: ignore[reportPrivateUsage]

    @property
    def moved(self) -> int:
        return self._moves.total()

    def _placed(self, row: int) -> int:
        offers = self._offers(row)
        self._goes(row, int(ranked(offers, Terms(self._run.gangs.now_s))[0].cell))
        return self._arrive(row)

    def _looked_at(self, trigger: Any) -> None:
        live = self._run.live
        for slot in range(live.count):
            row = live.ints.item(IntRow.ROW, slot)
            if live.placements[slot] is not None or live.floats.item(FloatRow.ATTAINED, slot):
                continue
            offers, terms = self._offers(row), Terms(self._run.gangs.now_s)
            own = offers.pop(self._cell[row])
            best = ranked(offers, terms)[0]
            if is_worth_a_move(own, best, terms, self._moves[row]):
                self._moves[row] += 1
                self._goes(row, int(best.cell))
                live.eligible[slot] = self._eligible(row)
        self._round(trigger)

    def _goes(self, row: int, cell: int) -> None:
        self._cell[row] = cell
        self._run.live._eligible_of[row] = self._eligible(row)  # pyright: ignore[reportPrivateUsage]

    def _eligible(self, row: int) -> Any:
        return np.array(self._run.nodes.zone_of) == self._cell[row]

    def _offers(self, row: int) -> list[Offer]:
        run, live = self._run, self._run.live
        now_s, gpus = run.gangs.now_s, run.workload.min_gpus.item(row)
        if now_s > self._at_s:
            self._at_s = now_s
            known = [grid.outlooks(now_s)[0].curve for grid in run.grids]
            self._gco2_per_kwh = [each.mean(now_s, now_s + S_PER_HOUR) for each in known]
        free = np.bincount(run.nodes.zone, run.nodes.free_gpus, len(run.grids))
        for slot in range(live.count):
            other = live.ints.item(IntRow.ROW, slot)
            if live.placements[slot] is None and other != row:
                free[self._cell[other]] -= live.ints.item(IntRow.MIN, slot)
        power_w = 300.0 * gpus  # as a cell's prior: the same in all, so that it decides nothing
        return [
            Offer(str(at), now_s if free[at] >= gpus else math.inf, each * power_w * S_PER_HOUR / J_PER_KWH)
            for at, each in enumerate(self._gco2_per_kwh)
        ]


def cells_table() -> str:
    """Return a row per policy, with its carbon, its times and how far it is above its bound."""
    lines = ["| policy | carbon, kg | mean JCT, h | moves of waiting jobs | above the least by place |"]
    lines.append("|---|---:|---:|---:|---:|")
    traces = [read_carbon(zone, start=START, days=40.0, forecast="issued") for zone in BUNDLED_ZONES]
    jobs = read_jobs("green-year", start=START, days=DAYS)
    five = ClusterSpec.parse(",".join(f"{zone}={NODES}" for zone in BUNDLED_ZONES))
    for policy in ("las", "joint"):
        homes: list[Home] = []
        result, least = ran(policy, jobs, five, traces, lambda run, homes=homes: homes.append(Home(run)))
        figures = f"{result.carbon_kg:.1f} | {result.avg_jct_s / S_PER_HOUR:.2f} | {homes[0].moved}"
        lines.append(f"| {policy} | {figures} | {100 * (result.carbon_kg / least - 1):+.0f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    load_policies()
    fill(Path(sys.argv[1]), {"cells": cells_table})
