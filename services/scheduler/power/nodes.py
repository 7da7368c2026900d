"""Nodes powered down and woken: the decision is committed first, then the hook runs, and it runs again after a crash.

A node is ``on``, ``going_down`` (it gets no starts; the hook runs, and its lease runs out), ``off`` (plans may start
gangs on it), ``waking`` (the hook runs, and its agent is waited for) or ``failed``. All but the hooks' own work happens
in short transactions; ``NodePower.look`` reads what came of it, and a second scheduler can go on from the same rows.
"""

import asyncio
import contextlib
from enum import Enum

import asyncpg

from services.contracts.nodes import PowerState
from services.contracts.streams import command_stream
from services.core.domain.reasons import Reason
from services.db.database import CONNECTION_ERRORS, Connection, Database
from services.kit.logging import Log
from services.kit.tasks import end_tasks
from services.scheduler.failures import contained, passes_over
from services.scheduler.power.hooks import HookError, PowerHook, Target
from services.scheduler.reasons import SENTENCES
from services.scheduler.repository import gangs, node_power
from services.scheduler.repository.node_power import ChangingNode
from services.scheduler.settings import SchedulerSettings

log = Log(__name__)

LOOK_EVERY_S = 1.0
LONGEST_BACKOFF_S = 300.0
STAYS_ON_S = 3_600.0  #: For so long plans leave a node on that could not be powered down

WOKEN = (Reason.NEEDED.value, SENTENCES[Reason.NEEDED])  #: Why a start wakes nodes: code and sentence
BY_OPERATOR = ("operator", "An operator asked for it.")


class PowerStep(Enum):
    """The next action for a node that is not simply on."""

    AWAKE = "awake"
    STAY = "stay"
    DOWN = "down"
    WAKE = "wake"
    RETRY = "retry"
    FAIL = "fail"


def next_step(node: ChangingNode, settings: SchedulerSettings) -> PowerStep | None:
    """Return the next action for a node, None while waiting; pure."""
    state, done_for_s = PowerState(node.state), node.done_for_s
    if state is PowerState.GOING_DOWN:
        if node.pinned and node.acted_at is None:
            return PowerStep.STAY
        if done_for_s is None:
            return None
        if not node.leased:
            return PowerStep.DOWN
        return PowerStep.STAY if done_for_s > settings.node_down_timeout_s else None
    if node.heard:
        return PowerStep.AWAKE
    if state is PowerState.OFF:
        return PowerStep.WAKE if node.pinned else None
    if state is PowerState.WAKING and done_for_s is not None and done_for_s > settings.node_wake_timeout_s:
        return PowerStep.RETRY if node.attempts < settings.node_power_attempts else PowerStep.FAIL
    return None


class NodePower:
    """Runs the hooks of one leading scheduler; its only state is which of them are running in this process."""

    def __init__(self, database: Database, hook: PowerHook, settings: SchedulerSettings) -> None:
        self.hook = hook
        self._database = database
        self._settings = settings
        self._due = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}

    def act(self) -> None:
        """Wake the loop, since something was committed."""
        self._due.set()

    async def look(self) -> int:
        """Fold in the outcomes of hooks and what heartbeats show; return how many nodes changed."""
        changing = await self._database.run(node_power.changing)
        changed = 0
        for seen in changing:
            with contained("node_power.failed", node=seen.node_id):
                changed += await self._step(seen)
        if changed:
            self.act()
        return changed

    async def _step(self, seen: ChangingNode) -> bool:
        if next_step(seen, self._settings) is None:
            return False
        async with self._database.transaction() as connection:
            node = await node_power.lock_changing(connection, seen.node_id)
            step = node and next_step(node, self._settings)
            if node is None or step is None:
                return False
            await self._take(connection, node, step)
        return True

    async def run(self) -> None:
        """Run the hooks that are due, until cancelled."""
        try:
            while True:
                self._due.clear()
                try:
                    await self._begin_due()
                except Exception as error:  # a fault over one node must not leave the others asleep for ever
                    if passes_over(error):
                        log.warning("node_power.waiting", error=str(error) or type(error).__name__)
                    else:
                        log.exception("node_power.failed")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._due.wait()
        finally:
            await end_tasks(list(self._running.values()))

    async def _take(self, connection: Connection, node: ChangingNode, step: PowerStep) -> None:
        match step:
            case PowerStep.AWAKE:
                await self._awake(connection, node)
            case PowerStep.STAY:
                detail = "" if node.pinned else "It was to be powered down, but still sends heartbeats."
                await _stay(connection, node, detail)
            case PowerStep.DOWN:
                await connection.execute(node_power.OFF, node.node_id, node.heartbeat_at)
                log.info("node.off", node=node.node_id)
            case PowerStep.WAKE:
                await node_power.wake(connection, [node.node_id], BY_OPERATOR[0], "It is pinned awake.")
            case PowerStep.RETRY:
                await connection.execute(node_power.HOOK_AGAIN, node.node_id)
                log.warning("node.not_awake", node=node.node_id, attempts=node.attempts)
            case PowerStep.FAIL:
                detail = f"Its hook ran {node.attempts} times to wake it, and it sent no heartbeat."
                await self._fail(connection, node, detail)

    async def _awake(self, connection: Connection, node: ChangingNode) -> None:
        node_id, settings = node.node_id, self._settings
        at, began = node.registered_at, node.acted_at or node.off_at
        heard_at = at if began is not None and at > began else node.heartbeat_at
        if node.off_at is not None:
            await connection.execute(node_power.PERIOD, node_id, "off", node.off_at, heard_at, settings.node_standby_w)
        if node.state == PowerState.WAKING and node.acted_at is not None:
            await connection.execute(
                node_power.PERIOD, node_id, "waking", node.acted_at, heard_at, settings.node_boot_w
            )
        await connection.execute(node_power.ON, node_id)
        log.info("node.awake", node=node_id, was=node.state)

    async def _fail(self, connection: Connection, node: ChangingNode, detail: str) -> None:
        if node.state == PowerState.WAKING and node.acted_at is not None:
            power_w = self._settings.node_boot_w
            await connection.execute(node_power.PERIOD, node.node_id, "waking", node.acted_at, node.at, power_w)
        await connection.execute(node_power.FAILED, node.node_id, detail)
        await gangs.lose_nodes(connection, [node.node_id], "not_woken")
        log.error("node.power_failed", node=node.node_id, was=node.state, detail=detail)

    async def _begin_due(self) -> None:
        async with self._database.connection() as connection:
            due = await node_power.due(connection, self._settings.node_min_off_s)
            booting = await connection.fetchval(node_power.BOOTING) if due else 0
        for node in due:
            node_id, state = node.node_id, PowerState(node.state)
            if node_id in self._running:
                continue
            if state is PowerState.WAKING and not node.begun:
                if booting >= self._settings.node_max_wakes:
                    continue
                booting += 1
            target = await self._begin(node_id, state)
            if target is not None:
                task = asyncio.create_task(self._carry_out(target, state), name=f"power {node_id}")
                self._running[node_id] = task
                task.add_done_callback(lambda _, node_id=node_id: self._running.pop(node_id, None))

    async def _begin(self, node_id: str, state: PowerState) -> Target | None:
        """Note an attempt before it is made, so that attempts that end in a crash count too."""
        async with self._database.transaction() as connection:
            begun = await node_power.begin(connection, node_id, state, command_stream(node_id))
            if begun is None:
                return None
            if state is PowerState.WAKING and begun.off_at is not None:
                power_w = self._settings.node_standby_w
                await connection.execute(node_power.PERIOD, node_id, "off", begun.off_at, begun.acted_at, power_w)
                await connection.execute(node_power.STANDBY_OVER, node_id)
        return Target(node_id, begun.address)

    async def _carry_out(self, target: Target, state: PowerState) -> None:
        error = ""
        try:
            await self.hook.set_power(target, on=state is PowerState.WAKING)
        except HookError as refusal:
            error = str(refusal)
        except Exception as fault:  # a hook's own bug must not be tried for ever
            log.exception("node_power.hook_broke", node=target.node_id)
            error = f"the hook broke: {type(fault).__name__}"
        while True:
            try:
                await self._finish(target.node_id, state, error)
                return
            except (TimeoutError, asyncpg.PostgresError, *CONNECTION_ERRORS) as trouble:
                log.warning("node_power.waiting", error=str(trouble) or type(trouble).__name__)
                await asyncio.sleep(LOOK_EVERY_S)

    async def _finish(self, node_id: str, state: PowerState, error: str) -> None:
        async with self._database.transaction() as connection:
            node = await node_power.lock_changing(connection, node_id)
            if node is None or node.state != state:
                return
            if not error:
                await connection.execute(node_power.HOOK_DONE, node_id)
                return
            log.warning("node_power.hook_failed", node=node_id, state=state.value, error=error)
            if node.attempts < self._settings.node_power_attempts:
                pause_s = min(self._settings.node_power_backoff_s * 2.0 ** (node.attempts - 1), LONGEST_BACKOFF_S)
                await connection.execute(node_power.HOOK_LATER, node_id, error, pause_s)
            elif state is PowerState.GOING_DOWN and node.leased:
                await _stay(connection, node, error)
            else:
                await self._fail(connection, node, error)


async def _stay(connection: Connection, node: ChangingNode, detail: str) -> None:
    stays_s = STAYS_ON_S if detail else 0.0
    await connection.execute(node_power.STAY_ON, node.node_id, detail, stays_s)
    if detail:
        log.warning("node.stays_on", node=node.node_id, detail=detail)
