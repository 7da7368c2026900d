"""Five cells with a fifth of the GPUs each, behind one home: ``python -m lab.reproductions.cells PAGE DATA``.

The workloads of ``joint_zones``. Each job is placed when it is submitted, and moved while it waits, by the code that a
home runs (``services.core.policies.cells``), from what cells say: after how long there is room for it, and what an hour
there emits by the forecast. In its cell the policy decides as ever; a job that was started stays. Beside each run is
that of one cluster over all zones, where jobs that run move, too. Makes the table ``cells`` of PAGE anew, in five
minutes; DATA as for ``joint_pairs``.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lab.reproductions.joint_zones import START, ran, workloads
from lab.reproductions.marked import fill
from services.core.domain.carbon import CarbonCurve
from services.core.domain.units import J_PER_KWH, S_PER_HOUR
from services.core.policies.cells import Offer, Terms, is_worth_a_move, ranked, room_after_s
from services.kit.policies import load_policies
from services.simulator.bundles import BUNDLED_ZONES
from services.simulator.engine.live import FloatRow, IntRow
from services.simulator.engine.simulation import Simulation
from services.simulator.readers.carbon import read_carbon
from services.simulator.workload import ClusterSpec

AGAIN_S = 300.0  #: As a home by default


class Home:
    """Places a simulation's jobs in its zones, each of which is a cell; ``moved`` counts the moves of waiting jobs."""

    def __init__(self, run: Simulation) -> None:
        self._run = run
        self._cell = dict[int, int]()  #: By the job's row
        self._moves = Counter[int]()
        self._asked_s = dict[int, float]()  #: When cells were last asked about a waiting job, or it was submitted
        self._gpus = np.bincount(run.nodes.zone, run.nodes.gpus, len(run.grids)).astype(int).tolist()
        self._at_s, self._known = -math.inf, list[CarbonCurve]()
        given = run.live._given  # pyright: ignore[reportPrivateUsage]
        self._predicted_s = np.nan_to_num(given[:, FloatRow.PREDICTED - FloatRow.FLEX])
        self._arrive: Callable[[int], int] = run._arrive  # pyright: ignore[reportPrivateUsage]
        self._round: Callable[[Any], None] = run._round  # pyright: ignore[reportPrivateUsage]
        run._arrive, run._round = self._placed, self._looked_at  # type: ignore[method-assign]
        run.live._all_eligible = False  # pyright: ignore[reportPrivateUsage]

    @property
    def moved(self) -> int:
        return self._moves.total()

    def _placed(self, row: int) -> int:
        offers, self._asked_s[row] = self._offers(row), self._run.gangs.now_s
        self._goes(row, int(ranked(offers, self._terms(row))[0].cell))
        return self._arrive(row)

    def _looked_at(self, trigger: Any) -> None:
        live = self._run.live
        for slot in range(live.count):
            row = live.ints.item(IntRow.ROW, slot)
            if live.placements[slot] is not None or live.floats.item(FloatRow.ATTAINED, slot):
                continue
            if self._run.gangs.now_s < self._asked_s[row] + AGAIN_S:
                continue
            self._asked_s[row] = self._run.gangs.now_s
            offers, terms = self._offers(row), self._terms(row)
            own = offers.pop(self._cell[row])
            best = ranked(offers, terms)[0]
            if is_worth_a_move(own, best, terms, self._moves[row]):
                self._moves[row] += 1
                self._goes(row, int(best.cell))
                live.eligible[slot] = self._eligible(row)
        self._round(trigger)

    def _terms(self, row: int) -> Terms:
        now_s = self._run.gangs.now_s
        return Terms(now_s, waited_s=now_s - self._run.workload.submitted_s.item(row))

    def _goes(self, row: int, cell: int) -> None:
        self._cell[row] = cell
        self._run.live._eligible_of[row] = self._eligible(row)  # pyright: ignore[reportPrivateUsage]

    def _eligible(self, row: int) -> Any:
        return np.array(self._run.nodes.zone_of) == self._cell[row]

    def _offers(self, row: int) -> list[Offer]:
        run, live, n = self._run, self._run.live, self._run.live.count
        now_s, gpus = run.gangs.now_s, run.workload.requested_gpus.item(row)
        if now_s > self._at_s:
            self._at_s, self._known = now_s, [grid.outlooks(now_s)[0].curve for grid in run.grids]
        floats, others = live.floats[:, :n], live.ints[IntRow.ROW, :n]
        done_s = floats[FloatRow.SET_DONE] + floats[FloatRow.SPEED] * np.maximum(now_s - floats[FloatRow.RUN_FROM], 0)
        done = np.where(live.ints[IntRow.GPUS, :n] > 0, done_s, floats[FloatRow.SET_DONE]) / floats[FloatRow.WORK]
        left_s = floats[FloatRow.PREDICTED] * (1 - np.minimum(done, 1))
        duration_s = self._predicted_s.item(row)
        duration_s = duration_s if duration_s > 0 else None
        cell = np.array([self._cell[other] for other in others.tolist()], dtype=np.int64)
        offers = list[Offer]()
        for at, curve in enumerate(self._known):
            there = (cell == at) & (others != row)
            asked, total = live.ints[IntRow.ASKED, :n][there], self._gpus[at]
            start_s = now_s + room_after_s(gpus, total, asked, left_s[there])
            intensity = curve.mean(now_s, now_s + (duration_s or S_PER_HOUR))
            power_w = 300.0 * gpus  # as a cell's prior: the same in all, so that it decides nothing
            offers.append(Offer(str(at), start_s, intensity * power_w * S_PER_HOUR / J_PER_KWH, duration_s))
        return offers


def cells_table(data: Path) -> str:
    """Return a row per workload and policy, with its carbon, its times and how far it is above its bounds."""
    lines = [
        "| jobs | policy | lengths | where | carbon, kg | mean JCT, h | 99th percentile, h | moves of waiting jobs |"
    ]
    lines[0] += " above the least by place | above the cleanest filled |"
    lines.append("|---|---|---|---|---:|---:|---:|---:|---:|---:|")
    traces = [read_carbon(zone, start=START, days=40.0, forecast="issued") for zone in BUNDLED_ZONES]
    for name, (jobs, nodes) in workloads(data).items():
        five = ClusterSpec.parse(",".join(f"{zone}={nodes}" for zone in BUNDLED_ZONES))
        for policy, lengths in (("las", "perfect"), ("joint", "none"), ("joint", "perfect")):
            for where in ("one cluster", "five cells"):
                homes = list[Home]()

                def prepare(run: Simulation, homes: list[Home] = homes, where: str = where) -> None:
                    if where == "five cells":
                        homes.append(Home(run))

                result, least, filled = ran(policy, jobs, five, traces, prepare, lengths)
                moved = f"{homes[0].moved}" if homes else ""
                jct_h = np.array([result.avg_jct_s, result.p99_jct_s]) / S_PER_HOUR
                figures = f"{result.carbon_kg:.1f} | {jct_h[0]:.2f} | {jct_h[1]:.1f} | {moved}"
                above = " | ".join(f"{100 * (result.carbon_kg / each - 1):+.0f} %" for each in (least, filled))
                lines.append(f"| {name} | {policy} | {lengths} | {where} | {figures} | {above} |")
    return "\n".join(lines)


if __name__ == "__main__":
    load_policies()
    fill(Path(sys.argv[1]), {"cells": lambda: cells_table(Path(sys.argv[2]))})
