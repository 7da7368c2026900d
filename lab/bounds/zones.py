"""The least that a run could have emitted if only the zones of its gangs had been chosen otherwise.

When jobs run, how wide and at which draw is kept. Hour by hour each job is shared out among the zones::

    min  sum E[s] c[h,z] x[s,z]  +  e sum (c[h,z] + min c[h]) / 2 * m[s,z]
    x[s] sums to 1,  m[s,z] >= x[s,z] - x[s-1,z],  GPU seconds of zone z in hour h <= its GPUs * 3600

``s`` is an hour of a job with energy ``E``, ``c`` the mean intensity and ``e`` the energy of a move. Fractions of gangs
may be anywhere, hours are averaged, and nobody waits for a checkpoint, so no choice of zones emits less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, vstack

from services.core.domain.transfers import Transfer
from services.core.domain.units import J_PER_KWH, S_PER_HOUR
from services.simulator.engine.grid import Grid
from services.simulator.engine.live import FloatRow, IntRow
from services.simulator.engine.simulation import Simulation

LOOKS_S = 900.0  #: How often ``planned_kg`` moves gangs
Stretch = tuple[int, float, float, float, int]  #: A job's row, begin and end (UTC seconds), watts, GPUs


def stretches_of(simulation: Simulation) -> list[Stretch]:
    """Return a list that fills, while a simulation runs, with the times in which a gang drew a constant power."""
    found: list[Stretch] = []
    settle: Callable[[int], None] = simulation.gangs.settle

    def settled(slot: int) -> None:
        floats, ints, now_s = simulation.live.floats, simulation.live.ints, simulation.gangs.now_s
        begin_s, watts = floats.item(FloatRow.ACCOUNTED, slot), floats.item(FloatRow.DRAW, slot)
        if now_s > begin_s:
            found.append((ints.item(IntRow.ROW, slot), begin_s, now_s, watts, ints.item(IntRow.GPUS, slot)))
        settle(slot)

    simulation.gangs.settle = settled
    return found


def filled_kg(stretches: Sequence[Stretch], grids: Sequence[Grid], gpus: Sequence[int]) -> float:
    """Return what a run had emitted, kg, if at each moment the GPUs in use had been the cleanest, of like draw.

    It is no bound: sorting the hottest gangs into the cleanest zones emits less. It is what is left of the bound for
    those who cannot choose by what gangs draw; no gang is in two zones, hours are not averaged, and moves are free.
    """
    changes = sorted(
        change for _, begin_s, end_s, watts, n in stretches for change in ((begin_s, n, watts), (end_s, -n, -watts))
    )
    held, drawn_w, total = 0, 0.0, 0.0
    for (at_s, n, watts), (until_s, *_) in pairwise(changes):
        held, drawn_w = held + n, drawn_w + watts
        while at_s < until_s and held:
            upto_s = min(until_s, (at_s // S_PER_HOUR + 1) * S_PER_HOUR)
            means = [(grid.integral(upto_s) - grid.integral(at_s)) / (upto_s - at_s) for grid in grids]
            left = held
            for zone in np.argsort(means).tolist():
                here = min(left, gpus[zone])
                total += here / held * drawn_w * means[zone] * (upto_s - at_s) / J_PER_KWH
                left -= here
            at_s = upto_s
    return total / 1_000.0


def planned_kg(stretches: Sequence[Stretch], grids: Sequence[Grid], gpus: Sequence[int], transfer: Transfer) -> float:
    """Return what a run had emitted, kg, if whole gangs had been moved by one who knows what is left of each.

    A gang starts where what is left of it emits least among the zones with room. Every quarter of an hour those move
    that save most, to where there is room, each if it saves more than its way, on which it also draws, costs.
    """
    parts: dict[int, list[Stretch]] = {}
    for each in sorted(stretches):
        parts.setdefault(each[0], []).append(each)
    after = {row: _left(mine, grids) for row, mine in parts.items()}
    at = dict.fromkeys(parts, 0)
    zone: dict[int, int] = {}
    begins = sorted((begin_s, row) for row, mine in parts.items() for _, begin_s, *_ in mine)
    first_s, last_s = begins[0][0], max(end_s for _, _, end_s, *_ in stretches)
    looks = np.arange(first_s, last_s, LOOKS_S).tolist()
    total, live = 0.0, set[int]()

    def left_g(row: int, to: int, now_s: float) -> float:
        _, begin_s, end_s, watts, _ = parts[row][at[row]]
        now = watts * (grids[to].integral(end_s) - grids[to].integral(max(begin_s, now_s))) / J_PER_KWH
        return now + after[row][at[row] + 1][to]

    def price_g(row: int, to: int, now_s: float) -> float:
        before, there = grids[zone[row]].at(now_s), grids[to].at(now_s)
        waits_kwh = parts[row][at[row]][3] * transfer.seconds / J_PER_KWH
        return transfer.energy_kwh * (before + there) / 2 + waits_kwh * there

    for now_s, begun in sorted([*((at_s, row) for at_s, row in begins), *((at_s, -1) for at_s in looks)]):
        free = list(gpus)
        for row in [*live]:
            while at[row] < len(parts[row]) and parts[row][at[row]][2] <= now_s:
                at[row] += 1
            if at[row] == len(parts[row]):
                live.remove(row)
            elif row != begun and parts[row][at[row]][1] <= now_s:
                free[zone[row]] -= parts[row][at[row]][4]
        if begun >= 0:
            live.add(begun)
            n, stays = parts[begun][at[begun]][4], zone.get(begun)
            if stays is not None and free[stays] >= n:
                continue
            fits = [each for each, room in enumerate(free) if room >= n] or [int(np.argmax(free))]
            goes = min(fits, key=lambda to: left_g(begun, to, now_s))
            if stays is not None:
                total += price_g(begun, goes, now_s) + left_g(begun, goes, now_s) - left_g(begun, stays, now_s)
            else:
                total += left_g(begun, goes, now_s)
            zone[begun] = goes
            continue
        pays = list[tuple[float, int, int]]()
        for row in live:
            for to, grid in enumerate(grids):
                if grid.at(now_s) < grids[zone[row]].at(now_s):
                    saved_g = left_g(row, zone[row], now_s) - left_g(row, to, now_s) - price_g(row, to, now_s)
                    pays += [(-saved_g, row, to)] if saved_g > 0 else []
        moved = set[int]()
        for less_g, row, to in sorted(pays):
            n = parts[row][at[row]][4]
            if row not in moved and free[to] >= n:
                free[to] -= n
                free[zone[row]] += n
                zone[row], total = to, total + less_g
                moved.add(row)
    return total / 1_000.0


def _left(mine: Sequence[Stretch], grids: Sequence[Grid]) -> list[list[float]]:
    """Return what a job emits in each zone from each of its stretches on, and nothing at last, gCO2."""
    found = [[0.0] * len(grids)]
    for _, begin_s, end_s, watts, _ in reversed(mine):
        grams = [watts * (grid.integral(end_s) - grid.integral(begin_s)) / J_PER_KWH for grid in grids]
        found.append([more + so_far for more, so_far in zip(grams, found[-1], strict=True)])
    return found[::-1]


def least_kg(stretches: Sequence[Stretch], grids: Sequence[Grid], gpus: Sequence[int], move_kwh: float) -> float:
    """Return the bound, kg.

    Args:
        grids, gpus: The grid and the number of GPUs of each zone.
        move_kwh: What networks and storage use to move one checkpoint.

    Raises:
        ArithmeticError: The solver finds none.
    """
    first_s = min(begin_s for _, begin_s, *_ in stretches) // S_PER_HOUR * S_PER_HOUR
    parts: dict[tuple[int, int], list[float]] = {}
    for row, begin_s, end_s, watts, count in stretches:
        while begin_s < end_s:
            hour = int((begin_s - first_s) // S_PER_HOUR)
            upto_s = min(end_s, first_s + (hour + 1) * S_PER_HOUR)
            part = parts.setdefault((row, hour), [0.0, 0.0])
            part[0] += watts * (upto_s - begin_s) / J_PER_KWH
            part[1] += count * (upto_s - begin_s)
            begin_s = upto_s
    keys, zones = sorted(parts), len(grids)
    hours, (kwh, gpu_s) = np.array([hour for _, hour in keys]), np.array([parts[key] for key in keys]).T
    edges_s = first_s + S_PER_HOUR * np.arange(int(hours.max()) + 2)
    means = np.diff([[grid.integral(at_s) for grid in grids] for at_s in edges_s.tolist()], axis=0) / S_PER_HOUR
    later = np.array([at for at in range(1, len(keys)) if keys[at][0] == keys[at - 1][0]], dtype=np.int64)
    n, moves = len(keys) * zones, later.size * zones
    at, wide, zone = np.arange(n), n + moves, np.arange(zones)
    there = means[hours[later]]
    cost = np.concatenate(
        ((kwh[:, None] * means[hours]).ravel(), move_kwh * ((there + there.min(axis=1, keepdims=True)) / 2).ravel())
    )
    whole = coo_matrix((np.ones(n), (at // zones, at)), shape=(len(keys), wide))
    room = (hours[:, None] * zones + zone).ravel()
    held = coo_matrix((np.repeat(gpu_s, zones), (room, at)), shape=(means.size, wide))
    rows, now = np.arange(moves), (later[:, None] * zones + zone).ravel()
    signs = np.repeat([1.0, -1.0, -1.0], moves)
    columns = np.concatenate((now, now - zones, n + rows))
    moved = coo_matrix((signs, (np.tile(rows, 3), columns)), shape=(moves, wide))
    most = np.concatenate((np.tile(np.array(gpus) * S_PER_HOUR, len(means)), np.zeros(moves)))
    result = linprog(cost, vstack((held, moved)), most, whole, np.ones(len(keys)), method="highs")
    if result.status:
        raise ArithmeticError(result.message)
    return float(result.fun) / 1_000.0
