"""What gangs draw by power limit or clock, also those of kinds of which nothing was measured.

A gang whose kind is known has the curve of its kind. Any other is taken to draw what its GPUs drew before an order, or
what they may draw by default, and no more than a power limit that is set: a limit is kept by the board itself, so that
an order can be met without a measurement. Its speed then follows the clock to which the board falls back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.core.cycle.plan import Action, Start
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.domain.gangs import GangTable
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.view import Tables
from services.core.profiles.boards import board_of


def in_zone(snapshot: Snapshot, zone: int) -> Snapshot:
    """Return the snapshot with the nodes of one grid alone, -1 for all; gangs count where their first rank is."""
    nodes = snapshot.nodes
    return snapshot if zone < 0 else snapshot.again(nodes=nodes.rows(nodes.zone == zone))


def within(scope: Snapshot, actions: Iterable[Action]) -> list[Action]:
    """Return the actions without the starts outside a scope."""
    nodes = scope.nodes.index
    return [each for each in actions if not isinstance(each, Start) or each.placement.shares[0].node_id in nodes]


LEVELS = 12  #: Limits that are considered for a gang of an unknown kind, besides the default
EXPONENT = 2.0  #: Of dynamic power over the clock: voltage falls with the clock, but has a floor
CLOCKED = 0.75  #: Share of a step that stretches when the clock falls; the rest waits for memory and the network
_DEFAULTS = PowerflowConfig()


def under_limit(limits_w: Floats, draws_w: float, idle_w: float) -> tuple[Floats, Floats]:
    """Return the speed, as a share of that without a limit, and the draw of a GPU under power limits: (n,) each.

    Args:
        limits_w: (n,) the limits.
        draws_w: What it draws without one.
        idle_w: What it draws idle, below ``draws_w``.
    """
    power_w = np.minimum(limits_w, draws_w)
    clock = (np.maximum(power_w - idle_w, 0.01 * draws_w) / (draws_w - idle_w)) ** (1 / EXPONENT)
    return 1 / (CLOCKED / np.minimum(clock, 1.0) + 1 - CLOCKED), power_w


@dataclass
class OrderTables(Tables):
    """The tables of all jobs; see the module."""

    @classmethod
    def of_round(cls, snapshot: Snapshot) -> OrderTables:
        jobs = snapshot.jobs
        before_w = np.where(np.isnan(jobs.unordered_w), jobs.gpu_power_w, jobs.unordered_w)
        columns = {**vars(jobs), "gpu_power_w": np.where(before_w > 0, before_w, np.nan)}
        return cls(snapshot.again(jobs=type(jobs).of_columns(columns)), _DEFAULTS)

    def assumed(self, job: int, gpu_model: int) -> GangTable:
        """Return what is assumed of a job without a table of its kind, with its share of the hosts."""
        table, highest_w = super().assumed(job, gpu_model), self._range_w(gpu_model)[1]
        power_w = table.power_w
        if np.isnan(self.snapshot.jobs.gpu_power_w.item(job)) and not np.isnan(highest_w):
            power_w = power_w * (highest_w / self.config.default_gpu_w)
        hosts_w = self._host_w(gpu_model) * table.gpus[:, None]
        return GangTable(table.gpus, table.speed, power_w + hosts_w, table.kind, table.values)

    def completed(self, table: GangTable, gpu_model: int) -> GangTable:
        """Return a table with what power limits do, where nothing was known of any control."""
        (lowest_w, highest_w), host_w = self._range_w(gpu_model), self._host_w(gpu_model)
        each_w = table.power_w[:, -1] / table.gpus - host_w
        draws_w = min(float(each_w.max()), highest_w)
        takes = self.snapshot.takes(gpu_model, ControlKind.POWER_LIMIT)
        if table.kind is not None or not takes or not draws_w > lowest_w:  # which NaN is not, either
            return table
        idle_w = min(board_of(self.snapshot.gpu_models[gpu_model]).idle_w, 0.5 * draws_w)
        values = np.append(np.linspace(lowest_w, draws_w, LEVELS, endpoint=False), highest_w)
        speed, limited_w = under_limit(values, draws_w, idle_w)
        power_w = (np.minimum(each_w[:, None], limited_w) + host_w) * table.gpus[:, None]
        kind = ControlKind.POWER_LIMIT
        return GangTable(table.gpus, table.speed[:, -1:] * speed, power_w, kind, values, table.power_error)

    def _range_w(self, gpu_model: int) -> tuple[float, float]:
        known = self.snapshot.limit_range_w
        lowest_w, highest_w = known[gpu_model].tolist() if gpu_model < len(known) else (np.nan, np.nan)
        return lowest_w, highest_w

    def _host_w(self, gpu_model: int) -> float:
        return self.snapshot.host_w.item(gpu_model) if self.snapshot.host_w.size else 0.0
