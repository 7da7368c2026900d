"""Where a gang sits: which devices on which nodes."""

from dataclasses import dataclass

from services.core.domain.ids import NodeId


@dataclass(frozen=True, slots=True)
class NodeShare:
    """A gang's devices on one node; its ranks there see them in this order."""

    node_id: NodeId
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A whole gang's devices; the order of the shares is the order of the node ranks."""

    shares: tuple[NodeShare, ...]

    @property
    def gpus(self) -> int:
        shares = self.shares
        return len(shares[0].devices) if len(shares) == 1 else sum([len(share.devices) for share in shares])
