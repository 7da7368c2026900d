"""A tenant's GPUs, whatever the policy: how many it is guaranteed, how many it may hold, what it borrows in between.

A tenant has a number of guaranteed GPUs (``Snapshot.tenant_guarantees``), may hold up to its ceiling
(``Snapshot.tenant_gpu_quota``), and what it holds beyond its guarantee it borrows of what others leave. A policy ranks
jobs as ever; before its ranking becomes a plan, ``by_guarantees`` changes it so that

- jobs within their tenant's guarantee come first, and for one that waits, borrowed gangs that may be stopped are: those
  that began last first, no more than it needs, none before its guaranteed run is over (``cycle.runs``), and none if
  they would not suffice. An elastic gang is asked to come back on what is not needed of it. That happens in every
  round, also of policies that stop nothing themselves;
- a tenant's oldest gangs that fit into its guarantee are within it, those that may not be stopped first; any other gang
  is borrowed as a whole, also one that is wider than the guarantee;
- in a round that may stop jobs, the policy chooses which jobs of a tenant are within its guarantee, as long as the
  tenant's other gangs, free and borrowed GPUs suffice for them. Beyond guarantees its own order decides;
- a job that may not be stopped starts within its tenant's guarantee, or on GPUs that are guaranteed to nobody
  (``Quota``): what could not be had back is not lent.

A job that its policy leaves out of the ranking by choice (``BY_CHOICE``) claims nothing; others that it leaves out do.
Guarantees of more GPUs than take work are all reduced in proportion. GPUs of engines with queues of their own are not
divided (``Snapshot.undivided``).

What is guaranteed to nobody, or not used, goes by the policy's order, or under ``fair+`` between tenants by weight
(``share_out``): the next place goes to the first remaining job of the tenant that has had the least for its weight,

    level = (used + lasting_s * GPUs given in this round) / weight

so that a tenant that has had less than its share comes first until it has caught up. With ``lasting_s`` the mean life
of usage, a level is what a tenant will have used in the long run if it keeps what it is given. The share of a tenant
without a guarantee is its part by weight of what is not guaranteed. Two rules keep running jobs where they are:

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat

import numpy as np

from services.core.cycle.bound import NodeRoom
from services.core.cycle.capacity import Capacity, resumed_size
from services.core.cycle.filling import BITS, Filler, Ranked
from services.core.cycle.plan import UNRANKED, Preempt
from services.core.cycle.ranking import Ranking
from services.core.cycle.rounds import Preemption
from services.core.cycle.runs import goes_on
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, STARTING, JobTable, Snapshot, TenantShares
from services.core.cycle.standing import Quota, Standing
from services.core.domain.arrays import Bools, Ints
from services.core.domain.reasons import Reason

ROUNDING = 1e-9
BY_CHOICE = UNRANKED | {Reason.POWER_LIMIT}
"""Why a policy leaves jobs out of its ranking that could run: they claim no guaranteed GPUs."""


@dataclass(frozen=True)
class Division:
    """A ranking with guarantees kept."""

    snapshot: Snapshot  #: With gangs that give GPUs back shown as stopping
    ranking: Ranking
    ahead: int = 0  #: How many of the first ranked jobs are within their tenants' guarantees
    stops: tuple[Preempt, ...] = ()  #: The gangs that give GPUs back
    behind: frozenset[int] = frozenset()  #: Jobs before which those of others have come by their guarantees
    wanted: Mapping[int, int] = field(default_factory=dict[int, int])
    """The sizes that the policy wants for jobs that are kept within guarantees."""

    def widened(self, ranking: Ranking, ranked: Ranked, filler: Filler) -> Ranking | None:
        """Return the ranking with gangs as wide as the policy wants, as far as there is room; None: as it is."""
        room, gpus, jobs = filler.room.copy(), ranking.gpus.copy(), self.snapshot.jobs
        on = dict(filler.starts)
        for at in np.flatnonzero(np.isin(ranking.order, [*self.wanted])).tolist():
            model, job = on.get(at, ranked.model.item(at)), ranking.order.item(at)
            if model >= 0:
                size = sized(jobs, job, self.wanted[job], gpus.item(at) + room[model])
                room[model] -= max(size - gpus.item(at), 0)
                gpus[at] = max(size, gpus.item(at))
        return None if (gpus == ranking.gpus).all() else replace(ranking, gpus=gpus)


def by_guarantees(snapshot: Snapshot, ranking: Ranking, preemption: Preemption) -> Division:
    """Return a policy's ranking with what guarantees require; with ``NOW`` running jobs compete, too."""
    return _Guarantees(snapshot, ranking, preemption).division()


class _Guarantees:
    """One round's guarantees, kept job by job on what there is of each GPU model; places are in the ranking."""

    def __init__(self, snapshot: Snapshot, ranking: Ranking, preemption: Preemption) -> None:
        self._before, self._now = snapshot, preemption is Preemption.NOW
        self._jobs = jobs = snapshot.jobs
        self._standing = Standing.of(snapshot)
        self._capacity = Capacity(snapshot)
        self._runs: Bools = (jobs.phase == RUNNING) | (jobs.phase == STARTING)
        guaranteed = self._standing.guaranteed
        self._code = dict(zip(guaranteed, range(len(guaranteed)), strict=True))
        self._tenant: Ints = np.fromiter(map(self._code.get, jobs.tenants, repeat(-1)), np.int64, len(jobs))
        most = np.array([*guaranteed.values(), 0], dtype=np.int64)
        self._may: Bools = (jobs.min_gpus <= most[self._tenant]) & self._standing.counts
        self._n_ranked, self._unranked = ranking.order.size, ranking.unranked
        self._ranking = self._extended(ranking)
        self._order: list[int] = self._ranking.order.tolist()
        self._gpus: list[int] = self._ranking.gpus.tolist()
        self._wanted = self._ranking.gpus
        self._borrowed = self._standing.borrowed(jobs, self._runs)
        self._ranked = Ranked(snapshot, self._ranking, self._capacity)
        bound = NodeRoom(snapshot, reclaims=False) if snapshot.confines else None
        quota = Quota(snapshot, all_runs_on=True)
        self._filler = Filler(self._ranked, self._capacity.room, self._capacity.free, quota, bound=bound)
        self._stops: dict[int, Preempt] = {}
        self._on: dict[int, int] = {}  # the GPU model of each job that waits and comes first, by place

    def _extended(self, ranking: Ranking) -> Ranking:
        """Return the ranking with the jobs behind it that the policy leaves out, though not by choice."""
        if ranking.unranked in BY_CHOICE:
            return ranking
        jobs, others = self._jobs, self._may.copy()
        others &= (jobs.phase == QUEUED) | (self._runs & jobs.preemptible & self._now)
        others[ranking.order] = False
        more = np.flatnonzero(others)
        more = more[np.lexsort((more, jobs.submitted_s[more], -jobs.priority[more]))]
        sizes = np.where(self._runs[more], jobs.gpus[more], jobs.min_gpus[more])
        return replace(ranking, order=np.append(ranking.order, more), gpus=np.append(ranking.gpus, sizes))

    def division(self) -> Division:
        """Return the division, also of an active round."""
        order = self._ranking.order
        phase, within = self._jobs.phase[order], self._may[order]
        held = self._jobs.gpus_by_tenant(self._runs & self._standing.counts)
        left = np.array([of - held.get(each, 0) for each, of in self._standing.guaranteed.items()] + [0])
        waits = within & ((phase == QUEUED) | (phase == PREEMPTING))
        claims: list[int] = np.flatnonzero(waits & (self._jobs.min_gpus[order] <= left[self._tenant[order]])).tolist()
        for at in claims:
            self._claim(at, left)
        first = self._chosen(within) if self._now else [*self._on]
        return self._divided(first)

    def _claim(self, at: int, left: Ints) -> None:
        """Give a job that waits GPUs that are ``left`` of its guarantee, if they are free, or once gangs stop."""
        job = self._order[at]
        tenant, least = self._tenant.item(job), self._jobs.min_gpus.item(job)
        most = left.item(tenant)
        if least <= most:
            for size in dict.fromkeys((sized(self._jobs, job, self._gpus[at], most), least)):
                if self._admit(at, size, stops=True):
                    left[tenant] -= size
                    break

    def _admit(self, at: int, size: int, *, stops: bool) -> bool:
        """Whether a job finds room, with ``stops`` also where borrowed gangs are; if so, it is given it."""
        job, filler = self._order[at], self._filler
        eligible = self._jobs.eligible[job] & (self._capacity.total >= size)
        models = int(eligible @ BITS[: eligible.size])
        queued = self._jobs.phase[job] == QUEUED
        model = filler.admit(at, job, queued, size, models) if models else -1
        if model < 0 and models and stops and queued and not self._before.confined(self._jobs.ids[job]):
            refused = filler.quota is not None and filler.quota.refusal(job, size) is not None
            model = -1 if refused else self._reclaim(job, size, np.flatnonzero(eligible).tolist())
            model = filler.admit(at, job, queued, size, 1 << model) if model >= 0 else -1
        if model >= 0:
            self._on[at], self._gpus[at] = model, size
        return model >= 0

    @cached_property
    def _lenders(self) -> list[int]:
        """The borrowed gangs that may be stopped, those that began last first."""
        jobs, runs = self._jobs, self._before.min_run_s or self._before.saves
        may = (job for job in self._borrowed if jobs.preemptible[job] and self._capacity.held[job])
        return [job for job in may if not (runs and goes_on(self._before, jobs.ids[job]))]

    def _reclaim(self, job: int, size: int, models: Sequence[int]) -> int:
        """Stop borrowed gangs so that a job of this size fits on one of these GPU models; return which, or -1.

        Nothing is stopped if all of them would not suffice.
        """
        jobs, capacity, room = self._jobs, self._capacity, self._filler.room
        taken: dict[int, list[int]] = {model: [] for model in models}
        short = {model: size - room[model] for model in models}
        for each in self._lenders:
            model = capacity.model.item(each)
            if model in taken and each not in self._stops:
                taken[model].append(each)
                short[model] -= capacity.held.item(each)
                if short[model] <= 0:
                    break
        else:
            return -1
        spare = -short[model]
        for each in reversed(taken[model]):  # one that began earlier is spared where later ones suffice after all
            held = capacity.held.item(each)
            self._filler.release(model, held)
            if held <= spare:
                self._filler.release(model, -held)
                spare -= held
                continue
            again = sized(jobs, each, held, spare)
            if again <= spare:
                spare -= again
            else:
                again = resumed_size(jobs, each)
            self._stops[each] = Preempt(jobs.ids[each], Reason.GUARANTEED, again, to=jobs.tenants[job])
        return model

    def _chosen(self, within: Bools) -> list[int]:
        """Return the places of the jobs within guarantees as the policy chooses them, in a round that may stop jobs."""
        jobs, filler, capacity, order = self._jobs, self._filler, self._capacity, self._ranking.order
        filler.quota = None  # what tenants' gangs hold now is not what they will hold
        moves: Bools = self._runs & jobs.preemptible & (capacity.model >= 0)
        competes, own = moves | ~self._runs, moves.copy()
        own[self._borrowed] = competes[list(self._stops)] = False
        for job in self._borrowed:
            if moves[job] and job not in self._stops:
                filler.release(capacity.model.item(job), capacity.held.item(job))
        firm = jobs.gpus_by_tenant(self._runs & ~moves & self._standing.counts)
        seated: Bools = own[order]
        seated[list(self._on)] = True
        first: list[int] = []
        for tenant, most in sorted(self._standing.guaranteed.items()):
            line = np.flatnonzero(within & competes[order] & (self._tenant[order] == self._code[tenant]))
            first += self._chosen_of(line.tolist(), line[seated[line]].tolist(), most, firm.get(tenant, 0))
        return first

    def _chosen_of(self, line: list[int], own: list[int], most: int, has: int) -> list[int]:
        """Return the same for one tenant.

        Args:
            line: The places of its jobs that wait or may be stopped.
            own: Those of them that run within its guarantee, or have claimed GPUs of it.
            has: What it holds with others.
        """
        chosen: list[tuple[int, int]] = []
        given = has
        for at in line:
            if given >= most:
                break
            size = self._size_of(at, most - given)
            if given + size <= most:
                chosen.append((at, size))
                given += size
        kept = {at for at, _ in chosen}.intersection(own)
        for at in own:
            if at not in kept:
                self._give_up(at)
        found = [at for at, _ in chosen if at in kept]
        has += sum(size for at, size in chosen if at in kept)
        for at, size in chosen:
            if at not in kept and has + size <= most and self._seat(at, size):
                found.append(at)
                has += size
        for at in own:
            size = self._gpus_of(at)
            if at not in kept and has + size <= most and self._seat(at, size):
                found.append(at)
                has += size
        sizes = dict(chosen)
        for at in found:
            if self._runs[self._order[at]]:
                self._gpus[at] = self._grown(at, sizes.get(at, self._gpus_of(at)))
        return found

    def _gpus_of(self, at: int) -> int:
        """Return what a job has, or has been given."""
        job = self._order[at]
        return self._jobs.gpus.item(job) if self._runs[job] else self._gpus[at]

    def _size_of(self, at: int, left: int) -> int:
        """Return the size at which a job counts towards a guarantee of which this much is left."""
        job = self._order[at]
        if at in self._on:
            return self._gpus[at]
        size = sized(self._jobs, job, self._gpus[at], left)
        has = self._jobs.gpus.item(job)
        if self._runs[job] and size != has and not (self._jobs.phase[job] == RUNNING and self._capacity.movable[job]):
            return has
        return size

    def _give_up(self, at: int) -> None:
        job = self._order[at]
        model = self._on.pop(at, self._capacity.model.item(job))
        self._filler.release(model, self._capacity.held.item(job) if self._runs[job] else self._gpus[at])

    def _seat(self, at: int, size: int) -> bool:
        """Whether there is room for a job, which is given it: for one that runs, where it is."""
        job = self._order[at]
        if not self._runs[job]:
            return self._admit(at, size, stops=False)
        model, held = self._capacity.model.item(job), self._capacity.held.item(job)
        if self._filler.room[model] < held:
            return False
        self._filler.release(model, -held)
        return True

    def _grown(self, at: int, size: int) -> int:
        """Return a running gang's size, at most as much more than it has as there is room for, which it is given."""
        job = self._order[at]
        has, model = self._jobs.gpus.item(job), self._capacity.model.item(job)
        if size > has:
            size = max(sized(self._jobs, job, size, has + self._filler.room[model]), has)
            self._filler.release(model, has - size)
        return size

    def _divided(self, first: list[int]) -> Division:
        order, before = self._order, self._before
        if not first and not self._stops:
            kept = slice(self._n_ranked)
            return Division(before, replace(self._ranking, order=self._ranking.order[kept], gpus=self._wanted[kept]))
        first.sort(key=lambda at: (not self._runs[order[at]], at))
        last = max((at for at in first if not self._runs[order[at]]), default=-1)
        sizes = self._wanted.copy()
        sizes[first] = [self._gpus[at] for at in first]
        rest = ~np.isin(self._ranking.order, [*self._stops])
        rest[self._n_ranked :] = rest[first] = False
        places = np.concatenate((np.array(first, dtype=np.int64), np.flatnonzero(rest)))
        return Division(
            self._shown(),
            replace(self._ranking, order=self._ranking.order[places], gpus=sizes[places]),
            len(first),
            tuple(self._stops.values()),
            frozenset(self._ranking.order[: last + 1][rest[: last + 1]].tolist()),
            {order[at]: wanted for at in first if (wanted := self._wanted.item(at)) > sizes[at]},
        )

    def _shown(self) -> Snapshot:
        """Return the snapshot with stops under way, and jobs that wait and come first on the models found for them."""
        jobs, snapshot = self._jobs, self._before
        changed: dict[str, Ints | Bools] = {}
        if self._stops:
            changed["phase"] = jobs.phase.copy()
            changed["phase"][list(self._stops)] = PREEMPTING
        if self._on and len(snapshot.gpu_models) > 1:
            changed["eligible"] = jobs.eligible.copy()
            for at, model in self._on.items():
                changed["eligible"][self._order[at]] &= np.arange(len(snapshot.gpu_models)) == model
        return snapshot.again(jobs=JobTable.of_columns({**vars(jobs), **changed})) if changed else snapshot


def sized(jobs: JobTable, job: int, wanted: int, most: float) -> int:
    """Return the largest size of a job, from its smallest to the wanted one, that does not exceed ``most``."""
    least, step = int(jobs.min_gpus[job]), int(jobs.step_gpus[job])
    if wanted <= max(most + ROUNDING, least):
        return wanted
    return least + max(int(most + ROUNDING) - least, 0) // step * step


def share_out(
    snapshot: Snapshot, shares: TenantShares, ranking: Ranking, preemption: Preemption, ahead: int = 0
) -> tuple[Ranking, frozenset[int]]:
    """Return a policy's ranking reordered between tenants, with elastic gangs kept within their tenants' shares.

    Also return the indices of the jobs that find no room because of other tenants but would in the policy's own order.

    Args:
        preemption: As used for the plan; running jobs compete only if it is ``NOW``.
        ahead: How many of the first ranked jobs come first in any case.
    """
    table = _Table(snapshot, shares, ranking, preemption)
    if len(table.tenants) < 2:
        return ranking, frozenset()
    competing: list[int] = np.flatnonzero(table.competes).tolist()
    in_own_order = table.admitted(competing)
    if len(in_own_order) == len(competing):
        return ranking, frozenset()
    placed, gpus, admitted = table.merged(competing, ahead)
    places = np.concatenate((np.flatnonzero(~table.competes), np.array(placed, dtype=np.int64)))
    behind = ranking.order[sorted({*in_own_order}.difference(admitted))]
    return replace(ranking, order=ranking.order[places], gpus=gpus[places]), frozenset(behind.tolist())


def nominal_gpus(snapshot: Snapshot, tenants: Iterable[str]) -> dict[str, float]:
    """Return each of these tenants' share of the GPUs: what it is guaranteed, or by weight its part of the others."""
    weights, found = snapshot.tenant_weights, dict[str, float]()
    if snapshot.tenant_guarantees:
        stated = Standing.of(snapshot).guaranteed
        found = {tenant: float(stated[tenant]) for tenant in tenants if tenant in stated}
    left = snapshot.total_gpus - sum(found.values())
    whole = sum(weights.get(each, 1.0) for each in tenants if each not in found)
    return {each: found[each] if each in found else left * weights.get(each, 1.0) / whole for each in tenants}


class _Table:
    """One round's ranking, by tenant; lists are by place in the ranking."""

    def __init__(self, snapshot: Snapshot, shares: TenantShares, ranking: Ranking, preemption: Preemption) -> None:
        jobs, order = snapshot.jobs, ranking.order
        self.snapshot, self.ranking, self._shares = snapshot, ranking, shares
        capacity = Capacity(snapshot)
        holds = (jobs.phase == RUNNING) | (jobs.phase == STARTING)
        moves: Bools = holds & jobs.preemptible if preemption is Preemption.NOW else np.zeros_like(holds)
        self.competes: Bools = ~holds[order] | moves[order]
        """(n_ranked,) whether the job's place is open: it waits, or runs and may be stopped now."""
        self.stays = jobs.gpus_by_tenant(holds & ~moves)  #: GPUs of jobs that run on whatever is decided, by tenant
        self._held = jobs.gpus_by_tenant(holds)
        places: list[int] = order.tolist()
        self.tenant = [jobs.tenants[job] for job in places]  #: The owner of each job
        self.tenants = dict.fromkeys((*self.tenant, *self._held))
        """Tenants with a job that is ranked or holds GPUs, in order of first appearance."""
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

    def merged(self, competing: list[int], ahead: int) -> tuple[list[int], Ints, list[int]]:
        """Return the places in the tenants' order, the sizes by place in the ranking, and the places that find room."""
        gpus: list[int] = self.ranking.gpus.tolist()
        nominal = nominal_gpus(self.snapshot, self.tenants)
        lines: dict[str, deque[int]] = {}
        for at in competing:
            if at >= ahead:
                lines.setdefault(self.tenant[at], deque()).append(at)
        given = dict.fromkeys(self.tenants, 0) | self.stays
        room, placed = _Room(self), [at for at in competing if at < ahead]
        admitted = [at for at in placed if room.take(at, gpus[at], given)]
        to_stop = sum(self._runs[at] for line in lines.values() for at in line)  # of those that have not had their turn
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
        """Return the size of a job, up to the wanted one, that does not exceed ``most``; see ``sized``."""
        return sized(self.snapshot.jobs, int(self.ranking.order[at]), wanted, most)

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
