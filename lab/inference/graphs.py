"""Configuration graphs as data that other programs read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.layouts import SLICES


def node_link(graph: ConfigGraph, variants: Sequence[str]) -> dict[str, Any]:
    """Return a graph as node-link data, which ``networkx.node_link_graph(..., edges="edges")`` reads.

    Each node has ``instances``: how many run the variant, or run on slices of the type.
    """
    of_variant, of_slice = graph.weights.sum(axis=1).tolist(), graph.weights.sum(axis=0).tolist()
    nodes = [{"id": name, "bipartite": 0, "instances": count} for name, count in zip(variants, of_variant, strict=True)]
    nodes += [
        {"id": f"{size}g", "bipartite": 1, "instances": count} for size, count in zip(SLICES, of_slice, strict=True)
    ]
    edges = [
        {"source": variants[row], "target": f"{SLICES[column]}g", "weight": int(graph.weights[row, column])}
        for row, column in np.argwhere(graph.weights).tolist()
    ]
    return {"directed": True, "multigraph": False, "graph": {}, "nodes": nodes, "edges": edges}
