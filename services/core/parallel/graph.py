"""A distributed training job as a graph: replicas of pipeline stages, and the bytes between them.

A *replica* is the unit of placement. It occupies as many GPUs as its stage's tensor groups are wide, all on one server.
Replicas are numbered stage by stage; that number is the vertex.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from services.core.domain.arrays import Ints
from services.core.domain.errors import DomainError


class AllReduce(StrEnum):
    """How the replicas of a stage sum their gradients; the time is the same, but the edges differ."""

    RING = "ring"
    TREE = "tree"


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a model, and their replicas. Bytes and times are per iteration and whole mini-batch."""

    replicas: int  #: Data-parallel copies, ``k``; each takes an equal share of the mini-batch
    forward_s: float = 0.0  #: Computation of one replica on its share, ``p^f``
    backward_s: float = 0.0  #: The same backward, ``p^b``
    parameter_bytes: float = 0.0  #: Gradients that the replicas sum, ``h``
    output_bytes: float = 0.0  #: Activations sent on to the next stage, by all replicas together: ``k * d_out``
    tensor_parallel: int = 1  #: GPUs that share each replica's layers; they never span servers
    tensor_bytes: float = 0.0  #: What tensor groups sum, forward and backward, over all replicas together
    expert_parallel: int = 1  #: Consecutive replicas that exchange tokens with one another; divides ``replicas``
    expert_bytes: float = 0.0
    """Tokens sent to experts and back in one pass, by all replicas together; the backward pass sends the same
    amount."""

    def __post_init__(self) -> None:
        if min(self.replicas, self.tensor_parallel, self.expert_parallel) < 1:
            raise DomainError("a stage has at least one replica, of at least one GPU")
        if self.replicas % self.expert_parallel:
            raise DomainError(f"{self.replicas} replicas do not divide into expert groups of {self.expert_parallel}")
        amounts = (self.forward_s, self.backward_s, self.parameter_bytes, self.output_bytes)
        if not all(0 <= each < np.inf for each in (*amounts, self.tensor_bytes, self.expert_bytes)):
            raise DomainError("the times and bytes of a stage are finite and at least 0")

    @property
    def gpus(self) -> int:
        return self.replicas * self.tensor_parallel


@dataclass(frozen=True)
class JobGraph:
    """A job: a chain of stages.

    In a stage with expert groups, each group is a *class* of its own; otherwise the stage is one class. Replicas of a
    class are interchangeable, so that, for timing, a placement is a count per class and server.
    """

    stages: tuple[Stage, ...]
    all_reduce: AllReduce = AllReduce.RING

    def __post_init__(self) -> None:
        if not self.stages:
            raise DomainError("a job has at least one stage")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, cached because placers look up by graph in every round."""
        return hash((self.stages, self.all_reduce is AllReduce.RING))

    @cached_property
    def gpus(self) -> int:
        return sum(stage.gpus for stage in self.stages)

    @cached_property
    def has_tensor_groups(self) -> bool:
        """Whether any replica has several GPUs, which must be on one server."""
        return any(stage.tensor_parallel > 1 for stage in self.stages)

    @cached_property
    def first(self) -> Ints:
        """(n_stages + 1,) the first vertex of each stage, followed by the number of vertices."""
        return np.cumsum([0, *(stage.replicas for stage in self.stages)]).astype(np.int64)

    @cached_property
    def size(self) -> Ints:
        """(n_vertices,) number of GPUs of each replica."""
        return np.repeat([stage.tensor_parallel for stage in self.stages], np.diff(self.first)).astype(np.int64)

    @cached_property
    def class_of(self) -> Ints:
        """(n_vertices,) the class of each vertex, ascending."""
        group = [stage.expert_parallel if stage.expert_parallel > 1 else stage.replicas for stage in self.stages]
        at = np.arange(int(self.first[-1])) - np.repeat(self.first[:-1], np.diff(self.first))
        within = at // np.repeat(group, np.diff(self.first))
        starts = np.cumsum([0, *(stage.replicas // each for stage, each in zip(self.stages, group, strict=True))])
        return (np.repeat(starts[:-1], np.diff(self.first)) + within).astype(np.int64)

    @cached_property
    def stage_of_class(self) -> Ints:
        """(n_classes,) the stage of each class."""
        stage_of = np.repeat(np.arange(len(self.stages)), np.diff(self.first))
        return stage_of[np.searchsorted(self.class_of, np.arange(int(self.class_of[-1]) + 1))].astype(np.int64)

    @cached_property
    def class_replicas(self) -> Ints:
        """(n_classes,) number of replicas in each class."""
        return np.bincount(self.class_of).astype(np.int64)

    @cached_property
    def class_size(self) -> Ints:
        """(n_classes,) number of GPUs of each replica in a class."""
        sizes = np.array([stage.tensor_parallel for stage in self.stages], dtype=np.int64)
        return sizes[self.stage_of_class]

    def sized(self, gpus: int) -> JobGraph:
        """Return the job on a different number of GPUs, keeping the mini-batch of each replica.

        For a multiple of the layout's GPUs, the replicas of each stage are multiplied accordingly; any other number
        gives plain data parallelism of the whole model.
        """
        if gpus == self.gpus:
            return self
        times, left = divmod(gpus, self.gpus)
        if left:
            computation_s = sum(stage.forward_s + stage.backward_s for stage in self.stages)
            return data_parallel(gpus, sum(stage.parameter_bytes for stage in self.stages), computation_s)
        wider = (
            replace(
                stage,
                replicas=stage.replicas * times,
                output_bytes=stage.output_bytes * times,
                tensor_bytes=stage.tensor_bytes * times,
                expert_bytes=stage.expert_bytes * times,
            )
            for stage in self.stages
        )
        return JobGraph(tuple(wider), self.all_reduce)


def data_parallel(gpus: int, parameter_bytes: float, computation_s: float = 0.0) -> JobGraph:
    """Return pure data parallelism: one stage of ``gpus`` replicas, with a third of the computation spent forward."""
    return JobGraph((Stage(gpus, computation_s / 3, computation_s * 2 / 3, parameter_bytes),))
