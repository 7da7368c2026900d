"""Where a job emits least, when the nodes of a cluster lie in several zones.

What is left of a job's work emits, on GPUs of a zone with the intensity ``c``,

    c * (E + moved * P * t_transfer) + moved * (c + c') / 2 * E_transfer

with ``E`` the energy of that work, ``P`` the draw of its gang, ``c`` the mean intensity over the time that the work
takes, and ``c'`` that of the zone from which a checkpoint has to move. A job that has no checkpoint yet moves nothing.
One whose data are in a zone has no other (``JobTable.eligible``).

Free GPUs come first whatever their zone: a job never waits for a cleaner one. Among kinds of nodes with the same GPU
model that could all take a gang now, it goes where it emits least (``Filler``). ``joint`` moves running jobs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from services.core.cycle.capacity import model_gpus
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.units import J_PER_KWH, S_PER_HOUR

UNKNOWN_W = 250.0  #: Draw of a GPU of a job before any was measured
LEAST_LEFT_S = 3_600.0  #: What a job of unknown length is taken to need; intensities are means over this at least
LEAST_PROGRESS = 1e-3  #: From this share of its work on, a job's own progress says how long it is


class Zones:
    """The zones of one round's nodes, by kind of node (``Snapshot.gpu_models``), which is in one zone."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._means: dict[int, Floats] = {}

    @classmethod
    def of(cls, snapshot: Snapshot) -> Zones | None:
        """Return the zones of a snapshot; None if no GPU model is in several."""
        several = len(snapshot.outlooks) > 1 and len(set(snapshot.gpu_models)) < len(snapshot.gpu_models)
        return cls(snapshot) if several else None

    @cached_property
    def zone(self) -> Ints:
        """(n_gpu_models,) the zone of each kind of node, an index into ``Snapshot.outlooks``."""
        nodes = self._snapshot.nodes
        zone = np.zeros(len(self._snapshot.gpu_models), dtype=np.int64)
        zone[nodes.gpu_model] = nodes.zone
        return zone

    def intensity(self, hours: int) -> Floats:
        """Return the mean intensity of each zone over the next hours, as far as known: (n_zones,) gCO2/kWh."""
        found = self._means.get(hours)
        if found is None:
            now_s, means = self._snapshot.now_s, list[float]()
            for outlook in self._snapshot.outlooks:
                curve, end_s = outlook.curve, now_s + hours * S_PER_HOUR
                means.append(curve.mean(now_s, min(end_s, curve.end_s)) if curve.end_s > now_s else curve.at(now_s))
            found = self._means[hours] = np.array(means)
        return found

    def grams(self, job: int, left_s: float | None = None, draw_w: float | None = None) -> Floats:
        """Return what the rest of a job's work would emit on each kind of node: (n_gpu_models,) gCO2, without PUE.

        Args:
            left_s, draw_w: How long it takes and what the gang draws meanwhile; None: as its smallest gang.
        """
        jobs, transfer = self._snapshot.jobs, self._snapshot.transfer
        if left_s is None or draw_w is None:
            left_s, draw_w = self._left_s(job), jobs.gpu_power_w.item(job)
            draw_w = (draw_w if draw_w > 0 else UNKNOWN_W) * jobs.min_gpus.item(job)
        at = jobs.data_zone.item(job)
        intensity = self.intensity(round(max(left_s, LEAST_LEFT_S) / S_PER_HOUR))
        grams = intensity * (draw_w * left_s / J_PER_KWH)
        if at >= 0:
            moved = intensity * (draw_w * transfer.seconds / J_PER_KWH)
            moved += (intensity + intensity[at]) / 2 * transfer.energy_kwh
            moved[at] = 0.0
            grams += moved
        return grams[self.zone]

    def greenest(self, job: int, kinds: Sequence[int], room: Sequence[int]) -> int:
        """Return the kind of node, of these, on which a job emits least; ties go to the one with the most room."""
        grams = self.grams(job)
        return min(kinds, key=lambda kind: (grams[kind], -room[kind]))

    def seats(self, which: Ints, gpus: Ints, room: Ints) -> Ints:
        """Return on which kind of node each waiting job would start, one after the other: (n_which,).

        From the first job on that finds no room, it is -1; those that could never run take none.

        Args:
            which: (n_which,) indices of the jobs, best first.
            gpus: (n_which,) their sizes.
            room: (n_gpu_models,) devices of each kind that they may have; reduced by what they take.
        """
        seats, total = np.full(which.size, -1, dtype=np.int64), model_gpus(self._snapshot)
        for row, (job, size) in enumerate(zip(which.tolist(), gpus.tolist(), strict=True)):
            never, grams = ~self._snapshot.jobs.eligible[job] | (total < size), self.grams(job)
            if never.all():
                seats[row] = 0
                continue
            grams[(room < size) | never] = np.inf
            at = int(grams.argmin())
            if np.isinf(grams[at]):
                break
            seats[row] = at
            room[at] -= size
        return seats

    def _left_s(self, job: int) -> float:
        """Return what a job still needs with its smallest gang, seconds: as predicted, or by its progress."""
        jobs = self._snapshot.jobs
        predicted_s, progress = jobs.remaining_s.item(job), jobs.progress.item(job)
        if predicted_s > 0:
            return predicted_s
        if progress > LEAST_PROGRESS:
            return jobs.attained_gpu_s.item(job) / jobs.min_gpus.item(job) * (1.0 - progress) / progress
        return LEAST_LEFT_S
