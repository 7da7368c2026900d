"""HTTP routes of the grid's orders and of reservations."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from redis.asyncio import Redis

from services.contracts.grid import GridOrder, GridOrderChange, GridOrderList, GridOrderReport, GridOrderSpec
from services.contracts.queries import PageQuery
from services.contracts.reservations import Reservation, ReservationList, ReservationSpec
from services.contracts.schema import Name
from services.kit.identity import Caller, GridCaller, Operator
from services.kit.redis import hint
from services.kit.routes import IdempotencyKey, from_state, one_page, read_cursor
from services.scheduler.explaining.reach import Judging
from services.scheduler.grid.orders import GridOrders
from services.scheduler.reservations import Reservations

ORDER_ID, RESERVATION_ID = r"grid_[0-9a-z]{26}", r"res_[0-9a-z]{26}"

router = APIRouter(prefix="/v1/grid", tags=["grid"])
reservations = APIRouter(prefix="/v1/reservations", tags=["reservations"])

Orders = Annotated[GridOrders, from_state("grid_orders")]
Judged = Annotated[Judging, from_state("grid_judging")]
Reserving = Annotated[Reservations, from_state("reservations")]
Hints = Annotated[Redis, from_state("redis")]


@router.post(
    "/orders",
    status_code=201,
    responses={200: {"description": "The same order was given before with this key."}},
)
async def give_grid_order(
    body: GridOrderSpec,
    caller: GridCaller,
    orders: Orders,
    judging: Judged,
    redis: Hints,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> GridOrder:
    """Order the cluster to draw less.

    It is stored once this is answered, and met within seconds of its start, under any policy.
    """
    order, is_new = await orders.give(body, caller, idempotency_key)
    response.headers["Location"] = f"/v1/grid/orders/{order.id}"
    if not is_new:
        response.status_code = 200
    await hint(redis, "grid")
    return await judging.one(order)


@router.get("/orders")
async def list_grid_orders(
    caller: GridCaller, orders: Orders, judging: Judged, query: Annotated[PageQuery, Query()]
) -> GridOrderList:
    """List orders of the grid, the newest first."""
    found = await orders.page(read_cursor(query.cursor, ORDER_ID), query.limit + 1, caller)
    items, following = one_page(found, query.limit, lambda order: order.id)
    return GridOrderList(items=await judging.all(items), next_cursor=following)


@router.get("/orders/{order_id}")
async def get_grid_order(order_id: Name, caller: GridCaller, orders: Orders, judging: Judged) -> GridOrder:
    """Get an order of the grid."""
    return await judging.one(await orders.find(order_id, caller))


@router.get(
    "/orders/{order_id}/report",
    responses={409: {"description": "The order has not begun, or the ledger has no line of it yet: `conflict`."}},
)
async def report_grid_order(order_id: Name, _: Operator, orders: Orders) -> GridOrderReport:
    """Report what came of an order of the grid, by the ledger."""
    return await orders.report(order_id)


@router.patch(
    "/orders/{order_id}",
    responses={409: {"description": "The order has ended, or has begun and is to begin later: `invalid_transition`."}},
)
async def amend_grid_order(
    order_id: Name, body: GridOrderChange, caller: GridCaller, orders: Orders, judging: Judged, redis: Hints
) -> GridOrder:
    """Change an order of the grid that has not ended."""
    order = await orders.amend(order_id, body, caller)
    await hint(redis, "grid")
    return await judging.one(order)


@router.delete("/orders/{order_id}", responses={409: {"description": "The order has ended: `invalid_transition`."}})
async def withdraw_grid_order(order_id: Name, caller: GridCaller, orders: Orders, redis: Hints) -> GridOrder:
    """Withdraw an order of the grid.

    What it had slowed or stopped is released at once.
    """
    order = await orders.withdraw(order_id, caller)
    await hint(redis, "grid")
    return order


@reservations.post(
    "",
    status_code=201,
    responses={
        200: {"description": "The same was reserved before with this key."},
        409: {"description": "Not free then: `conflict`."},
    },
)
async def reserve_gpus(
    body: ReservationSpec,
    caller: Caller,
    reserving: Reserving,
    redis: Hints,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Reservation:
    """Reserve GPUs for a time, or take nodes out for maintenance.

    Until then, and where its holder leaves them unused, others use them. A user reserves within its tenant's
    `max_gpus`, if it has that limit; an operator reserves for any tenant, and for maintenance.
    """
    made, is_new = await reserving.make(body, caller, idempotency_key)
    if not is_new:
        response.status_code = 200
    await hint(redis, "reservation")
    return made


@reservations.get("")
async def list_reservations(
    caller: Caller, reserving: Reserving, query: Annotated[PageQuery, Query()]
) -> ReservationList:
    """List reservations of the tenant, and maintenance, those made last first; an operator sees all."""
    found = await reserving.page(read_cursor(query.cursor, RESERVATION_ID), query.limit + 1, caller)
    items, following = one_page(found, query.limit, lambda reservation: reservation.id)
    return ReservationList(items=items, next_cursor=following)


@reservations.delete("/{reservation_id}", responses={409: {"description": "It has ended: `invalid_transition`."}})
async def cancel_reservation(reservation_id: Name, caller: Caller, reserving: Reserving, redis: Hints) -> Reservation:
    """Cancel a reservation: its GPUs are anybody's again."""
    cancelled = await reserving.cancel(reservation_id, caller)
    await hint(redis, "reservation")
    return cancelled
