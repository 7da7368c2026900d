"""HTTP routes of reservations."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from redis.asyncio import Redis

from services.contracts.queries import PageQuery
from services.contracts.reservations import Reservation, ReservationList, ReservationSpec
from services.contracts.schema import Name
from services.kit.identity import Caller
from services.kit.redis import hint
from services.kit.routes import IdempotencyKey, from_state, one_page, read_cursor
from services.scheduler.reservations import Reservations

RESERVATION_ID = r"res_[0-9a-z]{26}"

router = APIRouter(prefix="/v1/reservations", tags=["reservations"])

Reserving = Annotated[Reservations, from_state("reservations")]
Hints = Annotated[Redis, from_state("redis")]


@router.post(
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


@router.get("")
async def list_reservations(
    caller: Caller, reserving: Reserving, query: Annotated[PageQuery, Query()]
) -> ReservationList:
    """List reservations of the tenant, and maintenance, those made last first; an operator sees all."""
    found = await reserving.page(read_cursor(query.cursor, RESERVATION_ID), query.limit + 1, caller)
    items, following = one_page(found, query.limit, lambda reservation: reservation.id)
    return ReservationList(items=items, next_cursor=following)


@router.delete("/{reservation_id}", responses={409: {"description": "It has ended: `invalid_transition`."}})
async def cancel_reservation(reservation_id: Name, caller: Caller, reserving: Reserving, redis: Hints) -> Reservation:
    """Cancel a reservation: its GPUs are anybody's again."""
    cancelled = await reserving.cancel(reservation_id, caller)
    await hint(redis, "reservation")
    return cancelled
