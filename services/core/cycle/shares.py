"""GPUs between tenants: whose job comes next, whatever the policy; within a tenant the policy's order stands.

The ranking of a policy is taken apart by tenant and put together again: the next place goes to the first remaining
job of the tenant that has had the least relative to its weight,

    level = (used + lasting_s * GPUs given in this round) / weight

so that every free GPU goes to somebody, and a tenant that has had less than its share comes first until it has caught
up. With ``lasting_s`` the mean life of usage, a level is what a tenant will have used in the long run if it keeps what
it is given. Two rules keep running jobs where they are:

- What a tenant holds within its share of the GPUs stays its own, whatever it has used before: only what it borrowed
  beyond that is given to others. A gang wider than its tenant's share could then never run, so while its tenant has
  used the least of all, it comes before what others hold, and they take turns.
- A running job counts as if its tenant had used ``turn_s`` of its time less, so that two tenants do not take turns at
  every round.

An elastic gang is given no more than what is left of its tenant's share while somebody else would go without.

Source: Slurm's fair tree (usage that fades by half-lives, compared between siblings) and Kueue's fair sharing (weights,
borrowing, reclaiming within the cohort), between tenants alone.
"""

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from services.core.cycle.capacity import Capacity
from services.core.cycle.ranking import Ranking
from services.core.cycle.rounds import Preemption
from services.core.cycle.snapshot import RUNNING, STARTING, Snapshot, TenantShares
from services.core.domain.arrays import Bools, Ints

ROUNDING = 1e-9


def share_out(
    snapshot: Snapshot, shares: TenantShares, ranking: Ranking, preemption: Preemption
) -> tuple[Ranking, frozenset[int]]:
    """Return a policy's ranking reordered between tenants, with elastic gangs kept within their tenants' shares.

    Also return the indices of the jobs that find no room because of other tenants but would in the policy's own order.

    Args:
        preemption: As used for the plan; running jobs compete only if it is ``NOW``.
    """
    table = _Table(snapshot, shares, ranking, preemption)
    if len(table.tenants) < 2:
        return ranking, frozenset()
    competing: list[int] = np.flatnonzero(table.competes).tolist()
    in_own_order = table.admitted(competing)
    if len(in_own_order) == len(competing):
        return ranking, frozenset()
    placed, gpus, admitted = table.merged(competing)
    places = np.concatenate((np.flatnonzero(~table.competes), np.array(placed, dtype=np.int64)))
    behind = ranking.order[sorted({*in_own_order}.difference(admitted))]
    return replace(ranking, order=ranking.order[places], gpus=gpus[places]), frozenset(behind.tolist())


def nominal_gpus(weights: Mapping[str, float], tenants: Mapping[str, object], total_gpus: int) -> dict[str, float]:
    """Return each of these tenants' share of the GPUs; a weight that is not given is 1."""
    whole = sum(weights.get(tenant, 1.0) for tenant in tenants)
    return {tenant: total_gpus * weights.get(tenant, 1.0) / whole for tenant in tenants}


class _Table:
    """One round's ranking, by tenant; lists are by place in the ranking.

    Attributes:
        tenants: Tenants with a job that is ranked or holds GPUs, in order of first appearance.
        competes: (n_ranked,) whether the job's place is open: it waits, or runs and may be stopped now.
    """

    def __init__(self, snapshot: Snapshot, shares: TenantShares, ranking: Ranking, preemption: Preemption) -> None:
        jobs, order = snapshot.jobs, ranking.order
        self.snapshot, self.ranking, self._shares = snapshot, ranking, shares
        capacity = Capacity(snapshot)
        holds = (jobs.phase == RUNNING) | (jobs.phase == STARTING)
        moves: Bools = holds & jobs.preemptible if preemption is Preemption.NOW else np.zeros_like(holds)
        self.competes: Bools = ~holds[order] | moves[order]
        self.stays: dict[str, int] = {}  #: GPUs of jobs that run on whatever is decided, by tenant
        self._held: dict[str, int] = {}
        for job in np.flatnonzero(holds).tolist():
            tenant, gpus = jobs.tenants[job], int(jobs.gpus[job])
            self._held[tenant] = self._held.get(tenant, 0) + gpus
            if not moves[job]:
                self.stays[tenant] = self.stays.get(tenant, 0) + gpus
        places: list[int] = order.tolist()
        self.tenant = [jobs.tenants[job] for job in places]  #: The owner of each job
        self.tenants = dict.fromkeys((*self.tenant, *self._held))
        self._runs: list[bool] = holds[order].tolist()
        self._models = np.where(holds, capacity.model, -1)[order].tolist()
        freed = np.flatnonzero(moves & (capacity.model >= 0))
        room = np.bincount(capacity.model[freed], capacity.held[freed], capacity.total.size).astype(np.int64)
        self.room: list[int] = (room + np.array(capacity.room)).tolist()  #: GPUs to give, by model

    def admitted(self, places: list[int]) -> list[int]:
        """Return those of the given places, in the same order, whose jobs find room."""
        room, given, gpus = _Room(self), dict(self.stays), self.ranking.gpus.tolist()
        found: list[int] = []
        for at in places:
            if not room.left:
                break
            if room.take(at, gpus[at], given):
                found.append(at)
        return found

    def merged(self, competing: list[int]) -> tuple[list[int], Ints, list[int]]:
        """Return the places in the tenants' order, the sizes by place in the ranking, and the places that find room."""
        gpus: list[int] = self.ranking.gpus.tolist()
        nominal = nominal_gpus(self.snapshot.tenant_weights, self.tenants, self.snapshot.total_gpus)
        lines: dict[str, deque[int]] = {}
        for at in competing:
            lines.setdefault(self.tenant[at], deque()).append(at)
        given = dict.fromkeys(self.tenants, 0) | self.stays
        room, placed, admitted = _Room(self), list[int](), list[int]()
        to_stop = sum(self._runs[at] for at in competing)  # of those that have not had their turn
        heads = [self._key(line[0], gpus[line[0]], given, nominal) for line in lines.values()]
        heapq.heapify(heads)
        while heads:
            if not room.left and not to_stop and not self.snapshot.reasons:
                placed += sorted(at for line in lines.values() for at in line)
                break
            at = heapq.heappop(heads)[-1]
            tenant = self.tenant[at]
            line = lines[tenant]
            placed.append(line.popleft())
            to_stop -= self._runs[at]
            size = self.within(at, gpus[at], nominal[tenant] - given[tenant])
            if room.take(at, size, given):
                gpus[at] = size
                admitted.append(at)
            elif not room.left:
                given[tenant] += size
            if line:
                heapq.heappush(heads, self._key(line[0], gpus[line[0]], given, nominal))
        wanted = self.ranking.gpus
        for at in admitted:
            if gpus[at] < wanted[at]:
                gpus[at] = room.widened(at, gpus[at], int(wanted[at]))
        return placed, np.array(gpus, dtype=np.int64), admitted

    def within(self, at: int, wanted: int, most: float) -> int:
        """Return the largest size of a job, from its smallest to the wanted one, that does not exceed ``most``."""
        jobs, job = self.snapshot.jobs, int(self.ranking.order[at])
        least, step = int(jobs.min_gpus[job]), int(jobs.step_gpus[job])
        if wanted <= max(most + ROUNDING, least):
            return wanted
        return least + max(int(most + ROUNDING) - least, 0) // step * step

    def model_of(self, at: int, gpus: int, room: list[int]) -> int:
        """Return the GPU model on which a job finds room, -1 for none; a running job stays on its own."""
        if self._runs[at]:
            model = self._models[at]
            return model if model >= 0 and room[model] >= gpus else -1
        eligible: list[bool] = self.snapshot.jobs.eligible[self.ranking.order[at]].tolist()
        fits = [model for model, each in enumerate(room) if each >= gpus and eligible[model]]
        return max(fits, key=room.__getitem__, default=-1)

    def _key(
        self, at: int, wanted: int, given: Mapping[str, int], nominal: Mapping[str, float]
    ) -> tuple[bool, float, int]:
        """Return the sort key of a tenant's first remaining job among those of other tenants."""
        tenant, shares = self.tenant[at], self._shares
        has, share = given[tenant], nominal[tenant]
        wants = self.within(at, wanted, share - has)
        weight = self.snapshot.tenant_weights.get(tenant, 1.0)
        level = (shares.used_gpu_s.get(tenant, 0.0) + shares.lasting_s * has) / weight
        if self._runs[at]:
            level -= shares.turn_s * wants / weight
        own = has + wants <= min(self._held.get(tenant, 0), share + ROUNDING)
        has_turn = not has and wants > share + ROUNDING and level <= self._least_used(tenant)
        return not (own or has_turn), level, at

    def _least_used(self, tenant: str) -> float:
        """Return the least that any other tenant has used relative to its weight."""
        used, weights = self._shares.used_gpu_s, self.snapshot.tenant_weights
        others = (each for each in self.tenants if each != tenant)
        return min((used.get(each, 0.0) / weights.get(each, 1.0) for each in others), default=math.inf)


class _Room:
    """What is left of the GPUs as places are given."""

    def __init__(self, table: _Table) -> None:
        self._table, self._room = table, table.room.copy()
        self._model: dict[int, int] = {}
        self.left = sum(self._room)  #: GPUs left, over all models

    def take(self, at: int, gpus: int, given: dict[str, int]) -> bool:
        """Give a job its GPUs if there are enough and its tenant may have them, and count them for its tenant."""
        tenant = self._table.tenant[at]
        has = given.get(tenant, 0)
        if has + gpus > self._table.snapshot.tenant_gpu_quota.get(tenant, has + gpus):
            return False
        model = self._table.model_of(at, gpus, self._room)
        if model < 0:
            return False
        self._count(at, model, gpus)
        given[tenant] = has + gpus
        return True

    def widened(self, at: int, gpus: int, wanted: int) -> int:
        """Return the largest size up to the wanted one for which there is room, and count the difference."""
        model = self._model[at]
        size = self._table.within(at, wanted, gpus + self._room[model])
        self._count(at, model, size - gpus)
        return size

    def _count(self, at: int, model: int, gpus: int) -> None:
        self._model[at] = model
        self._room[model] -= gpus
        self.left -= gpus
