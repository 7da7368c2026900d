"""The part of a plan that concerns engines' jobs: carried out for steered engines, only counted for watched ones.

An engine with a queue of its own (``contracts.engines.QUEUEING``) decides itself which job starts when GPUs are free:
by its users' priorities, quotas and limits, of which a plan knows nothing. Only a plan's sizes, and its holds and stops
for greener hours and for orders of the grid, are carried out there. Whatever else a job waits for, GPUs above all, it
waits for in that queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from services.contracts.engines import QUEUEING, EngineAction, EngineMode
from services.core.cycle.plan import Hold, Preempt, Start
from services.core.cycle.snapshot import Snapshot
from services.core.domain.reasons import Reason
from services.db.database import Connection
from services.scheduler.engines.decisions import (
    decide,
    held,
    hold_gco2,
    hold_note,
    hold_saves_gco2,
    released,
    requeued,
    start_gco2,
    start_note,
    zone_of,
)
from services.scheduler.repository import engines
from services.scheduler.repository.documents import Json
from services.scheduler.repository.engines import LiveRow

HOLDS = frozenset({Reason.GREENER_HOURS, Reason.GRID_ORDER})
STOPS = HOLDS | {Reason.SCALE_IN, Reason.SCALE_OUT}
"""Why a job of an engine with a queue of its own may be stopped: who makes room for whom is the engine's to say."""


@dataclass
class Theirs:
    """The live jobs of engines."""

    snapshot: Snapshot
    live: Mapping[str, LiveRow]
    would: dict[str, Json] = field(default_factory=dict[str, Json])
    """What would become of the jobs of dry runs, by job."""
    would_start: dict[str, tuple[datetime | None, int | None]] = field(
        default_factory=dict[str, "tuple[datetime | None, int | None]"]
    )
    """Until when waiting jobs are held back, or would be in a dry run, and the grams which that saves; None: they may
    start."""

    @classmethod
    async def read(cls, connection: Connection, snapshot: Snapshot) -> Theirs:
        """Return the live jobs."""
        return cls(snapshot, await engines.live_jobs(connection))

    def carried_out(self, starts: Sequence[Start], preempts: Sequence[Preempt]) -> tuple[list[Start], list[Preempt]]:
        """Return the starts and stops of a plan to carry out, and note what would become of the jobs of dry runs."""
        starts = [each for each in starts if not self._awaits_active(each.job_id)]
        preempts = [each for each in preempts if each.reason in STOPS or not self._queues_itself(each.job_id)]
        self.would |= {each.job_id: released(each.gpus, "") for each in starts if self._is_watched(each.job_id)}
        self.would_start |= {each.job_id: (None, None) for each in starts if each.job_id in self.live}
        self.would |= {each.job_id: requeued(0, "") for each in preempts if self._is_watched(each.job_id)}
        return (
            [each for each in starts if not self._is_watched(each.job_id)],
            [each for each in preempts if not self._is_watched(each.job_id)],
        )

    async def direct(self, connection: Connection, starts: Sequence[Start], holds: Sequence[Hold]) -> None:
        """Tell the bridges which jobs may start, and which must wait until when."""
        await decide(connection, self.wanted(starts, holds))
        await engines.foresee(connection, self.would_start, self.ranks(starts, holds))

    def ranks(self, starts: Sequence[Start], holds: Sequence[Hold]) -> dict[str, int]:
        """Return the places in the plan's order of jobs that their engines may start, where these ask for it."""
        waits = [each.job_id for each in holds if each.reason not in HOLDS | {Reason.ENGINE_LIMIT}]
        named = [job_id for job_id in (*(each.job_id for each in starts), *waits) if job_id in self.live]
        return {job_id: at for at, job_id in enumerate(named) if self.live[job_id].orders}

    def wanted(self, starts: Sequence[Start], holds: Sequence[Hold]) -> dict[str, Json]:
        """Return the decisions, by job, and note until when jobs are held back."""
        wanted = dict(self.would)
        for start in starts:
            if start.job_id in self.live:
                note, zone = start_note(self.snapshot, start), zone_of(self.snapshot, start)
                gco2 = start_gco2(self.snapshot, start)
                wanted[start.job_id] = released(start.gpus, note, zone, gco2)
        for hold in holds if self.live else ():
            if (row := self.live.get(hold.job_id)) is None or self._awaits_active(hold.job_id):
                continue
            waits_here = hold.reason in HOLDS or row.kind not in QUEUEING
            start_s = hold.expected_start_s if waits_here else None
            start_at = None if start_s is None else datetime.fromtimestamp(start_s, UTC)
            self.would_start[hold.job_id] = start_at, hold_saves_gco2(self.snapshot, hold) if start_at else None
            if self._is_watched(hold.job_id):
                wanted[hold.job_id] = held(Hold(hold.job_id, hold.reason), "")
                if not waits_here and (gpus := self._only_size(hold)):
                    wanted[hold.job_id] = released(gpus, "")
            elif waits_here:
                wanted[hold.job_id] = held(
                    hold, hold_note(self.snapshot, hold), hold_gco2(self.snapshot, hold, hold.expected_start_s)
                )
            elif gpus := self._only_size(hold):
                wanted[hold.job_id] = released(gpus, "released")
            elif row.action != EngineAction.RELEASE:  # a size that was chosen before still holds
                wanted[hold.job_id] = held(Hold(hold.job_id, hold.reason), "waits:size")
        return wanted

    def _only_size(self, hold: Hold) -> int | None:
        """Return the GPUs of a job that has one size; None: it is held until a plan chooses a size.

        If it were started at another size, it would be stopped again for that.
        """
        jobs = self.snapshot.jobs
        at = jobs.index[hold.job_id]
        low, high = int(jobs.min_gpus[at]), int(jobs.max_gpus[at])
        return low if low == high else None

    def _awaits_active(self, job_id: str) -> bool:
        """Return whether a job is new to a passive round, and left for the active one that is held for it."""
        return self._queues_itself(job_id) and self.live[job_id].unplanned

    def _is_watched(self, job_id: str) -> bool:
        return job_id in self.live and self.live[job_id].mode != EngineMode.CONTROL

    def _queues_itself(self, job_id: str) -> bool:
        return job_id in self.live and self.live[job_id].kind in QUEUEING
