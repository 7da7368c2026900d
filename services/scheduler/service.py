"""Requests of operators and users to the scheduler, and what operators change: the policy, and nodes' power."""

import math
from collections.abc import Sequence

from services.contracts.identity import Identity
from services.contracts.nodes import PowerState
from services.contracts.policies import TenantShare, TenantShares
from services.contracts.profiles import ControlMeasurement
from services.core.accounting.completion import jain_index
from services.core.domain.errors import PolicyConfigError
from services.core.domain.topology import read_topology
from services.core.policies.fair import Fair
from services.core.policies.registry import build_policy
from services.db import audit
from services.db.database import Connection, Database
from services.scheduler.power.nodes import BY_OPERATOR
from services.scheduler.repository import figures, node_power, profiles, rounds
from services.scheduler.repository.documents import Json
from services.scheduler.repository.figures import ShareRow
from services.scheduler.repository.node_power import PoweredNode
from services.scheduler.repository.profiles import LearnedRow
from services.scheduler.repository.rounds import ActivePolicyRow, State


class PowerRefusedError(Exception):
    """A node's power cannot be changed as requested; the message says why."""


class SchedulerService:
    """The use cases of the scheduler's API; each is one transaction."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def set_policy(self, name: str, parameters: Json, caller: Identity) -> ActivePolicyRow | None:
        """Put a policy in force from the next round on, and note who did; None before the scheduler's first turn.

        That round is an active one: a lower limit may require gangs to be stopped.
        """
        async with self.database.transaction() as connection:
            policy = await rounds.set_policy(connection, name, parameters, caller.key_id)
            if policy is not None:
                await audit.note(connection, caller, "policy.set", name, parameters=parameters)
            return policy

    async def set_topology(self, file: str, caller: Identity) -> bool:
        """Take a file of the network's levels; False before the first turn; ``DomainError`` if it is malformed."""
        read_topology(file)
        async with self.database.transaction() as connection:
            is_set = await connection.fetchval(rounds.SET_TOPOLOGY, file) is not None
            if is_set:
                await audit.note(connection, caller, "topology.set", "topology", bytes=len(file))
            return is_set

    async def shares(self) -> tuple[State, list[ShareRow]] | None:
        """Return the policy with its memory, and the tenants that have jobs; None before the scheduler's first turn."""
        async with self.database.transaction("repeatable_read", readonly=True) as connection:
            if await rounds.active_policy(connection) is None:
                return None
            return await rounds.state(connection), await figures.shares(connection)

    async def sleep(self, node_id: str, caller: Identity) -> None:
        """Power an idle node down, and note who did; ``PowerRefusedError`` if it is busy, pinned, waking or silent."""
        async with self.database.transaction() as connection:
            node = await self._powered(connection, node_id)
            if node.state in (PowerState.OFF, PowerState.GOING_DOWN):
                return
            for is_refused, why in (
                (node.measures_only, "Its agent only measures: whoever runs its jobs powers it."),
                (node.pinned, "It is pinned awake."),
                (node.busy, "Gangs hold its GPUs; drain it and wait until they end."),
                (node.state == PowerState.WAKING, "It is being woken."),
                (not node.heard, "It sends no heartbeats."),
            ):
                if is_refused:
                    raise PowerRefusedError(why)
            await node_power.power_down(connection, [node_id], *BY_OPERATOR)
            await audit.note(connection, caller, "node.sleep", node_id)

    async def wake(self, node_id: str, caller: Identity) -> None:
        """Wake a node that is off, failed or silent, and note who did; ``PowerRefusedError`` if it is going down."""
        async with self.database.transaction() as connection:
            node = await self._powered(connection, node_id)
            if node.state == PowerState.WAKING or (node.state == PowerState.ON and node.heard):
                return
            if node.state == PowerState.GOING_DOWN:
                raise PowerRefusedError("It is being powered down; try again when it is off, or pin it awake.")
            await connection.execute(node_power.KNOWN, node_id)
            sources = (PowerState.OFF, PowerState.FAILED, PowerState.ON)
            await node_power.wake(connection, [node_id], *BY_OPERATOR, sources=sources)
            await audit.note(connection, caller, "node.wake", node_id)

    async def pin(self, node_id: str, pinned: bool, caller: Identity) -> None:
        """Keep a node awake, waking it first if need be, or let plans power it down again; note who did."""
        async with self.database.transaction() as connection:
            await self._powered(connection, node_id)
            await connection.execute(node_power.KNOWN, node_id)
            if await connection.fetchval(node_power.PIN, node_id, pinned) is not None:
                await audit.note(connection, caller, "node.pin_awake" if pinned else "node.unpin", node_id)

    async def _powered(self, connection: Connection, node_id: str) -> PoweredNode:
        """Return a node's power, and make plans under way stale; ``PowerRefusedError`` if there is no such node."""
        await rounds.next_version(connection)
        node = await node_power.powered(connection, node_id)
        if node is None:
            raise PowerRefusedError("The node no longer exists.")
        return node

    async def profile(self, kind: str) -> tuple[list[LearnedRow], list[ControlMeasurement]]:
        """Return what was learned about a kind of job, and its last measurements."""
        async with self.database.transaction("repeatable_read", readonly=True) as connection:
            return await profiles.learned(connection, kind), await profiles.measurements(connection, kind)


S_PER_HOUR = 3_600.0


def shares_of(state: State, rows: Sequence[ShareRow]) -> TenantShares:
    """Return what tenants are due and have had, with the usage that the policy in force remembers."""
    used_gpu_s = used_by(state)
    whole = sum(row.weight for row in rows if row.gpus or row.waiting_jobs) or 1.0
    items = [
        TenantShare.of(
            row,
            share=row.weight / whole if row.gpus or row.waiting_jobs else 0.0,
            borrowed_gpus=max(row.gpus - row.guaranteed_gpus, 0),
            used_gpu_hours=None if used_gpu_s is None else used_gpu_s.get(row.tenant_id, 0.0) / S_PER_HOUR,
        )
        for row in rows
    ]
    waits = [each for each in items if each.waiting_jobs and each.used_gpu_hours is not None]
    jain = jain_index((each.used_gpu_hours or 0.0) / each.weight for each in waits) if len(waits) > 1 else math.nan
    return TenantShares(
        policy=state.policy, active=used_gpu_s is not None, jain=None if math.isnan(jain) else jain, items=items
    )


def used_by(state: State) -> dict[str, float] | None:
    """Return the GPU seconds that count against each tenant now; None if the policy does not share GPUs out."""
    try:
        policy = build_policy(state.policy, state.parameters)
    except PolicyConfigError:
        return None
    if not isinstance(policy, Fair):
        return None
    usage = policy.load(state.memory or {}).usage.at(state.now_s, policy.config.share_half_life_s)
    return dict(usage.used_gpu_s)
