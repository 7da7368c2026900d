# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
"""Configuration graphs in files that other programs draw: GraphML (Gephi, yEd) and DOT (Graphviz)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.inference.graphs import node_link
from services.cli.commands import EXIT_USAGE, CliError
from services.contracts.partition import SLICE_NAMES
from services.core.policies.clover.config_graph import ConfigGraph

if TYPE_CHECKING:
    import networkx as nx

    from services.contracts.partition import PartitionRequest, PartitionResult

ENDINGS = (".graphml", ".dot")


def check_graph_file(file: Path) -> None:
    """Check that a graph file can be written, before anything is solved for it.

    Raises:
        CliError: The name has another ending, or its folder does not exist.
        ModuleNotFoundError: NetworkX is not installed.
    """
    import networkx  # noqa: F401

    if file.suffix not in ENDINGS:
        raise CliError(f"--graph: {file} must end in {' or '.join(ENDINGS)}", EXIT_USAGE)
    if not file.absolute().parent.is_dir():
        raise CliError(f"--graph: there is no folder {file.parent}", EXIT_USAGE)


def configuration_graphs(request: PartitionRequest, result: PartitionResult) -> nx.DiGraph:
    """Return what runs as one graph: each application's variants, its slices by type, and edges for instances.

    Nodes are called ``application/variant`` and ``application/1g``. Variants carry their accuracy; an edge carries how
    many instances it stands for, with the service time and power of one.
    """
    import networkx as nx

    whole = nx.DiGraph()
    plans = {plan.name: plan for plan in result.applications}
    for application in request.applications:
        names = [variant.name for variant in application.variants]
        weights = np.zeros((len(names), len(SLICE_NAMES)), dtype=np.int64)
        for each in plans[application.name].instances:
            weights[names.index(each.variant), SLICE_NAMES.index(each.slice)] += each.count
        graph = nx.node_link_graph(node_link(ConfigGraph(weights), names), edges="edges")
        for variant in application.variants:
            graph.nodes[variant.name]["accuracy_pct"] = variant.accuracy_pct
            for profile in variant.profiles:
                if graph.has_edge(variant.name, profile.slice):
                    measured = {"service_ms": profile.service_ms, "busy_w": profile.busy_w}
                    graph.edges[variant.name, profile.slice].update(measured)
        nx.set_node_attributes(graph, dict.fromkeys(graph, application.name), "application")
        whole.update(nx.relabel_nodes(graph, {node: f"{application.name}/{node}" for node in graph}))
    return whole


def write_graphs(file: Path, graph: nx.DiGraph) -> None:
    """Write a graph in the format that the file's name ends in."""
    import networkx as nx

    try:
        if file.suffix == ".graphml":
            nx.write_graphml(graph, file)
        else:
            file.write_text(_dot(graph), encoding="utf-8")
    except OSError as error:
        raise CliError(f"--graph: {file} cannot be written: {error.strerror}", EXIT_USAGE) from None


def _dot(graph: nx.DiGraph) -> str:
    """Return a graph for Graphviz: variants on the left, slices on the right, a box per application.

    Nodes without instances are left out. Names consist of letters, digits, dots, dashes and underscores only.
    """
    lines = ["digraph configuration {", "  rankdir=LR;"]
    nodes: list[tuple[str, dict[str, Any]]] = [(name, data) for name, data in graph.nodes(data=True)]
    for at, application in enumerate(dict.fromkeys(data["application"] for _, data in nodes)):
        lines += [f"  subgraph cluster_{at} {{", f'    label="{application}";']
        for name, data in nodes:
            if data["application"] != application or not data["instances"]:
                continue
            label = name.removeprefix(f"{application}/")
            if "accuracy_pct" in data:
                lines.append(f'    "{name}" [shape=ellipse, label="{label}\\n{data["accuracy_pct"]:g} %"];')
            else:
                lines.append(f'    "{name}" [shape=box, label="{data["instances"]} x {label}"];')
        lines.append("  }")
    lines += [f'  "{source}" -> "{target}" [label="{data["weight"]}"];' for source, target, data in graph.edges.data()]
    return "\n".join([*lines, "}", ""])
