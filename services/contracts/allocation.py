"""GPUs for jobs: the input and output of ``POST /v1/optimize/allocation`` and ``wattshift lab allocation``."""

from collections import Counter
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from services.contracts.parallel import ParallelLayout
from services.contracts.schema import LEAST, Flag, Int, Message, Name, Real, check_once, many, maybe, said
from services.contracts.solver import SolveOutcome
from services.core.domain.controls import ControlKind
from services.core.domain.gpus import likeliest_gpu_model
from services.core.domain.solving import Method, Wait

MAX_JOBS, MAX_NODES, MAX_NODE_GPUS, MAX_SIZES, MAX_VALUES = 2_000, 2_000, 1_024, 16, 32
MAX_CELLS = 200_000
"""Most control values of all sizes of all jobs together."""


class ControlChoice(Message):
    """What a gang does at one control value."""

    value: Real | None = maybe("Watts or MHz, by the job's `control`; null for the default.", ge=LEAST, le=1e6)
    speed: Real = said("Seconds of work done per second.", ge=LEAST, le=1e9)
    power_w: Real = said("Draw of the whole gang with its share of the hosts.", ge=LEAST, le=1e9)


class GangSize(Message):
    """A number of GPUs that a job could be given."""

    gpus: Int = Field(ge=1, le=65_536)
    controls: list[ControlChoice] = Field(min_length=1, max_length=MAX_VALUES)


class GpuShare(Message):
    """Some GPUs of a node."""

    node: Name
    gpus: Int = Field(ge=1, le=MAX_NODE_GPUS)


class AllocationJob(Message):
    """A job: what it could be given, and what is known about it."""

    name: Name
    sizes: list[GangSize] = said("By number of GPUs, ascending.", min_length=1, max_length=MAX_SIZES)
    control: ControlKind = said("What `value` is: watts or MHz.", default=ControlKind.POWER_LIMIT)
    gpu_model: Name | None = maybe("Of its GPUs; may be left out if all nodes have one model.")
    work_s: Real | None = maybe("Seconds of work left at speed 1.", ge=LEAST, le=1e12)
    held: list[GpuShare] = many(
        "Where it runs already: it stays there, `sizes` has the size of its gang and no other, and only "
        "its control value is chosen.",
        max_length=MAX_NODES,
    )
    layout: ParallelLayout | None = maybe("As in a job's spec, for its placement; other sizes get more replicas of it.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        gpus = [size.gpus for size in self.sizes]
        if any(after <= before for before, after in pairwise(gpus)):
            raise ValueError("sizes must ascend by gpus")
        for size in self.sizes:
            problem = f"the size of {size.gpus} GPUs has a control value twice"
            check_once((choice.value for choice in size.controls), problem)
        if self.held:
            check_once((share.node for share in self.held), "held names a node twice")
            if gpus != [sum(share.gpus for share in self.held)]:
                raise ValueError("sizes must have the size of the gang in held, and no other")
        return self


class AllocationNode(Message):
    """A node."""

    name: Name
    gpus: Int = said("GPUs, those of running jobs included.", ge=1, le=MAX_NODE_GPUS)
    gpu_model: Name = "gpu"


class AllocationRequest(Message):
    """Asks how many GPUs each job gets, at which control value and on which nodes, within a power limit.

    Jobs are listed in the order of their claim. GPUs and control values go where they save most time per energy
    (PowerFlow, Algorithm 1); gangs are placed by Heavy-Edge (A-SRPT).
    """

    nodes: list[AllocationNode] = Field(min_length=1, max_length=MAX_NODES)
    jobs: list[AllocationJob] = Field(min_length=1, max_length=MAX_JOBS)
    power_limit_w: Real | None = maybe("What jobs, free GPUs and `other_w` may draw together.", ge=LEAST, le=1e12)
    other_w: Real = said("What else draws power below the limit.", default=0, ge=0, le=1e12)
    idle_w: dict[Name, Annotated[Real, Field(ge=0, le=1e6)]] = said(
        "Power of a free GPU by GPU model; by default the one of the catalogue of GPU models.",
        default_factory=dict[str, float],
    )
    power_down: Flag = said("Whether a node without a gang is off and draws nothing.", default=False)
    marginal: Literal["energy", "energy_and_gpu", "power"] = said(
        "By what GPUs and watts are given out, as PowerFlow's parameter `marginal`.", default="energy"
    )
    queue: Literal["submitted", "shortest"] = said(
        "Which job without a GPU is first: in the given order, or by time left.", default="submitted"
    )
    at_limit: Literal["stop", "skip"] = said(
        "What a step beyond the limit ends: the allocation, or only that job's.", default="stop"
    )
    placement: Literal[Method.HEAVY_EDGE, Method.REFINED] = said(
        "As A-SRPT prints it, or with exchanges that shorten the iteration.", default=Method.HEAVY_EDGE
    )
    inter_gbps: Real = said("Bandwidth between nodes, gigabits per second.", default=10, ge=LEAST, le=1e6)
    intra_gbytes: Real = said("Bandwidth within a node, gigabytes per second.", default=300, ge=LEAST, le=1e6)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_once((node.name for node in self.nodes), "node {} is there twice")
        check_once((job.name for job in self.jobs), "job {} is there twice")
        if sum(len(size.controls) for job in self.jobs for size in job.sizes) > MAX_CELLS:
            raise ValueError(f"the jobs have more than {MAX_CELLS} control values together")
        models = self.gpu_models
        if unknown := sorted(set(self.idle_w) - set(models)):
            raise ValueError(f"idle_w: no node has GPUs of model {unknown[0]}")
        for model in models:
            if model not in self.idle_w and likeliest_gpu_model(model) is None:
                raise ValueError(f"idle_w needs the power of a free GPU of model {model}, which the catalogue lacks")
        nodes, held = {node.name: node for node in self.nodes}, Counter[str]()
        for job in self.jobs:
            if job.gpu_model is None and len(models) > 1:
                raise ValueError(f"job {job.name} needs a gpu_model, as there are {' and '.join(models)}")
            if job.gpu_model is not None and job.gpu_model not in models:
                raise ValueError(f"job {job.name}: no node has GPUs of model {job.gpu_model}")
            for share in job.held:
                if share.node not in nodes:
                    raise ValueError(f"job {job.name}: held names node {share.node}, which is not there")
                if nodes[share.node].gpu_model != (job.gpu_model or models[0]):
                    raise ValueError(f"job {job.name}: held names node {share.node}, whose GPUs are of another model")
                held[share.node] += share.gpus
        if over := next((node for node in self.nodes if held[node.name] > node.gpus), None):
            raise ValueError(f"running jobs hold {held[over.name]} GPUs of node {over.name}, which has {over.gpus}")
        return self

    @property
    def gpu_models(self) -> list[str]:
        """The GPU models of the nodes, in the order in which they first appear."""
        return list(dict.fromkeys(node.gpu_model for node in self.nodes))


class AllocationProblem(AllocationRequest):
    """An allocation problem."""

    kind: Literal["allocation"] = "allocation"


class JobAllocation(Message):
    """What a job gets."""

    name: str
    gpus: int = said("0 if it waits.")
    control: ControlKind
    value: float | None = said("Watts or MHz; null for the default, and while it waits.")
    speed: float
    power_w: float
    nodes: list[GpuShare] = said("In the order of its ranks.")
    iteration_s: float | None = maybe("Of an iteration there, if it has a layout.")
    waits: Wait | None = maybe("Why it gets nothing.")


class AllocationResult(SolveOutcome):
    """An allocation. `infeasible` if running jobs and free GPUs exceed the power limit even at the lowest values.

    `objective` is the speed of all gangs together, seconds of work per second.
    """

    kind: Literal["allocation"] = "allocation"
    jobs: list[JobAllocation]
    power_w: float = said("Jobs, free GPUs and `other_w` together.")
    idle_w: float = said("Free GPUs.")
    free_gpus: int
