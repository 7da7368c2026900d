"""Queries on solves. Every change names the state it expects, so that no two processes both make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, case, delete, func, literal, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.contracts.identity import Identity
from services.contracts.optimize import SolveFailure, SolveFailureCode, SolveState
from services.db.tables.admission import audit_log
from services.db.tables.optimizer import solve_submissions as submissions
from services.db.tables.optimizer import solves

LIVE = (SolveState.QUEUED, SolveState.RUNNING)
KEPT = (*LIVE, SolveState.SUCCEEDED)
OUTCOME_FIELDS = ("status", "solver", "objective", "bound", "gap", "note")

SolveRow = Row[*tuple[Any, ...]]

_SUMMARY = (
    *(solves.c[name] for name in ("id", "kind", "tenant_id", "state", "submitted_at", "started_at", "ended_at")),
    *(solves.c[name] for name in ("attempts", "solve_s", "failure")),
    *(solves.c.result[name].label(name) for name in OUTCOME_FIELDS),
)


@dataclass(frozen=True)
class Draft:
    """A valid submission: its ids and hashes are settled before the first attempt to store it."""

    id: str
    tenant_id: str
    key_id: str
    kind: str
    problem: Any
    problem_sha256: bytes
    idempotency_key: str | None
    body_sha256: bytes


@dataclass(frozen=True)
class Submitted:
    """Which solve a submission stands for."""

    solve_id: str
    is_new: bool


class KeyReusedError(Exception):
    """The idempotency key stands for another body."""


class TooManyPendingError(Exception):
    """The tenant has as many solves queued or running as it may."""


class SolveRepository:
    """Queries; times are the database's own."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def ping(self) -> None:
        """Return once the database has answered."""
        async with self._engine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    async def submitted(self, tenant_id: str, key: str, body_sha256: bytes) -> str | None:
        """Return the solve an idempotency key stands for, if any.

        Raises:
            KeyReusedError: The key was used with another body.
        """
        async with self._engine.connect() as connection:
            return await _submitted(connection, tenant_id, key, body_sha256)

    async def submit(self, draft: Draft, max_pending: int) -> Submitted:
        """Store a solve, unless its key or its problem stands for one already; durable on return.

        Raises:
            KeyReusedError: The key was used with another body.
            TooManyPendingError: The tenant has ``max_pending`` solves queued or running.
        """
        async with self._engine.begin() as connection:
            # One submission of a tenant at a time: the count and both uniqueness rules hold without further care.
            await connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(draft.tenant_id, 8_040))))
            if draft.idempotency_key is not None:
                known = await _submitted(connection, draft.tenant_id, draft.idempotency_key, draft.body_sha256)
                if known is not None:
                    return Submitted(known, is_new=False)
            same = and_(
                solves.c.tenant_id == draft.tenant_id,
                solves.c.kind == draft.kind,
                solves.c.problem_sha256 == draft.problem_sha256,
                solves.c.state.in_(KEPT),
            )
            # Locked, so that it cannot be cancelled between being found and being answered with.
            known = (await connection.execute(select(solves.c.id).where(same).with_for_update())).scalar()
            if known is None:
                mine = and_(solves.c.tenant_id == draft.tenant_id, solves.c.state.in_(LIVE))
                pending = (await connection.execute(select(func.count()).where(mine))).scalar_one()
                if pending >= max_pending:
                    raise TooManyPendingError
                columns = ("id", "tenant_id", "key_id", "kind", "problem", "problem_sha256")
                values = {name: getattr(draft, name) for name in columns}
                await connection.execute(insert(solves).values(**values, state=SolveState.QUEUED))
            if draft.idempotency_key is not None:
                await connection.execute(
                    insert(submissions).values(
                        tenant_id=draft.tenant_id,
                        idempotency_key=draft.idempotency_key,
                        body_sha256=draft.body_sha256,
                        solve_id=known or draft.id,
                    )
                )
            return Submitted(known or draft.id, is_new=known is None)

    async def find(self, solve_id: str, tenant_id: str | None) -> SolveRow | None:
        """Return a solve whole, of ``tenant_id`` if one is given."""
        wanted = _visible(solves.c.id == solve_id, tenant_id)
        query = select(*_SUMMARY, solves.c.problem, solves.c.result).where(wanted)
        async with self._engine.connect() as connection:
            return (await connection.execute(query)).first()

    async def summary(self, solve_id: str) -> SolveRow:
        """Return a solve that exists, without its problem and result."""
        async with self._engine.connect() as connection:
            return (await connection.execute(select(*_SUMMARY).where(solves.c.id == solve_id))).one()

    async def page(
        self, tenant_id: str | None, states: Sequence[str], kind: str | None, before_id: str | None, limit: int
    ) -> Sequence[SolveRow]:
        """Return solves, newest first: ids sort by the time they were made."""
        query = select(*_SUMMARY).where(_visible(literal(True), tenant_id))
        if states:
            query = query.where(solves.c.state.in_(states))
        if kind is not None:
            query = query.where(solves.c.kind == kind)
        if before_id is not None:
            query = query.where(solves.c.id < before_id)
        async with self._engine.connect() as connection:
            return (await connection.execute(query.order_by(solves.c.id.desc()).limit(limit))).all()

    async def cancel(self, solve_id: str, caller: Identity) -> bool:
        """Cancel a solve that is queued or running and return whether it was; its worker finds out by its lease.

        An operator who cancels another tenant's is written down.
        """
        wanted = and_(solves.c.id == solve_id, solves.c.state.in_(LIVE))
        if not caller.is_operator:
            wanted = _visible(wanted, caller.tenant_id)
        values = {"state": SolveState.CANCELLED, "ended_at": func.now(), "claim": None, "lease_until": None}
        statement = update(solves).where(wanted).values(values).returning(solves.c.tenant_id)
        async with self._engine.begin() as connection:
            tenant_id = (await connection.execute(statement)).scalar()
            if tenant_id not in (None, caller.tenant_id):
                await connection.execute(
                    insert(audit_log).values(
                        tenant_id=caller.tenant_id,
                        key_id=caller.key_id,
                        action="solve.cancelled",
                        target=solve_id,
                        data={"tenant": tenant_id},
                    )
                )
        return tenant_id is not None

    async def mark_enqueued(self, solve_id: str) -> None:
        """Note that a message for the solve is on its way."""
        wanted = and_(solves.c.id == solve_id, solves.c.state == SolveState.QUEUED)
        await self._change(update(solves).where(wanted).values(enqueued_at=func.now()))

    async def claim(self, solve_id: str, claim: str, lease_s: float) -> SolveRow | None:
        """Take a solve that is queued, or whose worker's lease is over; return its kind and problem, or None."""
        free = or_(
            solves.c.state == SolveState.QUEUED,
            and_(solves.c.state == SolveState.RUNNING, solves.c.lease_until < func.now()),
        )
        statement = (
            update(solves)
            .where(solves.c.id == solve_id, free)
            .values(
                state=SolveState.RUNNING,
                claim=claim,
                lease_until=_from_now(lease_s),
                started_at=func.now(),
                attempts=solves.c.attempts + 1,
            )
            .returning(solves.c.kind, solves.c.problem, solves.c.attempts)
        )
        async with self._engine.begin() as connection:
            return (await connection.execute(statement)).first()

    async def renew(self, solve_id: str, claim: str, lease_s: float) -> bool:
        """Extend a claim and return whether it still stands."""
        statement = update(solves).where(_owned(solve_id, claim)).values(lease_until=_from_now(lease_s))
        return await self._change(statement) > 0

    async def succeed(self, solve_id: str, claim: str, result: Any, solve_s: float) -> bool:
        """Write the answer if the claim still stands, and return whether it did."""
        return await self._end(solve_id, claim, state=SolveState.SUCCEEDED, result=result, solve_s=solve_s)

    async def fail(self, solve_id: str, claim: str, failure: SolveFailure, solve_s: float) -> bool:
        """Write why there is no answer if the claim still stands, and return whether it did."""
        document = failure.model_dump(mode="json")
        return await self._end(solve_id, claim, state=SolveState.FAILED, failure=document, solve_s=solve_s)

    async def release_abandoned(self, max_attempts: int) -> Sequence[SolveRow]:
        """Queue again every running solve whose lease is over, or fail it after ``max_attempts``; return both."""
        gave_up = solves.c.attempts >= max_attempts
        failure = SolveFailure(
            code=SolveFailureCode.WORKER_LOST, detail=f"{max_attempts} workers were lost while they solved this."
        )
        statement = (
            update(solves)
            .where(solves.c.state == SolveState.RUNNING, solves.c.lease_until < func.now())
            .values(
                state=case((gave_up, SolveState.FAILED), else_=SolveState.QUEUED),
                failure=case((gave_up, literal(failure.model_dump(mode="json"), solves.c.failure.type)), else_=None),
                ended_at=case((gave_up, func.now()), else_=None),
                claim=None,
                lease_until=None,
                enqueued_at=None,
            )
            .returning(solves.c.id, solves.c.state, solves.c.attempts)
        )
        async with self._engine.begin() as connection:
            return (await connection.execute(statement)).all()

    async def queued(self, enqueued_before_s: float) -> Sequence[str]:
        """Return the queued solves whose message was sent that long ago or never, those longest waiting first."""
        query = (
            select(solves.c.id)
            .where(
                solves.c.state == SolveState.QUEUED,
                or_(
                    solves.c.enqueued_at < _from_now(-enqueued_before_s),
                    # Never sent: the service that stored it may be about to send it.
                    and_(solves.c.enqueued_at.is_(None), solves.c.submitted_at < _from_now(-enqueued_before_s)),
                ),
            )
            .order_by(solves.c.enqueued_at.asc().nulls_first(), solves.c.id)
        )
        async with self._engine.connect() as connection:
            return (await connection.execute(query)).scalars().all()

    async def forget_ended(self, keep_days: float) -> int:
        """Delete what ended that long ago, and return how many."""
        return await self._change(delete(solves).where(solves.c.ended_at < _from_now(-86_400 * keep_days)))

    async def _end(self, solve_id: str, claim: str, **values: Any) -> bool:
        ended = {"ended_at": func.now(), "claim": None, "lease_until": None, **values}
        return await self._change(update(solves).where(_owned(solve_id, claim)).values(ended)) > 0

    async def _change(self, statement: Any) -> int:
        async with self._engine.begin() as connection:
            return (await connection.execute(statement)).rowcount


async def _submitted(connection: AsyncConnection, tenant_id: str, key: str, body_sha256: bytes) -> str | None:
    wanted = and_(submissions.c.tenant_id == tenant_id, submissions.c.idempotency_key == key)
    query = select(submissions.c.body_sha256, submissions.c.solve_id).where(wanted)
    row = (await connection.execute(query)).first()
    if row is None:
        return None
    if row.body_sha256 != body_sha256:
        raise KeyReusedError
    return row.solve_id


def _visible(condition: ColumnElement[bool], tenant_id: str | None) -> ColumnElement[bool]:
    return condition if tenant_id is None else and_(condition, solves.c.tenant_id == tenant_id)


def _owned(solve_id: str, claim: str) -> ColumnElement[bool]:
    return and_(solves.c.id == solve_id, solves.c.state == SolveState.RUNNING, solves.c.claim == claim)


def _from_now(seconds: float) -> ColumnElement[Any]:
    return func.now() + timedelta(seconds=seconds)
