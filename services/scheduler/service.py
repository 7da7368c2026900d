"""Requests of operators and users to the scheduler, and what operators change: the policy, and nodes' power."""

from __future__ import annotations

from services.contracts.identity import Identity
from services.contracts.nodes import PowerState
from services.db.database import Connection, Database
from services.scheduler.power.nodes import BY_OPERATOR
from services.scheduler.repository import audit, node_power, predictions, profiles, rounds, shares
from services.scheduler.repository.documents import Json
from services.scheduler.repository.node_power import NodePowerRow, PoweredNode
from services.scheduler.repository.predictions import ModelRow, PredictionRow
from services.scheduler.repository.profiles import InForceRow, LearnedRow, MeasurementRow, ProfiledJob
from services.scheduler.repository.rounds import ActivePolicyRow, PlanRow, State
from services.scheduler.repository.shares import ShareRow


class PowerRefusedError(Exception):
    """A node's power cannot be changed as requested; the message says why."""


class SchedulerService:
    """The use cases of the scheduler's API; each is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def active_policy(self) -> ActivePolicyRow | None:
        """Return the policy in force, or None before the scheduler's first turn."""
        async with self._database.connection() as connection:
            return await rounds.active_policy(connection)

    async def set_policy(self, name: str, parameters: Json, caller: Identity) -> ActivePolicyRow | None:
        """Put a policy in force from the next round on, and note who did; None before the scheduler's first turn.

        That round is an active one: a lower limit may require gangs to be stopped.
        """
        async with self._database.transaction() as connection:
            policy = await rounds.set_policy(connection, name, parameters, caller.key_id)
            if policy is not None:
                await audit.note(connection, caller, "policy.set", name, {"parameters": parameters})
            return policy

    async def shares(self) -> tuple[State, list[ShareRow]] | None:
        """Return the policy with its memory, and the tenants that have jobs; None before the scheduler's first turn."""
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            if await rounds.active_policy(connection) is None:
                return None
            return await rounds.state(connection), await shares.shares(connection)

    async def plans(self, before: int | None, limit: int) -> list[PlanRow]:
        """Return recorded rounds, newest first, below number ``before``."""
        async with self._database.connection() as connection:
            return await rounds.plans(connection, before, limit)

    async def plan(self, number: int) -> PlanRow | None:
        """Return one recorded round."""
        async with self._database.connection() as connection:
            return await rounds.plan(connection, number)

    async def node_power(self, node_id: str) -> NodePowerRow | None:
        """Return a node's power; None if there is no such node."""
        async with self._database.connection() as connection:
            return await node_power.node_power(connection, node_id)

    async def sleep(self, node_id: str, caller: Identity) -> None:
        """Have an idle node powered down, and note who did; one that is off or going down is left as it is.

        Raises:
            PowerRefusedError: it is busy, pinned, waking or silent.
        """
        async with self._database.transaction() as connection:
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
        """Have a node woken that is off, failed or silent, and note who did; one awake or waking is left as it is.

        Raises:
            PowerRefusedError: it is being powered down.
        """
        async with self._database.transaction() as connection:
            node = await self._powered(connection, node_id)
            if node.state == PowerState.WAKING or (node.state == PowerState.ON and node.heard):
                return
            if node.state == PowerState.GOING_DOWN:
                raise PowerRefusedError("It is being powered down; try again when it is off, or pin it awake.")
            await node_power.add(connection, node_id)
            sources = (PowerState.OFF, PowerState.FAILED, PowerState.ON)
            await node_power.wake(connection, [node_id], *BY_OPERATOR, sources=sources)
            await audit.note(connection, caller, "node.wake", node_id)

    async def pin(self, node_id: str, pinned: bool, caller: Identity) -> None:
        """Keep a node awake, waking it first if need be, or let plans power it down again; note who did."""
        async with self._database.transaction() as connection:
            await self._powered(connection, node_id)
            await node_power.add(connection, node_id)
            if await node_power.pin(connection, node_id, pinned):
                await audit.note(connection, caller, "node.pin_awake" if pinned else "node.unpin", node_id)

    async def _powered(self, connection: Connection, node_id: str) -> PoweredNode:
        """Return a node's power, and make plans stale that are being made at the same time.

        Raises:
            PowerRefusedError: it no longer exists.
        """
        await rounds.next_version(connection)
        node = await node_power.powered(connection, node_id)
        if node is None:
            raise PowerRefusedError("The node no longer exists.")
        return node

    async def job(self, job_id: str) -> ProfiledJob | None:
        """Return a job's owner, kind and size; None if there is no such job."""
        async with self._database.connection() as connection:
            return await profiles.job(connection, job_id)

    async def in_force(self, job_id: str) -> list[InForceRow]:
        """Return what a job's devices were set to."""
        async with self._database.connection() as connection:
            return await profiles.in_force(connection, job_id)

    async def profile(self, kind: str) -> tuple[list[LearnedRow], list[MeasurementRow]]:
        """Return what was learned about a kind of job, and its last measurements."""
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            return await profiles.learned(connection, kind), await profiles.measurements(connection, kind)

    async def prediction(self, job_id: str) -> PredictionRow | None:
        """Return a job with its predicted length, if any, and its actual length."""
        async with self._database.connection() as connection:
            return await predictions.prediction(connection, job_id)

    async def length_models(self) -> list[ModelRow]:
        """Return the versions of the job length model, newest first, without their contents."""
        async with self._database.connection() as connection:
            return await predictions.models(connection)
