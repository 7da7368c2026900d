"""How long one iteration takes on any placement of a job.

Under asynchronous pipelining the slowest stage on any server sets the pace (eq. 7)::

    alpha = max over (m, s) of  comp[s] + comm[s, m] + all_reduce[s, m]        where x[s, m] > 0

with ``x[s, m]`` replicas of stage ``s`` on server ``m``, each GPU having ``1/g`` of its server's NIC. Equations 5 and 6
are garbled in our copy of the paper; as they must read (``k`` replicas, ``d_in``, ``d_out`` per replica, ``h``
parameters)::

    comm       = (2 d_in (1 - x[s-1]/k[s-1]) + 2 d_out (1 - x[s+1]/k[s+1])) * x[s] / ((x[s]/g) B_inter)
               + (2 d_in x[s-1]/k[s-1] + 2 d_out x[s+1]/k[s+1]) / B_intra
    all_reduce = 2 (k-1) h / (k (x[s]/g) B_inter)   where the stage spans servers, 2 (k-1) h / (k B_intra) where not

Our additions (section VI gives no equations): a tensor group of ``t`` GPUs has ``t`` shares of the NIC and ``t`` links,
and sums ``tensor_bytes`` within its server; a replica of an expert group sends ``2 expert_bytes/k`` per iteration
evenly over its group, through the NIC or within the server. A server's terms depend only on what sits on that
server, so its time is a table look-up and three products.
"""

from dataclasses import dataclass, replace

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.core.parallel.graph import JobGraph


@dataclass(frozen=True)
class Network:
    """What connects GPUs. The defaults are the paper's: 10 Gb/s NICs, the NVLink of a V100, servers of eight GPUs."""

    inter_bytes_per_s: float = 10e9 / 8  #: A server's NIC, each direction; ``B_inter``
    intra_bytes_per_s: float = 300e9  #: Between GPUs of a server; ``B_intra``
    server_gpus: int = 8  #: GPUs of a server, which share its NIC evenly; ``g``
    within_bytes_per_s: tuple[float, ...] = ()
    """``B_inter`` of servers that are in one domain of a level, for each of the cluster's levels; empty: as ever."""

    def within(self, level: int) -> "Network":
        """Return the network of a gang within one domain of a level; of one beyond the last, the whole network."""
        if level >= len(self.within_bytes_per_s):
            return self
        return replace(self, inter_bytes_per_s=self.within_bytes_per_s[level])

    def __post_init__(self) -> None:
        rates = (self.inter_bytes_per_s, self.intra_bytes_per_s, *self.within_bytes_per_s)
        if not (all(0 < each < np.inf for each in rates) and self.server_gpus >= 1):
            raise DomainError("bandwidths are finite and above 0, and a server has at least one GPU")


class IterationModel:
    """The iteration time of one job on one kind of network."""

    def __init__(self, graph: JobGraph, network: Network) -> None:
        self.graph = graph
        self.network = network
        stages = graph.stages
        k = np.array([stage.replicas for stage in stages], dtype=np.float64)
        t = np.array([stage.tensor_parallel for stage in stages], dtype=np.float64)
        output = np.array([0.0, *(stage.output_bytes for stage in stages[:-1]), 0.0])
        d_in, d_out = output[:-1] / k, output[1:] / k
        outside = network.server_gpus / (t * network.inter_bytes_per_s)  # seconds per byte of one replica
        inside = 1.0 / (t * network.intra_bytes_per_s)
        tensor = np.array([stage.tensor_bytes for stage in stages]) / k * 2 * (t - 1) / t / network.intra_bytes_per_s
        computation = np.array([stage.forward_s + stage.backward_s for stage in stages]) + tensor
        summed = 2 * (k - 1) / k * np.array([stage.parameter_bytes for stage in stages])
        alone = computation + 2 * (d_in + d_out) * outside
        """Seconds with no neighbour on the server, without all-reduce."""
        self.saved_before = 2 * d_in * (outside - inside) / np.concatenate(([1.0], k[:-1]))
        self.saved_after = 2 * d_out * (outside - inside) / np.concatenate((k[1:], [1.0]))
        """Seconds saved per replica of the stage before, and after, on the same server."""
        most = int(k.max())
        x = np.arange(1, most + 1)
        reduced = np.where(x < k[:, None], (summed * outside)[:, None] / x, (summed * inside)[:, None])
        self.load = np.concatenate((np.full((len(stages), 1), -np.inf), alone[:, None] + reduced), axis=1)
        """(n_stages, most + 1) seconds by replicas on the server, without neighbours."""
        group = np.array([stage.expert_parallel for stage in stages], dtype=np.float64)
        sent = np.where(group > 1, 2 * np.array([stage.expert_bytes for stage in stages]) / k, 0.0)
        self.expert_alone = (sent * (group - 1) / group * outside)[graph.stage_of_class]
        self.expert_saved = (sent / group * (outside - inside))[graph.stage_of_class]
        """Per class: seconds of a replica's exchange alone on the server, and saved per peer on it."""
        self._has_experts = bool((self.expert_alone > 0).any())
        self._rows = np.arange(len(stages))[:, None]
        self._one_class_each = len(graph.stage_of_class) == len(stages)
        self._member = (graph.stage_of_class[None, :] == np.arange(len(stages))[:, None]).astype(np.int64)

    def server_times(self, counts: Ints) -> Floats:
        """Return the time of each server, seconds; -inf for one that has no replica.

        Args:
            counts: (..., n_classes, n_servers) replicas of each class on each server.

        Returns:
            (..., n_servers).
        """
        x = counts if self._one_class_each else self._member @ counts
        time = self.load[self._rows, x]
        time[..., 1:, :] -= self.saved_before[1:, None] * x[..., :-1, :]
        time[..., :-1, :] -= self.saved_after[:-1, None] * x[..., 1:, :]
        if self._has_experts:
            exchange = self.expert_alone[:, None] - self.expert_saved[:, None] * (counts - 1)
            time = np.where(counts > 0, time[..., self.graph.stage_of_class, :] + exchange, -np.inf)
        return time.max(axis=-2)

    def time_s(self, counts: Ints) -> Floats:
        """Return the iteration time of each placement: (..., n_classes, n_servers) to (...,)."""
        return self.server_times(counts).max(axis=-1)

    @property
    def whole_s(self) -> float:
        """The iteration time with everything on one server, however wide."""
        return float(self.time_s(self.graph.class_replicas[:, None]))

    @property
    def torn_s(self) -> float:
        """The iteration time with tensor groups split across servers, which no placement by graph allows."""
        k = np.array([stage.replicas for stage in self.graph.stages])
        torn = np.array([stage.tensor_bytes if stage.tensor_parallel > 1 else 0.0 for stage in self.graph.stages]) / k
        share = self.network.inter_bytes_per_s / self.network.server_gpus
        return self.worst_s + float(2 * torn.max() / share)

    @property
    def worst_s(self) -> float:
        """``alpha_max``: the iteration time with every replica on a server of its own."""
        alone = self.load[:, 1]
        return float(
            alone.max() if not self._has_experts else (alone[self.graph.stage_of_class] + self.expert_alone).max()
        )
