"""What the optimizer is asked for a fleet, and how the queue model expects its instances to perform. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.contracts.apps import AppSpec, FleetSpec, Repartition
from services.contracts.partition import (
    SLICE_NAMES,
    ModelVariant,
    PartitionApplication,
    PartitionRequest,
    PartitionResult,
    SliceName,
    VariantInstances,
)
from services.core.domain.gpus import find_gpu_model
from services.core.policies.clover.application import Application
from services.core.policies.clover.layouts import can_be_cut, counts_of, realise
from services.core.policies.clover.prediction import predict
from services.serving.fleets.assignment import Gpu, GpuState, Kind, Sizes, layout_of, sizes_of
from services.solving.partition import demand_of

INSTANCE_COST = 2.0  #: How many GPUs are rather cut than an instance stopped


@dataclass(frozen=True)
class PlannedApp:
    """An application as planning needs it."""

    name: str
    spec: AppSpec
    revision: int
    rate_per_s: float  #: Mean arrival rate, observed or estimated
    is_late: bool = False  #: Whether the observed latency is above the SLA
    failing: frozenset[tuple[str, str]] = frozenset()  #: Variants and slices whose instances fail; they are not planned


def idle_w_of(fleet: FleetSpec) -> float | None:
    """Return the power of an idle GPU; None if neither the fleet nor the catalogue states it."""
    if fleet.idle_w is not None:
        return fleet.idle_w
    model = find_gpu_model(fleet.gpu_model)
    return None if model is None else model.idle_w


def in_core(app: PlannedApp, idle_w: float) -> Application:
    """Return an application's variants as the core represents them."""
    return demand_of(_application(app, Counter()), idle_w).application


def partition_request(
    fleet: FleetSpec,
    apps: Sequence[PlannedApp],
    gpus: Sequence[GpuState],
    running: Mapping[Kind, int],
    gco2_per_kwh: float,
    baseline_gco2_per_kwh: float | None,
    seed: int,
    candidates: int = 0,
) -> PartitionRequest:
    """Return the problem of a fleet: all its applications share its GPUs.

    Args:
        gpus: Those that are up, in the order of the answer's layouts.
        running: What belongs on them now; the search begins there if the GPUs can hold it.
        baseline_gco2_per_kwh: Intensity that savings are measured against.
        candidates: How many configurations of each application to ask for besides the best.

    Raises:
        ValidationError: It is inconsistent.
    """
    idle_w = idle_w_of(fleet)
    assert idle_w is not None, "fleets without it are refused"
    return PartitionRequest(
        gpus=len(gpus),
        idle_w=idle_w,
        layouts=[layout_of(each.sizes) for each in gpus],
        intensity_gco2_per_kwh=gco2_per_kwh,
        baseline_gco2_per_kwh=baseline_gco2_per_kwh,
        applications=[_application(app, running, len(gpus)) for app in apps],
        seed=seed,
        candidates=candidates,
    )


def _application(app: PlannedApp, running: Mapping[Kind, int], gpus: int = 0) -> PartitionApplication:
    spec, best = app.spec, app.spec.most_accurate.name
    variants: list[ModelVariant] = []
    for variant in spec.variants:
        may = [
            profile
            for profile in variant.profiles
            if (variant.name, profile.slice) not in app.failing or (variant.name, profile.slice) == (best, "7g")
        ]
        if may:
            variants.append(ModelVariant(name=variant.name, accuracy_pct=variant.accuracy_pct, profiles=may))
    known = {(variant.name, profile.slice) for variant in variants for profile in variant.profiles}
    there = [
        VariantInstances(variant=variant, slice=slice_name(size), count=count)
        for (name, variant, size), count in sorted(running.items())
        if name == app.name and count > 0 and (variant, size) in known
    ]
    sizes = [int(each.slice[0]) for each in there for _ in range(each.count)]
    return PartitionApplication.of(
        spec,
        name=app.name,
        variants=variants,
        requests_per_s=app.rate_per_s,
        running=there if can_be_cut(counts_of(sizes), gpus) else [],
    )


def slice_name(size: str) -> SliceName:
    """Return a slice's name as contracts spell it."""
    return SLICE_NAMES[SLICE_NAMES.index(size)]  # pyright: ignore[reportArgumentType]


def layouts_for(
    wanted: Mapping[Kind, int], sizes: Mapping[Gpu, Sizes], running: Mapping[Gpu | None, int]
) -> dict[Gpu, Sizes]:
    """Return how to cut GPUs to hold some instances, so that few GPUs are cut and few instances have to stop for it.

    Raises:
        DomainError: The GPUs cannot hold the instances.
    """
    gpus = sorted(sizes)
    slices = counts_of([int(size[0]) for _, _, size in Counter(dict(wanted)).elements()])
    now = [layout_of(sizes[gpu]) - 1 for gpu in gpus]
    found = realise(slices, now, [1.0 + INSTANCE_COST * running.get(gpu, 0) for gpu in gpus])
    # A layout that no GPU has yet counts its slices in the order of the paper; what stays, stays as it is.
    return {
        gpu: sizes_of(layout + 1) if at in found.recut or layout_of(sizes[gpu]) == 1 else sizes[gpu]
        for at, (gpu, layout) in enumerate(zip(gpus, found.layouts, strict=True))
    }


def wanted_of(result: PartitionResult) -> Counter[Kind]:
    return Counter(
        {(plan.name, each.variant, each.slice): each.count for plan in result.applications for each in plan.instances}
    )


class SlaModel:
    """Tells whether some instances serve the applications within their SLAs, by the closed-form queue model."""

    def __init__(self, apps: Iterable[PlannedApp], idle_w: float, running: Counter[Kind]) -> None:
        """Take the applications, and the instances that are ready now."""
        self._apps = list(apps)
        self._idle_w, self._running = idle_w, running

    @cached_property
    def late(self) -> frozenset[str]:
        """The applications whose SLA is broken already, as observed or by the model."""
        return frozenset(app.name for app in self._apps if app.is_late or not self._keeps(app, self._running))

    def broken_by(self, wanted: Counter[Kind]) -> str | None:
        """Return the first application that these instances would not serve within its SLA, late ones last.

        None while an application has no instance at all: that is worse than late answers.
        """
        if {app.name for app in self._apps} - {name for name, _, _ in self._running}:
            return None
        bound = (app for app in self._apps if app.spec.repartition is not Repartition.ANY_TIME)
        broken = [app.name for app in bound if not self._keeps(app, wanted)]
        return min(broken, key=lambda name: name in self.late, default=None)

    def _keeps(self, app: PlannedApp, instances: Counter[Kind]) -> bool:
        application = in_core(app, self._idle_w)
        rows = {name: row for row, name in enumerate(application.variants)}
        weights = np.zeros((1, *application.service_s.shape), dtype=np.int64)
        for (name, variant, size), count in instances.items():
            if name == app.name and variant in rows:
                weights[0, rows[variant], SLICE_NAMES.index(size)] += count  # pyright: ignore[reportArgumentType]
        weights[0][~application.fits] = 0
        if not weights.any():
            return False
        found = predict(application, weights, 1, app.rate_per_s)
        return bool(found.load[0] < 1 and 1_000 * found.p95_s[0] <= app.spec.sla_p95_ms)
