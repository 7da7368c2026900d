"""HTTP routes of simulations, of stored savings, and of comparisons, which the scheduler uses in its explanations."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from services.contracts.background import WorkState
from services.contracts.explanations import PolicyComparison
from services.contracts.live import Earlier, EarlierRequest
from services.contracts.queries import SavingsQuery
from services.contracts.savings import SavingsReport
from services.contracts.schema import Instant
from services.contracts.simulations import (
    Simulation,
    SimulationList,
    SimulationQuery,
    SimulationSummary,
    TrainingRequest,
)
from services.kit.identity import Caller, Operator
from services.kit.routes import LARGE_BODY, IdempotencyKey, from_state
from services.simulator.daily import DailySavings
from services.simulator.service import Comparisons, SimulatorService

router = APIRouter(prefix="/v1/simulations", tags=["simulations"])
reports = APIRouter(prefix="/v1/reports", tags=["footprint"])
internal = APIRouter()
ROUTERS = (router, internal, reports)


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
    simulation, is_new = await service.submit(body, caller, idempotency_key)
    response.headers["Location"] = f"/v1/simulations/{simulation.id}"
    if not is_new and simulation.status is WorkState.SUCCEEDED:
        response.status_code = 200
    return simulation


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


@internal.get("/internal/comparisons/{job_id}")
async def read_comparison(
    job_id: str, since: Instant, comparisons: Annotated[Comparisons, from_state("comparisons")]
) -> PolicyComparison:
    """Return what each policy would do with a live job, as far as it is known since then."""
    return await comparisons.of(job_id, since)


@internal.post("/internal/earlier")
async def find_earlier(body: EarlierRequest, comparisons: Annotated[Comparisons, from_state("comparisons")]) -> Earlier:
    """Return which of some jobs would start earlier than one that waits, had they been submitted in its place."""
    return await comparisons.earlier(body)


@reports.get("/savings")
async def report_savings(
    query: Annotated[SavingsQuery, Query()], _: Operator, savings: Annotated[DailySavings, from_state("savings")]
) -> SavingsReport:
    """Get what each lever of the policy saved.

    Once a day the jobs of the day before are replayed: under `fifo`, which is the baseline, and then under the policy
    in force, adding one lever each time. The savings are stored, and add up to the difference between the two.
    """
    return await savings.report(query.start, query.end)
