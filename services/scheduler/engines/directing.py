"""A plan's share in engines' jobs: of those that are steered it is carried out, of those that are watched counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from services.contracts.engines import EngineMode
from services.core.cycle.plan import Hold, Preempt, Start
from services.core.cycle.snapshot import Snapshot
from services.db.database import Connection
from services.scheduler.engines.decisions import (
    decide,
    held,
    hold_gco2,
    hold_note,
    rank_at,
    released,
    requeued,
    start_gco2,
    start_note,
    zone_of,
)
from services.scheduler.repository import engines
from services.scheduler.repository.documents import Json


@dataclass
class Theirs:
    """The jobs of engines that are not over.

    Attributes:
        snapshot: What the plan was made from.
        steered: Those on which decisions are carried out.
        watched: Those of dry runs.
        would: What would become of the latter, by job.
        would_start: Until when they would be held back, by job that waits; None: they may start.
    """

    snapshot: Snapshot
    steered: frozenset[str]
    watched: frozenset[str]
    would: dict[str, Json] = field(default_factory=dict[str, Json])
    would_start: dict[str, datetime | None] = field(default_factory=dict[str, "datetime | None"])

    @classmethod
    async def read(cls, connection: Connection, snapshot: Snapshot) -> Theirs:
        """Return the jobs that there are now."""
        modes: Mapping[str, tuple[str, str]] = await engines.live_jobs(connection)
        steered = frozenset(job for job, (_, mode) in modes.items() if mode == EngineMode.CONTROL)
        return cls(snapshot, steered, frozenset(modes) - steered)

    def carried_out(self, starts: Sequence[Start], preempts: Sequence[Preempt]) -> tuple[list[Start], list[Preempt]]:
        """Return a plan's starts and stops without those of dry runs, and note what these would be."""
        self.would |= {each.job_id: released(each.gpus, 0, "") for each in starts if each.job_id in self.watched}
        self.would_start |= {each.job_id: None for each in starts if each.job_id in self.watched}
        self.would |= {each.job_id: requeued(0, "") for each in preempts if each.job_id in self.watched}
        return (
            [each for each in starts if each.job_id not in self.watched],
            [each for each in preempts if each.job_id not in self.watched],
        )

    async def direct(self, connection: Connection, starts: Sequence[Start], holds: Sequence[Hold]) -> None:
        """Have the bridges told which jobs start, in which order, and which wait until when."""
        wanted = dict(self.would)
        for position, start in enumerate(starts):
            if start.job_id in self.steered:
                rank = rank_at(self.snapshot.now_s, position)
                note, zone = start_note(self.snapshot, start), zone_of(self.snapshot, start)
                gco2 = start_gco2(self.snapshot, start)
                wanted[start.job_id] = released(start.gpus, rank, note, zone, gco2)
        for hold in holds if self.steered or self.watched else ():
            if hold.job_id in self.steered:
                wanted[hold.job_id] = held(hold, hold_note(self.snapshot, hold), hold_gco2(self.snapshot, hold))
            elif hold.job_id in self.watched:
                wanted[hold.job_id] = held(Hold(hold.job_id, hold.reason), "")
                start_s = hold.expected_start_s
                self.would_start[hold.job_id] = None if start_s is None else datetime.fromtimestamp(start_s, UTC)
        await decide(connection, wanted)
        await engines.foresee(connection, self.would_start)
