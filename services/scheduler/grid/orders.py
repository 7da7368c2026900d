"""What may be done with orders; each is one transaction, and is noted in the audit log."""

import hashlib
import math
from datetime import UTC, datetime, timedelta
from operator import attrgetter

from services.contracts import grid
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.core.domain.orders import Curve, curve_of, joined, least_of
from services.db import audit
from services.db.database import Connection, Database
from services.kit.ids import new_id
from services.kit.problems import ProblemError, conflict, invalid, key_reused, not_found
from services.kit.readable import Unread, each_readable
from services.scheduler.grid.reports import reported
from services.scheduler.repository import orders, snapshots
from services.scheduler.repository.orders import BEFORE_S, LineRow, NewOrder, OrderRow

NOT_AGAIN = "This order has ended or is withdrawn."


class GridOrders:
    """The use cases of orders."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def give(
        self, spec: grid.GridOrderSpec, caller: Identity, key: str | None, source: str = "api"
    ) -> tuple[grid.GridOrder, bool]:
        """Store an order; return it, and whether it is new or one that was given with the same key before.

        Raises:
            ProblemError: 422 if the key came with another order, the zone has no nodes or the order is over.
        """
        body = hashlib.sha256(spec.model_dump_json().encode()).digest()
        async with self._database.transaction() as connection:
            new = NewOrder(
                id=new_id("grid"),
                key_id=caller.key_id,
                source=source,
                idempotency_key=key,
                body_sha256=body,
                name=spec.name,
                zone=spec.zone,
                start_at=spec.start_at,
                duration_s=spec.duration_s,
                notice_s=spec.notice_s,
                steps=[step.model_dump(mode="json") for step in spec.steps],
            )
            if not await orders.insert(connection, new):
                known = await orders.keyed(connection, caller.key_id, key or "")
                assert known is not None
                return _same(known, body), False
            await _check_zone(connection, spec.zone)
            await _prepare(connection)
            await audit.note(connection, caller, "grid.order", new.id, **spec.model_dump(mode="json"))
            made = shown(await _own(connection, new.id, caller))
            if made.state is grid.GridOrderState.ENDED:
                raise invalid("/start_at", "The order would be over before it is given.")
            return made, True

    async def amend(self, order_id: str, change: grid.GridOrderChange, caller: Identity) -> grid.GridOrder:
        """Change an order; what it was until now stays known.

        Raises:
            ProblemError: 404 if there is none, 409 if it has ended, or has begun and is to begin at another time, 422
                if it would be over before it has begun, or before a step that is given.
        """
        async with self._database.transaction() as connection:
            row = await _own(connection, order_id, caller)
            start_at = change.start_at or row.start_at
            if start_at != row.start_at and row.start_at <= row.now_at:
                raise ProblemError(409, ProblemCode.INVALID_TRANSITION, "The order has begun: its start is past.")
            lasts_s = change.duration_s or (row.end_at - row.start_at).total_seconds()
            try:
                grid.check_steps(change.steps, lasts_s)
            except ValueError as error:
                raise invalid("/steps", f"{error}.") from error
            steps = row.steps if change.steps is None else [step.model_dump(mode="json") for step in change.steps]
            if not await orders.amend(connection, order_id, start_at, start_at + timedelta(seconds=lasts_s), steps):
                raise ProblemError(409, ProblemCode.INVALID_TRANSITION, NOT_AGAIN)
            await _prepare(connection)
            await audit.note(connection, caller, "grid.amend", order_id, **change.model_dump(mode="json"))
            amended = shown(await _own(connection, order_id, caller))
            if amended.state is grid.GridOrderState.ENDED and row.start_at > row.now_at:
                raise invalid("/start_at", "The order would be over before it is amended.")
            return amended

    async def withdraw(self, order_id: str, caller: Identity) -> grid.GridOrder:
        """Withdraw an order, if it stands; ``ProblemError``: 404 if there is none, 409 if it has ended."""
        async with self._database.transaction() as connection:
            await _own(connection, order_id, caller)
            if await orders.withdraw(connection, order_id):
                await audit.note(connection, caller, "grid.withdraw", order_id)
            found = shown(await _own(connection, order_id, caller))
            if found.state is grid.GridOrderState.ENDED:
                raise ProblemError(409, ProblemCode.INVALID_TRANSITION, NOT_AGAIN)
            return found

    async def find(self, order_id: str, caller: Identity) -> grid.GridOrder:
        """Return an order; ``ProblemError``: 404 if there is none."""
        return shown(await self._database.run(_own, order_id, caller))

    async def report(self, order_id: str) -> grid.GridOrderReport:
        """Return what came of an order; ``ProblemError``: 404 if there is none, 409 if nothing can be said yet."""
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            row = await orders.find(connection, order_id)
            if row is None:
                raise not_found("order")
            baseline_at, since = row.baseline_at, in_force_since(row)
            limits, amended = held(row, since)
            if row.withdrawn_at is not None and row.withdrawn_at <= since:
                raise conflict("It was withdrawn before it began, so there is nothing to report.")
            lines: list[LineRow] = []
            if limits is not None and baseline_at is not None and since < row.now_at:
                until = datetime.fromtimestamp(limits[-1][0], UTC)
                lines = await orders.lines(connection, baseline_at - timedelta(seconds=BEFORE_S), until, row.zone)
        found = None if limits is None else reported(shown(row), limits, lines, since, amended)
        if found is None:
            raise conflict("The ledger has no line yet of the time in which it held.")
        return found

    async def of_key(self, key_id: str) -> dict[str, grid.GridOrder]:
        """Return the orders of the last month that a key gave, by their idempotency keys."""
        rows = await self._database.run(orders.of_key, key_id)
        return {row.idempotency_key: shown(row) for row in rows if row.idempotency_key is not None}

    async def page(self, before: str | None, limit: int, caller: Identity) -> list[grid.GridOrder | Unread]:
        """Return the orders made before one, the newest first."""
        key_id = None if caller.is_operator else caller.key_id
        rows = await self._database.run(orders.page, before, limit, key_id)
        return each_readable(rows, shown, "order", attrgetter("id"))


async def prepare(database: Database) -> None:
    """Write down what was drawn before those orders for which the cluster may now prepare."""
    await database.run(_prepare)


async def _prepare(connection: Connection) -> None:
    for row in await orders.unprepared(connection):
        watts, at = await orders.baseline(connection, row)
        if watts is not None:
            await connection.execute(orders.SET_BASELINE, row.id, watts, at)


async def _check_zone(connection: Connection, zone: str | None) -> None:
    zones = await snapshots.zones_seen(connection)
    if zone is not None and zone not in zones:
        known = f"there are nodes in {', '.join(zones)}" if zones else "there are no nodes"
        raise invalid("/zone", f"There are no nodes in the zone {zone}; {known}.")


async def _own(connection: Connection, order_id: str, caller: Identity) -> OrderRow:
    """Return an order that a caller reaches: an operator every one, a grid key those that it gave."""
    row = await orders.find(connection, order_id)
    if row is None or not (caller.is_operator or row.key_id == caller.key_id):
        raise not_found("order")
    return row


def _same(row: OrderRow, body_sha256: bytes) -> grid.GridOrder:
    if row.body_sha256 != body_sha256:
        raise key_reused()
    return shown(row)


def curve(row: OrderRow) -> Curve | None:
    """Return the limits that an order sets; None while its baseline is not known."""
    if row.baseline_w is None:
        return None
    steps = tuple(
        (step.offset_s, step.limit_w(row.baseline_w)) for step in map(grid.GridStep.model_validate, row.steps)
    )
    return curve_of(row.start_at.timestamp(), row.end_at.timestamp(), steps, row.baseline_w)


def held(row: OrderRow, since: datetime) -> tuple[Curve | None, list[grid.GridOrderTerms]]:
    """Return the limits that an order has set since then, and what it said before each amendment in that time."""
    limits, terms = curve(row), list[grid.GridOrderTerms]()
    for each in reversed(row.past):
        until, end_at = (datetime.fromisoformat(each[name]) for name in ("until", "end_at"))
        before = curve(row._replace(steps=each["steps"], end_at=end_at))
        if until > since and limits is not None and before is not None:
            limits = joined(before, limits, until.timestamp())
            terms.insert(0, grid.GridOrderTerms(until=until, steps=each["steps"]))
    return limits, terms


def in_force_since(row: OrderRow) -> datetime:
    """Return when an order came into force, or is to: not before it was given, or was given a start that had passed."""
    past = [{name: datetime.fromisoformat(each[name]) for name in ("until", "start_at")} for each in row.past]
    return max(row.start_at, row.announced_at, *(each["until"] for each in past if each["start_at"] > each["until"]))


def changed_at(row: OrderRow) -> datetime:
    """Return when an order came into force, or is to, or was amended last."""
    return max([in_force_since(row), *(datetime.fromisoformat(each["until"]) for each in row.past[-1:])])


def shown(row: OrderRow) -> grid.GridOrder:
    """Return an order as it is shown."""
    now_s, limits = row.now_at.timestamp(), curve(row)
    if row.withdrawn_at is not None:
        state = grid.GridOrderState.WITHDRAWN
    elif row.end_at <= row.now_at:
        state = grid.GridOrderState.ENDED
    else:
        state = grid.GridOrderState.IN_FORCE if row.start_at <= row.now_at else grid.GridOrderState.ANNOUNCED
    limit_w = least_of(limits, now_s, now_s) if limits and state is not grid.GridOrderState.WITHDRAWN else float("inf")
    return grid.GridOrder.of(row, state=state, limit_w=limit_w if math.isfinite(limit_w) else None)
