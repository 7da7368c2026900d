"""Jobs, nodes and allocations, converted between messages and the core's GPU allocation."""

import numpy as np

from services.contracts.allocation import AllocationProblem, AllocationResult, GpuShare, JobAllocation
from services.core.domain.errors import DomainError
from services.core.domain.gpus import likeliest_gpu_model
from services.core.domain.solving import Method, Report, SolveStatus, unreported
from services.core.parallel.iteration import Network
from services.core.policies.allocation import Allocation, GivenJobs, GivenNodes, allocate
from services.core.policies.powerflow.allocate import Choices
from services.core.policies.powerflow.config import PowerflowConfig
from services.solving.layouts import graph_of


def given(problem: AllocationProblem) -> tuple[GivenJobs, GivenNodes]:
    """Convert jobs and nodes to the core's; ``DomainError`` if a layout makes no sense."""
    models = problem.gpu_models
    nodes = GivenNodes(
        gpus=np.array([node.gpus for node in problem.nodes], dtype=np.int64),
        gpu_model=np.array([models.index(node.gpu_model) for node in problem.nodes], dtype=np.int64),
        idle_w=np.array([_idle_w(problem, model) for model in models]),
        limit_w=np.inf if problem.power_limit_w is None else problem.power_limit_w,
        other_w=problem.other_w,
        power_down=problem.power_down,
        network=Network(
            problem.inter_gbps * 1e9 / 8, problem.intra_gbytes * 1e9, max(node.gpus for node in problem.nodes)
        ),
    )
    where = {node.name: index for index, node in enumerate(problem.nodes)}
    jobs = GivenJobs(
        choices=_choices(problem),
        gpu_model=np.array([models.index(job.gpu_model or models[0]) for job in problem.jobs], dtype=np.int64),
        work_s=np.array([np.nan if job.work_s is None else job.work_s for job in problem.jobs]),
        graphs=tuple(None if job.layout is None else graph_of(job.layout) for job in problem.jobs),
        held=tuple(tuple((where[share.node], share.gpus) for share in job.held) for job in problem.jobs),
    )
    return jobs, nodes


def _choices(problem: AllocationProblem) -> Choices:
    sizes = max(len(job.sizes) for job in problem.jobs)
    values = max(len(size.controls) for job in problem.jobs for size in job.sizes)
    gpus = np.zeros((len(problem.jobs), sizes), dtype=np.int64)
    speed, power_w = np.zeros((*gpus.shape, values)), np.zeros((*gpus.shape, values))
    for row, job in enumerate(problem.jobs):
        for column, size in enumerate(job.sizes):
            gpus[row, column] = size.gpus
            speed[row, column, : len(size.controls)] = [choice.speed for choice in size.controls]
            power_w[row, column, : len(size.controls)] = [choice.power_w for choice in size.controls]
    return Choices(gpus, speed, power_w)


def _idle_w(problem: AllocationProblem, model: str) -> float:
    if model in problem.idle_w:
        return problem.idle_w[model]
    known = likeliest_gpu_model(model)
    if known is None:
        raise DomainError(f"idle_w needs the power of a free GPU of model {model}")
    return known.idle_w


def solve_allocation(problem: AllocationProblem, report: Report = unreported) -> AllocationResult:
    """Return the answer to a problem, checked against it; ``DomainError`` if it makes no sense as a whole."""
    jobs, nodes = given(problem)
    config = PowerflowConfig(marginal=problem.marginal, queue=problem.queue, at_limit=problem.at_limit)
    found = allocate(jobs, nodes, config, Method(problem.placement), report)
    found.check(jobs, nodes)
    kept = found.keeps_limit(nodes)
    return AllocationResult(
        status=SolveStatus.FEASIBLE if kept else SolveStatus.INFEASIBLE,
        solver="greedy",
        objective=float(found.speed.sum()),
        note="" if kept else "what runs already exceeds the power limit at the lowest control values",
        jobs=[_job(problem, jobs, found, row) for row in range(len(problem.jobs))],
        power_w=found.total_w,
        idle_w=found.idle_w,
        free_gpus=int(nodes.gpus.sum() - found.gpus.sum()),
    )


def _job(problem: AllocationProblem, jobs: GivenJobs, found: Allocation, row: int) -> JobAllocation:
    job, gpus, iteration_s = problem.jobs[row], int(found.gpus[row]), float(found.iteration_s[row])
    choice = next((size.controls[int(found.control[row])] for size in job.sizes if size.gpus == gpus), None)
    return JobAllocation(
        name=job.name,
        gpus=gpus,
        control=job.control,
        value=None if choice is None else choice.value,
        speed=float(found.speed[row]),
        power_w=float(found.power_w[row]),
        nodes=[GpuShare(node=problem.nodes[node].name, gpus=count) for node, count in found.places[row]],
        iteration_s=None if np.isnan(iteration_s) else iteration_s,
        waits=found.waits[row],
    )
