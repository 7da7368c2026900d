"""HTTP routes under ``/v1/simulations``."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from services.contracts.background import WorkState
from services.contracts.simulations import (
    Simulation,
    SimulationList,
    SimulationQuery,
    SimulationSummary,
    TrainingRequest,
)
from services.kit.identity import Caller
from services.kit.routes import LARGE_BODY, IdempotencyKey, from_state
from services.simulator.service import SimulatorService

router = APIRouter(prefix="/v1/simulations", tags=["simulations"])


Service = Annotated[SimulatorService, from_state("simulator")]


@router.post(
    "",
    status_code=202,
    responses={200: {"description": "The same simulation has succeeded already."}},
    openapi_extra=LARGE_BODY,
)
async def submit_simulation(
    body: TrainingRequest, caller: Caller, service: Service, response: Response, idempotency_key: IdempotencyKey = None
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
    """List simulations, newest first."""
    return await service.page(query, caller)


@router.get("/{simulation_id}")
async def get_simulation(simulation_id: str, caller: Caller, service: Service) -> Simulation:
    """Get a simulation."""
    return await service.find(simulation_id, caller)


@router.delete("/{simulation_id}", responses={409: {"description": "The simulation has ended: `invalid_transition`."}})
async def cancel_simulation(simulation_id: str, caller: Caller, service: Service) -> SimulationSummary:
    """Cancel a queued or running simulation."""
    return await service.cancel(simulation_id, caller)
