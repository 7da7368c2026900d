"""Greedy filling: who gets capacity, in rank order, per GPU model and within tenant quotas.

The loop visits jobs one by one because each choice changes what is left. It works on plain lists, which a Python loop
reads several times faster than arrays, and it ends when nothing is left to give.
"""

from collections.abc import Iterator
from enum import IntEnum
from functools import cached_property

import numpy as np

from services.core.cycle.bound import NodeRoom
from services.core.cycle.capacity import Capacity
from services.core.cycle.ranking import Ranking
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, STARTING, Snapshot
from services.core.cycle.standing import Quota
from services.core.cycle.zones import Zones
from services.core.domain.arrays import Bools, Ints
from services.core.domain.plain_members import plain_members
from services.core.domain.reasons import Reason

ROWS = 256  #: How many are turned into lists at a time
BITS: Ints = np.int64(1) << np.arange(63, dtype=np.int64)


@plain_members
class Verdict(IntEnum):
    """What filling decides for a ranked job."""

    KEEP = 0  #: Continues as it is
    START = 1  #: Waits, and its devices are free
    AWAIT = 2  #: Waits, and its devices are or will be released by others
    RESIZE = 3  #: Runs, and comes back at its new size
    OUT = 4  #: Runs, and better-ranked jobs take its devices
    OVER_QUOTA = 5  #: Its tenant may not hold that many GPUs
    SHORT = 6  #: Waits, and better-ranked jobs have the devices it could use
    NOWHERE = 7  #: Waits, and no GPU model it may use has as many devices
    UNLENT = 8  #: Waits, and may not borrow what is guaranteed to others, since it may not be stopped


KEEP, START, AWAIT, RESIZE, OUT, OVER_QUOTA, SHORT, NOWHERE, UNLENT = map(int, Verdict)
REFUSED = {Reason.TENANT_QUOTA: OVER_QUOTA, Reason.GUARANTEED: UNLENT}


class Ranked:
    """A ranking's jobs as columns in rank order; every column is (n_ranked,).

    Attributes:
        models: Bit ``m`` is set where the job may use GPU model ``m`` and the model has as many devices as wanted.
    """

    def __init__(self, snapshot: Snapshot, ranking: Ranking, capacity: Capacity) -> None:
        self._table, self._capacity = snapshot.jobs, capacity
        self.gpu_models, self.zones = snapshot.gpu_models, Zones.of(snapshot)
        order, total = ranking.order, capacity.total
        self.jobs = order  #: Indices into the job table
        self.phase = self._table.phase[order]  #: ``Phase`` codes
        self.wanted = ranking.gpus  #: Sizes the ranking asks for
        if total.size == 1:
            self.models: Ints = (self._table.eligible[order, 0] & (ranking.gpus <= total)).astype(np.int64)
        else:
            usable = self._table.eligible[order] & (total >= ranking.gpus[:, None])
            self.models = usable @ BITS[: total.size]

    @cached_property
    def gpus(self) -> Ints:
        return self._table.gpus[self.jobs]

    @cached_property
    def model(self) -> Ints:
        """Index of the GPU model the job holds, or -1."""
        return self._capacity.model[self.jobs]

    @cached_property
    def held(self) -> Ints:
        return self._capacity.held[self.jobs]

    @cached_property
    def resizable(self) -> Bools:
        return (self.phase == RUNNING) & self._capacity.movable[self.jobs]

    def waiting(self) -> Ints | None:
        """Return the positions of jobs that have no devices or are about to lose them; None if that is all of them."""
        waits = (self.phase == QUEUED) | (self.phase == PREEMPTING)
        return None if waits.all() else np.flatnonzero(waits)

    def movable(self) -> Ints:
        """Return the positions of all jobs except those that are running and may not be preempted."""
        waiting = (self.phase == QUEUED) | (self.phase == PREEMPTING)
        return np.flatnonzero(waiting | self._table.preemptible[self.jobs])

    def unfilled(self) -> Ints:
        """Return the verdicts when there is no capacity: (n_ranked,)."""
        waits = np.where(self.models == 0, NOWHERE, SHORT)
        runs = np.where(self.held > 0, OUT, KEEP)
        return np.where(self.phase == QUEUED, waits, np.where(self.phase == PREEMPTING, KEEP, runs))


class Filler:
    """Gives out capacity, best rank first.

    Starts and waits for a release draw on the same capacity, but only starts use what is free now. So
    a job may start on a free device while a better-ranked gang waits, as long as the devices being released cover
    that gang.
    """

    def __init__(
        self,
        ranked: Ranked,
        room: list[int],
        free: list[int],
        quota: Quota | None,
        *,
        backfill: bool = True,
        bound: NodeRoom | None = None,
    ) -> None:
        """Take the obtainable devices of each model, and how many of them are free now: (n_gpu_models,).

        ``bound`` tracks the nodes to which jobs are bound, if any.
        """
        self._ranked = ranked
        self.room = room.copy()  #: What is left of each model
        self._free = free.copy()
        self._left = sum(room)
        self.quota = quota
        self._backfill = backfill
        self.bound = bound  #: What is left of the nodes to which jobs are bound
        self._blocked = 0
        self._columns: dict[int, tuple[int, ...]] = {}
        self._kept: Ints = np.empty(0, dtype=np.int64)
        self._given: dict[int, int] = {}
        self.starts: list[tuple[int, int]] = []  #: (position, GPU model) of each start, in rank order

    def verdicts(self) -> Ints:
        """Return the ``Verdict`` codes by position in the ranking: (n_ranked,)."""
        codes = self._ranked.unfilled()
        codes[self._kept] = KEEP
        codes[list(self._given)] = list(self._given.values())
        return codes

    def fill(self, positions: Ints | None = None) -> None:
        """Visit these positions of the ranking (None: all), in ascending order, until no capacity is left."""
        if not self._left and self.quota is None:
            return
        ranked = self._ranked
        if positions is not None and len(self.room) == 1 and self.quota is None and self.bound is None:
            positions = self._keep_first(positions)
        every_model = (1 << len(self.room)) - 1
        n_visited = 0
        for position, job, phase, wanted, models in _rows(ranked, positions):
            if not self._left or self._blocked == every_model:
                break
            n_visited += 1
            if phase in (RUNNING, STARTING):
                self._keep(position, job, wanted, models)
            elif models:
                self.admit(position, job, phase == QUEUED, wanted, models)
        if self.quota is not None:
            left = (np.arange(ranked.jobs.size) if positions is None else positions)[n_visited:]
            left = left[self.quota.may_refuse()[ranked.jobs[left]]]
            for position, job, phase, wanted, models in _rows(ranked, left):
                if phase == QUEUED and models and (refused := self.quota.refusal(job, wanted)) is not None:
                    self._given[position] = REFUSED[refused]

    def _keep_first(self, positions: Ints) -> Ints:
        """Keep running jobs that already have the right size, as long as there is room; return the other positions.

        The jobs ranked first are kept or, if there is room for everything that the jobs want, all of them. The result
        is what ``_keep`` would decide one by one, for one GPU model and no quotas: the case of most jobs in most active
        rounds.
        """
        ranked = self._ranked
        phase, held, wanted = ranked.phase[positions], ranked.held[positions], ranked.wanted[positions]
        keeps = ((phase == RUNNING) | (phase == STARTING)) & (held > 0) & (ranked.model[positions] >= 0)
        keeps &= wanted == ranked.gpus[positions]
        if int(np.maximum(wanted, held).sum()) > self.room[0]:
            keeps &= np.cumsum(np.where(keeps, held, self.room[0] + 1)) <= self.room[0]
        taken = int(held[keeps].sum())
        self.release(0, -taken)
        self._kept = positions[keeps]
        return positions[~keeps]

    def _keep(self, position: int, job: int, wanted: int, models: int) -> None:
        """Keep a running job, at its new size if that fits, else at its present size, else not at all."""
        ranked, quota, bound = self._ranked, self.quota, self.bound
        model, held, gpus = ranked.model.item(position), ranked.held.item(position), ranked.gpus.item(position)
        if model < 0 or not held:
            if quota is not None:
                quota.claim(job, gpus)
            return
        room = self.room[model]
        resizes = wanted != gpus and wanted <= room and bool(models >> model & 1) and ranked.resizable.item(position)
        resizes = resizes and (bound is None or bool(bound.fitting(job, wanted, 1 << model)))
        if resizes and (quota is None or quota.refusal(job, wanted) is None):
            verdict, held, gpus = RESIZE, wanted, wanted
        elif quota is not None and quota.refusal(job, gpus) is not None:
            self._given[position] = OVER_QUOTA
            return
        elif held > room or not (bound is None or bound.keeps(job)):
            return
        else:
            verdict = KEEP
        self._given[position] = verdict
        if bound is not None and verdict == RESIZE:
            bound.claim(job, wanted, model)
        elif bound is not None:
            bound.keep(job)
        self.release(model, -held)
        if quota is not None:
            quota.claim(job, gpus)

    def admit(self, position: int, job: int, queued: bool, wanted: int, models: int) -> int:
        """Let a waiting job start or claim: on the model with free devices, else with the most room, else the first.

        Of a model's nodes in several zones, it takes those on which it emits least. Return the model, -1 for none.
        """
        quota = self.quota
        if quota is not None and (refused := quota.refusal(job, wanted)) is not None:
            if queued:
                self._given[position] = REFUSED[refused]
            return -1
        bound = self.bound if self.bound is not None and self.bound.is_bound(job) else None
        fitting = models if bound is None else bound.fitting(job, wanted, models)
        best = self._model_for(job, wanted, fitting)
        if bound is not None and best < 0:
            if not self._backfill and queued:  # it lets others pass, but for what is free where it has to start
                self._keep_back(bound, job, wanted, models.bit_length() - 1)
            return -1
        if best < 0:
            if not self._backfill:
                self._blocked |= models
            return -1
        self.release(best, -wanted)
        if quota is not None:
            quota.claim(job, wanted)
        if bound is not None:
            bound.claim(job, wanted, best)
        if not queued:
            return best
        if self._free[best] < wanted or not (bound is None or bound.has_free(job, wanted)):
            self._given[position] = AWAIT
            if bound is not None:
                self._free[best] -= bound.keep_back(job, wanted, self._free[best], best)
        elif quota is not None and not quota.take_now(job, wanted):
            self._given[position] = OVER_QUOTA
        else:
            self._given[position] = START
            if bound is not None:
                bound.start(job, wanted)
            self._free[best] -= wanted
            self.starts.append((position, best))
        return best

    def release(self, model: int, gpus: int) -> None:
        """Count devices of a model as obtainable."""
        self.room[model] += gpus
        self._left += gpus

    def _keep_back(self, bound: NodeRoom, job: int, wanted: int, model: int) -> None:
        kept = bound.keep_back(job, wanted, min(self._free[model], self.room[model]), model)
        self._free[model] -= kept
        self.release(model, -kept)

    def _model_for(self, job: int, wanted: int, models: int) -> int:
        columns = self._columns.get(models)
        if columns is None:
            columns = self._columns[models] = tuple(m for m in range(len(self.room)) if models >> m & 1)
        room, free, blocked = self.room, self._free, self._blocked
        best = -1
        for column in columns:
            if room[column] < wanted or blocked >> column & 1:
                continue
            if best < 0 or (free[column] >= wanted, room[column]) > (free[best] >= wanted, room[best]):
                best = column
        zones, names = self._ranked.zones, self._ranked.gpu_models
        if best < 0 or zones is None:
            return best
        same = [each for each in columns if names[each] == names[best] and not blocked >> each & 1]
        same = [each for each in same if room[each] >= wanted and (free[each] >= wanted) == (free[best] >= wanted)]
        return zones.greenest(job, same, room)


def _rows(ranked: Ranked, positions: Ints | None) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield position, job, phase, size and models for these positions (None: all); callers often stop early."""
    columns = (ranked.jobs, ranked.phase, ranked.wanted, ranked.models)
    if positions is None:
        positions = np.arange(ranked.jobs.size)
    for at in range(0, positions.size, ROWS):
        some = positions[at : at + ROWS]
        yield from zip(some.tolist(), *(column[some].tolist() for column in columns), strict=True)
