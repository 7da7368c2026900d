"""``/v1/optimize``: HTTP only."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from optimizer_service.kinds import KINDS, SolveKind
from optimizer_service.service import OptimizerService
from services.contracts.background import WorkState
from services.contracts.optimize import Solve, SolveList, SolveQuery, SolveSummary
from services.kit.identity import Caller
from services.kit.routes import LARGE_BODY, IdempotencyKey, from_state

router = APIRouter(prefix="/v1/optimize", tags=["optimizer"])


Service = Annotated[OptimizerService, from_state("optimizer")]


def _add_submission(kind: SolveKind) -> None:
    async def submit(
        body: kind.request,  # type: ignore[name-defined]  # pyright: ignore[reportInvalidTypeForm]
        caller: Caller,
        service: Service,
        response: Response,
        idempotency_key: IdempotencyKey = None,
    ) -> SolveSummary:
        solve, is_new = await service.submit(kind, body, caller, idempotency_key)
        response.headers["Location"] = f"/v1/optimize/{solve.id}"
        if not is_new and solve.state is WorkState.SUCCEEDED:
            response.status_code = 200
        return solve

    router.add_api_route(
        f"/{kind.name}",
        submit,
        methods=["POST"],
        status_code=202,
        name=f"solve_{kind.name.replace('-', '_')}",
        description=kind.summary,
        responses={200: {"description": "The same problem has been solved already."}},
        openapi_extra=LARGE_BODY,
    )


for _kind in KINDS.values():
    _add_submission(_kind)


@router.get("")
async def list_solves(query: Annotated[SolveQuery, Query()], caller: Caller, service: Service) -> SolveList:
    """List solves, newest first."""
    return await service.page(query, caller)


@router.get("/{solve_id}")
async def get_solve(solve_id: str, caller: Caller, service: Service) -> Solve:
    """Get a solve."""
    return await service.find(solve_id, caller)


@router.delete("/{solve_id}", responses={409: {"description": "The solve has ended: `invalid_transition`."}})
async def cancel_solve(solve_id: str, caller: Caller, service: Service) -> SolveSummary:
    """Cancel a queued or running solve."""
    return await service.cancel(solve_id, caller)
