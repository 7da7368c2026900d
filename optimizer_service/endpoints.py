"""``/v1/optimize``: HTTP only."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from optimizer_service.kinds import KINDS, SolveKind
from optimizer_service.service import OptimizerService
from services.contracts.background import WorkState
from services.contracts.optimize import Solve, SolveList, SolveQuery, SolveSummary
from services.contracts.problems import Problem
from services.kit.identity import Caller

PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "`unauthenticated`."},
    422: {"model": Problem, "description": "`invalid_request`, with a pointer to what is wrong."},
    503: {"model": Problem, "description": "`unavailable`; asking again is safe."},
}
SUBMIT_PROBLEMS: dict[int | str, dict[str, Any]] = {
    200: {"model": SolveSummary, "description": "The same problem is solved already."},
    400: {"model": Problem, "description": "`body_not_json`."},
    413: {"model": Problem, "description": "`body_too_large`."},
    429: {"model": Problem, "description": "`quota_exceeded`: too many solves queued or running."},
}

router = APIRouter(prefix="/v1/optimize", tags=["optimize"], responses=PROBLEMS)


def read_service(request: Request) -> OptimizerService:
    """Return the service of this process."""
    return request.app.state.optimizer


Service = Annotated[OptimizerService, Depends(read_service)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="The same key with the same body gives the same solve.",
    ),
]


def _add_submission(kind: SolveKind[Any, Any, Any]) -> None:
    async def submit(
        body: kind.request,  # type: ignore[name-defined]  # pyright: ignore[reportInvalidTypeForm]
        caller: Caller,
        service: Service,
        response: Response,
        idempotency_key: IdempotencyKey = None,
    ) -> SolveSummary:
        submission = await service.submit(kind, body, caller, idempotency_key)
        response.headers["Location"] = f"/v1/optimize/{submission.solve.id}"
        if not submission.is_new and submission.solve.state is WorkState.SUCCEEDED:
            response.status_code = 200
        return submission.solve

    router.add_api_route(
        f"/{kind.name}",
        submit,
        methods=["POST"],
        status_code=202,
        summary=kind.summary,
        description=kind.request.__doc__,
        operation_id=f"optimize_{kind.name.replace('-', '_')}",
        responses=SUBMIT_PROBLEMS,
    )


for _kind in KINDS.values():
    _add_submission(_kind)


@router.get("")
async def list_solves(query: Annotated[SolveQuery, Query()], caller: Caller, service: Service) -> SolveList:
    """List solves, newest first: one's own tenant's, or an operator everyone's."""
    return await service.page(query, caller)


@router.get("/{solve_id}", responses={404: {"model": Problem, "description": "`not_found`."}})
async def read_solve(solve_id: str, caller: Caller, service: Service) -> Solve:
    """Read a solve: its state, its problem, its result, who solved it and how long it took."""
    return await service.find(solve_id, caller)


@router.delete(
    "/{solve_id}",
    responses={
        404: {"model": Problem, "description": "`not_found`."},
        409: {"model": Problem, "description": "`invalid_transition`: it has ended."},
    },
)
async def cancel_solve(solve_id: str, caller: Caller, service: Service) -> SolveSummary:
    """Cancel a solve that is queued or running; whatever is computing stops within seconds."""
    return await service.cancel(solve_id, caller)
