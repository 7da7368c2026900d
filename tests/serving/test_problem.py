"""From spec, forecasts, nodes and instances to the problem: what a place has, what counts as running."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.contracts.carbon import ForecastPoint, IntensityForecast
from services.contracts.pools import PoolsProblem, PoolsResult
from services.contracts.serving import DemandForecast, PlaceIntensity, PlanForecasts, PoolPartition, PoolSpec
from services.core.domain.carbon import Signal
from services.core.domain.errors import DomainError
from services.serving.instances import InstanceTerms
from services.serving.planning.cluster import Need, Node, gpus_by_place, misfits, without_needs
from services.serving.planning.problem import Running, check_signals, intensity_of, problem_of, result_of
from services.solving.pools import incumbent_plan, solve_pools
from tests.serving.pools import LIMITS, SERVED, ZONE, a_spec

PROFILE = {"max_qps": 2, "power_w": 300, **SERVED}


def a_node(gpus: int = 4, zone: str = ZONE, **labels: str) -> Node:
    return Node(zone, labels, {"A100": gpus})


def demand_of(spec: PoolSpec, qps: float) -> dict[str, DemandForecast]:
    return {
        part.name: DemandForecast(
            method="test", is_assumed=False, history_s=0, peaks_qps={each.name: [qps] * 6 for each in part.classes}
        )
        for part in spec.partitions
    }


def intensities_of(spec: PoolSpec, *signals: Signal) -> dict[str, PlaceIntensity]:
    source = {"zone": ZONE, "provider": "p", "method": "m", "generated_at": datetime.now(UTC), "is_stale": False}
    given = signals or (Signal.AVERAGE_DIRECT,) * len(spec.places)
    return {
        place.name: PlaceIntensity(**source, signal=signal, gco2_per_kwh=[100.0 * (index + 1)] * 6)
        for index, (place, signal) in enumerate(zip(spec.places, given, strict=True))
    }


def forecasts_of(spec: PoolSpec, *signals: Signal, **gpus: dict[str, int]) -> PlanForecasts:
    """Return forecasts with ``gpus`` and ``installed`` of the place west."""
    return PlanForecasts(
        step_s=300,
        demand={},
        intensity=intensities_of(spec, *signals),
        gpus={"west": gpus.get("available", {})},
        installed={"west": gpus["installed"]} if "installed" in gpus else {},
    )


def an_instance(spec: PoolSpec, mode: str = "small", up_s: float = 10.0, place: str = "west") -> Running:
    terms = InstanceTerms(
        mode=next(each for each in spec.modes if each.name == mode),
        place=next(each for each in spec.places if each.name == place),
        probes=spec.probes,
    )
    return Running(place, mode, terms, up_s)


def asked(
    spec: PoolSpec,
    nodes: list[Node],
    instances: list[Running] | None = None,
    qps: float = 1.0,
    in_force: PoolsResult | None = None,
) -> PoolsProblem:
    gpus = gpus_by_place(spec, nodes)
    request = problem_of(spec, demand_of(spec, qps), intensities_of(spec), gpus, instances or [], 5.0, in_force)
    return PoolsProblem.model_validate(request.model_dump())


def test_a_place_has_the_gpus_of_its_zone_and_labels_up_to_its_limit() -> None:
    places = [
        {"name": "fast", "zone": ZONE, "node_labels": {"net": "ib"}},
        {"name": "rest", "zone": ZONE, "gpus": {"A100": 5}},
        {"name": "far", "zone": "DE"},
        {"name": "none", "zone": "DE", "gpus": {"H100": 9}, "node_labels": {"x": "y"}},
    ]
    nodes = [a_node(4, net="ib", rack="1"), a_node(4), a_node(4, net="eth"), a_node(2, zone="DE"), a_node(8, zone="FR")]
    gpus = gpus_by_place(a_spec(places=places), nodes)
    assert {name: has.models["A100"] for name, has in gpus.items()} == {"fast": 4, "rest": 5, "far": 2, "none": 0}


def test_what_other_pools_wait_for_is_theirs() -> None:
    nodes = [a_node(1), a_node(4, net="ib"), a_node(4)]
    idle = [Counter(node.gpus) for node in nodes]
    needs = [Need(ZONE, {}, "A100", 2), Need(ZONE, {}, "A100", 2), Need(ZONE, {}, "A100", 2), Need("DE", {}, "A100", 1)]
    assert [node.gpus["A100"] for node in without_needs(nodes, needs, idle)] == [1, 0, 2]
    crowded = without_needs(nodes[:1], needs[:1], idle[:1])
    assert crowded[0].gpus["A100"] == 1, "what fits nowhere takes nothing"
    assert without_needs([], needs, []) == []
    yielded = without_needs(nodes, [Need(ZONE, {}, "A100", 4)], [Counter({"A100": 1}) for _ in nodes])
    assert sum(node.gpus["A100"] for node in yielded) == 5, "where no idle ones suffice, they get the pool's own"


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 4)), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_what_others_wait_for_is_all_theirs_where_it_has_room(
    filled: list[tuple[list[int], int]], draw: random.Random
) -> None:
    sizes = [size for sizes, _ in filled for size in sizes]
    draw.shuffle(sizes)
    nodes = [a_node(sum(sizes) + own) for sizes, own in filled]
    idle = [Counter({"A100": sum(sizes)}) for sizes, _ in filled]
    left = without_needs(nodes, [Need(ZONE, {}, "A100", size) for size in sizes], idle)
    assert [node.gpus["A100"] for node in left] == [own for _, own in filled], "the pool's own stay with it"


def test_an_instance_needs_its_gpus_on_one_node() -> None:
    spec = a_spec()
    problem = asked(spec, [a_node(3), a_node(3)], qps=12.0)
    result = solve_pools(problem)
    assert {each.mode: each.count for each in result.instances} == {"large": 2, "small": 2}
    on_one_node = solve_pools(asked(spec, [a_node(6)], qps=12.0))
    assert {each.mode: each.count for each in on_one_node.instances} == {"large": 3}
    shown = result_of(problem, result, forecasts_of(spec))
    assert {each.gpu_type for each in shown.full} <= {"A100"}
    assert not asked(spec, [a_node(4), a_node(4)]).modes[1].gpus.keys() - {"A100"}, "where it makes no difference"


def test_modes_that_share_a_node_fit_on_it_together() -> None:
    spec = a_spec()
    four = spec.modes[1].model_copy(update={"name": "four", "gpus": 4})
    classes = spec.partitions[0].classes[0]
    best = classes.profiles[0].model_copy(update={"mode": "four", "max_qps": 11, "power_w": 900})
    part = spec.partitions[0].model_copy(
        update={"classes": [classes.model_copy(update={"profiles": [*classes.profiles[1:], best]})]}
    )
    mixed = spec.model_copy(update={"modes": [*spec.modes[1:], four], "partitions": [part]})
    nodes = [a_node(5), a_node(5)]
    problem = asked(mixed, nodes, qps=24.0)  # two of four and one of two, by the number of GPUs
    result = solve_pools(problem)
    assert {each.mode: each.count for each in result.instances} == {"four": 2}
    assert misfits(mixed, result, nodes) == []
    assert [each.qps for each in result.shortfall] == [pytest.approx(24 * 1.1 - 22)]


def test_modes_whose_sizes_do_not_divide_each_other_fit_on_whole_nodes() -> None:
    """Three nodes of 6 hold two instances of 4 and two of 3; by their number of GPUs there would be room for three."""
    spec = a_spec()
    modes = [spec.modes[0].model_copy(update={"gpus": 3}), spec.modes[1].model_copy(update={"gpus": 4})]
    small = {"mode": "small", "max_qps": 3, "power_w": 900, "ttft_ms": 100, "tbt_ms": 20}
    large = small | {"mode": "large", "max_qps": 4, "power_w": 800}
    part = PoolPartition.model_validate({"name": "one", "classes": [{"name": "all", "profiles": [small, large]}]})
    spec = spec.model_copy(update={"modes": modes, "partitions": [part], "head_room": 1.0})
    nodes = [a_node(6)] * 3
    result = solve_pools(asked(spec, nodes, qps=14.0))
    assert {each.mode: each.count for each in result.instances} == {"large": 2, "small": 2}
    assert misfits(spec, result, nodes) == []
    crowded = solve_pools(asked(spec, nodes, qps=17.0))
    assert {each.mode: each.count for each in crowded.instances} == {"small": 6}, (
        "two of 4 and three of 3 would be less"
    )
    assert misfits(spec, crowded, nodes) == []


def test_without_intensities_a_plan_of_least_energy_is_made() -> None:
    spec = a_spec(objective="energy")
    gpus = gpus_by_place(spec, [a_node(4)])
    problem = problem_of(spec, demand_of(spec, 1.0), {}, gpus, [], 5.0)
    forecasts = PlanForecasts(step_s=300, demand={}, intensity={}, gpus={})
    shown = result_of(problem, solve_pools(PoolsProblem.model_validate(problem.model_dump())), forecasts)
    assert (shown.emissions_kg, shown.energy_kwh) == (None, pytest.approx(0.15 + 0.3 * 120 / 3_600)), "and a start"


@pytest.mark.parametrize(
    ("installed", "reason", "note"),
    [
        ({"A100": 2}, "gpus", ""),
        ({"A100": 4}, "gpus_held", ""),
        (
            {"A100-SXM4-40GB": 8},
            "no_gpus",
            "No node in the pool's places has a whole GPU of model A100 outside fleets, but: A100-SXM4-40GB.",
        ),
    ],
)
def test_a_shortfall_says_whether_gpus_are_too_few_or_held_or_unknown(
    installed: dict[str, int], reason: str, note: str
) -> None:
    spec = a_spec()
    available = min(2, installed.get("A100", 0))
    problem = asked(spec, [a_node(available)], qps=12.0)
    forecasts = forecasts_of(spec, installed=installed, available={"A100": available})
    shown = result_of(problem, solve_pools(problem), forecasts)
    assert [(each.reason, shown.note) for each in shown.shortfall] == [(reason, note)]


def test_instances_of_today_s_terms_run_and_others_do_not() -> None:
    spec = a_spec(min_up_s=60)
    other = a_spec(modes=[{**spec.modes[0].model_dump(), "command": ["serve", "--fp8"]}, spec.modes[1].model_dump()])
    instances = [an_instance(spec, up_s=10), an_instance(spec, "large", up_s=90), an_instance(other, up_s=10)]
    running = asked(spec, [a_node(8)], instances).running
    assert [(each.mode, each.instances, each.up_s) for each in running] == [("small", 1, 10), ("large", 1, None)]


def test_a_price_or_a_limit_is_no_reason_to_replace_an_instance() -> None:
    spec = a_spec()
    dearer = a_spec(places=[{"name": "west", "zone": ZONE, "price_per_kwh": 0.3, "gpus": {"A100": 4}}])
    assert len(asked(dearer, [a_node(8)], [an_instance(spec)]).running) == 1
    renamed = a_spec(places=[{"name": "other", "zone": ZONE}])
    assert asked(renamed, [a_node(8)], [an_instance(spec)]).running == []


def test_young_instances_whose_gpus_are_gone_do_not_break_the_plan() -> None:
    spec = a_spec(min_up_s=600)
    problem = asked(spec, [a_node(3)], [an_instance(spec, "large"), an_instance(spec, "large"), an_instance(spec)])
    assert [each.up_s for each in problem.running] == [10, None, 10]
    plan = solve_pools(problem)
    assert sum(each.count for each in plan.instances) == 2


def test_the_intensity_of_a_step_is_its_mean_and_goes_on_beyond_the_forecast() -> None:
    begins = datetime(2026, 3, 1, tzinfo=UTC)
    points = [
        ForecastPoint(
            start_at=begins + timedelta(seconds=at), end_at=begins + timedelta(seconds=at + 240), gco2_per_kwh=of
        )
        for at, of in [(0, 100.0), (240, 200.0), (480, -50.0)]
    ]
    source = {"zone": ZONE, "provider": "p", "method": "ridge", "generated_at": begins, "time_scale": 60.0}
    forecast = IntensityForecast(**source, signal=Signal.MARGINAL, is_stale=True, points=points)
    found = intensity_of(forecast, begins.timestamp() + 60)
    assert found.gco2_per_kwh == pytest.approx(
        [(180 * 100 + 120 * 200) / 300, (120 * 200 - 180 * 50) / 300, *[-50] * 4]
    )
    assert (found.signal, found.method, found.is_stale) == (Signal.MARGINAL, "ridge", True)


def test_different_signals_are_never_compared() -> None:
    places = [{"name": "a", "zone": ZONE}, {"name": "b", "zone": ZONE}]
    mixed = (Signal.AVERAGE_DIRECT, Signal.MARGINAL)
    spec = a_spec(places=places)
    with pytest.raises(DomainError, match="a has average_direct and b has marginal"):
        check_signals(spec, intensities_of(spec, *mixed))
    check_signals(spec, intensities_of(spec, Signal.MARGINAL, Signal.MARGINAL))
    by_energy = a_spec(places=places, objective="energy")
    check_signals(by_energy, intensities_of(by_energy, *mixed))
    problem = asked(by_energy, [a_node(4)])
    shown = result_of(problem, solve_pools(problem), forecasts_of(by_energy, *mixed))
    assert shown.emissions_kg is None, "nor added up"


def test_the_greener_place_is_planned_and_prices_hold_for_all_steps() -> None:
    places: list[dict[str, Any]] = [
        {"name": "dirty", "zone": "DE", "price_per_kwh": 0.1},
        {"name": "clean", "zone": ZONE, "price_per_kwh": 0.4},
    ]
    nodes = [a_node(8), a_node(8, zone="DE")]
    green = a_spec(places=places[::-1])  # intensities rise in the order of places
    assert {each.location for each in solve_pools(asked(green, nodes)).instances} == {"clean"}
    cheap = a_spec(places=places[::-1], objective="cost")
    assert {each.location for each in solve_pools(asked(cheap, nodes)).instances} == {"dirty"}


@pytest.mark.parametrize("objective", ["carbon", "energy", "cost"])
@pytest.mark.parametrize(("ordered", "there"), [(["west"], "east"), (["east"], "west"), (["east", "west"], None)])
def test_under_an_order_as_little_as_may_be_is_drawn_where_it_is_in_force(
    objective: str, ordered: list[str], there: str | None
) -> None:
    """By what the objective says otherwise: west is cleaner, and cheaper."""
    places = [
        {"name": "west", "zone": ZONE, "price_per_kwh": 0.1},
        {"name": "east", "zone": "DE", "price_per_kwh": 0.3},
    ]
    spec = a_spec(places=places, objective=objective)
    gpus = gpus_by_place(spec, [a_node(4), a_node(4, zone="DE")])
    found = {}
    for name, zones in (("free", []), ("ordered", ordered)):
        request = problem_of(spec, demand_of(spec, 5), intensities_of(spec), gpus, [], 5.0, ordered=zones)
        problem = PoolsProblem.model_validate(request.model_dump())
        found[name] = result_of(request, solve_pools(problem), forecasts_of(spec).model_copy(update={"ordered": zones}))
    plan, free = found["ordered"], found["free"]
    assert {each.location for each in plan.instances} == {there or "west"}
    assert not plan.shortfall
    assert plan.cost is None, "prices that say where power is to be saved are nobody's cost"
    assert free.cost is not None
    assert plan.emissions_kg is not None
    assert free.emissions_kg is not None
    assert plan.energy_kwh is not None
    # As reported, the emissions are those of the grid: 100 g in the west, 200 in the east.
    assert plan.emissions_kg / plan.energy_kwh == pytest.approx(0.2 if there == "east" else 0.1)


def test_under_an_order_what_has_no_other_place_draws_less_if_it_can() -> None:
    """The clean hour, in which more energy would not matter, does not count while it lasts."""
    modes = [
        {"name": name, "gpu_model": "A100", "gpus": 1, "command": ["serve"], "start_wh": 0} for name in ("fast", "lean")
    ]
    profiles = [
        {"mode": name, "max_qps": 2, "power_w": watts, **SERVED} for name, watts in (("fast", 301), ("lean", 300))
    ]
    parts = [{"name": "one", "classes": [{"name": "all", "profiles": profiles, **LIMITS}]}]
    spec = a_spec(modes=modes, partitions=parts)
    gpus = gpus_by_place(spec, [a_node(4)])
    intensity = {
        name: each.model_copy(update={"gco2_per_kwh": [0.0] * 6}) for name, each in intensities_of(spec).items()
    }
    request = problem_of(spec, demand_of(spec, 5), intensity, gpus, [], 5.0, ordered=["west"])
    plan = solve_pools(PoolsProblem.model_validate(request.model_dump()))
    assert {each.mode for each in plan.instances} == {"lean"}


def test_the_plan_in_force_is_where_the_search_begins_while_it_fits() -> None:
    spec = a_spec()
    nodes = [a_node(8)]
    plan = solve_pools(asked(spec, nodes))
    problem = asked(spec, nodes, in_force=plan)
    start = incumbent_plan(problem)
    assert start is not None
    assert start.totals().sum() == sum(each.count for each in plan.instances)
    again = solve_pools(problem)
    assert (again.objective, again.instances) == (plan.objective, plan.instances)
    gone = plan.model_copy(update={"instances": [plan.instances[0].model_copy(update={"mode": "gone"})]})
    assert incumbent_plan(asked(spec, nodes, in_force=gone)) is None
    assert incumbent_plan(asked(spec, nodes, in_force=plan.model_copy(update={"partition": "gone"}))) is None
    assert incumbent_plan(asked(spec, nodes)) is None


def test_a_plan_is_for_the_steps_until_the_next() -> None:
    request = asked(a_spec(plan_every_min=10), [a_node()])
    assert {len(place.intensity) for place in request.locations} == {2}
    assert {len(each.demand_qps) for part in request.partitions for each in part.classes} == {2}
    assert {len(place.intensity) for place in asked(a_spec(), [a_node()]).locations} == {6}


def test_starts_and_stops_are_priced_at_full_power_unless_stated() -> None:
    spec = a_spec()
    prices = {mode.name: (mode.start_wh, mode.stop_wh) for mode in asked(spec, [a_node()]).modes}
    assert prices == {
        "small": (10.0, pytest.approx(300 * 10 / 3_600)),
        "large": (550 * 120 / 3_600, pytest.approx(550 / 360)),
    }
    stated = spec.modes[0].model_copy(update={"start_wh": 0.0, "stop_wh": 2.0})
    slower = spec.modes[1].model_copy(update={"start_s": 600.0})
    changed = asked(spec.model_copy(update={"modes": [stated, slower]}), [a_node()]).modes
    assert [(mode.start_wh, round(mode.stop_wh, 3)) for mode in changed] == [
        (0.0, 2.0),
        (pytest.approx(550 / 6), 1.528),
    ]


PLACES = [{"name": "west", "zone": ZONE}, {"name": "east", "zone": "DE"}]


def placed(regions: list[dict[str, Any]], qps: float = 4.0) -> PoolsResult:
    """Plan for two places, the first the cleaner, with a TTFT of 100 ms of 200 ms allowed."""
    return solve_pools(asked(a_spec(places=PLACES, regions=regions), [a_node(), a_node(zone="DE")], qps=qps))


def test_requests_are_planned_for_where_the_network_leaves_them_time() -> None:
    near = {"name": "west-coast", "network_ms": {"west": 20, "east": 150}}
    far = {"name": "europe", "network_ms": {"west": 150, "east": 20}}
    assert {each.location for each in placed([]).instances} == {"west"}
    assert {each.location for each in placed([near]).instances} == {"west"}
    assert {each.location for each in placed([far]).instances} == {"east"}
    shared = placed([near | {"share": 3}, far])
    served = {each.location: each.count * {"small": 2, "large": 5}[each.mode] for each in shared.instances}
    assert served["west"] >= 0.75 * 4.4
    assert served["east"] >= 0.25 * 4.4


VARIANTS = [
    {"name": "small", "gpu_model": "A100", "gpus": 1, "command": ["serve"], "accuracy_pct": 65},
    {"name": "large", "gpu_model": "A100", "gpus": 2, "command": ["serve"], "accuracy_pct": 80},
]


def with_floors(floors: dict[float, float], qps: float = 10.0, **changes: Any) -> dict[str, float]:
    """Plan for keys that ask for some accuracy; return the requests per second that each mode could serve."""
    spec = a_spec(modes=VARIANTS, places=[{"name": "west", "zone": ZONE}], objective="energy", **changes)
    gpus = gpus_by_place(spec, [a_node(gpus=40)])
    request = problem_of(spec, demand_of(spec, qps), intensities_of(spec), gpus, [], 5.0, None, floors)
    plan = solve_pools(PoolsProblem.model_validate(request.model_dump()))
    assert plan.status == "optimal"
    served = dict.fromkeys(("small", "large"), 0.0)
    for each in plan.instances:
        served[each.mode] += each.count * {"small": 2, "large": 5}[each.mode]
    return served


def dear() -> list[dict[str, Any]]:
    """One class, which the more accurate variant serves at three times the energy."""
    profiles = [
        {"mode": "small", "max_qps": 2, "power_w": 100, **SERVED},
        {"mode": "large", "max_qps": 5, "power_w": 750, **SERVED},
    ]
    return [{"name": "one", "classes": [{"name": "all", **LIMITS, "profiles": profiles}]}]


def test_a_plan_has_room_for_the_accuracy_that_keys_ask_for() -> None:
    assert with_floors({}, partitions=dear()) == {"small": 12, "large": 0}
    asked_for = with_floors({70.0: 0.5}, partitions=dear())
    assert asked_for["large"] >= 0.5 * 11
    assert sum(asked_for.values()) >= 11
    assert with_floors({70.0: 0.01}, partitions=dear())["large"] == 5, "one instance at least"
    for everybody_or_nobody in ({60.0: 0.9}, {81.0: 0.5}):
        assert with_floors(everybody_or_nobody, partitions=dear())["large"] == 0


def test_floors_divide_regions_and_the_highest_become_one_where_there_is_no_room() -> None:
    modes = [{**VARIANTS[0], "name": f"m{pct}", "accuracy_pct": pct} for pct in (50, 60, 70, 80)]
    floors = {55.0: 0.1, 65.0: 0.2, 80.0: 0.3, 90.0: 0.4}

    def regions(count: int) -> list[tuple[str, float, float | None]]:
        given = [{"name": f"r{number}", "share": 2, "network_ms": {"west": 1}} for number in range(count)]
        part = {"name": "one", "classes": [{"name": "all", **LIMITS, "profiles": [{"mode": "m50", **PROFILE}]}]}
        spec = a_spec(modes=modes, regions=given, partitions=[part])
        made = problem_of(
            spec, demand_of(spec, 1), intensities_of(spec), gpus_by_place(spec, []), [], 5.0, None, floors
        )
        return [(each.name, round(each.share, 6), each.least_accuracy_pct) for each in made.regions]

    assert regions(0) == [("all--0", 0.4, None), ("all--1", 0.1, 60), ("all--2", 0.2, 70), ("all--3", 0.3, 80)]
    assert [each[1:] for each in regions(2)] == [(0.8, None), (0.2, 60), (1.0, 80)] * 2
    assert [each[1:] for each in regions(3)] == [(0.8, None), (1.2, 80)] * 3
    assert [each[1:] for each in regions(4)] == [(2.0, None)] * 4


def test_clients_too_far_from_every_place_are_named_in_the_shortfall() -> None:
    result = placed([{"name": "moon", "network_ms": {"west": 1_300, "east": 1_300}}])
    assert [each.reason for each in result.shortfall] == ["no_mode"]


def test_a_region_that_names_an_unknown_place_is_refused() -> None:
    with pytest.raises(ValidationError, match="network_ms of region eu names no place: north"):
        a_spec(regions=[{"name": "eu", "network_ms": {"north": 3}}])
    with pytest.raises(ValidationError, match="regions name eu twice"):
        a_spec(regions=[{"name": "eu"}, {"name": "eu"}])


def test_the_power_of_a_mode_with_idle_power_follows_the_mean_load() -> None:
    spec = a_spec()
    modes = [spec.modes[0].model_copy(update={"idle_w": 100.0, "start_wh": 0.0})]
    classes = spec.partitions[0].classes[0]
    part = spec.partitions[0].model_copy(
        update={"classes": [classes.model_copy(update={"profiles": classes.profiles[:1]})]}
    )
    spec = spec.model_copy(update={"modes": modes, "partitions": [part]})
    demand = {"one": demand_of(spec, 1.0)["one"].model_copy(update={"mean_shares": {"all": 0.5}})}
    request = problem_of(spec, demand, intensities_of(spec), gpus_by_place(spec, [a_node()]), [], 5.0)
    (planned,) = solve_pools(PoolsProblem.model_validate(request.model_dump())).instances
    assert planned.power_w == pytest.approx(100 + 200 * 0.5 / 2), "half a request a second of two"


@pytest.mark.parametrize("field", ["plan_every_min", "demand_quantile"])
@pytest.mark.parametrize("value", [0, 4, 7, 35, 1.5])
def test_an_interval_or_quantile_out_of_bounds_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=field):
        a_spec(**{field: value})


def test_without_demand_or_nodes_there_is_a_plan_without_instances() -> None:
    for nodes in ([a_node(8)], []):
        plan = solve_pools(asked(a_spec(), nodes, qps=0.0))
        assert (plan.status, plan.instances) == ("optimal", [])
    nowhere = solve_pools(asked(a_spec(), []))
    assert (nowhere.status, nowhere.instances) == ("infeasible", [])
    assert [(each.request_class, each.reason) for each in nowhere.shortfall] == [("all", "gpus")]
