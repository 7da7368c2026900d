"""Five cells with a fifth of the GPUs each, behind one home: ``python -m lab.reproductions.cells PAGE DATA``.

The workloads of ``joint_zones``. Each job is placed when it is submitted, and moved while it waits, by the code that a
home runs (``services.core.policies.cells``), from what cells say: after how long there is room for it, and what an hour
there emits by the forecast. In its cell the policy decides as ever. A job that was started stays, or moves with its
checkpoint while it runs, once it has progress to report; a move then takes ``HANDED_OVER_S`` more than the transfer.
Beside each run is that of one cluster over all zones. Makes the tables ``cells`` and ``cells-gap`` of PAGE anew, in ten
minutes; DATA as for ``joint_pairs``.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lab.reproductions.joint_zones import START, ran, workloads
from lab.reproductions.marked import fill
from services.core.cycle.snapshot import QUEUED, RUNNING, Trigger
from services.core.domain.carbon import CarbonCurve
from services.core.domain.transfers import Transfer
from services.core.domain.units import J_PER_KWH, S_PER_HOUR
from services.core.policies.cells import (
    HANDED_OVER_S,
    Offer,
    Rest,
    Terms,
    for_the_rest,
    is_worth_a_move,
    ranked,
    room_after_s,
)
from services.kit.policies import load_policies
from services.simulator.bundles import BUNDLED_ZONES
from services.simulator.engine.live import FloatRow, IntRow
from services.simulator.engine.simulation import Simulation
from services.simulator.readers.carbon import read_carbon
from services.simulator.workload import ClusterSpec

AGAIN_S = 300.0  #: As a home by default
TRANSFER = Transfer()
HANDED_OVER = Transfer(gbps=TRANSFER.checkpoint_gb * 8.0 / (TRANSFER.seconds + HANDED_OVER_S))
"""What a move between cells is simulated to take: the gang draws all the time."""
ONE, STAY, MOVE = "one cluster", "five cells", "five cells, jobs that run move"


class Home:
    """Places a simulation's jobs in its zones, each of which is a cell."""

    def __init__(self, run: Simulation, *, runs_move: bool) -> None:
        self._run, self._runs_move = run, runs_move
        self._cell = dict[int, int]()  #: By the job's row
        self._moves = Counter[int]()
        self.moved = [0, 0]  #: Moves of jobs that waited, and of those that ran
        self._asked_s = dict[int, float]()  #: When cells were last asked about a waiting job, or it was submitted
        self._gpus = np.bincount(run.nodes.zone, run.nodes.gpus, len(run.grids)).astype(int).tolist()
        self._at_s, self._known = -math.inf, list[CarbonCurve]()
        given = run.live._given  # pyright: ignore[reportPrivateUsage]
        self._predicted_s = np.nan_to_num(given[:, FloatRow.PREDICTED - FloatRow.FLEX])
        self._arrive: Callable[[int], int] = run._arrive  # pyright: ignore[reportPrivateUsage]
        self._round: Callable[[Any], None] = run._round  # pyright: ignore[reportPrivateUsage]
        run._arrive, run._round = self._placed, self._looked_at  # type: ignore[method-assign]
        run.live._all_eligible = False  # pyright: ignore[reportPrivateUsage]

    def _placed(self, row: int) -> int:
        offers, self._asked_s[row] = self._offers(row), self._run.gangs.now_s
        self._goes(row, int(ranked(offers, self._terms(row))[0].cell))
        return self._arrive(row)

    def _looked_at(self, trigger: Any) -> None:
        live, now_s = self._run.live, self._run.gangs.now_s
        for slot in range(live.count):
            row, phase = (live.ints.item(each, slot) for each in (IntRow.ROW, IntRow.PHASE))
            if now_s < self._asked_s[row] + AGAIN_S:
                continue
            if phase == QUEUED and not live.floats.item(FloatRow.ATTAINED, slot):
                offers = self._offers(row)
            elif phase == RUNNING and self._runs_move and trigger is Trigger.ACTIVE:
                offers = self._for_the_rest(slot)
            else:
                continue
            self._asked_s[row] = now_s
            here, terms = str(self._cell[row]), self._terms(row)
            own = next((offer for offer in offers if offer.cell == here), None)
            best = next(iter(ranked([offer for offer in offers if offer.cell != here], terms)), None)
            if own is not None and best is not None and is_worth_a_move(own, best, terms, self._moves[row]):
                self._moves[row] += 1
                self.moved[phase == RUNNING] += 1
                self._goes(row, int(best.cell))
                live.eligible[slot] = self._eligible(row)
                if phase == RUNNING:
                    self._run.gangs.preempt(slot)
        self._round(trigger)

    def _for_the_rest(self, slot: int) -> list[Offer]:
        live = self._run.live
        row, gpus = (live.ints.item(each, slot) for each in (IntRow.ROW, IntRow.GPUS))
        told = (live.floats.item(each, slot) for each in (FloatRow.PROGRESS, FloatRow.ATTAINED, FloatRow.ENERGY))
        done, gpu_s, energy_j = told
        if (rest := Rest.of(done, gpus, gpu_s, energy_j)) is None:
            return []
        offers = self._offers(row, rest.seconds)
        return for_the_rest(offers, str(self._cell[row]), rest, self._run.gangs.now_s, TRANSFER)

    def _terms(self, row: int) -> Terms:
        now_s = self._run.gangs.now_s
        return Terms(now_s, waited_s=now_s - self._run.workload.submitted_s.item(row))

    def _goes(self, row: int, cell: int) -> None:
        self._cell[row] = cell
        self._run.live._eligible_of[row] = self._eligible(row)  # pyright: ignore[reportPrivateUsage]

    def _eligible(self, row: int) -> Any:
        return np.array(self._run.nodes.zone_of) == self._cell[row]

    def _offers(self, row: int, left_s: float | None = None) -> list[Offer]:
        run, live, n = self._run, self._run.live, self._run.live.count
        now_s, gpus = run.gangs.now_s, run.workload.requested_gpus.item(row)
        if now_s > self._at_s:
            self._at_s, self._known = now_s, [grid.outlooks(now_s)[0].curve for grid in run.grids]
        floats, others = live.floats[:, :n], live.ints[IntRow.ROW, :n]
        done_s = floats[FloatRow.SET_DONE] + floats[FloatRow.SPEED] * np.maximum(now_s - floats[FloatRow.RUN_FROM], 0)
        done = np.where(live.ints[IntRow.GPUS, :n] > 0, done_s, floats[FloatRow.SET_DONE]) / floats[FloatRow.WORK]
        theirs_s = floats[FloatRow.PREDICTED] * (1 - np.minimum(done, 1))
        duration_s = self._predicted_s.item(row) if left_s is None else left_s
        duration_s = duration_s if duration_s > 0 else None
        cell = np.array([self._cell[other] for other in others.tolist()], dtype=np.int64)
        offers = list[Offer]()
        for at, curve in enumerate(self._known):
            there = (cell == at) & (others != row)
            asked, total = live.ints[IntRow.ASKED, :n][there], self._gpus[at]
            start_s = now_s + room_after_s(gpus, total, asked, theirs_s[there])
            intensity = curve.mean(now_s, now_s + (duration_s or S_PER_HOUR))
            power_w = 300.0 * gpus  # as a cell's prior: the same in all, so that it decides nothing
            grams = intensity * power_w * S_PER_HOUR / J_PER_KWH
            offers.append(Offer(str(at), start_s, grams, duration_s, intensity))
        return offers


def made(data: Path) -> dict[str, str]:
    """Return both tables: what came of each way, and of what the gap to its bound is made."""
    table = ["| jobs | policy | lengths | where | carbon, kg | mean JCT, h | 99th percentile, h | moves, waiting |"]
    table[0] += " moves, running | above the least by place | above the cleanest filled |"
    table.append("|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    gaps = ["| jobs | policy | lengths | where | carbon, kg | idle | places | whole gangs and moves |"]
    gaps[0] += " draw, split gangs, hours | least by place |"
    gaps.append("|---|---|---|---|---:|---:|---:|---:|---:|---:|")
    traces = [read_carbon(zone, start=START, days=40.0, forecast="issued") for zone in BUNDLED_ZONES]
    for name, (jobs, nodes) in workloads(data).items():
        five = ClusterSpec.parse(",".join(f"{zone}={nodes}" for zone in BUNDLED_ZONES))
        for policy, lengths in (("las", "perfect"), ("joint", "none"), ("joint", "perfect")):
            for where in (ONE, STAY, MOVE):
                homes = list[Home]()

                def prepare(run: Simulation, homes: list[Home] = homes, where: str = where) -> None:
                    if where != ONE:
                        homes.append(Home(run, runs_move=where == MOVE))

                found = ran(policy, jobs, five, traces, prepare, lengths, TRANSFER if where == ONE else HANDED_OVER)
                result, total = found.result, found.result.carbon_kg
                moved = [str(each) for each in homes[0].moved] if homes else ["", ""]
                cells = [name, policy, lengths, where, f"{total:.1f}", f"{result.avg_jct_s / S_PER_HOUR:.2f}"]
                cells += [f"{result.p99_jct_s / S_PER_HOUR:.1f}", *moved]
                cells += [f"{100 * (total / each - 1):+.0f} %" for each in (found.least_kg, found.filled_kg)]
                table.append(f"| {' | '.join(cells)} |")
                levels = [total - result.idle_carbon_kg, found.planned_kg, found.filled_kg, found.least_kg]
                parts = [total, result.idle_carbon_kg, *(more - less for more, less in pairwise(levels)), levels[-1]]
                gaps.append(f"| {' | '.join([name, policy, lengths, where, *(f'{each:.1f}' for each in parts)])} |")
    return {"cells": "\n".join(table), "cells-gap": "\n".join(gaps)}


if __name__ == "__main__":
    load_policies()
    tables = made(Path(sys.argv[2]))
    fill(Path(sys.argv[1]), {name: partial(tables.__getitem__, name) for name in tables})
