"""Configuration graphs as data that other programs read."""

from __future__ import annotations

import networkx as nx

from lab.inference.graphs import node_link
from tests.support.clover import a_graph


def test_node_link_data_has_an_edge_per_weight() -> None:
    data = node_link(a_graph([2, 0, 0, 0, 0], [0, 0, 0, 0, 1]), ("small", "large"))

    assert data["edges"] == [
        {"source": "small", "target": "1g", "weight": 2},
        {"source": "large", "target": "7g", "weight": 1},
    ]
    assert len(data["nodes"]) == 7


def test_networkx_reads_the_graph_and_finds_the_same_distance() -> None:
    """Figure 7's distance, the weight removed plus the weight added, over NetworkX's edges."""
    variants = ("small", "large")
    graphs = a_graph([3, 0, 0, 0, 1], [1, 2, 0, 0, 0]), a_graph([1, 1, 0, 0, 1], [2, 2, 0, 0, 0])

    drawn = [nx.node_link_graph(node_link(graph, variants), edges="edges") for graph in graphs]

    assert nx.is_bipartite(drawn[0])
    assert drawn[0].nodes["small"] == {"bipartite": 0, "instances": 4}
    assert drawn[0].nodes["1g"] == {"bipartite": 1, "instances": 4}
    edges = set(drawn[0].edges) | set(drawn[1].edges)
    weights = [[graph.edges[edge]["weight"] if graph.has_edge(*edge) else 0 for edge in edges] for graph in drawn]
    assert sum(abs(one - other) for one, other in zip(*weights, strict=True)) == graphs[0].distance(graphs[1])
