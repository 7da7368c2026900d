"""The exchange between a bridge and the control plane: reports of what has changed, and decisions.

Nothing has to survive this process: what the control plane has not accepted is reported again, and decisions are
repeated to a bridge that starts.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from services.contracts.engines import (
    MAX_JOBS_OF_A_REPORT,
    EngineDecision,
    EngineJob,
    EngineJobState,
    EngineNode,
    EngineReply,
    EngineReport,
)
from services.kit.bridges.process import BridgeSettings
from services.kit.bridges.silent import EngineSilentError
from services.kit.control_plane import ControlPlane
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

PRESENT_EVERY_S = 30.0  #: How often all jobs are named, so that those that the engine has lost are noticed
REST = 9.0  #: Times as long as the engine took, it is left in peace: so it is asked for a tenth of the time at most
MOST_REST_S = 300.0
_TOGETHER_S = 0.1  #: Decisions of one round come in several commands, and jobs change together


class Talk:
    """A bridge's side of the exchange; it raises ``ProblemError`` if the control plane does not answer, or refuses."""

    def __init__(
        self, kind: str, settings: BridgeSettings, control_plane: ControlPlane | None, *, heard: bool = True
    ) -> None:
        """Talk to this control plane, which counts as ``heard`` at first; None: it never does, nothing is reported."""
        self.decisions: dict[str, EngineDecision] = {}  #: By job; of two about the same job, the newer one is in force
        self.sent: dict[str, EngineJob] = {}
        self.is_known = False  #: Whether this process has reported everything about the engine, and asked for decisions
        self.engine_s = 0.0  #: How long the engine took to answer at the last look
        self.woken = asyncio.Event()  #: Set by decisions, and by whoever wants a look before the next is due
        self.version = ""  #: The engine's version; "" if it is not known
        self.queues: Sequence[str] = ()
        self.orders = False  #: Whether the engine's site wants the plan's order
        self._gone_since_s: dict[str, float] = {}
        self._unsaid: dict[str, str] = {}
        self._kind, self._settings, self._control_plane = kind, settings, control_plane
        self._boot_id = secrets.token_hex(8)
        self._heard_at_s = time.monotonic() if heard else -1e9
        self._present_at_s = -1e9
        self._problem: str | None = None

    def take(self, decisions: Sequence[EngineDecision]) -> None:
        """Take decisions; of two about the same job, the newer one is in force."""
        for decision in decisions:
            known = self.decisions.get(decision.external_id)
            if known is None or known.revision < decision.revision:
                self.decisions[decision.external_id] = decision
                self.woken.set()

    @property
    def is_heard(self) -> bool:
        """Whether the control plane has answered within ``silence_s``."""
        silent_s = time.monotonic() - self._heard_at_s
        return self._control_plane is not None and silent_s < self._settings.silence_s

    async def keep_looking(self, look: Callable[[], Awaitable[object]]) -> None:
        """Look at the engine whenever a look is due or requested, until cancelled."""
        while True:
            began_s = time.monotonic()
            self.woken.clear()
            try:
                await self.look_once(look)
            except ProblemError as error:
                log.warning("control_plane.silent", error=error.detail)
            except Exception:  # whatever the engine has answered, the next look begins anew
                log.exception("look.failed")
            await asyncio.sleep(min(REST * self.engine_s, MOST_REST_S))
            pause_s = max(self._settings.interval_s - (time.monotonic() - began_s), 0.05)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.woken.wait()
                await asyncio.sleep(_TOGETHER_S)

    async def look_once(self, look: Callable[[], Awaitable[object]]) -> None:
        """Look at the engine; if it is silent, say so to the control plane."""
        try:
            await look()
        except EngineSilentError as error:
            await self.complain(error)

    def said(self, name: str, report_of: Callable[[], EngineJob | None]) -> EngineJob | None:
        """Return a job's report; while it says what no job can have, the last one that was accepted, if any."""
        try:
            report = report_of()
        except (ValueError, OverflowError, OSError) as error:  # it costs no other job its report
            if self._unsaid.get(name) != (why := str(error)[:300]):
                log.error(f"{self._kind}.job_unreportable", job=name, error=why)
            self._unsaid[name] = why
            return self.sent.get(name)
        self._unsaid.pop(name, None)
        return report

    async def tell(
        self, reports: Mapping[str, EngineJob], took: Callable[[Sequence[EngineJob], EngineReply], None] | None = None
    ) -> None:
        """Report the jobs that have changed, in reports of limited size; what is not accepted is reported again.

        Args:
            took: Called with each part that the control plane has accepted, and its answer.
        """
        self._problem = None
        changed = [report for name, report in reports.items() if self.sent.get(name) != report]
        for at in range(0, len(changed), MAX_JOBS_OF_A_REPORT):
            part = changed[at : at + MAX_JOBS_OF_A_REPORT]
            reply = await self.say(jobs=part)
            self.sent |= {report.external_id: report for report in part}
            if took is not None:
                took(part, reply)

    async def tell_all(
        self, nodes: Sequence[EngineNode] | None, live: Sequence[str] | None, **more: Any
    ) -> EngineReply:
        """Report nodes, and from time to time which jobs there are.

        Args:
            nodes: All of them; None: unchanged.
            live: The jobs that wait or run; None: not known yet.
            more: Other fields of the report.

        Returns:
            The answer; if the jobs were included, its ``unreported`` are jobs not among ``live`` whose end it does not
                know.
        """
        now_s = time.monotonic()
        asks = live is not None and now_s - self._present_at_s >= PRESENT_EVERY_S
        more |= {} if nodes is None else {"nodes": nodes}
        reply = await self.say(wants_decisions=not self.is_known, present=live if asks else None, **more)
        self.is_known = True
        if asks:
            self._present_at_s = now_s
        return reply

    def gone_for_s(self, names: Collection[str]) -> dict[str, float]:
        """Return how long jobs have been gone without a known end, seconds; their ends are asked for at each look."""
        now_s = time.monotonic()
        self._gone_since_s = {name: self._gone_since_s.get(name, now_s) for name in names}
        if names:
            self.ask_again()
        return {name: now_s - since_s for name, since_s in self._gone_since_s.items()}

    def ask_again(self) -> None:
        """Make the next report name all jobs."""
        self._present_at_s = -1e9

    async def tell_ends(self, over: Sequence[EngineJob]) -> None:
        """Report how jobs ended that the engine no longer shows; what does not fit into one report follows later."""
        if over:
            log.warning(f"{self._kind}.jobs_gone", jobs=len(over))
            await self.say(jobs=over[:MAX_JOBS_OF_A_REPORT])
            self.sent |= {report.external_id: report for report in over[:MAX_JOBS_OF_A_REPORT]}

    def ended(
        self, name: str, state: EngineJobState, *, number: str, submitted_at: datetime | None = None, **more: object
    ) -> EngineJob:
        """Return how a job ended that the engine no longer shows.

        Args:
            number, submitted_at: What is said of one that this process has never seen.
            more: Other fields of the report.
        """
        known = self.sent.get(name) or EngineJob(
            external_id=name,
            number=number[:100],
            name="",
            user="",
            state=EngineJobState.MISSING,
            steered=False,
            gpus=1,
            submitted_at=submitted_at or utc_now(),
        )
        return known.model_copy(update={"state": state, "shares": [], **more})

    def forget(self, seen: Collection[str], *also: dict[str, Any]) -> None:
        """Forget jobs that the engine has forgotten and that were reported as over, here and in ``also``."""
        for known in (*also, self.decisions, self.sent, self._unsaid):
            for name in [name for name in known if name not in seen and name not in self._gone_since_s]:
                if name not in self.sent or self.sent[name].state.is_over:
                    del known[name]

    async def complain(self, error: EngineSilentError) -> None:
        problem = str(error)
        if problem != self._problem:
            log.error(f"{self._kind}.silent", error=problem)
        self._problem = problem
        await self._send({"problem": problem[:500]})

    async def say(self, **fields: Any) -> EngineReply:
        """Send one report, and take the decisions in its answer."""
        return await self._send(
            {"version": self.version, "queues": self.queues, "orders": self.orders}
            | {"zone": self._settings.own_zone, **fields}
        )

    async def _send(self, fields: Mapping[str, Any]) -> EngineReply:
        if self._control_plane is None:
            return EngineReply()
        always = {"boot_id": self._boot_id, "kind": self._kind, "mode": self._settings.mode}
        report = EngineReport.model_validate(always | dict(fields))
        reply = await self._control_plane.call("engine", report, EngineReply, 30.0)
        self._heard_at_s = time.monotonic()
        self.take(reply.decisions)
        return reply
