"""Makes the problem of a pool's next plan from its spec, forecasts, nodes and running instances. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from services.contracts import pools
from services.contracts.carbon import IntensityForecast, curve_of
from services.contracts.serving import (
    DemandForecast,
    PlaceIntensity,
    PlanForecasts,
    PoolPartition,
    PoolSpec,
    ServerMode,
)
from services.core.domain.errors import DomainError
from services.core.domain.packing import divide_each_other
from services.core.domain.serving import MAX_REGIONS, STEP_S, STEPS_AHEAD
from services.serving.instances import InstanceTerms, pool_blueprint
from services.serving.planning.cluster import PlaceGpus

MAX_TYPES = 50  #: Of GPUs in one problem
ORDERED = 100.0  #: How many times the highest price a kWh costs where an order of the grid is in force
FITS = "fits--"
"""Begins the name of a stand-in for a GPU type: it says how many instances of a size fit on whole nodes of a place."""


@dataclass(frozen=True)
class Running:
    """An instance that runs or is starting."""

    place: str
    mode: str
    terms: InstanceTerms  #: The specs that it was made from
    up_s: float  #: Seconds since it was ready, or else created


def intensity_of(forecast: IntensityForecast, from_s: float, steps: int = STEPS_AHEAD) -> PlaceIntensity:
    """Return a forecast's means over the steps from ``from_s`` on; its first and last values hold beyond its ends."""
    curve = curve_of(forecast.points)
    starts_s = [from_s + step * STEP_S for step in range(steps)]
    means = [curve.mean(start_s, start_s + STEP_S) for start_s in starts_s]
    return PlaceIntensity.of(forecast, gco2_per_kwh=means)


def check_signals(spec: PoolSpec, intensity: Mapping[str, PlaceIntensity]) -> None:
    """Refuse, by a ``DomainError``, to compare the carbon of places whose signals differ."""
    of_signal = {found.signal: place for place, found in reversed(list(intensity.items()))}
    if spec.objective == "carbon" and len(of_signal) > 1:
        said = " and ".join(f"{place} has {signal}" for signal, place in sorted(of_signal.items()))
        raise DomainError(f"Intensities of different signals are never compared: {said}. Set the places' signal.")


def problem_of(
    spec: PoolSpec,
    demand: Mapping[str, DemandForecast],
    intensity: Mapping[str, PlaceIntensity],
    gpus: Mapping[str, PlaceGpus],
    instances: Sequence[Running],
    time_limit_s: float,
    in_force: pools.PoolsResult | None = None,
    floors: Mapping[float, float] | None = None,
    ordered: Sequence[str] = (),
) -> pools.PoolsRequest:
    """Return the problem for the five-minute steps until the pool is planned again.

    While an order of the grid is in force in some places, as little energy as may be is planned there, and of such
    plans the one that is best by the spec's objective, by prices that say so; the order's time is not looked at, since
    the pool is planned again when it ends.

    Args:
        demand: Demand by partition, of which the first steps are taken.
        intensity: Intensity by place; empty if it is unknown and the objective is not carbon.
        instances: The pool's own; those made from other terms than the spec's will be replaced and do not count.
        time_limit_s: Longest time to solve, besides the spec's own limit.
        in_force: The plan that the search begins from.
        floors: The accuracies that keys ask for at least, per cent, each with its share of the requests, 0 .. 1.
        ordered: The places in which an order of the grid is in force.

    Raises:
        ValidationError: It is inconsistent, or too large.
    """
    stand_ins = _stand_ins(spec.modes, gpus)
    named = {(mode.gpu_model, mode.gpus): mode.name for mode in spec.modes}
    types = {
        place: {**has.models, **{of: has.fits[named[size]] for size, of in stand_ins.items()}}
        for place, has in gpus.items()
    }
    modes = [_mode(spec, mode, stand_ins) for mode in spec.modes]
    prices = _prices(spec, intensity, set(ordered))
    steps, follows_load = spec.plan_steps, any(mode.idle_w is not None for mode in spec.modes)
    return pools.PoolsRequest.of(
        spec,
        time_limit_s=min(spec.time_limit_s, time_limit_s),
        objective="cost" if ordered else spec.objective,
        step_s=STEP_S,
        locations=[
            pools.PoolLocation(
                name=place.name,
                gpus=types[place.name],
                intensity=intensity[place.name].gco2_per_kwh[:steps] if intensity else [0.0] * steps,
                nodes=_whole_nodes(spec.modes, gpus[place.name]),
                price_per_kwh=prices[place.name],
            )
            for place in spec.places
        ],
        regions=_regions(spec, floors or {}),
        modes=modes,
        partitions=[_partition(part, demand[part.name], steps, follows_load) for part in spec.partitions],
        running=_running(spec, modes, types, instances),
        incumbent=None
        if in_force is None or in_force.partition is None
        else pools.Incumbent(partition=in_force.partition, instances=in_force.instances),
    )


def _prices(
    spec: PoolSpec, intensity: Mapping[str, PlaceIntensity], ordered: Set[str]
) -> dict[str, list[float] | None]:
    """Return the price of a kWh by place and step: the spec's, or under an order ``ORDERED`` times the highest there.

    Without prices the objective is carbon or energy, and what counts for it is taken for one.
    """
    steps = spec.plan_steps
    stated = {place.name: place.price_per_kwh for place in spec.places}
    if not ordered:
        return {name: None if price is None else [price] * steps for name, price in stated.items()}
    if spec.objective == "cost":
        rates = {name: [price or 0.0] * steps for name, price in stated.items()}
    else:
        rates = {name: intensity[name].gco2_per_kwh[:steps] if intensity else [0.0] * steps for name in stated}
    highest = max((abs(rate) for found in rates.values() for rate in found), default=0.0) or 1.0
    share, same = (pools.TIE_SHARE, 1.0) if spec.objective == "energy" else (1.0, 0.0)  # the cleaner of equal ones
    return {
        name: [same + share * rate / highest + ORDERED * (name in ordered) for rate in found]
        for name, found in rates.items()
    }


def result_of(request: pools.PoolsRequest, result: pools.PoolsResult, forecasts: PlanForecasts) -> pools.PoolsResult:
    """Return a plan in its pool's terms: without stand-in GPU types, or sums over different or unknown signals.

    A shortfall gets the reasons that only the nodes tell: GPUs that others hold, and models that no node has.
    """
    changes: dict[str, Any] = {"cost": None} if forecasts.ordered else {}
    changes |= {"full": [each for each in result.full if not each.gpu_type.startswith(FITS)]}
    if len({each.signal for each in forecasts.intensity.values()}) != 1:
        changes["emissions_kg"] = None
    if result.shortfall and forecasts.installed:
        takes = {mode.name: next(of for of in mode.gpus if not of.startswith(FITS)) for mode in request.modes}
        installed, available = _by_model(forecasts.installed), _by_model(forecasts.gpus)
        part = next(each for each in request.partitions if each.name == result.partition)
        usable = {
            each.name: {takes[profile.mode] for profile in each.profiles if profile.max_qps and each.admits(profile)}
            for each in part.classes
        }
        changes["shortfall"] = [
            _with_reason(each, usable[each.request_class], installed, available) for each in result.shortfall
        ]
        unknown = sorted({of for models in usable.values() for of in models if not installed[of]})
        if unknown:
            there = ", ".join(sorted(+installed)) or "none"
            names = " or ".join(unknown)
            said = f"No node in the pool's places has a whole GPU of model {names} outside fleets, but: {there}."
            changes["note"] = f"{result.note} {said}".lstrip()
    return result.model_copy(update=changes)


def _by_model(gpus: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    return sum((Counter(of) for of in gpus.values()), Counter[str]())


def _with_reason(
    unserved: pools.UnservedDemand, models: Set[str], installed: Counter[str], available: Counter[str]
) -> pools.UnservedDemand:
    if unserved.reason == "no_mode":
        return unserved
    if not any(installed[of] for of in models):
        return unserved.model_copy(update={"reason": "no_gpus"})
    if any(installed[of] > available[of] for of in models):
        return unserved.model_copy(update={"reason": "gpus_held"})
    return unserved


def _stand_ins(modes: Sequence[ServerMode], gpus: Mapping[str, PlaceGpus]) -> dict[tuple[str, int], str]:
    """Return a stand-in GPU type for each model and size that fits on nodes less often than their total suggests."""
    taken = len({mode.gpu_model for mode in modes})
    cut = {
        (mode.gpu_model, mode.gpus)
        for mode in modes
        if any(has.fits[mode.name] < has.models[mode.gpu_model] // mode.gpus for has in gpus.values())
    }
    return {size: f"{FITS}{index}" for index, size in enumerate(sorted(cut)[: max(0, MAX_TYPES - taken)])}


def _whole_nodes(modes: Sequence[ServerMode], gpus: PlaceGpus) -> list[pools.LocationNodes]:
    """Return the nodes of each model whose modes' sizes do not divide each other; for the others, stand-ins suffice."""
    found: list[pools.LocationNodes] = []
    for model in gpus.models:
        if divide_each_other([mode.gpus for mode in modes if mode.gpu_model == model]):
            continue
        kinds = Counter(min(count, pools.MAX_NODE_GPUS) for count in gpus.nodes.get(model, ()))
        found += [
            pools.LocationNodes(gpu_type=model, nodes=nodes, gpus=count) for count, nodes in sorted(kinds.items())
        ]
    return found


def _mode(spec: PoolSpec, mode: ServerMode, stand_ins: Mapping[tuple[str, int], str]) -> pools.PoolMode:
    """Return a mode; it takes as many of a smaller size's stand-in as instances of that size would fit in it.

    Where the sizes of modes divide each other, as powers of two do, instances that satisfy this for all sizes fit on
    the nodes together (Marcotte, 1985).
    """
    gpus = {mode.gpu_model: mode.gpus}
    for (model, size), of in stand_ins.items():
        if model == mode.gpu_model and mode.gpus >= size:
            gpus[of] = mode.gpus // size
    start_wh, stop_wh = spec.switching_wh(mode)
    return pools.PoolMode.of(mode, gpus=gpus, start_wh=start_wh, stop_wh=stop_wh)


def _regions(spec: PoolSpec, floors: Mapping[float, float]) -> list[pools.ClientRegion]:
    """Return the regions that requests come from, each divided by the accuracy that they ask for at least.

    Floors that the same modes meet are one, and one that no mode meets is none. Where that makes more regions than a
    plan may have, the highest floors become one, or with more than half as many regions in the spec, none.
    """
    stated = sorted({mode.accuracy_pct for mode in spec.modes if mode.accuracy_pct is not None})
    shares: dict[float, float] = {}
    for floor, share in sorted(floors.items()):
        least = next((each for each in stated if each >= floor), 0.0)
        if least and least > stated[0]:
            shares[least] = shares.get(least, 0.0) + share
    regions = spec.regions or [pools.ClientRegion(name="all")]
    room = MAX_REGIONS // len(regions) - 1
    while len(shares) > room > 0:
        *_, second, highest = shares
        shares[highest] += shares.pop(second)
    if not shares or not room:
        return spec.regions
    parts = [(0.0, max(1.0 - sum(shares.values()), 0.0)), *shares.items()]
    return [
        pools.ClientRegion(
            name=f"{region.name[:50]}--{number}",
            share=region.share * share,
            network_ms=region.network_ms,
            least_accuracy_pct=max(least, region.least_accuracy_pct or 0.0) or None,
        )
        for region in regions
        for number, (least, share) in enumerate(parts)
        if share > 0
    ]


def _partition(part: PoolPartition, demand: DemandForecast, steps: int, follows_load: bool) -> pools.RequestPartition:
    return pools.RequestPartition(
        name=part.name,
        classes=[
            pools.RequestClass(  # a class's terms, and how much of it
                **dict(each),
                demand_qps=peaks,
                mean_qps=[demand.mean_shares.get(each.name, 1.0) * qps for qps in peaks] if follows_load else None,
            )
            for each in part.classes
            for peaks in [demand.peaks_qps[each.name][:steps]]
        ],
    )


def _running(
    spec: PoolSpec,
    modes: Sequence[pools.PoolMode],
    types: Mapping[str, Mapping[str, int]],
    instances: Sequence[Running],
) -> list[pools.RunningInstances]:
    """Return the running instances; young ones are kept only as far as there are GPUs for them.

    GPUs may have been lost since they started: a node is drained, or the spec allows fewer.
    """
    left = {place: Counter(has) for place, has in types.items()}
    takes = {mode.name: mode.gpus for mode in modes}
    blueprint = pool_blueprint(spec)
    found: list[pools.RunningInstances] = []
    for each in instances:
        if not blueprint.is_current((each.place, each.mode), each.terms.process()):
            continue
        young = each.up_s < spec.min_up_s and all(left[each.place][of] >= n for of, n in takes[each.mode].items())
        if young:
            left[each.place].subtract(takes[each.mode])
        up_s = max(each.up_s, 0.0) if young else None
        found.append(pools.RunningInstances(location=each.place, mode=each.mode, instances=1, up_s=up_s))
    return found
