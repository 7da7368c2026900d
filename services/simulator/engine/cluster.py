"""The simulated nodes: which devices are free, which nodes are up, and what idle devices draw.

GPUs cut into MIG slices are not among the devices; ``slices.py`` handles those.
"""

import numpy as np

from services.core.cycle.levels import numbered
from services.core.cycle.snapshot import NodeTable
from services.core.domain.arrays import Bools, Ints
from services.core.domain.ids import NodeId
from services.core.domain.placement import Placement
from services.core.domain.topology import Topology
from services.simulator.workload import ClusterSpec


class Nodes:
    """All nodes of a cluster, up or down.

    Attributes:
        levels, domains: The levels of the network, and the nodes' domains, as a snapshot has them.
    """

    def __init__(self, spec: ClusterSpec, host_idle_w: float, topology: Topology | None = None) -> None:
        self.zones = spec.zones
        kinds = [*dict.fromkeys((group.zone, group.model.name) for group in spec.groups)]
        self.models = tuple(name for _, name in kinds)
        """Names of the GPU models, as in ``Snapshot.gpu_models``: one for each model in each zone."""
        self.zone_of = [self.zones.index(zone) for zone, _ in kinds]
        """The zone of each of those, an index into ``zones``."""
        groups = [group for group in spec.groups for _ in range(group.count)]
        self.ids = tuple(NodeId(f"n{at}") for at in range(len(groups)))
        self.levels, self.domains = (), np.empty((len(groups), 0), dtype=np.int64)
        if topology is not None:
            self.levels, self.domains = numbered(topology, [(node_id, {}) for node_id in self.ids])
        self.where = {node_id: at for at, node_id in enumerate(self.ids)}
        self.model = [kinds.index((group.zone, group.model.name)) for group in groups]  #: Index of each node's model
        self.zone = [self.zone_of[model] for model in self.model]  #: Index of each node's zone
        self._whole_gpus = [group.whole for group in groups]
        self.gpus = [len(whole) for whole in self._whole_gpus]  #: Uncut GPUs of each node
        self._idle_each = [group.model.idle_w + host_idle_w for group in groups]
        self._free: list[tuple[int, ...]] = list(self._whole_gpus)
        self.free_gpus: Ints = np.array(self.gpus, dtype=np.int64)  #: (n_nodes,) free devices of each node that is up
        self.free_total = sum(self.gpus)  #: Their sum
        self.up = [True] * len(groups)  #: Whether a node's lease holds
        self.idle_w = sum(each * gpus for each, gpus in zip(self._idle_each, self.gpus, strict=True))
        """What all idle devices on nodes that are up and switched on draw now, watts."""
        self.zone_idle_w = [0.0] * len(self.zones)  #: The same by zone, if there are several
        for at, zone in enumerate(self.zone):
            self.zone_idle_w[zone] += self._idle_each[at] * self.gpus[at]
        schedulable = np.array([group.schedulable and bool(group.whole) for group in groups], dtype=np.bool_)
        self._cut = np.array([group.slices > 0 for group in groups], dtype=np.bool_)
        self._asleep: Bools = np.zeros(len(groups), dtype=np.bool_)  # switched off to save power; given work, they boot
        model, gpus, zone = (np.array(each, dtype=np.int64) for each in (self.model, self.gpus, self.zone))
        columns = (self.ids, model, gpus, schedulable, tuple(self._free), self.free_gpus)
        sleep = schedulable & ~self._cut
        self._whole = NodeTable(*columns, may_sleep=sleep, zone=zone, domains=self.domains)
        self._table: NodeTable | None = None
        self._down = 0
        self._awake_at_s = [0.0] * len(groups)
        board_of = {group.model.name: group.model for group in groups}
        self.boards = [board_of[name] for name in self.models]  #: By index of the model
        self.idle_w_of = np.array([board.idle_w + host_idle_w for board in self.boards])
        """(n_models,) what one idle device draws, its share of the host included."""
        self._shared: set[tuple[int, int]] = set()

    def table(self) -> NodeTable:
        """Return the nodes that are up, as a snapshot shows them until the next event."""
        if self._table is None:
            whole = self._whole.with_free(tuple(self._free), self.free_gpus, self.free_total, self._asleep)
            self._table = whole.rows(np.array(self.up)) if self._down else whole
        return self._table

    def _put_to_sleep(self, node: int, asleep: bool) -> None:
        """Mark a node as switched off or on; tables shown earlier keep the column they have."""
        self._asleep = self._asleep.copy()
        self._asleep[node] = asleep
        self._table = None

    def _draws(self, node: int, gpus: int) -> None:
        idle_w = self._idle_each[node] * gpus
        self.idle_w += idle_w
        self.zone_idle_w[self.zone[node]] += idle_w

    def take(self, placement: Placement, now_s: float, boot_s: float) -> tuple[int, float]:
        """Take a gang's devices; return the index of their model and when all its nodes will be awake, UTC seconds."""
        awake_at_s = now_s
        at = -1
        for share in placement.shares:
            at = self.where[share.node_id]
            self.wake(at, now_s, boot_s)
            awake_at_s = max(awake_at_s, self._awake_at_s[at])
            free = self._free[at]
            count = len(share.devices)
            self._free[at] = () if count == len(free) else tuple(d for d in free if d not in share.devices)
            self.free_gpus[at] -= count
            self.free_total -= count
            self._draws(at, -count)
        self._table = None
        return self.model[at], awake_at_s

    def share(self, placement: Placement) -> int:
        """Let a second gang share the single device of another; return the index of its model."""
        at = self.where[placement.shares[0].node_id]
        self._shared.add((at, placement.shares[0].devices[0]))
        return self.model[at]

    def give_back(self, placement: Placement) -> list[int]:
        """Release a gang's devices, except on nodes that are down. Return the nodes that are now entirely idle.

        The first of two gangs on a shared device leaves it to the other.
        """
        idle: list[int] = []
        if self._shared:
            share = placement.shares[0]
            device = self.where[share.node_id], share.devices[0]
            if device in self._shared:
                self._shared.remove(device)
                return idle
        for share in placement.shares:
            at = self.where[share.node_id]
            if not self.up[at]:
                continue
            free = self._free[at]
            self._free[at] = tuple(sorted((*free, *share.devices))) if free else share.devices
            count = len(share.devices)
            self.free_gpus[at] += count
            self.free_total += count
            self._draws(at, count)
            if self.free_gpus[at] == self.gpus[at]:
                idle.append(at)
        self._table = None
        return idle

    def wake(self, node: int, now_s: float, boot_s: float) -> None:
        """Switch a node on if it is off; it draws its idle power, and can run work once it has booted."""
        if self._asleep.item(node):
            self._put_to_sleep(node, False)
            self._draws(node, self.gpus[node])
            self._awake_at_s[node] = now_s + boot_s

    def switch_off(self, node: int) -> None:
        """Switch an idle node off, unless some of its GPUs are cut."""
        is_idle = self.up[node] and self.free_gpus[node] == self.gpus[node]
        if is_idle and not self._asleep[node] and not self._cut[node]:
            self._put_to_sleep(node, True)
            self._draws(node, -self.gpus[node])

    def fail(self, node: int) -> None:
        if not self._asleep[node]:
            self._draws(node, -int(self.free_gpus[node]))
        self._put_to_sleep(node, False)
        self.up[node] = False
        self._down += 1
        self.free_total -= int(self.free_gpus[node])
        self.free_gpus[node] = 0
        self._free[node] = ()
        self._table = None

    def recover(self, node: int) -> None:
        self.up[node] = True
        self._down -= 1
        self._free[node] = self._whole_gpus[node]
        self.free_gpus[node] = self.gpus[node]
        self.free_total += self.gpus[node]
        self._draws(node, self.gpus[node])
        self._table = None
