"""Placing by graph: which nodes a gang gets, and when it waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cycle.graph_placing import COMM_HEAVY, Servers, mapper_of, servers_for
from services.core.cycle.placers import PLACERS
from services.core.cycle.placing import FreeDevices, consolidated
from services.core.domain.ids import JobId
from services.core.domain.placement import Placement
from services.core.domain.solving import Method
from services.core.parallel.graph import JobGraph, Stage
from services.core.parallel.iteration import Network
from services.core.parallel.mapping import Mapper
from tests.support.builders import a_job, a_node, a_snapshot
from tests.support.graphs import graphs

LIGHT = JobGraph((Stage(2, forward_s=1.0, output_bytes=1e6), Stage(2, forward_s=1.0)))
HEAVY = JobGraph((Stage(2, output_bytes=1e6, parameter_bytes=1e9), Stage(2, forward_s=0.01)))
WIDE = JobGraph((Stage(2, parameter_bytes=1e9, tensor_parallel=2, tensor_bytes=1e6),))
TENSOR = JobGraph((Stage(2, 0.1, tensor_parallel=2, tensor_bytes=1e6),))


def place(how: str, graph: JobGraph | None, free: dict[str, int], gpus: int, *, width: int = 8) -> Placement | None:
    """Return where a queued job goes on nodes with so many devices free."""
    nodes = [a_node(name, gpus=width) for name in free]
    taken = [a_job(f"on-{name}", on={name: tuple(range(width - left))}) for name, left in free.items() if left < width]
    snapshot = a_snapshot([a_job("new", min_gpus=gpus), *taken], nodes)
    known = {} if graph is None else {JobId("new"): graph}
    snapshot = replace(snapshot, graphs=known, network=Network(server_gpus=width))
    return PLACERS[how](snapshot, 0, gpus, 0, FreeDevices(snapshot.nodes))


def shares(placement: Placement | None) -> dict[str, int] | None:
    """Return the devices by node, in order."""
    return None if placement is None else {share.node_id: len(share.devices) for share in placement.shares}


@pytest.mark.parametrize(
    ("how", "graph", "free", "gpus", "expected"),
    [
        pytest.param("heavy-edge", HEAVY, {"a": 8, "b": 5, "c": 2, "d": 2}, 4, {"b": 4}, id="one node, the tightest"),
        pytest.param("heavy-edge", HEAVY, {"a": 2, "b": 1, "c": 3}, 4, {"c": 3, "a": 1}, id="heavy: the fewest nodes"),
        pytest.param("heavy-edge", LIGHT, {"a": 8, "b": 1, "c": 3}, 4, {"b": 1, "c": 3}, id="light: what is left over"),
        pytest.param("heavy-edge", None, {"a": 5, "b": 4, "c": 4}, 8, {"a": 5, "b": 3}, id="unknown: as data parallel"),
        pytest.param("refined", None, {"a": 5, "b": 4, "c": 4}, 8, {"a": 4, "b": 4}, id="refined: even shares"),
        pytest.param("refined", None, {"a": 7, "b": 3, "c": 3}, 8, {"a": 5, "b": 3}, id="refined: no thinner share"),
        pytest.param("heavy-edge", WIDE, {"a": 3, "b": 2}, 4, {"a": 2, "b": 2}, id="the same, heavy"),
        pytest.param("heavy-edge", TENSOR, {"a": 3, "b": 2}, 4, {"a": 2, "b": 2}, id="tensor groups whole"),
        pytest.param("refined", TENSOR, {"a": 3, "b": 1, "c": 1}, 4, None, id="no room for a second group: waits"),
        pytest.param("refined", HEAVY, {"a": 2, "b": 1}, 4, None, id="not enough"),
        pytest.param("first-fit", HEAVY, {"a": 2, "b": 1, "c": 4}, 4, {"a": 2, "b": 1, "c": 1}, id="first servers"),
        pytest.param("first-fit", LIGHT, {"a": 2, "b": 2, "c": 1}, 3, {"a": 2, "b": 1}, id="the same, light"),
        pytest.param("first-fit", TENSOR, {"a": 1, "b": 2, "c": 3}, 4, {"b": 2, "c": 2}, id="first: groups whole"),
        pytest.param("first-fit", None, {"a": 2, "b": 1}, 4, None, id="first: not enough"),
        pytest.param("refined", HEAVY, {"a": 6, "b": 1, "c": 1}, 8, {"a": 6, "b": 1, "c": 1}, id="a wider gang"),
    ],
)
def test_a_gang_gets_the_nodes_its_graph_asks_for(
    how: str, graph: JobGraph | None, free: dict[str, int], gpus: int, expected: dict[str, int] | None
) -> None:
    assert shares(place(how, graph, free, gpus)) == expected


def test_one_gpu_is_placed_as_ever() -> None:
    snapshot = a_snapshot([a_job()], [a_node("a", gpus=8), a_node("b", gpus=2)])

    for how in ("heavy-edge", "refined"):
        placed = PLACERS[how](snapshot, 0, 1, 0, FreeDevices(snapshot.nodes))
        assert placed == consolidated(snapshot, 0, 1, 0, FreeDevices(snapshot.nodes))


def test_first_fit_gives_one_gpu_of_the_first_node_that_has_one() -> None:
    snapshot = a_snapshot([a_job(), a_job("r", on={"a": (0, 1)})], [a_node("a", gpus=2), a_node("b", gpus=8)])

    assert shares(PLACERS["first-fit"](snapshot, 0, 1, 0, FreeDevices(snapshot.nodes))) == {"b": 1}


def test_what_is_light_and_what_is_heavy() -> None:
    light, heavy = (mapper_of(graph, 4, Network()) for graph in (LIGHT, HEAVY))

    assert light.model.worst_s < COMM_HEAVY * light.least_s()
    assert servers_for(light) is Servers.EMPTIEST
    assert servers_for(heavy) is Servers.FULLEST


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["heavy-edge", "refined"]),
    graphs(),
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.integers(2, 12),
)
def test_a_gang_is_whole_and_takes_free_devices_only(how: str, graph: JobGraph, free: list[int], gpus: int) -> None:
    names = {f"n{at}": left for at, left in enumerate(free)}
    placement = place(how, graph, names, gpus, width=4)

    if placement is None:
        return
    assert placement.gpus == gpus
    for share in placement.shares:
        assert len(set(share.devices)) == len(share.devices)
        assert set(share.devices) <= set(range(4 - names[share.node_id], 4))
    sized = graph.sized(gpus)
    on = [len(share.devices) for share in placement.shares]
    mapper = Mapper(sized, Network(server_gpus=4))
    assert mapper.counts(np.array(on), Method.HEAVY_EDGE) is not None  # tensor groups fit


@settings(max_examples=100, deadline=None)
@given(graphs(widths=(1,)), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_without_tensor_groups_a_gang_is_placed_wherever_it_fits(graph: JobGraph, free: list[int]) -> None:
    names = {f"n{at}": left for at, left in enumerate(free)}

    for how in ("heavy-edge", "refined"):
        assert (place(how, graph, names, graph.gpus, width=4) is None) == (sum(free) < graph.gpus)
