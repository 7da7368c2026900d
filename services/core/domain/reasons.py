"""Why the scheduler does what it does, as codes."""

from enum import StrEnum

from services.core.domain.plain_members import plain_members


@plain_members
class Reason(StrEnum):
    """Why a job starts, stops or waits, or why its controls are set.

    The codes are public API: new ones may be added, existing ones are never renamed.
    """

    # starts
    IN_ORDER = "in_order"  #: First in the policy's order, and its gang fits
    PACKED = "packed"  #: No GPU is free, and it shares one with another job: two together may do more than in turns
    # stops
    OUTRANKED = "outranked"  #: Jobs ahead of it in the policy's order need its GPUs
    SCALE_OUT = "scale_out"  #: It restarts on more GPUs: it uses their energy well
    SCALE_IN = "scale_in"  #: It restarts on fewer GPUs
    UNPACKED = "unpacked"  #: It did less beside another job on one GPU than in turns, or a GPU is free for it alone
    SERVICE_INSTANCE = "standing_service"
    """A service instance starts, or a training gang is stopped for one: instances come first under any policy."""
    # waits
    NOT_ENOUGH_FREE_GPUS = "not_enough_free_gpus"
    """Jobs ahead of it, service instances or fleets have every GPU it could use."""
    WAITING_FOR_RELEASE = "waiting_for_release"  #: Its GPUs are being released by jobs that are stopping
    WAITING_FOR_ROUND = "waiting_for_round"  #: It is placed at the next active round
    NO_ELIGIBLE_NODE = "no_eligible_node"
    """No nodes of one kind have the GPUs it asks for: one model and memory, in one grid zone."""
    NODE_CLOSED = "node_closed"
    """Nodes that have what it asks for are silent, closed or drained, or their GPUs are out of service."""
    NO_SUCH_SLICE = "no_such_slice"  #: No GPU that it may use is cut into a slice of the size it asks for
    NOT_ENOUGH_FREE_SLICES = "not_enough_free_slices"  #: Other jobs hold every slice it could use
    TENANT_QUOTA = "tenant_quota"  #: With it, its tenant would hold more GPUs than it may
    FAIR_SHARE = "fair_share"
    """Its tenant holds its share of the GPUs, or has had more than others have; theirs come first."""
    GUARANTEED = "guaranteed"
    """Its GPUs go back to a tenant to which they are guaranteed; or those that it would borrow go to such tenants, or
    may not be lent to it, because it may not be stopped."""
    GREENER_HOURS = "greener_hours"  #: The policy keeps it, or stops it, for hours of lower carbon intensity
    SHORTER_FIRST = "shorter_first"  #: Jobs that are predicted to need less of the cluster come before it
    BETTER_PLACEMENT = "better_placement"
    """GPUs are free, but so spread that it would run much slower: it waits a while for better ones."""
    NO_ROOM_WITHIN = "no_room_within"
    """GPUs are free, but no single rack, or other domain of the level that it must lie within, has enough of them."""
    NO_SUCH_DOMAIN = "no_such_domain"
    """No domain of the level that it must lie within has as many GPUs, or the cluster has no such level."""
    CHECKPOINT_NODE_BUSY = "checkpoint_node_busy"
    """Its checkpoint is on a node alone, where others hold the GPUs or come before it."""
    CHECKPOINT_NODE_CLOSED = "checkpoint_node_closed"
    """Its checkpoint is on a node alone, which takes no work, or no longer has as many GPUs as it needs."""
    CHECKPOINT_NODE_AWAY = "checkpoint_node_away"  #: Its checkpoint is on a node alone, which is silent or gone
    # waits and ends that no policy decides
    DEPENDENCY = "dependency"  #: It waits for other jobs to end, as its user asked
    ARRAY_LIMIT = "array_limit"  #: As many tasks of its array hold GPUs as may at once
    BACKING_OFF = "backing_off"  #: It ended soon after each of its last starts, and pauses before the next one
    SET_ASIDE = "set_aside"  #: No round could be held with it, and it is left out for a while, so that others start
    IN_CELL = "in_cell"  #: Another installation has it
    CHOOSING_CELL = "choosing_cell"  #: It is being chosen which installation is to run it
    ENGINE_LIMIT = "engine_limit"
    """Its engine does not start it, whatever GPUs are free: a limit, a licence or a begin time there."""
    DEPENDENCY_FAILED = "dependency_failed"  #: It was cancelled: a job it depends on ended otherwise than it had to
    # control values
    LEAST_COST = "least_cost"  #: Its energy and its time together cost least at this control value
    PROFILING = "profiling"
    """It is measured at each control value, for the policy does not know yet what they do to it."""
    DEFAULT_CONTROL = "default_setting"  #: The policy has no reason to keep the control value it had
    POWER_LIMIT = "power_limit"
    """The cluster's power limit decides: it leaves a job no watts, stops it, or allows this control value."""
    GRID_ORDER = "grid_order"  #: An order of the grid, or the limit of the cluster, leaves no more power
    RESERVED = "reserved"
    """It starts on GPUs that its tenant has reserved; or those it has, or would have, are reserved or go into
    maintenance before it could end."""
    # moves and nodes
    GREENER_ZONE = "greener_zone"  #: It restarts in a zone where it emits less, even with the way of its checkpoint
    DEFRAGMENTATION = "defragmentation"
    """It restarts elsewhere: that frees a block for a gang that waits, or a node to power down, and pays for itself."""
    UNUSED = "unused"  #: Nothing runs on the node
    NEEDED = "needed"  #: Jobs will need the node
    WAITING_FOR_NODE = "waiting_for_node"  #: The gang has its GPUs, but a node of them still has to boot
