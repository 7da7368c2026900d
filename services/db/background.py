"""Queries on work that workers claim. Each change names the state it expects, so that two processes never make the same
change.

A table of work has the columns of ``services.db.tables`` and those its owner adds; its table of submissions maps
idempotency keys to pieces of work. ``services.kit.background`` is the processes' side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    RowMapping,
    TableClause,
    and_,
    case,
    delete,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.contracts import background
from services.contracts.identity import Identity
from services.db.tables import audit_log

LIVE = (background.WorkState.QUEUED, background.WorkState.RUNNING)
KEPT = (*LIVE, background.WorkState.SUCCEEDED)

RECORD = tuple(each.name for each in fields(background.WorkRecord) if each.name != "columns")
SHOWN = tuple(name for name in RECORD if name not in ("problem", "result", "claim"))


class LiveWork(NamedTuple):
    """How many pieces of work wait for a worker, how many run, and how long the oldest has waited, seconds."""

    queued: int
    running: int
    longest_wait_s: float


class WorkRepository:
    """Queries on one table of work; times are the database's own."""

    def __init__(
        self,
        engine: AsyncEngine,
        work: TableClause,
        submissions: TableClause | None,
        what: str,
        summary: Sequence[ColumnElement[Any]],
        *,
        swept: ColumnElement[bool] | None = None,
        urgent: ColumnElement[bool] | None = None,
        kind: ColumnElement[bool] | None = None,
    ) -> None:
        """Take the tables, the name of one piece of work, and the extra columns that lists show.

        Without a table of submissions no draft may have an idempotency key. ``swept`` limits the sweeper to that
        condition: a table whose work goes to several queues has a sweeper for each. Work that is ``urgent`` is listed
        as queued before all other work. Tenants take turns among work of the same ``kind``, that of one queue.
        """
        self._engine, self._work = engine, work
        self._submissions = work if submissions is None else submissions
        self._stands_for = self._submissions.c.get(f"{what}_id", work.c.id)
        self._what = what
        self._summary = (*(work.c[name] for name in SHOWN), *summary)
        self._swept = literal(True) if swept is None else swept
        self._urgency = () if urgent is None else (urgent.desc(),)
        self._kind = literal(True) if kind is None else kind

    async def live(self) -> LiveWork:
        """Return how much of the work that the sweeper is limited to waits and runs."""
        work = self._work
        queued, running = (work.c.state == state for state in LIVE)
        waits = func.extract("epoch", func.now() - func.min(work.c.submitted_at).filter(queued))
        query = select(func.count().filter(queued), func.count().filter(running), func.coalesce(waits, 0.0))
        async with self._engine.connect() as connection:
            found = await connection.execute(query.where(work.c.state.in_(LIVE), self._swept))
            waiting, busy, longest_s = found.one()
        return LiveWork(int(waiting), int(busy), float(longest_s))

    async def submitted(self, tenant_id: str, key: str, body_sha256: bytes) -> str | None:
        """Return an idempotency key's work, if any; ``KeyReusedError`` if the key came with another body."""
        async with self._engine.connect() as connection:
            return await self._submitted(connection, tenant_id, key, body_sha256)

    async def submit(self, draft: background.Draft, max_pending: int) -> background.Submitted:
        """Store a piece of work, unless its key or its problem refers to an existing one; durable on return.

        Raises:
            KeyReusedError: The key was used with another body.
            TooManyPendingError: The tenant has ``max_pending`` pieces queued or running.
        """
        work, problem = self._work, draft.problem
        async with self._engine.begin() as connection:
            # One submission of a tenant at a time: the count and both uniqueness rules hold without further care.
            lock = func.hashtextextended(f"{work.name}:{draft.tenant_id}", 0)
            await connection.execute(select(func.pg_advisory_xact_lock(lock)))
            if draft.idempotency_key is not None:
                known = await self._submitted(connection, draft.tenant_id, draft.idempotency_key, draft.body_sha256)
                if known is not None:
                    return background.Submitted(known, is_new=False)
            same = and_(
                work.c.tenant_id == draft.tenant_id, work.c.problem_sha256 == problem.sha256, work.c.state.in_(KEPT)
            )
            # Locked, so that it cannot be cancelled between being found and being answered with.
            known = (await connection.execute(select(work.c.id).where(same).with_for_update())).scalar()
            if known is None:
                mine = and_(work.c.tenant_id == draft.tenant_id, work.c.state.in_(LIVE))
                pending = (await connection.execute(select(func.count()).where(mine))).scalar_one()
                if pending >= max_pending:
                    raise background.TooManyPendingError
                values = {name: getattr(draft, name) for name in ("id", "tenant_id", "key_id")}
                values |= {"problem": problem.document, "problem_sha256": problem.sha256, **problem.columns}
                await connection.execute(insert(work).values(**values, state=background.WorkState.QUEUED))
            if draft.idempotency_key is not None:
                await connection.execute(
                    insert(self._submissions).values(
                        {
                            "tenant_id": draft.tenant_id,
                            "idempotency_key": draft.idempotency_key,
                            "body_sha256": draft.body_sha256,
                            self._stands_for.name: known or draft.id,
                        }
                    )
                )
            return background.Submitted(known or draft.id, is_new=known is None)

    async def find(self, work_id: str, tenant_id: str | None) -> background.WorkRecord | None:
        """Return a complete piece of work, of ``tenant_id`` if one is given."""
        wanted = self._visible(self._work.c.id == work_id, tenant_id)
        query = select(*self._summary, self._work.c.problem, self._work.c.result).where(wanted)
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).mappings().first()
        return None if row is None else _record(row)

    async def summary(self, work_id: str) -> background.WorkRecord:
        """Return a piece of work that exists, without its problem and result."""
        async with self._engine.connect() as connection:
            query = select(*self._summary).where(self._work.c.id == work_id)
            return _record((await connection.execute(query)).mappings().one())

    async def page(
        self, tenant_id: str | None, states: Sequence[str], before_id: str | None, limit: int
    ) -> Sequence[background.WorkRecord]:
        """Return work, newest first."""
        return [_record(row) for row in await self.listed(tenant_id, states, before_id, limit)]

    async def listed(
        self,
        tenant_id: str | None,
        states: Sequence[str],
        before_id: str | None,
        limit: int,
        also: Mapping[str, Any] | None = None,
    ) -> Sequence[RowMapping]:
        """Return rows of work, newest first: ids sort by creation time; ``also``: what other columns must hold."""
        work = self._work
        query = select(*self._summary).where(self._visible(literal(True), tenant_id))
        if states:
            query = query.where(work.c.state.in_(states))
        for name, value in (also or {}).items():
            query = query.where(work.c[name] == value)
        if before_id is not None:
            query = query.where(work.c.id < before_id)
        async with self._engine.connect() as connection:
            return (await connection.execute(query.order_by(work.c.id.desc()).limit(limit))).mappings().all()

    async def cancel(self, work_id: str, caller: Identity) -> bool:
        """Cancel work that is queued or running, and return whether it was; its worker notices at its next renewal.

        If an operator cancels another tenant's work, the audit log records it.
        """
        work = self._work
        wanted = and_(work.c.id == work_id, work.c.state.in_(LIVE))
        if not caller.is_operator:
            wanted = self._visible(wanted, caller.tenant_id)
        values = {"state": background.WorkState.CANCELLED, "ended_at": func.now(), "claim": None, "lease_until": None}
        statement = update(work).where(wanted).values(values).returning(work.c.tenant_id)
        async with self._engine.begin() as connection:
            tenant_id = (await connection.execute(statement)).scalar()
            if tenant_id not in (None, caller.tenant_id):
                await connection.execute(
                    insert(audit_log).values(
                        tenant_id=caller.tenant_id,
                        key_id=caller.key_id,
                        action=f"{self._what}.cancelled",
                        target=work_id,
                        data={"tenant": tenant_id},
                    )
                )
        return tenant_id is not None

    async def mark_enqueued(self, work_id: str) -> None:
        """Record that a message for the work was sent."""
        work = self._work
        wanted = and_(work.c.id == work_id, work.c.state == background.WorkState.QUEUED)
        await self._change(update(work).where(wanted).values(enqueued_at=func.now()))

    async def fairest(self, work_id: str) -> str:
        """Return the waiting work of the tenant for whom a worker last began longest ago; ``work_id`` if none waits."""
        work, others = self._work, self._work.alias()
        last_at = select(func.max(others.c.started_at)).where(others.c.tenant_id == work.c.tenant_id).scalar_subquery()
        kind = select(self._kind).where(work.c.id == work_id).correlate(None).scalar_subquery()
        waiting = select(work.c.id).where(work.c.state == background.WorkState.QUEUED, self._kind == kind)
        query = waiting.order_by(last_at.asc().nulls_first(), work.c.id).limit(1)
        async with self._engine.connect() as connection:
            return (await connection.execute(query)).scalar() or work_id

    async def claim(self, work_id: str, claim: str, lease_s: float) -> background.WorkRecord | None:
        """Take work that is queued, or whose worker's lease has expired; return it, or None."""
        work = self._work
        free = or_(
            work.c.state == background.WorkState.QUEUED,
            and_(work.c.state == background.WorkState.RUNNING, work.c.lease_until < func.now()),
        )
        values = {"state": background.WorkState.RUNNING, "claim": claim, "lease_until": _from_now(lease_s)}
        values |= {"started_at": func.now(), "attempts": work.c.attempts + 1}
        statement = update(work).where(work.c.id == work_id, free).values(values).returning(work)
        async with self._engine.begin() as connection:
            row = (await connection.execute(statement)).mappings().first()
        return None if row is None else _record(row)

    async def renew(self, work_id: str, claim: str, lease_s: float, **columns: Any) -> bool:
        """Extend a claim, store the progress of the work, and return whether the claim is still valid."""
        values = {"lease_until": _from_now(lease_s), **columns}
        return await self._change(update(self._work).where(self._owned(work_id, claim)).values(values)) > 0

    async def succeed(self, work_id: str, claim: str, result: Any, **columns: Any) -> bool:
        """Write the answer if the claim is still valid, and return whether it was."""
        return await self._end(work_id, claim, state=background.WorkState.SUCCEEDED, result=result, **columns)

    async def fail(self, work_id: str, claim: str, failure: background.WorkFailure, **columns: Any) -> bool:
        """Record why there is no answer if the claim is still valid, and return whether it was."""
        document = failure.model_dump(mode="json")
        return await self._end(work_id, claim, state=background.WorkState.FAILED, failure=document, **columns)

    async def release_abandoned(self, max_attempts: int, lease_s: float) -> Sequence[background.WorkRecord]:
        """Requeue all running work whose lease has expired, or fail it after ``max_attempts``; return both.

        A lease longer than ``lease_s`` was taken while the clock was ahead: it ends as if it had been taken now.
        """
        work = self._work
        shorten = update(work).where(work.c.lease_until > _from_now(lease_s), self._swept)
        gave_up = work.c.attempts >= max_attempts
        failure = background.WorkFailure(
            code=background.WorkFailureCode.WORKER_LOST,
            detail=f"{max_attempts} workers were lost while they worked on this.",
        )
        statement = (
            update(work)
            .where(work.c.state == background.WorkState.RUNNING, work.c.lease_until < func.now(), self._swept)
            .values(
                state=case((gave_up, background.WorkState.FAILED), else_=background.WorkState.QUEUED),
                failure=case((gave_up, literal(failure.model_dump(mode="json"), work.c.failure.type)), else_=None),
                ended_at=case((gave_up, func.now()), else_=None),
                claim=None,
                lease_until=None,
                enqueued_at=None,
            )
            .returning(*(work.c[name] for name in SHOWN))
        )
        async with self._engine.begin() as connection:
            await connection.execute(shorten.values(lease_until=_from_now(lease_s)))
            return [_record(row) for row in (await connection.execute(statement)).mappings()]

    async def queued(self, enqueued_before_s: float) -> Sequence[str]:
        """Return queued work whose message was sent (or which was submitted) that long ago, longest waiting first."""
        work = self._work
        # What was never sent, the service that stored it may be about to send.
        touched_at = func.coalesce(work.c.enqueued_at, work.c.submitted_at)
        query = (
            select(work.c.id)
            .where(
                work.c.state == background.WorkState.QUEUED,
                self._swept,
                or_(
                    touched_at < _from_now(-enqueued_before_s),
                    touched_at > func.now(),  # the clock was ahead then
                ),
            )
            .order_by(*self._urgency, work.c.enqueued_at.asc().nulls_first(), work.c.id)
        )
        async with self._engine.connect() as connection:
            return (await connection.execute(query)).scalars().all()

    async def forget_ended(self, keep_days: float) -> int:
        """Delete work that ended that long ago, and return how many rows."""
        is_old = self._work.c.ended_at < _from_now(-86_400 * keep_days)
        return await self._change(delete(self._work).where(is_old, self._swept))

    async def forget_older(self, tenant_id: str, *, keep: int) -> None:
        """Delete a tenant's work that has ended, except its newest ``keep``."""
        work = self._work
        newest = select(work.c.id).where(work.c.tenant_id == tenant_id).order_by(work.c.id.desc())
        is_older = work.c.id < newest.offset(keep - 1).limit(1).scalar_subquery()
        await self._change(delete(work).where(work.c.tenant_id == tenant_id, work.c.state.not_in(LIVE), is_older))

    async def _submitted(self, connection: AsyncConnection, tenant_id: str, key: str, body_sha256: bytes) -> str | None:
        keys = self._submissions.c
        wanted = and_(keys.tenant_id == tenant_id, keys.idempotency_key == key)
        row = (await connection.execute(select(keys.body_sha256, self._stands_for).where(wanted))).first()
        if row is None:
            return None
        if row[0] != body_sha256:
            raise background.KeyReusedError
        return row[1]

    async def _end(self, work_id: str, claim: str, **values: Any) -> bool:
        ended = {"ended_at": func.now(), "claim": None, "lease_until": None, **values}
        return await self._change(update(self._work).where(self._owned(work_id, claim)).values(ended)) > 0

    async def _change(self, statement: Any) -> int:
        async with self._engine.begin() as connection:
            return (await connection.execute(statement)).rowcount

    def _visible(self, condition: ColumnElement[bool], tenant_id: str | None) -> ColumnElement[bool]:
        return condition if tenant_id is None else and_(condition, self._work.c.tenant_id == tenant_id)

    def _owned(self, work_id: str, claim: str) -> ColumnElement[bool]:
        work = self._work
        return and_(work.c.id == work_id, work.c.state == background.WorkState.RUNNING, work.c.claim == claim)

    def record(self, row: RowMapping, /) -> background.WorkRecord:
        """Return what a listed row says."""
        return _record(row)


def _record(row: RowMapping) -> background.WorkRecord:
    known = {name: row[name] for name in RECORD if name in row}
    known["state"] = background.WorkState(known["state"])
    if known["failure"] is not None:
        known["failure"] = background.WorkFailure.as_stored(known["failure"])
    return background.WorkRecord(**known, columns={name: value for name, value in row.items() if name not in RECORD})


def _from_now(seconds: float) -> ColumnElement[Any]:
    return func.now() + timedelta(seconds=seconds)
