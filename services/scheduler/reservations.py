"""What may be done with reservations; each is one transaction."""

import asyncio
import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import numpy as np

from services.contracts.codes import ProblemCode
from services.contracts.engines import OURS
from services.contracts.identity import Identity
from services.contracts.reservations import Reservation, ReservationSpec, ReservationState, Slot
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.counted import counted
from services.core.domain.ids import NodeId
from services.core.domain.units import J_PER_KWH
from services.core.domain.windows import most_taken
from services.core.policies.windows import Slot as Found
from services.core.policies.windows import Stuck, slots, stuck
from services.core.profiles.priors import usual_w
from services.db import audit
from services.db.database import Database
from services.kit.ids import new_id
from services.kit.problems import ProblemError, conflict, invalid, key_reused, not_found
from services.kit.readable import Unread, each_readable
from services.scheduler.planning.dry_run import Live, LiveView
from services.scheduler.repository import reservations, rounds
from services.scheduler.repository.reservations import NewReservation, ReservationRow
from services.scheduler.repository.snapshots import NodeRow

ATTEMPTS = 8  #: How often the cluster is looked at again after a concurrent change
STEP_S = 900.0  #: Between the times that are compared
MOST_TIMES = 500
SHOWN = 24  #: Slots that are shown


class Reservations:
    """The use cases of reservations."""

    def __init__(self, database: Database, view: LiveView) -> None:
        self._database = database
        self._view = view

    async def make(self, spec: ReservationSpec, caller: Identity, key: str | None) -> tuple[Reservation, bool]:
        """Store a reservation; return it, and whether it is new or one that was made with the same key before.

        Raises:
            ProblemError: 403 if the caller may not make it, 409 if the GPUs are not free then, 422 if there are no such
                nodes, the time is past or the key came with another one, 503 while the cluster never rests.
        """
        body = hashlib.sha256(spec.model_dump_json().encode()).digest()
        if not caller.is_operator and (spec.maintenance or spec.tenant_id not in (None, caller.tenant_id)):
            raise ProblemError(403, ProblemCode.FORBIDDEN, "Only an operator reserves for others, or for maintenance.")
        for _ in range(ATTEMPTS):
            live = await self._view.read()
            if key is not None:  # after what is read: else its own twin, stored in between, would hold the GPUs
                async with self._database.connection() as connection:
                    if known := await reservations.keyed(connection, caller.key_id, key):
                        return _same(known, body), False
            new = await asyncio.to_thread(self._new, spec, caller, live)
            new = new._replace(key_id=caller.key_id, idempotency_key=key, body_sha256=body)
            async with self._database.transaction() as connection:
                newest = await rounds.next_version(connection, after=live.rows.state.version)
                if newest and await reservations.insert(connection, new):
                    await audit.note(connection, caller, "reservation.made", new.id, **spec.model_dump(mode="json"))
                    row = await reservations.find(connection, new.id)
                    assert row is not None
                    return shown(row), True
        raise ProblemError(503, ProblemCode.UNAVAILABLE, "The cluster changed each time it was looked at; try again.")

    async def cancel(self, reservation_id: str, caller: Identity) -> Reservation:
        """Give back what is reserved; ``ProblemError``: 404 if the caller may cancel none, 409 if it has ended."""
        async with self._database.transaction() as connection:
            row = await reservations.find(connection, reservation_id)
            if row is None or not (caller.is_operator or row.tenant_id == caller.tenant_id):
                raise not_found("reservation")
            if await reservations.cancel(connection, reservation_id):
                await audit.note(connection, caller, "reservation.cancelled", reservation_id)
                row = await reservations.find(connection, reservation_id)
            assert row is not None
            if row.cancelled_at is None:
                raise ProblemError(409, ProblemCode.INVALID_TRANSITION, "This reservation has ended.")
            return shown(row)

    async def page(self, before: str | None, limit: int, caller: Identity) -> list[Reservation | Unread]:
        """Return those made before one, the newest first."""
        tenant_id = None if caller.is_operator else caller.tenant_id
        rows = await self._database.run(reservations.page, before, limit, tenant_id)
        return each_readable(rows, shown, "reservation", attrgetter("id"))

    def _new(self, spec: ReservationSpec, caller: Identity, live: Live) -> NewReservation:
        """Return what to store: this is slow with many jobs, so it is called in a thread."""
        snapshot = self._view.snapshot(live, Trigger.PASSIVE)
        now_s = snapshot.now_s
        start_s = now_s if spec.start_at is None else spec.start_at.timestamp()
        if start_s + spec.duration_s <= now_s or (spec.start_at and start_s < now_s - STEP_S):
            raise invalid("/start_at", "That time is past.")
        own = {row.id: row for row in live.rows.nodes if row.engine == OURS}
        tenant_id = None if spec.maintenance else spec.tenant_id or caller.tenant_id
        found, stays = list[Found](), list[Stuck]()
        if spec.maintenance:
            gpus = _of_nodes(spec, snapshot, own, start_s)
            stays = [each for each in stuck(snapshot) if snapshot.nodes.ids[each.node] in gpus]
        else:
            usable = [
                node_id in own
                and not own[node_id].draining
                and spec.zone in (None, own[node_id].zone)
                and spec.gpu_model in (None, snapshot.gpu_models[model])
                for node_id, model in zip(snapshot.nodes.ids, snapshot.nodes.gpu_model.tolist(), strict=True)
            ]
            starts_s = [start_s] if spec.before is None else _starts_s(now_s, spec.before.timestamp() - spec.duration_s)
            found = slots(snapshot, np.array(usable, dtype=np.bool_), spec.gpus or 0, spec.duration_s, starts_s)
            if not found:
                room = counted(spec.gpus or 0, "GPU is", "GPUs of one model in one zone are")
                detail = f"No {room} free for that long" + (" before then." if spec.before else " from then on.")
                raise conflict(detail)
            gpus, start_s = {str(node_id): count for node_id, count in found[0].gpus.items()}, found[0].start_s
            self._check_quota(spec, snapshot, tenant_id or "", start_s)
        return NewReservation(
            id=new_id("res"),
            key_id="",
            idempotency_key=None,
            body_sha256=b"",
            name=spec.name,
            tenant_id=tenant_id,
            start_at=datetime.fromtimestamp(start_s, UTC),
            duration_s=spec.duration_s,
            gpu_model=snapshot.gpu_models[found[0].gpu_model] if found else None,
            gpus=gpus,
            slots=[_slot(each, spec, snapshot) for each in found[:SHOWN]],
            stays=[snapshot.jobs.ids[job] for job in sorted({each.job for each in stays if each.until_s > start_s})],
        )

    @staticmethod
    def _check_quota(spec: ReservationSpec, snapshot: Snapshot, tenant_id: str, start_s: float) -> None:
        """Refuse what a tenant could not hold; one without a limit may hold all, as by its jobs."""
        most = snapshot.tenant_gpu_quota.get(tenant_id, math.inf)
        at_once = [
            sum(each.gpus.values())
            for each in snapshot.windows
            if each.holder == tenant_id and each.start_s < start_s + spec.duration_s and each.end_s > start_s
        ]
        if sum(at_once) + (spec.gpus or 0) > most:
            detail = f"The tenant may hold {counted(most, 'GPU')}, and has reserved {sum(at_once)} in that time."
            raise ProblemError(403, ProblemCode.QUOTA_EXCEEDED, detail)


def _of_nodes(spec: ReservationSpec, snapshot: Snapshot, own: Mapping[str, NodeRow], start_s: float) -> dict[str, int]:
    """Return the GPUs of a maintenance's nodes; ``ProblemError``: 422 for no such node, 409 for a reserved one."""
    found = dict[str, int]()
    for node_id in spec.nodes or [row.id for row in own.values() if row.zone == spec.zone]:
        if node_id not in own:
            raise invalid("/nodes", f"There is no node {node_id} that is up.")
        if most_taken(snapshot.windows, NodeId(node_id), start_s, start_s + spec.duration_s):
            detail = f"The node {node_id} is reserved in that time: `wattshift reservations` shows by whom."
            raise conflict(detail)
        found[node_id] = len(own[node_id].devices)
    if not found:
        raise invalid("/zone", f"There are no nodes in the zone {spec.zone}.")
    return found


def _starts_s(now_s: float, last_s: float) -> Sequence[float]:
    """Return the times to compare, UTC seconds: now, and then quarters of hours, or fewer."""
    if last_s < now_s:
        raise invalid("/before", "It cannot end before then.")
    step_s = STEP_S * max(math.ceil((last_s - now_s) / STEP_S / MOST_TIMES), 1)
    first_s = math.ceil(now_s / step_s) * step_s
    return [now_s, *np.arange(first_s, last_s + 1e-6, step_s).tolist()]


def _slot(found: Found, spec: ReservationSpec, snapshot: Snapshot) -> dict[str, Any]:
    energy_j = (spec.gpus or 0) * usual_w(snapshot.gpu_models[found.gpu_model]) * spec.duration_s
    return Slot(
        start_at=datetime.fromtimestamp(found.start_s, UTC),
        zone=snapshot.outlooks[found.zone].zone,
        intensity_gco2_per_kwh=found.intensity,
        carbon_gco2=energy_j / J_PER_KWH * found.intensity,
        estimated=found.estimated,
    ).model_dump(mode="json")


def _same(row: ReservationRow, body_sha256: bytes) -> Reservation:
    if row.body_sha256 != body_sha256:
        raise key_reused()
    return shown(row)


def shown(row: ReservationRow) -> Reservation:
    """Return a reservation as it is shown."""
    if row.cancelled_at is not None:
        state = ReservationState.CANCELLED
    elif row.end_at <= row.now_at:
        state = ReservationState.ENDED
    else:
        state = ReservationState.IN_FORCE if row.start_at <= row.now_at else ReservationState.AHEAD
    return Reservation.of(row, state=state)
