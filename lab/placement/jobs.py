"""The jobs for which a placement is asked: a layout, a model by name, or parameters alone."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field

from lab.placement.planner import plan_layout
from services.contracts.parallel import MAX_GANG_GPUS, ParallelLayout
from services.contracts.schema import Int, Message, Real
from services.core.parallel.graph import AllReduce, JobGraph, data_parallel
from services.solving import layouts


class ModelLayout(Message):
    """A common model by name, for which the planner finds a layout."""

    model: str
    gpus: Int = Field(ge=1, le=MAX_GANG_GPUS)
    batch: Int | None = Field(
        default=None, ge=1, description="Mini-batch of each pipeline; by default the one in the paper."
    )
    tensor_parallel: Int | None = Field(default=None, ge=1, le=1024)
    all_reduce: Literal["ring", "tree"] = "ring"


class DataParallelLayout(Message):
    """Pure data parallelism of a model that is known only by its size."""

    gpus: Int = Field(ge=1, le=MAX_GANG_GPUS)
    parameter_bytes: Real = Field(ge=0)
    computation_s: Real = Field(default=0, ge=0, description="Forward and backward computation of one replica.")


PlacementJob = ParallelLayout | ModelLayout | DataParallelLayout  #: The jobs for which a placement can be planned


def placement_job(document: Any) -> PlacementJob:
    """Return the job in a JSON document, whose kind is told by one of its keys; for a job spec, its layout.

    Raises:
        ValidationError: The document is not a valid job of any form.
    """
    kind: type[PlacementJob] = DataParallelLayout
    if isinstance(document, dict):
        keys = cast("dict[str, Any]", document)
        if "layout" in keys:
            document, kind = keys["layout"], ParallelLayout
        elif "stages" in keys:
            kind = ParallelLayout
        elif "model" in keys:
            kind = ModelLayout
    return kind.model_validate(document)


def graph_of(job: PlacementJob) -> JobGraph:
    """Return the graph of a layout: the given one, the planner's for a known model, or data parallelism.

    Raises:
        DomainError: The model is not known, or the sizes are inconsistent.
    """
    if isinstance(job, DataParallelLayout):
        return data_parallel(job.gpus, job.parameter_bytes, job.computation_s)
    if isinstance(job, ModelLayout):
        kind = AllReduce(job.all_reduce)
        return plan_layout(job.model, job.gpus, job.batch, tensor_parallel=job.tensor_parallel, all_reduce=kind)
    return layouts.graph_of(job)
