"""Pools that share nodes, in any combination, planned one after the other until nothing is due: by the planner's own
functions, beside a plain account of who has which GPU."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from services.contracts.pools import PoolsProblem
from services.contracts.serving import DemandForecast, PlaceIntensity, PlanForecasts, PoolPlanResult, PoolSpec
from services.core.domain.carbon import Signal
from services.serving.instances import InstanceTerms
from services.serving.planning.cluster import (
    Cluster,
    ClusterNode,
    Need,
    PoolNeeds,
    gpus_by_place,
    installed_by_place,
)
from services.serving.planning.events import Present, Standing, event_of
from services.serving.planning.problem import Running, problem_of, result_of
from services.solving.pools import solve_pools
from tests.serving.pools import LIMITS, SERVED

ZONES, MODELS = ("GB", "DE"), ("A100", "H100")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def a_pool(draw: random.Random, number: int) -> PoolSpec:
    sizes = draw.sample([1, 2, 3, 4], draw.randint(1, 3))
    modes = [
        {"name": f"m{size}", "gpu_model": draw.choice(MODELS), "gpus": size, "command": ["serve"],
         "accuracy_pct": draw.choice((60, 80, 90)), "idle_w": draw.choice((None, 50.0)),
         "start_s": draw.choice((0, 120)), "stop_s": draw.choice((0, 10))}
        for size in sizes
    ]  # fmt: skip
    profiles = [
        {"mode": each["name"], "max_qps": draw.choice((0.5, 1, 2)) * each["gpus"], "power_w": 250.0 * each["gpus"],
         **(SERVED if draw.random() < 0.9 else {"ttft_ms": 900, "tbt_ms": 20})}
        for each in modes
    ]  # fmt: skip

    def classes(*names: str) -> list[dict[str, Any]]:
        return [{"name": each, **LIMITS, "profiles": profiles} for each in names]

    partitions: list[dict[str, Any]] = [{"name": "one", "classes": classes("all")}]
    if draw.random() < 0.3:
        thresholds = {"input_tokens": 100, "output_tokens": 100}
        partitions.append({"name": "four", "thresholds": thresholds, "classes": classes("SS", "SL", "LS", "LL")})
    places = [
        {"name": f"p{at}", "zone": draw.choice(ZONES), "node_labels": draw.choice(({}, {}, {"net": "ib"})),
         "gpus": draw.choice((None, None, {"A100": 3, "H100": 2})), "price_per_kwh": draw.choice((0.1, 0.3))}
        for at in range(draw.randint(1, 2))
    ]  # fmt: skip
    regions = [
        {"name": "near", "share": 0.5, "network_ms": {}},
        {"name": "picky", "share": 0.5, "network_ms": {}, "least_accuracy_pct": 80},
    ]
    return PoolSpec.model_validate(
        {"places": places, "modes": modes, "partitions": partitions, "min_up_s": draw.choice((0, 0, 600)),
         "objective": draw.choice(("carbon", "carbon", "energy", "cost")), "models": [f"model-{number}"],
         "head_room": draw.choice((1.0, 1.3)), "regions": draw.choice(([], [], regions))}
    )  # fmt: skip


class Site:
    """Nodes, pools and who has what; plans are carried out as far as there are GPUs."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.nodes = [
            ClusterNode(
                f"n{at}",
                draw.choice(ZONES),
                draw.choice(({}, {"net": "ib"})),
                dict.fromkeys(range(draw.choice((1, 2, 4, 4, 6))), draw.choice(MODELS)),
            )
            for at in range(draw.randint(1, 4))
        ]
        self.pools = {f"pool-{at}": a_pool(draw, at) for at in range(draw.randint(2, 3))}
        self.qps = {name: draw.choice((0.0, 0.4, 1.5, 4.0, 9.0)) for name in self.pools}
        self.gco2 = {zone: float(draw.choice((20, 200, 400, -10))) for zone in ZONES}
        self.ordered = frozenset(draw.choice(((), (), ("GB",), (None,))))
        self.floors = draw.choice(({}, {}, {80.0: 0.3}, {70.0: 0.01, 95.0: 0.1}))
        self.held: dict[tuple[str, int], str | None] = {
            (node.id, index): None for node in self.nodes for index in node.devices if draw.random() < 0.1
        }
        self.running: dict[str, list[tuple[Running, list[tuple[str, int]]]]] = defaultdict(list)
        self.plans: dict[str, PoolPlanResult] = {}

    # What the planner is told, in its terms.

    def cluster(self) -> Cluster:
        needs: dict[str, PoolNeeds] = {}
        for name, made in self.plans.items():
            missing = self.missing(name, made)
            needs[name] = PoolNeeds([], missing, missing)
        return Cluster(self.nodes, self.held, needs, self.ordered)

    def missing(self, name: str, made: PoolPlanResult) -> list[Need]:
        spec = self.pools[name]
        wanted = Counter[tuple[str, str]]()
        for each in made.plan.instances:
            wanted[each.location, each.mode] += each.count
        wanted -= Counter((each.place, each.mode) for each, _ in self.running[name])
        places, modes = {each.name: each for each in spec.places}, {each.name: each for each in spec.modes}
        return [
            Need(places[place].zone, places[place].node_labels, modes[mode].gpu_model, modes[mode].gpus)
            for place, mode in wanted.elements()
        ]

    def plan(self, name: str) -> PoolPlanResult:
        spec, cluster = self.pools[name], self.cluster()
        gpus, ordered = gpus_by_place(spec, cluster.nodes_for(name)), cluster.ordered_places(spec)
        source = {"provider": "p", "method": "m", "generated_at": NOW, "is_stale": False}
        intensity = {
            place.name: PlaceIntensity(
                **source, zone=place.zone, signal=Signal.AVERAGE_DIRECT, gco2_per_kwh=[self.gco2[place.zone]] * 6
            )
            for place in spec.places
        }
        demand = {
            part.name: DemandForecast(
                method="test",
                is_assumed=False,
                history_s=0,
                peaks_qps={each.name: [self.qps[name] / len(part.classes)] * 6 for each in part.classes},
            )
            for part in spec.partitions
        }
        own, before = [each for each, _ in self.running[name]], self.plans.get(name)
        request = problem_of(spec, demand, intensity, gpus, own, 20.0, before and before.plan, self.floors, ordered)
        forecasts = PlanForecasts(
            step_s=300,
            demand=demand,
            intensity=intensity,
            gpus={place: dict(has.models) for place, has in gpus.items()},
            installed=installed_by_place(spec, cluster.installed()),
            ordered=ordered,
        )
        result = solve_pools(PoolsProblem.model_validate(request.model_dump()))
        return PoolPlanResult(forecasts=forecasts, plan=result_of(request, result, forecasts))

    def event(self, name: str) -> object:
        made = self.plans[name]
        standing = Standing(name, self.pools[name], name, made, NOW, NOW, False, None)
        rates = {
            part.counted_as: {each.name: self.qps[name] / len(part.classes) for each in part.classes}
            for part in self.pools[name].partitions
        }
        intensity = {place.name: self.gco2[place.zone] for place in self.pools[name].places}
        if self.pools[name].objective != "carbon" or len(intensity) < 2:
            intensity = {}
        return event_of(standing, Present(NOW, self.cluster(), rates, intensity))

    # What becomes of plans, by a search of its own.

    def carry_out(self, name: str) -> None:
        """Stop what is too much, and start what has GPUs."""
        left = Counter[tuple[str, str]]()
        for each in self.plans[name].plan.instances:
            left[each.location, each.mode] += each.count
        kept = list[Any]()
        for each in self.running[name]:
            key = each[0].place, each[0].mode
            if left[key]:
                left[key] -= 1
                kept.append(each)
            else:
                for device in each[1]:
                    del self.held[device]
        self.running[name] = kept

    def start(self) -> bool:
        """Start all that plans want; whether there is a way to."""
        wanted = [
            (name, place, mode)
            for name, made in self.plans.items()
            for (place, mode), count in self._short(name, made).items()
            for _ in range(count)
        ]
        wanted.sort(key=lambda each: -self._mode(each).gpus)
        free = {node.id: [at for at in node.devices if (node.id, at) not in self.held] for node in self.nodes}
        places = self._pack(wanted, free)
        if places is None:
            return False
        for (name, place, mode), node in zip(wanted, places, strict=True):
            spec = self.pools[name]
            devices = [(node, free[node].pop()) for _ in range(self._mode((name, place, mode)).gpus)]
            terms = InstanceTerms(
                mode=self._mode((name, place, mode)),
                place=next(each for each in spec.places if each.name == place),
                probes=spec.probes,
            )
            self.running[name].append((Running(place, mode, terms, self.draw.choice((5.0, 900.0))), devices))
            self.held |= dict.fromkeys(devices, name)
        return True

    def _short(self, name: str, made: PoolPlanResult) -> Counter[tuple[str, str]]:
        wanted = Counter[tuple[str, str]]()
        for each in made.plan.instances:
            wanted[each.location, each.mode] += each.count
        return wanted - Counter((each.place, each.mode) for each, _ in self.running[name])

    def _mode(self, of: tuple[str, str, str]) -> Any:
        return next(each for each in self.pools[of[0]].modes if each.name == of[2])

    def _pack(self, wanted: Sequence[tuple[str, str, str]], free: dict[str, list[int]]) -> list[str] | None:
        if not wanted:
            return []
        name, place, _ = first = wanted[0]
        of = self._mode(first)
        where = next(each for each in self.pools[name].places if each.name == place)
        tried = set[Any]()
        for node in self.nodes:
            kind = node.zone, tuple(node.labels.items()), node.devices[0], len(free[node.id])
            is_there = node.zone == where.zone and where.node_labels.items() <= node.labels.items()
            if kind in tried or not is_there or node.devices[0] != of.gpu_model or len(free[node.id]) < of.gpus:
                continue
            tried.add(kind)
            rest = self._pack(wanted[1:], {**free, node.id: free[node.id][of.gpus :]})
            if rest is not None:
                return [node.id, *rest]
        return None

    def change(self) -> None:
        """Lose a node, or have another order or demand."""
        match self.draw.choice(("node", "order", "demand")):
            case "node" if self.nodes:
                gone = self.nodes.pop(self.draw.randrange(len(self.nodes))).id
                for name, running in self.running.items():
                    self.running[name] = [each for each in running if each[1][0][0] != gone]
                self.held = {at: pool for at, pool in self.held.items() if at[0] != gone}
            case "order":
                self.ordered = frozenset() if self.ordered else frozenset(("GB",))
            case _:
                self.qps = {name: qps * self.draw.choice((0, 1, 5)) for name, qps in self.qps.items()}

    def check(self, name: str) -> None:
        """What a plan owes to its own pool."""
        spec, plan = self.pools[name], self.plans[name].plan
        part = next(each for each in spec.partitions if each.name == plan.partition)
        unserved = {each.request_class: each.qps for each in plan.shortfall}
        for each in part.classes:
            rates = {
                profile.mode: profile.max_qps
                for profile in each.profiles
                if profile.ttft_ms == SERVED["ttft_ms"]  # others are too slow
            }
            serve = [of for of in plan.instances if of.request_class == each.name]
            assert all(of.mode in rates for of in serve), "served by what is too slow for it"
            wanted = spec.head_room * self.qps[name] / len(part.classes)
            served = sum(rates[of.mode] * of.count for of in serve)
            assert served + unserved.get(each.name, 0.0) >= wanted - 1e-6, (each.name, wanted, plan)
            accurate = {mode.name for mode in spec.modes if (mode.accuracy_pct or 0) >= 80}
            if spec.regions and not plan.shortfall:
                assert sum(rates[of.mode] * of.count for of in serve if of.mode in accurate) >= wanted / 2 - 1e-6


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 600), marks=[pytest.mark.slow, pytest.mark.timeout(3_600)])],
    ids=["few", "many"],
)  # fmt: skip
def test_pools_that_share_nodes_come_to_rest_with_what_there_is(seeds: range) -> None:
    for seed in seeds:
        try:
            comes_to_rest(Site(seed))
        except BaseException as error:
            error.add_note(f"site {seed}")
            raise


def comes_to_rest(site: Site) -> None:
    for _ in range(2):
        for name in site.pools:  # by the clock
            site.plans[name] = site.plan(name)
            site.check(name)
            site.carry_out(name)
        assert site.start(), "GPUs are planned twice"
        rests(site)
        site.change()


def rests(site: Site) -> None:
    """Plan what is due until nothing is, and see that nothing would change then."""
    done = list[tuple[str, object]]()
    for _ in range(6):
        due = [(name, why) for name in site.pools if (why := site.event(name)) is not None]
        for name, why in due:
            done.append((name, why))
            site.plans[name] = site.plan(name)
            site.check(name)
            site.carry_out(name)
        assert site.start(), ("GPUs are planned twice", done)
        if not due:
            break
    else:
        raise AssertionError(("it does not come to rest", done))
    for name in site.pools:
        again = site.plan(name)
        changes = *again.plan.starts, *again.plan.stops
        assert not changes, ("a plan at rest changes", name, again, site.plans[name])


def renamed(site: Site) -> Site:
    """The same site with other names and everything in another order."""
    other = copy.deepcopy(site)
    names = {node.id: f"z{at}" for at, node in enumerate(reversed(other.nodes))}
    other.nodes = [
        replace(node, id=names[node.id], devices=dict(reversed([*node.devices.items()]))) for node in other.nodes
    ]
    other.nodes.reverse()
    other.held = {(names[node], index): pool for (node, index), pool in reversed([*other.held.items()])}
    zones = dict(zip(ZONES, ("ZZ", "AA"), strict=True))
    other.gco2 = {zones[zone]: gco2 for zone, gco2 in reversed([*other.gco2.items()])}
    other.nodes = [replace(node, zone=zones[node.zone]) for node in other.nodes]
    other.ordered = frozenset(zone and zones[zone] for zone in other.ordered)
    for name, spec in other.pools.items():
        document = spec.model_dump(mode="json", exclude_none=True)
        for each in document["places"]:
            each["name"], each["zone"] = f"other-{each['name']}", zones[each["zone"]]
        apart = len({each["zone"] for each in document["places"]}) == len(document["places"])
        for each in ("places", "modes", "regions") if apart else ("modes", "regions"):  # a node is of the first place
            document.get(each, []).reverse()
        for part in document["partitions"]:
            for served in part["classes"]:
                served["profiles"].reverse()
        other.pools[name] = PoolSpec.model_validate(document)
    return other


def dirtier(site: Site) -> Site:
    """The same site with grids three times as dirty, and power three times as dear."""
    other = copy.deepcopy(site)
    other.gco2 = {zone: 3 * gco2 for zone, gco2 in other.gco2.items()}
    for name, spec in other.pools.items():
        places = [place.model_copy(update={"price_per_kwh": 3 * (place.price_per_kwh or 0)}) for place in spec.places]
        other.pools[name] = spec.model_copy(update={"places": places})
    return other


@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 1_000), marks=[pytest.mark.slow, pytest.mark.timeout(3_600)])],
    ids=["few", "many"],
)  # fmt: skip
def test_neither_names_nor_orders_nor_units_change_what_a_plan_is_worth(seeds: range) -> None:
    for seed in seeds:
        site = Site(seed)
        for name, spec in site.pools.items():
            plan, same, dear = (each.plan(name).plan for each in (site, renamed(site), dirtier(site)))
            scale = {"carbon": 3.0, "cost": 3.0, "energy": 1.0}[spec.objective]
            # under an order, watts count in place of grams and prices
            for other, times in ((same, 1.0),) if site.ordered else ((same, 1.0), (dear, scale)):
                unserved = sum(each.qps for each in plan.shortfall), sum(each.qps for each in other.shortfall)
                assert unserved[1] == pytest.approx(unserved[0], rel=1e-6, abs=1e-6), (seed, name)
                assert other.status == plan.status, (seed, name)
                worth = plan.objective and times * plan.objective
                assert other.objective == pytest.approx(worth, rel=1e-3, abs=1e-6), (seed, name)
