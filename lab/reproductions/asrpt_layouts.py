"""A-SRPT's Table II by the layout that is assumed: ``python -m lab.reproductions.asrpt_layouts PAGE``.

The paper does not print how its two models are cut into stages. VGG19 is cut here by the planner for GPUs that have
their share of a NIC, a whole NIC each, or NVLink between all, or is plain data parallelism; GPT-175B is a plain
pipeline, with its embedding in the first stage or with all stages alike. Every job is placed on the paper's network.
The table ``a-srpt-layouts`` of PAGE is made anew, in some 5 s.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from lab.placement.architectures import architecture
from lab.placement.mapping import Mapper, Method
from lab.placement.planner import plan_layout
from lab.reproductions.marked import fill
from lab.reproductions.powerflow_day import rows_of
from services.core.parallel.graph import JobGraph, data_parallel
from services.core.parallel.iteration import Network

PATTERNS, SEED = 20, 20
PAPER = Network()
SIZES = (8, 16)
"""GPUs of the jobs; the paper does not print them either."""


def patterns(gpus: int, count: int = PATTERNS) -> list[list[int]]:
    """Return patterns of free GPUs for a job of that size: servers with 1 to 8, the last cut so that all are taken."""
    random = np.random.default_rng(SEED)
    drawn: list[list[int]] = []
    for _ in range(count):
        free: list[int] = []
        while sum(free) < gpus:
            free.append(int(random.integers(1, 9)))
        free[-1] -= sum(free) - gpus
        drawn.append(free)
    return drawn


def layouts(gpus: int) -> dict[str, JobGraph]:
    """Return both models on so many GPUs, by what is assumed."""
    nic, fast = PAPER.inter_bytes_per_s, PAPER.intra_bytes_per_s
    assumed = {
        "an eighth of a NIC each": nic,
        "a NIC each": nic * PAPER.server_gpus,
        "NVLink between all": fast * PAPER.server_gpus,
    }
    graphs = {
        f"vgg19 on {gpus}, cut for {name}": plan_layout("vgg19", gpus, network=Network(bytes_per_s, fast))
        for name, bytes_per_s in assumed.items()
    }
    model = architecture("vgg19")
    computation_s = 3 * sum(layer.forward_flops for layer in model.layers) * model.batch / gpus / model.flops_per_s
    pipeline = plan_layout("gpt-175b", gpus, tensor_parallel=1)
    inner = pipeline.stages[1]
    return graphs | {
        f"vgg19 on {gpus}, data parallel": data_parallel(
            gpus, float(model.parameters * model.bytes_per_value), computation_s
        ),
        f"gpt-175b on {gpus}, embedding in the first stage": pipeline,
        f"gpt-175b on {gpus}, all stages alike": JobGraph((inner,) * gpus),
    }


def by_layout() -> str:
    """Return the table."""
    rows: list[list[str]] = []
    for gpus in SIZES:
        for name, graph in layouts(gpus).items():
            mapper = Mapper(graph, PAPER)
            time_s = {
                method: np.array([mapper.map(free, method).iteration_time_s for free in patterns(gpus)])
                for method in Method
            }
            stages = "1 each" if len(graph.stages) > 4 else ", ".join(str(stage.replicas) for stage in graph.stages)
            above = [
                f"{100 * float(time_s[method].mean() / time_s[Method.ILP].mean() - 1):.1f} %"
                for method in (Method.HEAVY_EDGE, Method.REFINED)
            ]
            rows.append([name, stages, f"{1_000 * float(time_s[Method.ILP].mean()):,.1f} ms", *above])
    return rows_of(["job", "replicas by stage", "optimum", "heavy-edge above it", "refined above it"], rows)


def main() -> None:
    """Make the table of a page anew."""
    fill(Path(sys.argv[1]), {"a-srpt-layouts": by_layout})


if __name__ == "__main__":
    main()
