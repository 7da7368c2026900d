"""Use cases: submit a solve, see it, cancel it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import orjson

from optimizer_service.kinds import KINDS, SolveKind
from optimizer_service.queue import SolveQueue
from optimizer_service.repository import (
    Draft,
    KeyReusedError,
    SolveRepository,
    SolveRow,
    Submitted,
    TooManyPendingError,
)
from optimizer_service.sources import Sources
from services.contracts.identity import Identity
from services.contracts.optimize import (
    SOLVE_ID_PATTERN,
    Solve,
    SolveFailure,
    SolveList,
    SolveOutcome,
    SolveQuery,
    SolveState,
    SolveSummary,
)
from services.contracts.problems import FieldError, ProblemCode
from services.contracts.schema import Message
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.problems import ProblemError, not_found

log = Log(__name__)

AnyKind = SolveKind[Any, Any, Any]


@dataclass(frozen=True)
class Submission:
    """The answer to a submission; a new solve may have ended already."""

    solve: SolveSummary
    is_new: bool


class OptimizerService:
    """What callers may do with solves. A user reaches its tenant's, an operator everyone's."""

    def __init__(
        self, repository: SolveRepository, queue: SolveQueue, sources: Sources, max_pending_per_tenant: int
    ) -> None:
        self._repository = repository
        self._queue = queue
        self._sources = sources
        self._max_pending = max_pending_per_tenant

    async def submit(
        self, kind: AnyKind, request: Message, caller: Identity, idempotency_key: str | None
    ) -> Submission:
        """Accept a solve: it is in the database on return, and a message for it on its way.

        The same idempotency key, and the same problem while it is queued, running or solved, give the same solve.

        Raises:
            ProblemError: 422 for a request that cannot be resolved or a key used for another body, 429 with too many
                solves pending, 503 when something it refers to cannot be read right now.
        """
        body_sha256 = _sha256(kind.name, request.model_dump(mode="json"))
        try:
            submitted = await self._submit(kind, request, caller, idempotency_key, body_sha256)
        except KeyReusedError as error:
            raise ProblemError(
                422,
                ProblemCode.IDEMPOTENCY_KEY_REUSED,
                "This Idempotency-Key stands for another request body; nothing was submitted.",
                errors=[FieldError(pointer="#Idempotency-Key", detail="Already used with another body.")],
            ) from error
        except TooManyPendingError as error:
            raise ProblemError(
                429,
                ProblemCode.QUOTA_EXCEEDED,
                f"{self._max_pending} solves of yours are queued or running; wait for one to end, or cancel one.",
                headers={"Retry-After": "5"},
            ) from error
        if submitted.is_new:
            log.info("solve.accepted", solve=submitted.solve_id, kind=kind.name, tenant=caller.tenant_id)
            if await self._queue.send(submitted.solve_id):
                await self._repository.mark_enqueued(submitted.solve_id)
        return Submission(_summary(await self._repository.summary(submitted.solve_id)), submitted.is_new)

    async def find(self, solve_id: str, caller: Identity) -> Solve:
        """Return a solve whole.

        Raises:
            ProblemError: 404 where there is none that the caller may see.
        """
        row = await self._repository.find(_checked(solve_id), _scope(caller))
        if row is None:
            raise not_found("solve")
        kind = KINDS[row.kind]
        return Solve(
            **dict(_summary(row)),
            problem=kind.problem.model_validate(row.problem),
            result=None if row.result is None else kind.result.model_validate(row.result),
        )

    async def page(self, query: SolveQuery, caller: Identity) -> SolveList:
        """Return one page of solves, newest first.

        Raises:
            ProblemError: 422 for a cursor that is not one.
        """
        if query.cursor is not None and not re.fullmatch(SOLVE_ID_PATTERN, query.cursor):
            detail = "The cursor is not one that this list gave out."
            errors = [FieldError(pointer="?cursor", detail=detail)]
            raise ProblemError(422, ProblemCode.INVALID_CURSOR, detail, errors=errors)
        tenant_id = query.tenant if caller.is_operator else caller.tenant_id
        rows = await self._repository.page(tenant_id, query.state, query.kind, query.cursor, query.limit + 1)
        items = [_summary(row) for row in rows[: query.limit]]
        return SolveList(items=items, next_cursor=items[-1].id if len(rows) > query.limit else None)

    async def cancel(self, solve_id: str, caller: Identity) -> SolveSummary:
        """Cancel a solve; cancelling it again changes nothing.

        Raises:
            ProblemError: 404 where there is none that the caller may see, 409 for one that has ended otherwise.
        """
        cancelled = await self._repository.cancel(_checked(solve_id), caller)
        row = await self._repository.find(solve_id, _scope(caller))
        if row is None:
            raise not_found("solve")
        if cancelled:
            log.info("solve.cancelled", solve=solve_id, tenant=row.tenant_id, by=caller.key_id, role=caller.role)
        elif row.state != SolveState.CANCELLED:
            raise ProblemError(409, ProblemCode.INVALID_TRANSITION, f"The solve has {row.state} already.")
        return _summary(row)

    async def _submit(
        self, kind: AnyKind, request: Message, caller: Identity, idempotency_key: str | None, body_sha256: bytes
    ) -> Submitted:
        if idempotency_key is not None:  # before resolving: what the request refers to may have changed since
            known = await self._repository.submitted(caller.tenant_id, idempotency_key, body_sha256)
            if known is not None:
                return Submitted(known, is_new=False)
        problem: Message = await kind.resolve(request, self._sources)
        draft = Draft(
            id=new_id("solve"),
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            kind=kind.name,
            problem=problem.model_dump(mode="json"),
            # Where a forecast came from does not make it another problem; what it says does.
            problem_sha256=_sha256(kind.name, problem.model_dump(mode="json", exclude={"source"})),
            idempotency_key=idempotency_key,
            body_sha256=body_sha256,
        )
        return await self._repository.submit(draft, self._max_pending)


def _sha256(kind: str, document: Any) -> bytes:
    return hashlib.sha256(kind.encode() + b"\0" + orjson.dumps(document, option=orjson.OPT_SORT_KEYS)).digest()


def _scope(caller: Identity) -> str | None:
    return None if caller.is_operator else caller.tenant_id


def _checked(solve_id: str) -> str:
    """Return an id that could be one; PostgreSQL could not even be asked for some texts."""
    if not re.fullmatch(SOLVE_ID_PATTERN, solve_id):
        raise not_found("solve")
    return solve_id


def _summary(row: SolveRow) -> SolveSummary:
    return SolveSummary(
        id=row.id,
        kind=row.kind,
        tenant_id=row.tenant_id,
        state=row.state,
        submitted_at=row.submitted_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        attempts=row.attempts,
        solve_s=row.solve_s,
        outcome=None
        if row.status is None
        else SolveOutcome(
            status=row.status, solver=row.solver, objective=row.objective, bound=row.bound, gap=row.gap, note=row.note
        ),
        failure=None if row.failure is None else SolveFailure.model_validate(row.failure),
    )
