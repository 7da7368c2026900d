"""Energy of Slurm's nodes, booked by the models of their GPUs: an idle GPU draws its board's idle power.

A GPU that a job holds draws as much as is usual for its model. All of it is marked as modelled. An interval is numbered
by the moment in which it ends, so that a bridge that starts again books nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from services.contracts.nodes import EnergyInterval, EnergySource, Usage
from services.core.profiles.boards import board_of
from services.core.profiles.priors import ANY_FAMILY, family_of
from services.engines.slurm.reading import SlurmJob, SlurmNode
from services.engines.slurm.settings import SlurmSettings

_BOOT = "engine"
_MOST = 100
"""Intervals kept of a node while the control plane does not answer."""


class Energy:
    """What each node and job is taken to have used, in intervals of equal length."""

    def __init__(self, settings: SlurmSettings) -> None:
        self._length_s = settings.energy_interval_s
        self._models = settings.gpu_models
        self._since_s = 0.0
        self._due: dict[str, list[EnergyInterval]] = {}

    def due(
        self, nodes: Sequence[SlurmNode], live: Sequence[tuple[SlurmJob, str]], now_s: float
    ) -> dict[str, list[EnergyInterval]]:
        """Return what is to be booked, by node: also what was not acknowledged yet."""
        end_s = now_s // self._length_s * self._length_s
        start_s, self._since_s = self._since_s, end_s
        if not start_s or end_s <= start_s:
            return {}
        for node in nodes:
            interval = self._interval(node, live, start_s, end_s)
            self._due[node.name] = [*self._due.get(node.name, []), interval][-_MOST:]
        return {node: list(intervals) for node, intervals in self._due.items() if intervals}

    def booked(self, node: str) -> None:
        """Take note that all that was due of a node is on disk."""
        self._due.pop(node, None)

    def _interval(
        self, node: SlurmNode, live: Sequence[tuple[SlurmJob, str]], start_s: float, end_s: float
    ) -> EnergyInterval:
        board = board_of(self._models.get(node.gpu_type, node.gpu_type))
        busy_w = board.idle_w + family_of(ANY_FAMILY).demand * (board.peak_w - board.idle_w)
        usages: list[Usage] = []
        idle = set(range(node.gpus))
        for job, name in live:
            devices = job.shares.get(node.name, ())
            if devices:
                began_s = min(max(float(job.start_s), start_s), end_s)
                joules = len(devices) * (busy_w * (end_s - began_s) + board.idle_w * (began_s - start_s))
                usages.append(_usage(name, devices, joules))
                idle -= set(devices)
        if idle:
            usages.append(_usage(None, sorted(idle), len(idle) * board.idle_w * (end_s - start_s)))
        return EnergyInterval(
            boot_id=_BOOT,
            sequence=int(end_s),
            start_at=datetime.fromtimestamp(start_s, UTC),
            end_at=datetime.fromtimestamp(end_s, UTC),
            metered_gpu_energy_j=sum(usage.gpu_energy_j for usage in usages),
            usages=usages,
        )


def _usage(owner: str | None, devices: Sequence[int], joules: float) -> Usage:
    return Usage(
        allocation_id=owner,
        devices=list(devices),
        gpu_energy_j=joules,
        cpu_energy_j=0.0,
        static_energy_j=0.0,
        source=EnergySource.MODELLED,
    )
