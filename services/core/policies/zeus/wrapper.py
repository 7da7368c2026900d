"""Any policy, with Zeus' choice of power limits on top of it.

The wrapped policy decides what runs; then every gang that runs or starts is put to the power limit that costs least. A
kind of job that is not known yet is measured at each limit as its work begins (just-in-time profiling), once for all
gangs of the kind; until then, and where nothing can be measured, they run at the default. GREEN's and PowerFlow's
baselines combine Zeus with Tiresias so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic

import numpy as np

from services.core.cycle.plan import Plan, Preempt, ProfileControls, Reason, SetClock, SetPowerLimit, Start, set_to
from services.core.cycle.policy import Memory, Policy
from services.core.cycle.snapshot import Phase, Snapshot
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.domain.placement import Placement
from services.core.policies.parameters import Parameter, check_parameters
from services.core.policies.zeus.cost import least_cost

LIMIT = ControlKind.POWER_LIMIT


@dataclass(frozen=True)
class ZeusConfig:
    """Zeus' own parameters; those of the wrapped policy stand beside them."""

    eta: Annotated[
        float,
        Parameter("Weight of energy against time: 1 saves energy alone, 0 time alone.", minimum=0.0, maximum=1.0),
    ] = 0.5
    profile_window_s: Annotated[
        float,
        Parameter(
            "How long an unknown kind of job is measured at each power limit.",
            unit="s",
            minimum=0.1,
            maximum=3600.0,
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class ZeusMemory(Generic[Memory]):
    """The memory of the wrapper, with the wrapped policy's.

    Attributes:
        inner: Of the wrapped policy.
        measured: The gangs whose measurement was requested and that still hold their GPUs, by job.
    """

    inner: Memory
    measured: frozenset[JobId] = field(default_factory=frozenset[JobId])


class Zeus(Generic[Memory]):
    """A policy whose jobs run at the power limit of least cost."""

    def __init__(self, name: str, inner: Policy[Memory], config: ZeusConfig) -> None:
        self.name = name
        self.inner = inner
        self.config = config

    def initial(self) -> ZeusMemory[Memory]:
        """Return the wrapped policy's first memory, and no measurement."""
        return ZeusMemory(self.inner.initial())

    def decide(self, snapshot: Snapshot, memory: ZeusMemory[Memory]) -> tuple[Plan, ZeusMemory[Memory]]:
        """Return the wrapped policy's plan with the power limits of all that runs by it."""
        plan, inner = self.inner.decide(snapshot, memory.inner)
        if not any(LIMIT in kinds for kinds in snapshot.settable):
            return plan, ZeusMemory(inner)
        going = list(_going(snapshot, plan))
        measured = {snapshot.jobs.ids[job] for job, _, starts in going if not starts} & memory.measured
        controls = list(self._controls(snapshot, going, measured))
        measured |= {action.job_id for action in controls if isinstance(action, ProfileControls)}
        plan = Plan(plan.snapshot_version, (*plan.actions, *controls)) if controls else plan
        return plan, ZeusMemory(inner, frozenset(measured))

    def dump(self, memory: ZeusMemory[Memory]) -> dict[str, Any]:
        """Return both memories as JSON values."""
        return {"inner": self.inner.dump(memory.inner), "measured": sorted(memory.measured)}

    def load(self, stored: dict[str, Any]) -> ZeusMemory[Memory]:
        """Return the memories that ``dump`` wrote; what is missing is empty."""
        measured = frozenset(JobId(job_id) for job_id in stored.get("measured", []))
        return ZeusMemory(self.inner.load(stored.get("inner", {})), measured)

    def _controls(
        self, snapshot: Snapshot, going: list[tuple[int, int, bool]], measured: set[JobId]
    ) -> Iterator[SetPowerLimit | SetClock | ProfileControls]:
        """Yield what differs from what is set now; of each unknown kind of job, one gang is measured at a time."""
        jobs = snapshot.jobs
        kinds = {(int(jobs.control_curve[job]), model) for job, model, _ in going if jobs.ids[job] in measured}
        for job, model, starts in going:
            if not snapshot.takes(model, LIMIT):
                continue
            job_id, kind = jobs.ids[job], (int(jobs.control_curve[job]), model)
            curve = snapshot.control_curve(job, model, LIMIT)
            if curve is None:
                if snapshot.measures and job_id not in measured and (kind[0] < 0 or kind not in kinds):
                    kinds.add(kind)
                    yield ProfileControls(job_id, LIMIT, self.config.profile_window_s)
                continue
            wanted = least_cost(curve, self.config.eta)
            now = math.nan if starts else float(jobs.power_limit_w[job])
            if wanted is None and not math.isnan(now):
                yield set_to(job_id, LIMIT, None, Reason.DEFAULT_CONTROL)
            elif wanted is not None and wanted != now:
                yield set_to(job_id, LIMIT, wanted, Reason.LEAST_COST)


def _going(snapshot: Snapshot, plan: Plan) -> Iterator[tuple[int, int, bool]]:
    """Yield (job, GPU model, whether it starts now) of every gang that runs once the plan is carried out, by index."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    model_of = dict(zip(nodes.ids, nodes.gpu_model.tolist(), strict=True))
    stops = {action.job_id for action in plan.actions if isinstance(action, Preempt)}
    starts = {action.job_id: action.placement for action in plan.actions if isinstance(action, Start)}
    placements: dict[int, tuple[Placement | None, bool]] = {}
    for job in np.flatnonzero((jobs.phase == Phase.STARTING) | (jobs.phase == Phase.RUNNING)).tolist():
        if jobs.ids[job] not in stops:
            placements[job] = jobs.placements[job], False
    if starts:
        index = {job_id: at for at, job_id in enumerate(jobs.ids) if job_id in starts}
        placements |= {index[job_id]: (placement, True) for job_id, placement in starts.items()}
    for job, (placement, is_new) in sorted(placements.items(), key=lambda each: jobs.ids[each[0]]):
        model = model_of.get(placement.shares[0].node_id) if placement is not None else None
        if model is not None:
            yield job, model, is_new
