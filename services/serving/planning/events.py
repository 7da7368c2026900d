"""Why a pool is planned before it is due: what has changed since its newest plan was made. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain

from services.contracts.serving import PlanTrigger, PoolPlanResult, PoolSpec
from services.serving.planning.cluster import Cluster, gpus_by_place, installed_by_place, misfits

INTENSITY_TOLERANCE = 0.25  #: How far an intensity may be from its forecast, as a share of the places' mean intensity
DEMAND_WINDOWS = 3
"""A peak of one or two windows of 5 s is what queues are for; from this many known windows on, the mean counts."""

Gpus = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Standing:
    """The newest plan of a pool that is in force, proposed, or was refused because it no longer fitted."""

    pool: str  #: The pool's name
    spec: PoolSpec  #: The spec it was made for, which is still the pool's
    plan_id: str  #: The plan
    made: PoolPlanResult  #: The plan and the forecasts it was made from
    from_at: datetime  #: When it begins
    slot_at: datetime  #: When the interval that it is for begins by the clock
    was_refused: bool  #: Whether it no longer fitted when it was to be applied
    event_at: datetime | None  #: When the pool was last planned because of an event, if it was


@dataclass(frozen=True)
class Present:
    """The present."""

    now: datetime  #: The database's time
    cluster: Cluster  #: The nodes
    qps: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """Requests per second over the last known windows, by what a partition is counted as and by class."""
    intensity: Mapping[str, float] = field(default_factory=dict[str, float])
    """gCO2/kWh by place; empty where it is unknown or nothing depends on it."""


def event_of(standing: Standing, present: Present) -> PlanTrigger | None:
    """Return the most urgent reason to plan a pool again, if there is one."""
    spec, known, cluster = standing.spec, standing.made.forecasts, present.cluster
    nodes = cluster.nodes_for(standing.pool)
    gpus = {place: has.models for place, has in gpus_by_place(spec, nodes).items()}
    installed = _of_modes(spec, installed_by_place(spec, cluster.installed()))
    before = _of_modes(spec, known.installed)
    # What did not fit when the plan was made is no news.
    fewer = is_any_less(gpus, known.gpus)
    if is_any_less(installed, before):
        return PlanTrigger.NODE_LOST
    if standing.was_refused or (fewer and misfits(spec, standing.made.plan, nodes)):
        return PlanTrigger.SHORTFALL
    if standing.made.plan.shortfall and is_any_less(known.gpus, gpus):
        return PlanTrigger.GPUS_FREED
    if known.ordered != cluster.ordered_places(spec):
        return PlanTrigger.GRID_ORDER
    if is_demand_above(standing, present.qps):
        return PlanTrigger.DEMAND
    if known.installed and is_any_less(before, installed):
        return PlanTrigger.NODE_BACK
    if is_intensity_off(standing, present):
        return PlanTrigger.INTENSITY
    return None


def is_demand_above(standing: Standing, qps: Mapping[str, Mapping[str, float]]) -> bool:
    """Return whether a class of the plan's partition gets more requests than were planned for with head-room."""
    chosen = standing.made.plan.partition
    part = next((each for each in standing.spec.partitions if each.name == chosen), None)
    forecast = standing.made.forecasts.demand.get(chosen or "")
    if part is None or forecast is None:
        return False
    return any(
        rate > standing.spec.head_room * max(forecast.peaks_qps.get(name, [0.0]))
        for name, rate in qps.get(part.counted_as, {}).items()
    )


def is_intensity_off(standing: Standing, present: Present) -> bool:
    """Return whether an intensity differs from its forecast by more than ``INTENSITY_TOLERANCE``."""
    known, step_s = standing.made.forecasts.intensity, standing.made.forecasts.step_s
    step = int((present.now - standing.from_at).total_seconds() // step_s)
    if not known or not 0 <= step < standing.spec.plan_steps or present.intensity.keys() != known.keys():
        return False
    planned = {place: each.gco2_per_kwh[min(step, len(each.gco2_per_kwh) - 1)] for place, each in known.items()}
    scale = sum(map(abs, planned.values())) / len(planned)
    return any(abs(present.intensity[place] - value) > INTENSITY_TOLERANCE * scale for place, value in planned.items())


def mean_qps(
    windows: Mapping[datetime, Mapping[str, Mapping[str, int]]], window_s: float
) -> dict[str, dict[str, float]]:
    """Return mean rates over known windows, by what a partition is counted as and by class; none for too few windows.

    Args:
        windows: Counts by the window's start, all sources together.
    """
    if len(windows) < DEMAND_WINDOWS:
        return {}
    found: dict[str, dict[str, float]] = {}
    for counted_as, counts in chain.from_iterable(each.items() for each in windows.values()):
        rates = found.setdefault(counted_as, {})
        for name, count in counts.items():
            rates[name] = rates.get(name, 0.0) + count / (len(windows) * window_s)
    return found


def _of_modes(spec: PoolSpec, gpus: Gpus) -> Gpus:
    models = {mode.gpu_model for mode in spec.modes}
    return {place: {model: count for model, count in has.items() if model in models} for place, has in gpus.items()}


def is_any_less(these: Gpus, those: Gpus) -> bool:
    """Return whether a place has fewer GPUs of a model in ``these`` than in ``those``."""
    pairs = [(place, model, count) for place, has in those.items() for model, count in has.items()]
    return any(these.get(place, {}).get(model, 0) < count for place, model, count in pairs)
