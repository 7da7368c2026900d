"""Clocks of model servers that follow the latency of their requests, which routers report every second.

Each report on a server moves the clock of all its devices once, by MIAD or by the learned model, among the clocks that
all of them support. A server that no router has reported for ``stale_s`` returns to the default clock. What is decided
here is an order like the scheduler's: ``controls`` sets it, remembers it on disk and restores the default. A clock that
the scheduler orders takes precedence.

Source: FREESH section 3.2, equation 5; ``services.core.policies.freesh.clock_model`` for the learned clock.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import ValidationError
from redis.exceptions import RedisError

from gpu_agent.controls import Order
from gpu_agent.gangs import Gang
from gpu_agent.learned_clocks import LearnedClocks, ServerKind
from services.contracts.clocks import ClockPolicy, ServerClocks
from services.contracts.nodes import ClockMinute, DeviceControls, DeviceInfo
from services.contracts.routing import LatencyReport, ServerLatency
from services.contracts.streams import LATENCY_FIELD, NEWEST_ENTRY, latency_stream
from services.core.domain.errors import DomainError
from services.core.policies.freesh import miad
from services.core.policies.freesh.clock_model import ClockSample, Unused, learned_clock
from services.core.policies.freesh.miad import Clocks, common_clocks, miad_clock
from services.kit.command_stream import BATCH, BLOCK_MS, StreamSource
from services.kit.logging import Log

log = Log(__name__)

Following = Literal["on", "dry_run", "off"]

PACE_S = 0.9
"""Least time between two changes of a clock: a little less than the second between reports, whose arrival varies."""
BUSY_SHARE = 0.99  #: Share of time with requests above which a server counts as busy all the time
MINUTE_S = 60.0


@dataclass(frozen=True)
class Measured:
    """The last readings of a server's devices: their total power and lowest clock; NaN and None where unknown."""

    power_w: float
    clock_mhz: float | None = None


@dataclass
class Seen:
    """What the routers have seen of one server since its clock was last decided, as sums."""

    clocks: ServerClocks
    first_tokens: int = 0
    ttft_s: float = 0.0
    wait_s: float = 0.0
    tokens: int = 0
    tbt_s: float = 0.0
    ended: int = 0
    e2e_s: float = 0.0
    ended_tokens: int = 0
    oldest_s: float = 0.0
    held: dict[str, int] = field(default_factory=dict[str, int])
    reports: Counter[str] = field(default_factory=Counter[str])

    def add(self, router: str, row: ServerLatency) -> None:
        """Add what one router saw of one class of requests."""
        self.reports[f"{router}\n{row.request_class}"] += 1
        self.first_tokens += row.first_tokens
        self.ttft_s += 1e-3 * (row.mean_ttft_ms or 0.0) * row.first_tokens
        self.wait_s += 1e-3 * (row.mean_wait_ms or 0.0) * row.first_tokens
        self.tokens += row.tokens
        self.tbt_s += 1e-3 * (row.mean_tbt_ms or 0.0) * row.tokens
        self.ended += row.ended
        self.e2e_s += (row.mean_e2e_s or 0.0) * row.ended
        self.ended_tokens += row.ended_tokens
        self.oldest_s = max(self.oldest_s, row.oldest_s)
        self.held[router] = row.held  # of all its classes, each of which says so

    @property
    def window_s(self) -> float:
        """The time that the reports cover, in seconds: each router reports once a second."""
        return float(max(self.reports.values()))

    def report(self, clock_since_s: float) -> miad.LatencyReport:
        """Return the means; the present clock has been set for ``clock_since_s``."""
        return miad.LatencyReport(
            ttft_s=self.ttft_s / self.first_tokens if self.first_tokens else None,
            tbt_s=self.tbt_s / self.tokens if self.tokens else None,
            e2e_s=self.e2e_s / self.ended if self.ended else None,
            in_service=sum(self.held.values()),
            is_stale=self.oldest_s > clock_since_s,
        )

    def sample(self, clock_mhz: float, clock_since_s: float, power_w: float) -> ClockSample:
        """Return what the server did at a clock that has been set for ``clock_since_s``.

        *Approximation*: the mean number of requests decoded together is the sum of all times between tokens divided by
        the window (Little's law). A mean below 1 is one request for that fraction of the time. The tokens of answers
        that are returned whole were not all made in the window: then the batch is the requests held at its end, each at
        the mean token rate.
        """
        mean_batch, tokens_per_s = self.tbt_s / self.window_s, self.tokens / self.window_s
        if self.oldest_s:
            mean_batch = float(sum(self.held.values())) or min(mean_batch, 1.0)
            tokens_per_s = mean_batch * self.tokens / self.tbt_s if self.tbt_s else 0.0
        busy_share = min(mean_batch, 1.0)
        return ClockSample(
            clock_mhz=clock_mhz,
            batch=mean_batch / busy_share if busy_share > 0 else 0.0,
            report=self.report(clock_since_s),
            power_w=power_w,
            queued_s=self.wait_s / self.first_tokens if self.first_tokens else 0.0,
            tokens_per_request=self.ended_tokens / self.ended if self.ended else None,
            tokens_per_s=tokens_per_s,
            busy_share=busy_share,
        )


@dataclass(frozen=True)
class Decision:
    """The clock of one server."""

    devices: tuple[int, ...]
    policy: ClockPolicy
    clock_mhz: float  #: The clock for its devices. In a dry run: the one they would get next after their default.
    dry_run: bool  #: Whether the clock is only reported, not set
    at_s: float
    since_s: float  #: When its devices were first given this clock
    exceeded: bool  #: Whether the reports behind it exceeded a limit
    unobserved: bool  #: Whether the clock was kept because requests were in service but nothing was seen of them
    model: ModelState | None = None  #: What is known of servers of this kind; None with another policy


@dataclass
class Minute:
    """The clocks of one server during one minute of UTC."""

    start_s: float
    decided: list[Decision] = field(default_factory=list["Decision"])

    def message(self) -> ClockMinute:
        clocks, last = [each.clock_mhz for each in self.decided], self.decided[-1]
        return ClockMinute(
            start_at=datetime.fromtimestamp(self.start_s, UTC),
            policy=last.policy,
            dry_run=last.dry_run,
            decisions=len(clocks),
            exceeded=sum(each.exceeded for each in self.decided),
            unobserved=sum(each.unobserved for each in self.decided),
            mean_mhz=round(sum(clocks) / len(clocks), 1),
            lowest_mhz=min(clocks),
            highest_mhz=max(clocks),
            last_mhz=last.clock_mhz,
            model_error=last.model and last.model.error,
            unused=last.model and last.model.unused,
        )


@dataclass(frozen=True)
class ModelState:
    samples: int
    clocks: int
    error: float | None  #: Mean relative error of predicted times between tokens; None while there is no model
    unused: Unused | None  #: Why MIAD decided this time; None if the model did


class LatencyClocks:
    """Decides the clocks of this node's model servers. Times are seconds on any monotonic clock.

    Args:
        learned: What is known of kinds of servers.
        following: Whether this node's clocks follow latency, do not, or only report what they would do.
        stale_s: After this time without a report, a server's devices return to their default.
    """

    def __init__(
        self, devices: Sequence[DeviceInfo], driver: str, learned: LearnedClocks, following: Following, stale_s: float
    ) -> None:
        self._driver, self._learned, self._following, self._stale_s = driver, learned, following, stale_s
        self.recut(devices)
        self._seen: dict[str, Seen] = {}
        self._heard_s: dict[str, float] = {}
        self._decisions: dict[str, Decision] = {}
        self._minutes: dict[str, deque[Minute]] = {}
        self._unable: set[str] = set()

    def recut(self, devices: Sequence[DeviceInfo]) -> None:
        self._devices = {device.index: device for device in devices}

    def take(self, report: LatencyReport, now_s: float) -> bool:
        """Take in what one router saw; return whether a clock may be decided now.

        A server whose clocks no longer follow latency is dropped.
        """
        may_decide = False
        for row in report.servers:
            if row.job_id is None or self._following == "off":
                continue
            if row.clocks is None or row.clocks.policy is ClockPolicy.DEFAULT:
                self._forget(row.job_id)
                continue
            self._heard_s[row.job_id] = now_s
            seen = self._seen.setdefault(row.job_id, Seen(row.clocks))
            seen.clocks = row.clocks
            seen.add(report.router, row)
            last = self._decisions.get(row.job_id)
            may_decide |= last is None or now_s - last.at_s >= PACE_S
        return may_decide

    def decide(
        self, gangs: Iterable[Gang], measured: Callable[[Sequence[int]], Measured], now_s: float, utc_s: float = 0.0
    ) -> None:
        """Decide the clocks of servers reported since their last decision; ``utc_s``: now in UTC, for the record."""
        running = {gang.start.job_id: gang for gang in gangs if gang.holding and gang.start}
        self._unable &= running.keys()
        self._minutes = {job_id: kept for job_id, kept in self._minutes.items() if job_id in running}
        for job_id in [each for each in self._heard_s if each not in running]:
            self._forget(job_id)
        for job_id, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > self._stale_s:
                log.warning("clocks.reports_stopped", job_id=job_id, silent_s=round(now_s - heard_s, 1))
                self._forget(job_id)
        for job_id, seen in list(self._seen.items()):
            gang = running[job_id]
            last = self._decisions.get(job_id)
            if last is not None and last.devices == gang.devices and now_s - last.at_s < PACE_S:
                continue
            del self._seen[job_id]
            decision = self._decision(gang, seen, last, measured(gang.devices), now_s)
            if decision is None:
                self._decisions.pop(job_id, None)
            else:
                self._decisions[job_id] = decision
                self._record(job_id, decision, utc_s)

    def orders(self, gangs: Iterable[Gang]) -> list[Order]:
        """Return the settings for the devices of gangs: as the scheduler ordered, else as decided here."""
        found: list[Order] = []
        for gang in gangs:
            decision = self._decisions.get(gang.start.job_id) if gang.start else None
            settings = gang.settings
            if decision and not decision.dry_run and decision.devices == gang.devices and not _is_ordered(gang):
                clock = {"clock_mhz": round(decision.clock_mhz)}
                settings = (settings or DeviceControls(revision=0)).model_copy(update=clock)
            if gang.holding and settings:
                found.append(Order(gang.allocation_id, gang.devices, settings))
        return found

    def wanted_mhz(self, index: int) -> int | None:
        """Return the clock that latency requires of a device; None if it requires none."""
        found = (round(decision.clock_mhz) for decision in self._decisions.values() if index in decision.devices)
        return next(found, None)

    def minutes(self, job_id: str, utc_s: float) -> list[ClockMinute]:
        """Return the clocks of a server in the current minute and the one before, where there were decisions."""
        kept = self._minutes.get(job_id, ())
        return [minute.message() for minute in kept if minute.start_s > utc_s - 2 * MINUTE_S]

    def describe(self, now_s: float) -> list[dict[str, Any]]:
        return [
            {"job_id": job_id, **asdict(decision), "reported_s_ago": round(now_s - self._heard_s[job_id], 1)}
            for job_id, decision in self._decisions.items()
        ]

    def _decision(
        self, gang: Gang, seen: Seen, last: Decision | None, measured: Measured, now_s: float
    ) -> Decision | None:
        terms = seen.clocks
        dry_run = terms.dry_run or self._following == "dry_run"
        clocks = None if _is_ordered(gang) else self._clocks(gang, dry_run=dry_run)
        if clocks is None:
            return None
        goes_on = last is not None and last.devices == gang.devices and not (last.dry_run or dry_run)
        before_mhz, since_s = (last.clock_mhz, last.since_s) if last and goes_on else (clocks.highest, -math.inf)
        sample = seen.sample(before_mhz, now_s - since_s, measured.power_w)
        teaches = True
        if dry_run:
            # Devices choose their clocks by themselves. What they choose while nothing runs says nothing.
            teaches = measured.clock_mhz is not None and sample.busy_share > BUSY_SHARE
            if teaches:
                chosen = min(clocks.mhz, key=lambda mhz: abs(mhz - (measured.clock_mhz or 0.0)))
                sample = replace(sample, clock_mhz=chosen)
        model = None
        if terms.policy is ClockPolicy.LEARNED:
            clock_mhz, model = self._learned_clock(gang, terms, sample, clocks, teaches=teaches)
        else:
            clock_mhz = miad_clock(sample.clock_mhz, sample.report, terms.limits, clocks, terms.miad)
        exceeded = sample.report.exceeds(terms.limits)
        unobserved = not exceeded and sample.report.is_blind(terms.limits)
        since_s = since_s if clock_mhz == before_mhz else now_s
        if last is None or (last.policy, last.dry_run) != (terms.policy, dry_run):
            log.info("clocks.follow", job_id=gang.start and gang.start.job_id, policy=terms.policy, dry_run=dry_run)
        return Decision(gang.devices, terms.policy, clock_mhz, dry_run, now_s, since_s, exceeded, unobserved, model)

    def _learned_clock(
        self, gang: Gang, terms: ServerClocks, sample: ClockSample, clocks: Clocks, *, teaches: bool
    ) -> tuple[float, ModelState]:
        """Return the next clock and the state of the model; learn from the sample if ``teaches``."""
        kind = self._kind(gang, terms)
        learner = self._learned.learner(kind, sample if teaches else None)
        idle_w, capacity = terms.idle_w, terms.capacity
        clock_mhz = learned_clock(learner, sample, terms.limits, clocks, capacity, idle_w=idle_w, config=terms.miad)
        error = learner.fitted and round(learner.fitted.error, 4)
        return clock_mhz, ModelState(learner.known, learner.clocks, error, learner.unused(sample, terms.limits))

    def _clocks(self, gang: Gang, *, dry_run: bool) -> Clocks | None:
        """Return the clocks that all devices of a gang support and may be set to; None if there are none."""
        devices = [self._devices[index] for index in gang.devices if index in self._devices]
        with suppress(DomainError):
            found = common_clocks([Clocks(tuple(map(float, sorted(each.clocks_mhz)))) for each in devices])
            if devices and (dry_run or all(device.can_set_clock for device in devices)):
                return found
        if gang.start and gang.start.job_id not in self._unable:
            self._unable.add(gang.start.job_id)
            log.warning("clocks.not_settable", job_id=gang.start.job_id, devices=gang.devices)
        return None

    def _kind(self, gang: Gang, terms: ServerClocks) -> ServerKind:
        assert gang.start is not None
        spec = gang.start.spec
        own = {name: value for name, value in spec.environment.items() if not name.startswith("WATTSHIFT_")}
        return ServerKind(
            command=tuple(spec.command),
            image=spec.image,
            environment=tuple(sorted(own.items())),
            gpus=len(gang.devices),
            gpu_model=self._devices[gang.devices[0]].model,
            driver=self._driver,
            limits=terms.limits,
        )

    def _record(self, job_id: str, decision: Decision, utc_s: float) -> None:
        start_s = utc_s - utc_s % MINUTE_S
        kept = self._minutes.setdefault(job_id, deque(maxlen=2))
        if not kept or kept[-1].start_s != start_s:
            kept.append(Minute(start_s))
        kept[-1].decided.append(decision)

    def _forget(self, job_id: str) -> None:
        self._seen.pop(job_id, None)
        self._heard_s.pop(job_id, None)
        self._decisions.pop(job_id, None)


class LatencyInbox:
    """This node's stream of latency reports. It is read from its end on: missed reports are of no use any more."""

    def __init__(
        self, redis: StreamSource, node_id: str, take: Callable[[LatencyReport], None], retry_s: float
    ) -> None:
        self._redis: Any = redis  # the library's types do not know that its answers are awaited
        self._stream = latency_stream(node_id)
        self._take = take
        self._retry_s = retry_s
        self._is_down = False

    async def run(self) -> None:
        """Pass on reports until cancelled; failures of Redis are retried."""
        last = NEWEST_ENTRY
        while True:
            try:
                answer = await self._redis.xread({self._stream: last}, count=BATCH, block=BLOCK_MS)
                self._is_down = False
                for _, entries in answer or []:
                    for entry_id, fields in entries:
                        last = entry_id
                        self._read(fields.get(LATENCY_FIELD, ""))
            except (RedisError, OSError) as error:
                if not self._is_down:
                    log.warning("latency.interrupted", error=str(error) or type(error).__name__)
                self._is_down, last = True, NEWEST_ENTRY
                await asyncio.sleep(self._retry_s)

    def _read(self, text: str) -> None:
        try:
            report = LatencyReport.model_validate_json(text)
        except ValidationError as error:
            log.warning("latency.unreadable", error=str(error)[:500])
            return
        self._take(report)


def _is_ordered(gang: Gang) -> bool:
    """Return whether the scheduler orders the clock of a gang's devices, or measures the gang at the default clock."""
    return gang.settings is not None and (gang.settings.clock_mhz is not None or gang.settings.measure)
