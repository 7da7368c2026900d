"""Parallel layouts as graphs for the core."""

from services.contracts.parallel import ParallelLayout
from services.core.parallel.graph import AllReduce, JobGraph, Stage


def graph_of(layout: ParallelLayout) -> JobGraph:
    """Return the graph of a layout; ``DomainError`` if the sizes are inconsistent."""
    stages = tuple(Stage(**stage.model_dump(exclude_none=True)) for stage in layout.stages)
    return JobGraph(stages, AllReduce(layout.all_reduce))
