"""Reason codes in words."""

from collections.abc import Sequence

from services.core.domain.reasons import Reason

SENTENCES: dict[Reason, str] = {
    Reason.IN_ORDER: "First in the policy's order, and its GPUs are free.",
    Reason.PACKED: "No GPU is free: it shares one with another job, as long as the two do more than in turns.",
    Reason.UNPACKED: "It did less beside another job on one GPU than in turns, or a GPU is free for it alone.",
    Reason.OUTRANKED: "Jobs ahead of it in the policy's order need its GPUs.",
    Reason.SCALE_OUT: "It restarts on more GPUs, because it uses their energy well.",
    Reason.SCALE_IN: "It restarts on fewer GPUs.",
    Reason.SERVICE_INSTANCE: "Service instances come before training jobs, and get the GPUs they need.",
    Reason.NOT_ENOUGH_FREE_GPUS: "Jobs ahead of it, service instances or fleets have every GPU it could use.",
    Reason.WAITING_FOR_RELEASE: "Its GPUs are being released by jobs that are stopping.",
    Reason.WAITING_FOR_ROUND: "It is placed at the next active round.",
    Reason.NO_ELIGIBLE_NODE: "No grid zone of the cluster has as many GPUs of one kind as it asks for.",
    Reason.NODE_CLOSED: "The nodes that have what it asks for take no work.",
    Reason.NO_SUCH_SLICE: "No GPU that it may use is cut into slices of the size it asks for.",
    Reason.NOT_ENOUGH_FREE_SLICES: "Other jobs hold every slice it could use.",
    Reason.TENANT_QUOTA: "With it, its tenant would hold more GPUs than it may.",
    Reason.DEPENDENCY: "It waits for other jobs to end.",
    Reason.ARRAY_LIMIT: "As many tasks of its array run as may at once.",
    Reason.BACKING_OFF: "It ended soon after each of its last starts, and pauses before the next one.",
    Reason.SET_ASIDE: "The scheduler cannot plan with it: it is left out for a while, and operators are told why.",
    Reason.IN_CELL: "Another installation has it.",
    Reason.CHOOSING_CELL: "It is being chosen which installation is to run it.",
    Reason.ENGINE_LIMIT: "Its engine does not start it yet, whatever GPUs are free.",
    Reason.DEPENDENCY_FAILED: "A job it depends on ended otherwise than it had to.",
    Reason.LEAST_COST: "Its energy and its time together cost least at this power limit or clock.",
    Reason.PROFILING: "It is measured at several power limits or clocks: the policy does not know their effect yet.",
    Reason.DEFAULT_CONTROL: "The policy has no reason to keep the power limit or clock it had.",
    Reason.POWER_LIMIT: "The cluster's power limit leaves it no more.",
    Reason.GRID_ORDER: "An order of the grid to draw less, or the limit of the cluster's power, leaves it no more.",
    Reason.RESERVED: "The GPUs are reserved, or go into maintenance, before it could end there.",
    Reason.GREENER_ZONE: "It restarts in a zone where it emits less, even with the way of its checkpoint.",
    Reason.DEFRAGMENTATION: "It restarts elsewhere, which makes room for a gang that waits or lets a node power down.",
    Reason.UNUSED: "Nothing runs on the node.",
    Reason.NEEDED: "Jobs will need the node.",
    Reason.WAITING_FOR_NODE: "A node it starts on is being woken.",
    Reason.FAIR_SHARE: "Its tenant holds its share of the GPUs, or has had more than others have; theirs come first.",
    Reason.GUARANTEED: "The GPUs that it borrows, or would borrow, are guaranteed to other tenants.",
    Reason.GREENER_HOURS: "It waits for hours of lower carbon intensity.",
    Reason.SHORTER_FIRST: "Jobs that are predicted to need less of the cluster come before it.",
    Reason.NO_ROOM_WITHIN: "GPUs are free, but no one domain of the level it must lie within has enough of them.",
    Reason.NO_SUCH_DOMAIN: "No domain of the level it must lie within has as many GPUs, or there is no such level.",
    Reason.CHECKPOINT_NODE_BUSY: "Other jobs hold the GPUs of the node of its checkpoint, or get them before it.",
    Reason.CHECKPOINT_NODE_CLOSED: "The node of its checkpoint takes no work, or has too few GPUs for it by now.",
    Reason.CHECKPOINT_NODE_AWAY: "The node of its checkpoint is silent, off or gone.",
    Reason.BETTER_PLACEMENT: "GPUs are free, but too spread for it to run well; it waits a while for better ones.",
}


def words_of_stop(reason: Reason, to: str) -> str:
    """Return why a gang stops; ``to``: the tenant that has its GPUs back, if any."""
    return f"It gives GPUs back to the tenant {to}, to which they are guaranteed." if to else SENTENCES[reason]


_OF_NODES = (Reason.CHECKPOINT_NODE_BUSY, Reason.CHECKPOINT_NODE_CLOSED, Reason.CHECKPOINT_NODE_AWAY)


def detail_of(reason: Reason, nodes: Sequence[str] = ()) -> str:
    """Return a reason in words; ``nodes``: those that the job is bound to."""
    words = SENTENCES[reason]
    if reason in _OF_NODES and nodes:
        words = f"{words} It waits for {', '.join(nodes)}; `wattshift forget-checkpoint` lets it begin anew elsewhere."
    return words
