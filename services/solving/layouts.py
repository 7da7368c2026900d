"""Parallel layouts as graphs for the core."""

from __future__ import annotations

from services.contracts.parallel import DataParallelLayout, ModelLayout, PlacementJob
from services.core.parallel.graph import AllReduce, JobGraph, Stage, data_parallel
from services.core.parallel.planner import plan_layout


def graph_of(job: PlacementJob) -> JobGraph:
    """Return the graph of a layout: the given one, the planner's for a known model, or data parallelism.

    Raises:
        DomainError: The model is not known, or the sizes are inconsistent.
    """
    if isinstance(job, DataParallelLayout):
        return data_parallel(job.gpus, job.parameter_bytes, job.computation_s)
    kind = AllReduce(job.all_reduce)
    if isinstance(job, ModelLayout):
        return plan_layout(job.model, job.gpus, job.batch, tensor_parallel=job.tensor_parallel, all_reduce=kind)
    return JobGraph(tuple(Stage(**stage.model_dump(exclude_none=True)) for stage in job.stages), kind)
