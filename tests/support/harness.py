"""A small cluster that carries out plans in virtual time, so that a test can tell a story of arrivals, rounds and ends.

    harness = Harness("green", {"mu": 1.0}, nodes=[a_node(gpus=4)])
    harness.submit("a", work_s=3600)
    harness.run(hours=2)
    assert harness.ended["a"].jct_s == 3660

It is not the simulator: it knows one speed law and no failures, and it checks after every plan that no device is held
twice. Plans, and the rounds whose plans were refused, are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.core.accounting.carbon import carbon_gco2
from services.core.cycle.plan import Plan, Preempt, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.domain.carbon import CarbonCurve
from services.core.domain.errors import PlanError
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, JobRow, NodeRow, a_snapshot, flat_curve

ACTIVE_EVERY_S = 1800.0
GRACE_S = 120.0
STARTUP_S = 60.0
MEASURED_AFTER_S = 300.0


@dataclass
class LiveJob:
    """A job of the harness. It does ``gpus ** scaling`` seconds of work per second."""

    name: str
    work_s: float
    submitted_s: float
    min_gpus: int = 1
    max_gpus: int = 1
    step_gpus: int = 1
    scaling: float = 0.9
    gpu_power_w: float = 250.0
    tenant: str = "t"
    priority: int = 0
    preemptible: bool = True
    phase: Phase = Phase.QUEUED
    since_s: float = 0.0
    on: dict[str, tuple[int, ...]] = field(default_factory=dict)
    done_s: float = 0.0
    attained_gpu_s: float = 0.0
    energy_j: float = 0.0
    carbon_gco2: float = 0.0
    preemptions: int = 0
    profiled: bool = False
    ended_s: float = float("nan")
    first_start_s: float = float("nan")
    longest_wait_s: float = 0.0

    @property
    def gpus(self) -> int:
        """Devices held."""
        return sum(map(len, self.on.values()))

    @property
    def jct_s(self) -> float:
        """From submission to end."""
        return self.ended_s - self.submitted_s

    def row(self, now_s: float) -> JobRow:
        """Return the job as a snapshot shows it; its efficiency is known five minutes after it runs at a size."""
        measured = self.phase == Phase.RUNNING and now_s - self.since_s >= MEASURED_AFTER_S
        self.profiled |= measured and self.gpus == self.min_gpus
        base = self.min_gpus ** (self.scaling - 1) / self.gpu_power_w
        now = max(self.gpus, 1) ** (self.scaling - 1) / self.gpu_power_w
        return JobRow(
            self.name,
            self.phase,
            self.gpus,
            self.min_gpus,
            self.max_gpus,
            self.step_gpus,
            on=dict(self.on) if self.on else None,
            models=None,
            tenant=self.tenant,
            preemptible=self.preemptible,
            priority=self.priority,
            submitted_s=self.submitted_s,
            waiting_since_s=self.since_s,
            attained_gpu_s=self.attained_gpu_s,
            energy_j=self.energy_j,
            carbon_gco2=self.carbon_gco2,
            gpu_power_w=self.gpu_power_w if self.attained_gpu_s else float("nan"),
            efficiency_base=base if self.profiled else float("nan"),
            efficiency_now=now if measured else float("nan"),
            progress=min(self.done_s / self.work_s, 1.0),
        )


class Harness:
    """Owns a cluster, its jobs and its clock; runs rounds of one policy and carries out the plans.

    Attributes:
        now_s: The virtual clock.
        jobs: Live jobs by name.
        ended: Jobs that have ended, by name, in order of their ends.
        plans: Every plan carried out, with when.
        rejections: (when, why) of every plan that was refused; a refused round leaves jobs and memory as they were.
        reject_next: How many of the next plans to refuse, as a cluster does that has changed since the snapshot.
    """

    def __init__(
        self,
        policy: str,
        parameters: Mapping[str, object] | None = None,
        *,
        nodes: Sequence[NodeRow],
        curve: CarbonCurve | None = None,
        more_curves: Sequence[CarbonCurve] = (),
        quota: Mapping[str, int] | None = None,
        guarantees: Mapping[str, int] | None = None,
    ) -> None:
        self.policy = build_policy(policy, parameters or {})
        self.memory: Any = self.policy.initial()
        self.nodes = list(nodes)
        self.curves = (curve or flat_curve(start_s=NOON_S - 86_400.0, hours=24 * 30), *more_curves)
        self.quota = dict(quota or {})
        self.guarantees = dict(guarantees or {})
        self.now_s = NOON_S
        self.jobs: dict[str, LiveJob] = {}
        self.ended: dict[str, LiveJob] = {}
        self.plans: list[tuple[float, Plan]] = []
        self.rejections: list[tuple[float, str]] = []
        self.reject_next = 0
        self._version = 0
        self._arrivals: list[LiveJob] = []
        self._next_active_s = NOON_S

    def submit(self, name: str, *, work_s: float, at_s: float = 0.0, **columns: Any) -> LiveJob:
        """Let a job arrive ``at_s`` seconds after the harness began (not before now)."""
        arrives_s = max(NOON_S + at_s, self.now_s)
        job = LiveJob(name, work_s, arrives_s, since_s=arrives_s, **columns)
        job.max_gpus = max(job.max_gpus, job.min_gpus)
        self._arrivals.append(job)
        self._arrivals.sort(key=lambda each: (each.submitted_s, each.name))
        return job

    def run(self, *, hours: float) -> None:
        """Let time pass: active rounds by the clock, passive ones on every arrival, end and release."""
        until_s = self.now_s + hours * 3600.0
        while True:
            event_s = min([self._next_active_s, *self._event_times()])
            if event_s > until_s:
                break
            self.advance(event_s - self.now_s)
            if self.now_s >= self._next_active_s:
                self._next_active_s += ACTIVE_EVERY_S
                self.cycle(Trigger.ACTIVE)
            else:
                self.cycle(Trigger.PASSIVE)
        self.advance(until_s - self.now_s)

    def run_until_idle(self, *, at_most_hours: float = 24.0 * 14) -> None:
        """Let time pass until no job is left, or fail."""
        end_s = self.now_s + at_most_hours * 3600.0
        while (self.jobs or self._arrivals) and self.now_s < end_s:
            self.run(hours=0.5)
        left = sorted([*self.jobs, *(job.name for job in self._arrivals)])
        assert not left, f"still there: {left}"

    def advance(self, seconds: float) -> None:
        """Move the clock; jobs work, and whatever happens by then happens."""
        end_s = self.now_s + seconds
        for job in self.jobs.values():
            self._work(job, seconds)
        self.now_s = end_s
        for job in list(self.jobs.values()):
            if job.phase == Phase.STARTING and end_s >= job.since_s + STARTUP_S:
                job.phase, job.since_s = Phase.RUNNING, end_s
            if job.phase == Phase.PREEMPTING and end_s >= job.since_s + GRACE_S:
                job.phase, job.since_s, job.on = Phase.QUEUED, end_s, {}
            if job.phase == Phase.RUNNING and job.done_s >= job.work_s - 1e-6:
                job.ended_s, job.on = end_s, {}
                self.ended[job.name] = self.jobs.pop(job.name)
        while self._arrivals and self._arrivals[0].submitted_s <= end_s:
            job = self._arrivals.pop(0)
            self.jobs[job.name] = job

    def snapshot(self, trigger: Trigger) -> Snapshot:
        """Return what the policy sees now."""
        self._version += 1
        rows = [job.row(self.now_s) for job in self.jobs.values()]
        return a_snapshot(
            rows,
            self.nodes,
            trigger=trigger,
            now_s=self.now_s,
            curve=self.curves[0],
            more_curves=self.curves[1:],
            quota=self.quota,
            version=self._version,
        ).again(tenant_guarantees=self.guarantees)

    def cycle(self, trigger: Trigger = Trigger.ACTIVE) -> Plan | None:
        """Hold a round and carry its plan out; None if the plan is refused."""
        snapshot = self.snapshot(trigger)
        try:
            result = run_cycle(self.policy, snapshot, self.memory)
            if self.reject_next:
                self.reject_next -= 1
                raise PlanError("the cluster has changed since the snapshot")
        except PlanError as refused:
            self.rejections.append((self.now_s, str(refused)))
            return None
        self.memory = result.memory
        self.plans.append((self.now_s, result.plan))
        for action in result.plan.actions:
            self._carry_out(action)
        self.check_devices()
        return result.plan

    def check_devices(self) -> None:
        """Fail if a device is held twice or does not exist."""
        there = {(node.name, device) for node in self.nodes for device in range(node.gpus)}
        held = [(node, device) for job in self.jobs.values() for node in job.on for device in job.on[node]]
        assert len(set(held)) == len(held)
        assert set(held) <= there

    def _carry_out(self, action: object) -> None:
        if isinstance(action, Start):
            job = self.jobs[action.job_id]
            job.longest_wait_s = max(job.longest_wait_s, self.now_s - job.since_s)
            job.on = {share.node_id: share.devices for share in action.placement.shares}
            job.phase, job.since_s = Phase.STARTING, self.now_s
            job.first_start_s = self.now_s if job.first_start_s != job.first_start_s else job.first_start_s
        elif isinstance(action, Preempt):
            job = self.jobs[action.job_id]
            job.phase, job.since_s = Phase.PREEMPTING, self.now_s
            job.preemptions += 1

    def _work(self, job: LiveJob, seconds: float) -> None:
        if not job.gpus:
            return
        job.attained_gpu_s += job.gpus * seconds
        zones = {node.name: node.zone for node in self.nodes}
        for name, devices in job.on.items():
            energy_j = len(devices) * job.gpu_power_w * seconds
            job.energy_j += energy_j
            job.carbon_gco2 += carbon_gco2(energy_j, self.curves[zones[name]].mean(self.now_s, self.now_s + seconds))
        if job.phase == Phase.RUNNING:
            job.done_s += job.gpus**job.scaling * seconds

    def _event_times(self) -> list[float]:
        times = [job.submitted_s for job in self._arrivals[:1]]
        for job in self.jobs.values():
            if job.phase == Phase.STARTING:
                times.append(job.since_s + STARTUP_S)
            elif job.phase == Phase.PREEMPTING:
                times.append(job.since_s + GRACE_S)
            elif job.phase == Phase.RUNNING:
                times.append(self.now_s + max(job.work_s - job.done_s, 0.0) / job.gpus**job.scaling)
        return times
