"""Cells, and the jobs of this installation that they have."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import Row, text

from services.admission.repository import Repository
from services.contracts.cells import ANY, Cell
from services.core.domain.jobs import JobState
from services.core.domain.reasons import Reason
from services.db import locks
from services.db.database import dumps
from services.db.job_specs import MAX_GPUS, MAY_MOVE, WORK_TOTAL
from services.kit.readable import BY_NAME

DOUBT_S = 600.0
"""Within so long a submission that was not answered has arrived or never will: the gateway's own limits are shorter."""

SETTLES_S = 60.0  #: How long after a job's end its cell's ledger is still read

_ANYTHING = text("""
SELECT EXISTS (SELECT FROM cells) OR EXISTS (SELECT FROM jobs WHERE cell = '' AND state = 'queued')
""")

_CELLS = text("SELECT * FROM cells ORDER BY name")

_LISTED = text("""
SELECT c.name, c.url, c.draining, c.tenant_id, c.project, c.added_at, c.heard_at, c.problem,
       count(j.id) FILTER (WHERE j.state IN ('queued', 'held')) AS waiting,
       count(j.id) FILTER (WHERE j.state IN ('starting', 'running', 'preempting')) AS running,
       coalesce((SELECT sum(energy_j) FROM cell_energy WHERE cell = c.name), 0) AS energy_j,
       coalesce((SELECT sum(carbon_gco2) FROM cell_energy WHERE cell = c.name), 0) AS carbon_gco2
  FROM cells c LEFT JOIN cell_jobs t ON t.cell = c.name AND t.state <> 'over' LEFT JOIN jobs j ON j.id = t.job_id
 WHERE CAST(:name AS text) IS NULL OR c.name = :name
 GROUP BY c.name ORDER BY c.name
""")

_ADD = text("""
INSERT INTO cells (name, url, key, home, tenant_id, project) VALUES (:name, :url, :key, :home, :tenant_id, :project)
ON CONFLICT DO NOTHING RETURNING name
""")

_DRAIN = text("UPDATE cells SET draining = :draining WHERE name = :name")

_LOCK_CELL = text("SELECT name FROM cells WHERE name = :name FOR UPDATE")

_REMOVE = text("""
DELETE FROM cells c WHERE name = :name
   AND NOT EXISTS (SELECT FROM cell_jobs t WHERE t.cell = c.name AND t.state <> 'over') RETURNING name
""")

_HEARD = text("""
UPDATE cells SET problem = :problem, heard_at = CASE WHEN :heard THEN now() ELSE heard_at END WHERE name = :name
""")

_WAITS = """j.generation, j.expected_start_at,
       extract(epoch FROM now() - coalesce(j.queued_at, j.submitted_at))::float8 AS waited_s"""

_WAITING = text(f"""
SELECT j.id, j.tenant_id, j.spec, j.cell, 0 AS moves, {_WAITS}, NULL AS runs FROM jobs j
 WHERE cell = '' AND state = 'queued' AND NOT cancel_requested AND NOT hold_requested AND id > :after
 ORDER BY id LIMIT :limit
""")

# Jobs that wait, at home or in a cell, were never started and may be elsewhere; and those that run and may move.
_ROAMING = text(f"""
SELECT id, tenant_id, spec, cell, moves, generation, expected_start_at, waited_s,
       runs || (SELECT jsonb_build_object('gpu_s', sum(u.gpu_s), 'energy_j', sum(u.energy_j)) FROM (
           SELECT gpu_s, energy_j FROM footprints WHERE job_id = found.id
           UNION ALL SELECT gpu_s, energy_j FROM cell_energy WHERE job_id = found.id) u) AS runs
  FROM (
    SELECT j.id, j.tenant_id, j.spec, j.cell, coalesce(t.moves, 0) AS moves, {_WAITS}, NULL::jsonb AS runs
      FROM jobs j LEFT JOIN cell_jobs t ON t.job_id = j.id
     WHERE j.cell IS NULL AND j.state = 'queued' AND j.spec ? 'cells' AND j.array_id IS NULL
       AND j.generation = 0 AND j.id > :after
    UNION ALL
    SELECT j.id, j.tenant_id, j.spec, j.cell, t.moves, {_WAITS}, NULL
      FROM cell_jobs t JOIN jobs j ON j.id = t.job_id
     WHERE t.state = 'there' AND j.state = 'queued' AND t.seen ->> 'generation' = '0' AND j.id > :after
    UNION ALL
    SELECT j.id, j.tenant_id, j.spec, j.cell, t.moves, j.generation, NULL,
           extract(epoch FROM now() - j.started_at)::float8,
           jsonb_build_object('gpus', t.seen -> 'gpus', 'done', t.seen #> '{{progress,done}}',
                              'total', t.seen #> '{{progress,total}}')
      FROM cell_jobs t JOIN jobs j ON j.id = t.job_id
     WHERE t.state = 'there' AND j.state = 'running' AND {MAY_MOVE} AND j.id > :after
    UNION ALL
    SELECT j.id, j.tenant_id, j.spec, j.cell, coalesce(t.moves, 0), j.generation, NULL,
           extract(epoch FROM now() - g.running_at)::float8,
           jsonb_build_object('gpus', g.gpus, 'done', w.done, 'total', coalesce(w.total, {WORK_TOTAL}))
      FROM live_gangs g JOIN jobs j ON j.id = g.job_id JOIN reported_work w ON w.job_id = j.id
      LEFT JOIN cell_jobs t ON t.job_id = j.id
     WHERE j.cell IS NULL AND j.state = 'running' AND {MAY_MOVE} AND j.array_id IS NULL AND j.id > :after
    ORDER BY id LIMIT :limit
) found ORDER BY id
""")

_LOCK = text("SELECT FROM jobs WHERE id = :job_id FOR UPDATE")

# A statement of its own: one that waits for the lock reads `cell_jobs` as it was before.
_LOCKED = text("""
SELECT j.state, j.cell, j.tenant_id, j.cancel_requested, j.hold_requested, j.generation, j.expected_start_at,
       coalesce(t.attempt, 0) AS attempt, coalesce(t.state, 'over') AS handing, t.doubt_until, t.cell AS given_to,
       coalesce(j.spec -> 'cells', '[]') AS cells
  FROM jobs j LEFT JOIN cell_jobs t ON t.job_id = j.id WHERE j.id = :job_id
""")

_SEND = text("""
INSERT INTO cell_jobs AS t (job_id, cell, attempt, moves, state, body)
VALUES (:job_id, :cell, :attempt, :moved, 'sending', :body)
ON CONFLICT (job_id) DO UPDATE SET cell = :cell, attempt = :attempt, moves = t.moves + :moved, state = 'sending',
    body = :body, remote_id = NULL, doubt_until = NULL, seen = '{}', zone = ''
""")

_GIVE = text("""
UPDATE jobs SET cell = :cell, reason = :reason, detail = :detail, expected_start_at = NULL WHERE id = :job_id
""")

_SAY = text("""
UPDATE jobs SET reason = :reason, detail = :detail
 WHERE id = :job_id AND cell = '' AND state = 'queued' AND (reason, detail) IS DISTINCT FROM (:reason, :detail)
""")

_EVENT = text("""
INSERT INTO job_events (job_id, tenant_id, type, data)
SELECT id, tenant_id, :type, CAST(:data AS jsonb) FROM jobs WHERE id = :job_id
""")

_LIVE = text("""
SELECT t.job_id, t.attempt, t.state AS handing, t.remote_id, t.body, t.seen, t.zone,
       coalesce(CAST(t.seen ->> 'ended_at' AS timestamptz) > now() - make_interval(secs => :settles_s), false)
           AS settles,
       j.state, j.cancel_requested, j.hold_requested
  FROM cell_jobs t JOIN jobs j ON j.id = t.job_id WHERE t.cell = :cell AND t.state <> 'over' ORDER BY t.job_id
""")

_DOUBT = text("""
WITH was AS (
    SELECT job_id, doubt_until FROM cell_jobs
     WHERE job_id = :job_id AND attempt = :attempt AND state = 'sending' FOR UPDATE
)
UPDATE cell_jobs t SET doubt_until = clock_timestamp() + make_interval(secs => CAST(:doubt_s AS float8))
  FROM was WHERE t.job_id = was.job_id
RETURNING t.doubt_until, was.doubt_until AS before, coalesce(was.doubt_until > now(), false) AS in_doubt
""")

_UNDOUBT = text("""
UPDATE cell_jobs SET doubt_until = :before WHERE job_id = :job_id AND attempt = :attempt AND doubt_until = :until
""")

_ARRIVED = text("""
UPDATE cell_jobs SET state = 'there', remote_id = :remote_id, doubt_until = NULL
 WHERE job_id = :job_id AND attempt = :attempt AND state = 'sending'
""")

_TURN = text("""
UPDATE cell_jobs SET state = :to, moves = moves + :moved
 WHERE job_id = :job_id AND attempt = :attempt AND state = :from
""")

# The scheduler stops what runs here and whose place is to be chosen.
_LEAVE = text("""
WITH leaving AS (
    UPDATE jobs SET cell = '' WHERE id = :job_id AND cell IS NULL AND state = 'running'
       AND NOT cancel_requested AND NOT hold_requested RETURNING id
)
INSERT INTO cell_jobs AS t (job_id, cell, attempt, moves, state, body) SELECT id, '', 0, 1, 'over', '' FROM leaving
ON CONFLICT (job_id) DO UPDATE SET moves = t.moves + 1
""")

_OVER = text("UPDATE cell_jobs SET state = 'over', doubt_until = NULL WHERE job_id = :job_id")

_BACK = text("""
UPDATE jobs SET cell = '', state = :state, reason = :reason, detail = :detail, hold_requested = false,
       expected_start_at = NULL,
       queued_at = CASE WHEN :state = 'queued' AND started_at IS NULL THEN coalesce(queued_at, now())
                        WHEN :state = 'queued' THEN now() END,
       ended_at = CASE WHEN :state = 'cancelled' THEN now() END
 WHERE id = :job_id
""")

_REOPEN = text("UPDATE cell_jobs SET state = 'there', remote_id = :remote_id WHERE job_id = :job_id")

# What tenants may hold at once, and what is left of that: jobs in cells count by the most that they may have there.
_ROOM = text(f"""
SELECT t.tenant_id, t.max_gpus AS most,
       t.max_gpus - coalesce((SELECT sum({MAX_GPUS}) FROM jobs j
                               WHERE j.tenant_id = t.tenant_id AND j.cell <> '' AND j.ended_at IS NULL), 0)
                  - coalesce((SELECT sum(g.gpus) FROM live_gangs g JOIN jobs j ON j.id = g.job_id
                               WHERE j.tenant_id = t.tenant_id), 0) AS left_over
  FROM tenant_limits t WHERE t.max_gpus IS NOT NULL AND (CAST(:tenant_id AS text) IS NULL OR t.tenant_id = :tenant_id)
""")

_LOCK_ROOM = text(f"SELECT pg_advisory_xact_lock({locks.GPUS_HELD})")

_TERMS = text("UPDATE cell_jobs SET zone = :zone, signal = :signal, pue = :pue WHERE job_id = :job_id")

_MIRROR = text("""
UPDATE jobs SET state = :state, reason = :reason, detail = :detail,
       generation = greatest(generation, CAST(:generation AS int)),
       preemptions = :preemptions, restarts = :restarts, exit_code = :exit_code,
       hold_requested = hold_requested AND :state <> 'held', started_at = CAST(:started_at AS timestamptz),
       ended_at = CAST(:ended_at AS timestamptz), expected_start_at = CAST(:expected_start_at AS timestamptz)
 WHERE id = :job_id
""")

_SEEN = text("""
UPDATE cell_jobs SET seen = CAST(:seen AS jsonb),
       state = CASE WHEN CAST(:ended_at AS timestamptz) < now() - make_interval(secs => CAST(:settles_s AS float8))
                    THEN 'over' ELSE state END
 WHERE job_id = :job_id AND attempt = :attempt
""")

_AMOUNTS = ("energy_j", "gpu_energy_j", "estimated_energy_j", "carbon_gco2", "gpu_s")

_HOUR = "date_trunc('hour', least(now(), coalesce(CAST(:ended_at AS timestamptz), now())), 'UTC')"


def _added(name: str) -> str:
    noted, this_hour = f"coalesce(sum(n.{name}), 0)", f"coalesce(sum(n.{name}) FILTER (WHERE n.hour = {_HOUR}), 0)"
    return f"greatest(:{name} - {noted}, -{this_hour})"


# What a cell's ledger has in all, less what was noted before, so that repeating it adds nothing. A ledger that has less
# than before, as one restored from a backup, leaves no hour with less than nothing.
_ENERGY = f"""
INSERT INTO cell_energy AS e (job_id, attempt, cell, hour, zone, signal, pue, {", ".join(_AMOUNTS)})
SELECT t.job_id, t.attempt, t.cell,
       {_HOUR}, t.zone, t.signal, t.pue, {", ".join(map(_added, _AMOUNTS))}
  FROM %s t LEFT JOIN cell_energy n ON n.job_id = t.job_id AND n.attempt = t.attempt
 WHERE t.job_id = :job_id AND t.attempt = :attempt
 GROUP BY t.job_id, t.attempt, t.cell, t.zone, t.signal, t.pue HAVING coalesce(sum(n.energy_j), 0) <> :energy_j
ON CONFLICT (job_id, attempt, hour) DO UPDATE SET {", ".join(f"{n} = e.{n} + excluded.{n}" for n in _AMOUNTS)}
"""
_NOTE_ENERGY = text(_ENERGY % "cell_jobs")
_STRAY = """(SELECT CAST(:job_id AS text) AS job_id, CAST(:attempt AS int) AS attempt, CAST(:cell AS text) AS cell,
               CAST(:zone AS text) AS zone, CAST(:signal AS text) AS signal, CAST(:pue AS float8) AS pue)"""
_NOTE_STRAY = text(_ENERGY % _STRAY)

_HELD_BY = text("""
SELECT t.remote_id, c.name, c.url, c.key, j.ended_at IS NOT NULL AS has_ended
  FROM jobs j JOIN cell_jobs t ON t.job_id = j.id AND t.cell = j.cell JOIN cells c ON c.name = t.cell
 WHERE j.id = :job_id AND t.remote_id IS NOT NULL
""")


class CellRow(NamedTuple):
    """A cell; ``home`` is the label by which it knows this installation's jobs, ``key`` sealed."""

    name: str
    url: str
    key: bytes
    home: str
    tenant_id: str
    project: str | None
    draining: bool
    added_at: datetime
    heard_at: datetime | None
    problem: str | None


class WaitingRow(NamedTuple):
    """A job that waits for a place, or is in one; ``cell`` is empty before it has one, None at home."""

    id: str
    tenant_id: str
    spec: dict[str, Any]
    cell: str | None
    moves: int
    generation: int
    expected_start_at: datetime | None
    waited_s: float  #: Or, if it runs, since when
    runs: dict[str, Any] | None  #: If it does: what it has ``done`` of its ``total``, its ``gpus``, and all it has used


class GivenRow(NamedTuple):
    """A job that a cell has or is to have; ``state`` and what was asked for are those at home.

    ``settles``: its copy has ended, and its cell's ledger is read once more, a minute later.
    """

    job_id: str
    attempt: int
    handing: str
    remote_id: str | None
    body: str
    seen: dict[str, Any]
    zone: str
    settles: bool
    state: str
    cancel_requested: bool
    hold_requested: bool


class Room(NamedTuple):
    """How many GPUs a tenant may hold at once, here and in all cells, and how many more than it has."""

    most: int
    left: int


class HeldBy(NamedTuple):
    """A job's copy in a cell, and how the cell is reached."""

    remote_id: str
    name: str
    url: str
    key: bytes
    has_ended: bool


class Doubt(NamedTuple):
    """A submission that is about to be sent: until when it may be under way, and whether an earlier one may be."""

    doubt_until: datetime
    before: datetime | None
    in_doubt: bool


class CellRepository(Repository):
    """Cells, and the jobs that they have."""

    async def is_needed(self) -> bool:
        """Return whether there is a cell, or a job whose place is to be chosen."""
        return bool(await self._value(_ANYTHING))

    async def cells(self) -> list[CellRow]:
        return await self._all(_CELLS, lambda row: CellRow(**row))

    async def listed(self) -> list[Cell]:
        """Return the cells as operators see them."""
        return await self._readable(_LISTED.bindparams(name=None), Cell.as_stored, "cell", BY_NAME)

    async def find(self, name: str) -> Cell | None:
        """Return one cell likewise."""
        return await self._one(_LISTED.bindparams(name=name), Cell.as_stored)

    async def add(self, **values: Any) -> bool:
        """Add a cell; return False if there is one of this name."""
        return await self._value(_ADD.bindparams(**values)) is not None

    async def drain(self, name: str, draining: bool) -> None:
        await self._connection.execute(_DRAIN, {"name": name, "draining": draining})

    async def lock_cell(self, name: str) -> bool:
        """Lock a cell until the transaction ends; return False if there is none of this name."""
        return await self._value(_LOCK_CELL.bindparams(name=name)) is not None

    async def remove(self, name: str) -> bool:
        """Remove a cell; return False if it still has jobs."""
        return await self._value(_REMOVE.bindparams(name=name)) is not None

    async def note(self, name: str, problem: str | None, *, heard: bool) -> None:
        """Note that a cell was heard, or why not, or what it refused."""
        await self._connection.execute(_HEARD, {"name": name, "problem": problem, "heard": heard})

    async def to_place(self, after: str, limit: int) -> list[WaitingRow]:
        """Return jobs whose place is to be chosen, oldest first, from behind one."""
        return await self._all(_WAITING.bindparams(after=after, limit=limit), lambda row: WaitingRow(**row))

    async def roaming(self, after: str, limit: int) -> list[WaitingRow]:
        """Return jobs that are somewhere and might be elsewhere, by id, from behind one."""
        return await self._all(_ROAMING.bindparams(after=after, limit=limit), lambda row: WaitingRow(**row))

    async def given(self, cell: str) -> list[GivenRow]:
        """Return the jobs that a cell has or is to have, and those whose ends are not settled."""
        return await self._all(_LIVE.bindparams(cell=cell, settles_s=SETTLES_S), lambda row: GivenRow(**row))

    async def rooms(self, tenant_id: str | None = None) -> dict[str, Room]:
        """Return what tenants with a limit of GPUs, or one, may hold besides what they have."""
        found = await self._all(_ROOM.bindparams(tenant_id=tenant_id), lambda row: row)
        return {row["tenant_id"]: Room(row["most"], row["left_over"]) for row in found}

    async def give(
        self, job_id: str, cell: str, body: Callable[[int], str], detail: str, *, gpus: int, moved: bool
    ) -> GivenRow | None:
        """Give a job to a cell, and return what it is to be sent; None if it is not to be given any more.

        Args:
            body: Returns what is submitted there, from the number of the attempt.
            gpus: The most that it may have there.
            moved: Whether it waited at home before.
        """
        await self._connection.execute(_LOCK_ROOM)  # first of all, as the scheduler does
        found = await self._locked(job_id)
        free = found is not None and (found.cell == "" or (found.cell is None and found.generation == 0))
        if found is None or not free or found.state != JobState.QUEUED or found.handing != "over":
            return None
        if found.cancel_requested or found.hold_requested or not await self.lock_cell(cell):
            return None
        room = (await self.rooms(found.tenant_id)).get(found.tenant_id)
        if room is not None and gpus > room.left:
            return None
        attempt = found.attempt + 1
        sent = {"job_id": job_id, "cell": cell, "attempt": attempt, "moved": int(moved), "body": body(attempt)}
        await self._connection.execute(_SEND, sent)
        given = {"job_id": job_id, "cell": cell, "reason": Reason.IN_CELL, "detail": detail}
        await self._connection.execute(_GIVE, given)
        await self.event(job_id, "job.in_cell", cell=cell, detail=detail)
        return GivenRow(job_id, attempt, "sending", None, sent["body"], {}, "", False, found.state, False, False)

    async def keep(self, job_id: str, detail: str | None) -> bool:
        """Leave a job whose place was to be chosen to the scheduler of this installation."""
        found = await self._locked(job_id)
        if found is None or found.cell != "" or found.state != JobState.QUEUED:
            return False
        await self._connection.execute(_GIVE, {"job_id": job_id, "cell": None, "reason": None, "detail": None})
        if detail is not None:
            await self.event(job_id, "job.at_home", detail=detail)
        return True

    async def say(self, job_id: str, detail: str) -> None:
        """State why a job's place is not chosen yet."""
        said = {"job_id": job_id, "reason": Reason.CHOOSING_CELL, "detail": detail}
        await self._connection.execute(_SAY, said)

    async def doubt(self, given: GivenRow) -> Doubt | None:
        """Note that a submission is about to be sent; None if it is not to be sent any more."""
        asked = {"job_id": given.job_id, "attempt": given.attempt, "doubt_s": DOUBT_S}
        return await self._one(_DOUBT.bindparams(**asked), lambda row: Doubt(**row))

    async def undoubt(self, given: GivenRow, doubt: Doubt) -> None:
        """Note that this submission was answered, whatever may be of an earlier one."""
        values = {"before": doubt.before, "until": doubt.doubt_until}
        await self._connection.execute(_UNDOUBT, {"job_id": given.job_id, "attempt": given.attempt, **values})

    async def arrived(self, given: GivenRow, remote_id: str) -> None:
        """Note the copy of a job in its cell."""
        values = {"job_id": given.job_id, "attempt": given.attempt, "remote_id": remote_id}
        await self._connection.execute(_ARRIVED, values)

    async def turn(self, job_id: str, attempt: int, before: str, after: str, *, moved: bool = False) -> None:
        """Have a job leave its cell, or stay after all."""
        values = {"job_id": job_id, "attempt": attempt, "from": before, "to": after, "moved": int(moved)}
        await self._connection.execute(_TURN, values)

    async def leave(self, job_id: str) -> None:
        """Have a job that runs here be stopped, and then placed anew, unless it is to end or to be held."""
        await self._connection.execute(_LEAVE, {"job_id": job_id})

    async def back(self, job_id: str, attempt: int, detail: str, *, doubt: Doubt | None = None) -> None:
        """Take a job back from a cell in which it is certain not to run; it is placed anew, unless it is to end.

        Args:
            doubt: The submission that was refused; nothing is done if another one was begun since.
        """
        found = await self._locked(job_id)
        if found is None or found.attempt != attempt or found.handing == "over":
            return
        if doubt is not None and found.doubt_until != doubt.doubt_until:
            return
        await self._connection.execute(_OVER, {"job_id": job_id})
        if JobState(found.state).is_final:
            return
        held = found.hold_requested or found.state == JobState.HELD
        state = JobState.CANCELLED if found.cancel_requested else JobState.HELD if held else JobState.QUEUED
        reason = Reason.CHOOSING_CELL if state is JobState.QUEUED else state.value
        values = {"job_id": job_id, "state": state.value, "reason": reason, "detail": detail}
        await self._connection.execute(_BACK, values)
        await self.event(job_id, f"job.{state}", state=state.value, detail=detail)

    async def claim(self, job_id: str, attempt: int, cell: str, remote_id: str) -> bool | None:
        """Return whether a copy that is not noted is wanted; None: it is of no job that the cell might have.

        One of a later attempt than is known was made before this database was restored from a backup: it is noted, and
        the job is in its cell, unless it runs here since. One of a job that has ended is noted again, to be cancelled
        and followed to its end.
        """
        found = await self._locked(job_id)
        if found is None or not {ANY, cell} & {*found.cells}:
            return None
        if (attempt, cell) == (found.attempt, found.given_to):
            if found.handing == "over" and JobState(found.state).is_final:
                await self._connection.execute(_REOPEN, {"job_id": job_id, "remote_id": remote_id})
                return True
            return found.handing != "over"
        state = JobState(found.state)
        if attempt <= found.attempt or state.is_final or (found.cell is None and state.holds_gpus):
            return False
        detail = "It was in this cell already when this installation was restored from a backup."
        of_job = {"job_id": job_id, "cell": cell, "attempt": attempt}
        await self._connection.execute(_SEND, {**of_job, "moved": 0, "body": ""})
        await self._connection.execute(_ARRIVED, {"job_id": job_id, "attempt": attempt, "remote_id": remote_id})
        given = {"job_id": job_id, "cell": cell, "reason": Reason.IN_CELL, "detail": detail}
        await self._connection.execute(_GIVE, given)
        await self.event(job_id, "job.in_cell", cell=cell, detail=detail)
        return True

    async def terms(self, job_id: str, zone: str, signal: str, pue: float) -> None:
        """Note by which terms a cell's ledger prices a job."""
        await self._connection.execute(_TERMS, {"job_id": job_id, "zone": zone, "signal": signal, "pue": pue})

    async def mirror(self, given: GivenRow, cell: str, copy: Mapping[str, Any]) -> None:
        """Note how a job's copy is, as ``RemoteJob`` has it, and what it used; the job becomes as it is."""
        found = await self._locked(given.job_id)
        if found is None or found.attempt != given.attempt or found.handing == "over":
            return
        times = {name: at(copy[name]) for name in ("started_at", "ended_at", "expected_start_at")}
        if not JobState(found.state).is_final:
            if (found.state, found.cancel_requested, found.hold_requested) != given[-3:]:
                return  # something was asked for meanwhile: the next turn sees it
            state, names = JobState(copy["state"]), ("generation", "preemptions", "restarts", "exit_code")
            said, has = copy["detail"] or "", "had" if state.is_final else "has"
            values = {
                **{name: copy[name] for name in names},
                **times,
                "state": state.value,
                "reason": copy["reason"] or Reason.IN_CELL.value,
                "detail": f"In cell {cell}: {said}" if said else f"Cell {cell} {has} it.",
            }
            await self._connection.execute(_MIRROR, {"job_id": given.job_id, **values})
            if state != found.state:
                told = {"state": state.value, "cell": cell, "reason": copy["reason"], "exit_code": copy["exit_code"]}
                await self.event(given.job_id, f"job.{state}", **told)
        await self._noted(given, copy, times["ended_at"])

    async def _noted(self, given: GivenRow, copy: Mapping[str, Any], over_at: datetime | None) -> None:
        of_row = {"job_id": given.job_id, "attempt": given.attempt}
        if given.zone:
            used = {name: float(copy["footprint"][name]) for name in _AMOUNTS}
            await self._connection.execute(_NOTE_ENERGY, {**of_row, **used, "ended_at": at(copy["ended_at"])})
        seen = {"seen": dumps(copy), "ended_at": over_at, "settles_s": SETTLES_S}
        await self._connection.execute(_SEEN, {**of_row, **seen})

    async def left(self, given: GivenRow, copy: Mapping[str, Any], detail: str) -> None:
        """Note what a copy used that was given back, and take the job back once its ledger is settled."""
        found = await self._locked(given.job_id)
        if found is None or found.attempt != given.attempt or found.handing == "over":
            return
        await self._noted(given, copy, None)
        ended_at = at(copy["ended_at"])
        if ended_at is None or datetime.now(UTC) > ended_at + timedelta(seconds=SETTLES_S):
            await self.back(given.job_id, given.attempt, detail)

    async def note_stray(self, job_id: str, cell: str, copy: Mapping[str, Any], terms: tuple[str, str, float]) -> None:
        """Note what a copy of a job used that is elsewhere by now, as an attempt of a number that no other has."""
        attempt = -1 - (crc32(copy["id"].encode()) >> 1)
        values = {"job_id": job_id, "attempt": attempt, "cell": cell, "ended_at": at(copy["ended_at"])}
        values |= zip(("zone", "signal", "pue"), terms, strict=True)
        values |= {name: float(copy["footprint"][name]) for name in _AMOUNTS}
        await self._connection.execute(_NOTE_STRAY, values)

    async def _locked(self, job_id: str) -> Row[Any] | None:
        await self._connection.execute(_LOCK, {"job_id": job_id})
        return (await self._connection.execute(_LOCKED, {"job_id": job_id})).one_or_none()

    async def holder(self, job_id: str) -> HeldBy | None:
        """Return a job's copy in a cell; None if it has none."""
        return await self._one(_HELD_BY.bindparams(job_id=job_id), lambda row: HeldBy(**row))

    async def event(self, job_id: str, kind: str, **data: Any) -> None:
        """Add an event to a job."""
        told = {name: value for name, value in data.items() if value is not None}
        await self._connection.execute(_EVENT, {"job_id": job_id, "type": kind, "data": dumps(told)})


def at(value: str | None) -> datetime | None:
    """Return a time that was written in ISO 8601."""
    return None if value is None else datetime.fromisoformat(value)
