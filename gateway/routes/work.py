"""Work that takes longer than a request: solves and simulations."""

from __future__ import annotations

from gateway.routes.route import Route, Status, Upstream
from services.contracts import optimize, pools, simulations
from services.contracts.identity import IDEMPOTENCY_HEADER, Role

_SOLVED_ALREADY = Status(200, "The same problem has been solved already.")

OPTIMIZER = (
    Route(
        "POST",
        "/v1/optimize/carbon-bound",
        Role.USER,
        Upstream.OPTIMIZER,
        "optimizer",
        "Compute the least carbon that any schedule could reach",
        operation="solve_carbon_bound",
        body=optimize.CarbonBoundRequest,
        answer=optimize.SolveSummary,
        status=202,
        headers=(IDEMPOTENCY_HEADER,),
        statuses=(_SOLVED_ALREADY,),
        has_large_body=True,
    ),
    Route(
        "POST",
        "/v1/optimize/pools",
        Role.USER,
        Upstream.OPTIMIZER,
        "optimizer",
        "Plan LLM instances by place, mode and class of requests",
        operation="solve_pools",
        body=pools.PoolsRequest,
        answer=optimize.SolveSummary,
        status=202,
        headers=(IDEMPOTENCY_HEADER,),
        statuses=(_SOLVED_ALREADY,),
        has_large_body=True,
    ),
    Route(
        "GET",
        "/v1/optimize",
        Role.USER,
        Upstream.OPTIMIZER,
        "optimizer",
        "List solves, newest first",
        operation="list_solves",
        query=optimize.SolveQuery,
        answer=optimize.SolveList,
    ),
    Route(
        "GET",
        "/v1/optimize/{solve_id}",
        Role.USER,
        Upstream.OPTIMIZER,
        "optimizer",
        "Get a solve",
        operation="get_solve",
        answer=optimize.Solve,
    ),
    Route(
        "DELETE",
        "/v1/optimize/{solve_id}",
        Role.USER,
        Upstream.OPTIMIZER,
        "optimizer",
        "Cancel a queued or running solve",
        operation="cancel_solve",
        answer=optimize.SolveSummary,
        statuses=(Status(409, "The solve has ended: `invalid_transition`."),),
    ),
)

SIMULATIONS = (
    Route(
        "POST",
        "/v1/simulations",
        Role.USER,
        Upstream.SIMULATOR,
        "simulations",
        "Simulate what policies would have done with past jobs",
        operation="submit_simulation",
        body=simulations.TrainingRequest,
        answer=simulations.SimulationSummary,
        status=202,
        headers=(IDEMPOTENCY_HEADER,),
        statuses=(Status(200, "The same simulation has succeeded already."),),
        has_large_body=True,
    ),
    Route(
        "GET",
        "/v1/simulations",
        Role.USER,
        Upstream.SIMULATOR,
        "simulations",
        "List simulations, newest first",
        operation="list_simulations",
        query=simulations.SimulationQuery,
        answer=simulations.SimulationList,
    ),
    Route(
        "GET",
        "/v1/simulations/{simulation_id}",
        Role.USER,
        Upstream.SIMULATOR,
        "simulations",
        "Get a simulation",
        operation="get_simulation",
        answer=simulations.Simulation,
    ),
    Route(
        "DELETE",
        "/v1/simulations/{simulation_id}",
        Role.USER,
        Upstream.SIMULATOR,
        "simulations",
        "Cancel a queued or running simulation",
        operation="cancel_simulation",
        answer=simulations.SimulationSummary,
        statuses=(Status(409, "The simulation has ended: `invalid_transition`."),),
    ),
)
