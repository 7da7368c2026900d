"""The parallel layout of a training job, as part of a job spec."""

from typing import Literal, Self

from pydantic import Field, model_validator

from services.contracts.schema import Int, Message, Real, maybe, said

MAX_GANG_GPUS = 65_536


class Stage(Message):
    """One pipeline stage of a job's parallel layout. Bytes are per iteration, for the whole mini-batch."""

    replicas: Int = said("Data-parallel replicas; each is placed as a unit.", ge=1, le=MAX_GANG_GPUS)
    tensor_parallel: Int = said("GPUs of each replica, all on one server.", default=1, ge=1, le=1024)
    expert_parallel: Int = said(
        "Consecutive replicas that exchange tokens; divides `replicas`.", default=1, ge=1, le=1024
    )
    parameter_bytes: Real = said("Bytes of gradients that the replicas all-reduce.", default=0, ge=0)
    forward_s: Real | None = maybe("Forward computation of one replica on its share of the batch.", ge=0)
    backward_s: Real | None = Field(default=None, ge=0)
    output_bytes: Real = said("Bytes sent to the next stage per iteration.", default=0, ge=0)
    tensor_bytes: Real = said("Bytes all-reduced within tensor groups, forward and backward together.", default=0, ge=0)
    expert_bytes: Real = said("Bytes sent to experts and back in one pass.", default=0, ge=0)

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Self:
        if self.replicas % self.expert_parallel:
            raise ValueError("expert_parallel does not divide replicas")
        return self


class ParallelLayout(Message):
    """How the gang is divided into stages and replicas, for placement."""

    stages: list[Stage] = Field(min_length=1, max_length=512)
    all_reduce: Literal["ring", "tree"] = "ring"
