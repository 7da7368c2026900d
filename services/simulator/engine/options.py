"""Options of a simulation, apart from the policy's own parameters."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from services.core.cycle.placers import PLACERS
from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.ids import JobId
from services.core.domain.topology import Topology
from services.core.domain.transfers import Transfer
from services.core.domain.windows import Window
from services.simulator.engine.orders import SimulatedOrder
from services.simulator.workload import Workload

TUNING_SHARES = {"all": 1.0, "half": 0.5, "none": 0.0}  #: The share of jobs whose batch size may follow the gang


class Foresight(Protocol):
    """What is foreseen of the lengths of a workload's jobs, by workload row, as the run goes on."""

    work_s: Floats  #: (n_jobs,) as predicted at submission; NaN for jobs not yet submitted
    spreads: dict[JobId, float]  #: Of the live jobs, as ``Snapshot.length_spreads`` has them

    def at_arrival(self, row: int, now_s: float) -> float:
        """Return the job's predicted work as a share of its true work."""
        ...

    def ended(self, row: int) -> None:
        """Record a job whose length is now known."""
        ...


Foreseeing = Callable[[Workload], Foresight]


@dataclass(frozen=True)
class EngineOptions:
    """How the simulated cluster behaves. Defaults are the live scheduler's where it has the same setting.

    Attributes:
        history_s, horizon_s: How far back and ahead policies see the grid.
        inter_gbps, intra_gbytes: Bandwidth of a node's NIC, Gb/s, and between devices of a node, GB/s. They determine
            what gangs whose profile has a graph lose when they are spread, and what graph-aware placers expect.
    """

    seed: int = 1  #: Seed of the random draws; equal input and equal seed give equal results
    round_interval_s: float = 1_800.0  #: Between active rounds
    passive_interval_s: float = 0.0
    """Least time between passive rounds; what happens in between waits for the next one."""
    min_run_s: float = 0.0  #: How long a gang holds its GPUs before a policy may stop it
    save_wait_s: float | None = None
    """How long a gang that a policy stops may be waited for to save its work; None: as long as a round."""
    interval_jobs: float = 0.0
    """The share of jobs that save their work at intervals alone, which they tell, and not when they are asked to stop;
    drawn using the seed."""
    grace_s: float = 120.0  #: From asking a gang to stop until it is killed
    checkpoint_every_s: float = 1_800.0
    """Interval of a run's checkpoints; a job falls back to the last when killed or when its node fails."""
    min_profile_s: float = 60.0  #: A gang size counts as profiled after it has run this long
    history_s: float = 172_800.0
    horizon_s: float = 172_800.0
    node_mtbf_s: float | None = None  #: Mean time between failures of a node, exponential; None: nodes never fail
    node_repair_s: float = 7_200.0  #: Mean time to repair, exponential
    lease_s: float = 60.0  #: From a node's failure until its jobs have certainly ended and wait again
    power_down_after_s: float | None = None
    """Nodes idle for this long are switched off and draw nothing; None: they stay on."""
    boot_s: float = 180.0  #: How long a gang waits for a node that is switched off
    host_idle_w: float = 30.0
    """Draw of the host per idle GPU, watts, while its node is on; the default is that of the recipes."""
    settings_known: bool = False
    """Whether policies know from the beginning, as predicted, how each kind of job responds to power limits and clocks;
    otherwise it has to be measured."""
    metered: bool = False
    """Whether policies see the cluster's measured power, as live ones do; otherwise only the models' predictions."""
    placement: str = "consolidated"
    """How gangs are placed unless the policy says otherwise: a name in ``placers.PLACERS``."""
    inter_gbps: float = 10.0
    intra_gbytes: float = 300.0
    topology: Topology = field(default_factory=Topology)
    """The levels of the network; nodes are n0, n1 and so on, in the order of the cluster."""
    within: str = ""  #: The level in one domain of which every gang must lie; empty: anywhere
    transfer: Transfer = field(default_factory=Transfer)  #: What it takes to move a job's checkpoint to another zone
    power_limit_w: float | None = None
    """The limit of every GPU unless the policy sets one; None: the board's own limit."""
    rigid: bool = False  #: Whether every job is fixed at the size its user asked for
    tenant_gpu_quota: Mapping[str, int] = field(default_factory=dict[str, int])
    """The most GPUs that tenants of the trace may hold at once."""
    tenant_guarantees: Mapping[str, int] = field(default_factory=dict[str, int])
    """GPUs that they are guaranteed, under any policy."""
    tenant_weights: Mapping[str, float] | None = None
    """Relative GPU shares of the trace's tenants under policies that share between tenants (``fair+``); 1 where none is
    given."""
    batch_tuning: str = "all"
    """Which jobs may tune their batch size to the gang, under policies that support it (``PolicyEntry.tunes_batch``): a
    name in ``TUNING_SHARES``; the jobs are drawn using the seed."""
    orders: tuple[SimulatedOrder, ...] = ()
    """Orders of the grid; while there are any, a power limit also slows jobs of which no curve is known, as
    ``core.policies.orders.tables`` assumes."""
    windows: tuple[Window, ...] = ()
    """Reservations and maintenance; a gang that is stopped for one releases its GPUs as after any stop."""
    until_s: float | None = None
    """Stop here, UTC seconds, even with unfinished jobs; None: run until the last job ends."""

    def __post_init__(self) -> None:
        positive = [self.round_interval_s, self.checkpoint_every_s, self.history_s, self.horizon_s, self.node_repair_s]
        positive += [self.inter_gbps, self.intra_gbytes]
        positive += [
            each for each in (self.node_mtbf_s, self.power_down_after_s, self.power_limit_w) if each is not None
        ]
        least = [self.passive_interval_s, self.grace_s, self.min_profile_s, self.lease_s, self.boot_s, self.host_idle_w]
        least += [self.min_run_s, self.save_wait_s or 0.0, self.interval_jobs]
        if self.placement not in PLACERS:
            raise DomainError(f"unknown placement {self.placement!r}; known: {', '.join(PLACERS)}")
        if self.batch_tuning not in TUNING_SHARES:
            raise DomainError(f"unknown batch tuning {self.batch_tuning!r}; known: {', '.join(TUNING_SHARES)}")
        if not all(math.isfinite(weight) and weight > 0 for weight in (self.tenant_weights or {}).values()):
            raise DomainError("weights of tenants are above 0")
        if not (all(each > 0 for each in positive) and all(each >= 0 for each in least)):
            raise DomainError("intervals of a simulation are above 0, and its delays and powers at least 0")

    def host_w(self, per_gpu_w: float, gpus: Ints, nodes: Ints) -> Floats:
        """Return what gangs are charged for their hosts, watts: (n,).

        Args:
            per_gpu_w: From the job's profile.
            gpus, nodes: (n,) how many each gang holds.
        """
        del nodes
        return np.multiply(gpus, per_gpu_w, dtype=np.float64)
