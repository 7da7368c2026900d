"""``/v1/optimize``: HTTP only."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from optimizer_service.kinds import KINDS, SolveKind
from optimizer_service.service import OptimizerService
from services.contracts.background import WorkState
from services.contracts.optimize import Solve, SolveList, SolveQuery, SolveSummary
from services.kit.background.http import ENDED, NOT_FOUND, PROBLEMS, SUBMIT_PROBLEMS, IdempotencyKey
from services.kit.identity import Caller

router = APIRouter(prefix="/v1/optimize", tags=["optimize"], responses=PROBLEMS)


async def read_service(request: Request) -> OptimizerService:
    """Return the service of this process."""
    return request.app.state.optimizer


Service = Annotated[OptimizerService, Depends(read_service)]


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
        responses={
            200: {"model": SolveSummary, "description": "The same problem is solved already."},
            **SUBMIT_PROBLEMS,
        },
    )


for _kind in KINDS.values():
    _add_submission(_kind)


@router.get("")
async def list_solves(query: Annotated[SolveQuery, Query()], caller: Caller, service: Service) -> SolveList:
    """List the solves of the caller's tenant, newest first; operators see all."""
    return await service.page(query, caller)


@router.get("/{solve_id}", responses=NOT_FOUND)
async def read_solve(solve_id: str, caller: Caller, service: Service) -> Solve:
    """Read a solve: its state, its problem, its result, the solver and the time it took."""
    return await service.find(solve_id, caller)


@router.delete("/{solve_id}", responses=ENDED)
async def cancel_solve(solve_id: str, caller: Caller, service: Service) -> SolveSummary:
    """Cancel a solve that is queued or running; a worker that computes it stops within seconds."""
    return await service.cancel(solve_id, caller)
