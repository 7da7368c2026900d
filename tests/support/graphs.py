"""Job graphs as Hypothesis draws them, and the iteration time of a placement written out replica by replica."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from services.core.parallel.graph import AllReduce, JobGraph, Stage
from services.core.parallel.iteration import Network

SLOW = Network(inter_bytes_per_s=1e9, intra_bytes_per_s=100e9, server_gpus=4)


@st.composite
def stages(draw: st.DrawFn, *, widths: Sequence[int] = (1, 1, 2), most: int = 3) -> Stage:
    """Draw a stage of a few replicas, some with tensor or expert groups."""
    replicas = draw(st.integers(1, most))
    amount = st.sampled_from([0.0, 1e6, 7e6, 40e6])
    return Stage(
        replicas=replicas,
        forward_s=draw(st.sampled_from([0.0, 0.01, 0.03])),
        backward_s=draw(st.sampled_from([0.0, 0.02])),
        parameter_bytes=draw(amount),
        output_bytes=draw(amount),
        tensor_parallel=draw(st.sampled_from(widths)),
        tensor_bytes=draw(amount),
        expert_parallel=draw(st.sampled_from([1, replicas])),
        expert_bytes=draw(amount),
    )


@st.composite
def graphs(draw: st.DrawFn, *, widths: Sequence[int] = (1, 1, 2), most: int = 3) -> JobGraph:
    """Draw a job of one to three stages."""
    chain = draw(st.lists(stages(widths=widths, most=most), min_size=1, max_size=3))
    return JobGraph(tuple(chain), draw(st.sampled_from(list(AllReduce))))


@st.composite
def cases(draw: st.DrawFn, *, widths: Sequence[int] = (1, 1, 2), most: int = 3) -> tuple[JobGraph, list[int]]:
    """Draw a job and free GPUs of servers of four, at least as many as it needs."""
    graph = draw(graphs(widths=widths, most=most))
    free: list[int] = []
    while sum(free) < graph.gpus:
        free.append(draw(st.integers(1, 4)))
    return graph, free


def written_out_s(graph: JobGraph, network: Network, server: Sequence[int]) -> float:
    """Return eq. 7 for the server of each replica, one replica's bytes at a time; seconds."""
    first = [sum(stage.replicas for stage in graph.stages[:at]) for at in range(len(graph.stages))]
    where = [list(server[at : at + stage.replicas]) for at, stage in zip(first, graph.stages, strict=True)]
    slowest = 0.0
    for s, stage in enumerate(graph.stages):
        k, t = stage.replicas, stage.tensor_parallel
        nic = t * network.inter_bytes_per_s / network.server_gpus
        link = t * network.intra_bytes_per_s
        tensor_s = 2 * (t - 1) / t * stage.tensor_bytes / k / network.intra_bytes_per_s
        for replica, m in enumerate(where[s]):
            time_s = stage.forward_s + stage.backward_s + tensor_s
            for other, data in ((s - 1, graph.stages[s - 1].output_bytes), (s + 1, stage.output_bytes)):
                if 0 <= other < len(graph.stages):
                    for peer in where[other]:
                        time_s += 2 * data / k / len(where[other]) / (link if peer == m else nic)
            group = stage.expert_parallel
            for peer in range(replica - replica % group, replica - replica % group + group):
                if peer != replica:
                    time_s += 2 * stage.expert_bytes / k / group / (link if where[s][peer] == m else nic)
            together = where[s].count(m)
            time_s += 2 * (k - 1) / k * stage.parameter_bytes / (link if together == k else together * nic)
            slowest = max(slowest, time_s)
    return slowest
