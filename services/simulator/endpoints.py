"""``/v1/simulations``: HTTP only."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from services.contracts.background import WorkState
from services.contracts.simulations import (
    Simulation,
    SimulationList,
    SimulationQuery,
    SimulationSummary,
    TrainingRequest,
)
from services.kit.background.http import ENDED, NOT_FOUND, PROBLEMS, SUBMIT_PROBLEMS, IdempotencyKey
from services.kit.identity import Caller
from services.simulator.service import SimulatorService

router = APIRouter(prefix="/v1/simulations", tags=["simulations"], responses=PROBLEMS)


async def read_service(request: Request) -> SimulatorService:
    """Return the service of this process."""
    return request.app.state.simulator


Service = Annotated[SimulatorService, Depends(read_service)]


@router.post(
    "",
    status_code=202,
    responses={200: {"model": SimulationSummary, "description": "The same run has already succeeded."}}
    | SUBMIT_PROBLEMS,
)
async def submit_simulation(
    body: TrainingRequest,
    caller: Caller,
    service: Service,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> SimulationSummary:
    """Simulate what policies would have done with past jobs."""
    submission = await service.submit(body, caller, idempotency_key)
    response.headers["Location"] = f"/v1/simulations/{submission.simulation.id}"
    if not submission.is_new and submission.simulation.status is WorkState.SUCCEEDED:
        response.status_code = 200
    return submission.simulation


@router.get("")
async def list_simulations(
    query: Annotated[SimulationQuery, Query()], caller: Caller, service: Service
) -> SimulationList:
    """List runs, newest first.

    Operators see the runs of all tenants, other callers those of their own tenant.
    """
    return await service.page(query, caller)


@router.get("/{simulation_id}", responses=NOT_FOUND)
async def read_simulation(simulation_id: str, caller: Caller, service: Service) -> Simulation:
    """Return a run: its status, progress, request and result."""
    return await service.find(simulation_id, caller)


@router.delete("/{simulation_id}", responses=ENDED)
async def cancel_simulation(simulation_id: str, caller: Caller, service: Service) -> SimulationSummary:
    """Cancel a run that is queued or running; its computation stops within seconds."""
    return await service.cancel(simulation_id, caller)
