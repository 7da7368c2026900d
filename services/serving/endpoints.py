"""``/v1/pools``: HTTP only."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from services.contracts.problems import Problem
from services.contracts.queries import PageQuery
from services.contracts.schema import Name
from services.contracts.serving import (
    ClockHistory,
    ClockHistoryQuery,
    InstanceList,
    InstanceQuery,
    Pool,
    PoolChange,
    PoolList,
    PoolPlanDetail,
    PoolPlanList,
    PoolPlanQuery,
    PoolPlanSummary,
    PoolSpec,
    TrafficReceipt,
    TrafficReport,
)
from services.kit.background.http import NOT_FOUND, PROBLEMS
from services.kit.identity import Caller, Operator
from services.serving.service import Pools, etag
from services.serving.traffic import TrafficReports

router = APIRouter(prefix="/v1/pools", tags=["pools"], responses=PROBLEMS)

DELETED: dict[int | str, dict[str, Any]] = {
    **NOT_FOUND,
    409: {"model": Problem, "description": "`conflict`: it is being deleted."},
}


async def _pools(request: Request) -> Pools:
    return request.app.state.pools


async def _traffic(request: Request) -> TrafficReports:
    return request.app.state.traffic


Known = Annotated[Pools, Depends(_pools)]
Traffic = Annotated[TrafficReports, Depends(_traffic)]
PoolName = Annotated[Name, Path()]
PlanId = Annotated[Name, Path()]
IfMatch = Annotated[str | None, Header(max_length=200, description="The `ETag` that the pool must still have.")]


@router.get("")
async def list_pools(query: Annotated[PageQuery, Query()], caller: Caller, pools: Known) -> PoolList:
    """List the pools of the caller's tenant by name; operators see all."""
    return await pools.page(query, caller)


@router.get("/{pool}", responses=NOT_FOUND)
async def read_pool(pool: PoolName, caller: Caller, pools: Known, response: Response) -> Pool:
    """Read a pool: its spec, the plan in force, and the number of instances in each state."""
    return _tagged(await pools.find(pool, caller), response)


@router.put(
    "/{pool}",
    responses={
        201: {"model": Pool, "description": "It is new."},
        412: {"model": Problem, "description": "`conflict`: its `ETag` is not the one in `If-Match`."},
        **DELETED,
    },
)
async def put_pool(
    pool: PoolName, spec: PoolSpec, caller: Operator, pools: Known, response: Response, if_match: IfMatch = None
) -> Pool:
    """Create a pool, or replace its spec; the same spec again changes nothing."""
    put = await pools.put(pool, spec, caller, if_match)
    if put.is_new:
        response.status_code = 201
        response.headers["Location"] = f"/v1/pools/{pool}"
    return _tagged(put.pool, response)


@router.patch("/{pool}", responses=DELETED)
async def change_pool(pool: PoolName, change: PoolChange, caller: Operator, pools: Known, response: Response) -> Pool:
    """Choose whether plans are carried out or only proposed. A plan that is being made continues."""
    return _tagged(await pools.set_mode(pool, change.mode, caller), response)


@router.delete("/{pool}", status_code=202, responses=NOT_FOUND)
async def delete_pool(pool: PoolName, caller: Operator, pools: Known) -> Pool:
    """Drain a pool's instances. When the last has ended, the pool and its traffic are deleted."""
    return await pools.delete(pool, caller)


@router.get("/{pool}/plans", responses=NOT_FOUND)
async def list_plans(
    pool: PoolName, query: Annotated[PoolPlanQuery, Query()], caller: Caller, pools: Known
) -> PoolPlanList:
    """List a pool's plans, newest first."""
    return await pools.plans(pool, query, caller)


@router.post("/{pool}/plans", status_code=202, responses=DELETED)
async def plan_pool(pool: PoolName, caller: Operator, pools: Known, response: Response) -> PoolPlanSummary:
    """Plan a pool now, or return the plan that is being made."""
    plan = await pools.plan_now(pool, caller)
    response.headers["Location"] = f"/v1/pools/{pool}/plans/{plan.id}"
    return plan


@router.get("/{pool}/plans/{plan_id}", responses=NOT_FOUND)
async def read_plan(pool: PoolName, plan_id: PlanId, caller: Caller, pools: Known) -> PoolPlanDetail:
    """Read a plan: its outcome, its inputs, and its instances."""
    return await pools.plan(pool, plan_id, caller)


@router.post(
    "/{pool}/plans/{plan_id}/apply",
    responses={
        **NOT_FOUND,
        409: {
            "model": Problem,
            "description": "`invalid_transition`: it is not a proposal; `conflict`: it is outdated.",
        },
    },
)
async def apply_plan(pool: PoolName, plan_id: PlanId, caller: Operator, pools: Known) -> PoolPlanSummary:
    """Put a proposed plan in force."""
    return await pools.accept(pool, plan_id, caller)


@router.get("/{pool}/instances", responses=NOT_FOUND)
async def list_instances(
    pool: PoolName, query: Annotated[InstanceQuery, Query()], caller: Caller, pools: Known
) -> InstanceList:
    """List a pool's instances, newest first; ended ones only on request."""
    return await pools.instances(pool, query, caller)


@router.get("/{pool}/clocks", responses=NOT_FOUND)
async def list_clocks(
    pool: PoolName, query: Annotated[ClockHistoryQuery, Query()], caller: Caller, pools: Known
) -> ClockHistory:
    """List the clocks of a pool's instances minute by minute, newest first."""
    return await pools.clocks(pool, query, caller)


@router.post("/{pool}/traffic", responses=NOT_FOUND)
async def report_traffic(pool: PoolName, report: TrafficReport, caller: Caller, traffic: Traffic) -> TrafficReceipt:
    """Report the requests that arrived. A window that is reported again replaces the earlier one."""
    return await traffic.report(pool, report, caller)


def _tagged(pool: Pool, response: Response) -> Pool:
    response.headers["ETag"] = etag(pool)
    return pool
