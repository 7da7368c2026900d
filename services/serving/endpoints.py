"""``/v1/pools``: HTTP only."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Response

from services.contracts import serving
from services.contracts.queries import PageQuery
from services.contracts.schema import Name
from services.kit.identity import Caller, Operator
from services.kit.routes import LARGE_BODY, from_state
from services.serving.service import Pools, etag
from services.serving.traffic import TrafficReports

router = APIRouter(prefix="/v1/pools", tags=["pools"])

BEING_DELETED: dict[int | str, dict[str, Any]] = {409: {"description": "The pool is being deleted: `conflict`."}}


Known = Annotated[Pools, from_state("pools")]
Traffic = Annotated[TrafficReports, from_state("traffic")]
PoolName = Annotated[Name, Path()]
PlanId = Annotated[Name, Path()]
IfMatch = Annotated[str | None, Header(max_length=200, description="The `ETag` that the pool must still have.")]


@router.get("")
async def list_pools(query: Annotated[PageQuery, Query()], caller: Caller, pools: Known) -> serving.PoolList:
    """List pools by name."""
    return await pools.page(query, caller)


@router.get("/{pool}")
async def get_pool(pool: PoolName, caller: Caller, pools: Known, response: Response) -> serving.Pool:
    """Get a pool."""
    return _tagged(await pools.find(pool, caller), response)


@router.put(
    "/{pool}",
    responses={
        201: {"description": "The pool is new."},
        409: {"description": "The pool is being deleted: `conflict`."},
        412: {"description": "The pool's `ETag` is not the one in `If-Match`, or there is no such pool: `conflict`."},
    },
    openapi_extra=LARGE_BODY,
)
async def set_pool(
    pool: PoolName, spec: serving.PoolSpec, caller: Operator, pools: Known, response: Response, if_match: IfMatch = None
) -> serving.Pool:
    """Create a pool or replace its spec."""
    found, is_new = await pools.put(pool, spec, caller, if_match)
    if is_new:
        response.status_code = 201
        response.headers["Location"] = f"/v1/pools/{pool}"
    return _tagged(found, response)


@router.patch("/{pool}", responses=BEING_DELETED)
async def change_pool(
    pool: PoolName, change: serving.PoolChange, caller: Operator, pools: Known, response: Response
) -> serving.Pool:
    """Choose whether a pool's plans are carried out or only proposed."""
    return _tagged(await pools.set_mode(pool, change.mode, caller), response)


@router.delete("/{pool}", status_code=202)
async def delete_pool(pool: PoolName, caller: Operator, pools: Known) -> serving.Pool:
    """Delete a pool.

    Its instances are drained first; the pool is removed when the last one has ended.
    """
    return await pools.delete(pool, caller)


@router.get("/{pool}/plans")
async def list_pool_plans(
    pool: PoolName, query: Annotated[serving.PoolPlanQuery, Query()], caller: Caller, pools: Known
) -> serving.PoolPlanList:
    """List a pool's plans, newest first."""
    return await pools.plans(pool, query, caller)


@router.post("/{pool}/plans", status_code=202, responses=BEING_DELETED)
async def plan_pool(pool: PoolName, caller: Operator, pools: Known, response: Response) -> serving.PoolPlanSummary:
    """Plan a pool now.

    While a plan is being made, that plan is returned and no other is started.
    """
    plan = await pools.plan_now(pool, caller)
    response.headers["Location"] = f"/v1/pools/{pool}/plans/{plan.id}"
    return plan


@router.get("/{pool}/plans/{plan_id}")
async def get_pool_plan(pool: PoolName, plan_id: PlanId, caller: Caller, pools: Known) -> serving.PoolPlanDetail:
    """Get a plan."""
    return await pools.plan(pool, plan_id, caller)


@router.post(
    "/{pool}/plans/{plan_id}/apply",
    responses={
        409: {"description": "The plan is not a proposal: `invalid_transition`; or it is outdated: `conflict`."}
    },
)
async def apply_pool_plan(pool: PoolName, plan_id: PlanId, caller: Operator, pools: Known) -> serving.PoolPlanSummary:
    """Apply a proposed plan."""
    return await pools.accept(pool, plan_id, caller)


@router.get("/{pool}/instances")
async def list_pool_instances(
    pool: PoolName, query: Annotated[serving.InstanceQuery, Query()], caller: Caller, pools: Known
) -> serving.InstanceList:
    """List a pool's instances, newest first."""
    return await pools.instances(pool, query, caller)


@router.get("/{pool}/clocks")
async def list_pool_clocks(
    pool: PoolName, query: Annotated[serving.ClockHistoryQuery, Query()], caller: Caller, pools: Known
) -> serving.ClockHistory:
    """List the clocks of a pool's instances, minute by minute, newest first."""
    return await pools.clocks(pool, query, caller)


@router.post("/{pool}/traffic", openapi_extra=LARGE_BODY)
async def report_pool_traffic(
    pool: PoolName, report: serving.TrafficReport, caller: Caller, traffic: Traffic
) -> serving.TrafficReceipt:
    """Report the requests that arrived.

    A window that was reported before is replaced.
    """
    return await traffic.report(pool, report, caller)


def _tagged(pool: serving.Pool, response: Response) -> serving.Pool:
    response.headers["ETag"] = etag(pool)
    return pool
