"""First in, first out: jobs start in order of submission and run to their end."""

from dataclasses import dataclass

from services.core.cycle.plan import Plan
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.ranking import rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, waiting
from services.core.cycle.snapshot import Snapshot
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class FifoConfig:
    """Parameters of FIFO."""

    gang: GangParameter = "min"
    backfill: bool = parameter(
        False,
        "Whether later jobs may start while an earlier one waits for more GPUs than are free; "
        "a wide gang may then never start.",
    )

    def __post_init__(self) -> None:
        check_parameters(self)


class Fifo(StatelessPolicy):
    """Jobs in order of submission, but users' priorities come first. Never preempts."""

    name = "fifo"

    def __init__(self, config: FifoConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the starts that free devices allow, in order of submission."""
        waits, never, backfill = waiting(snapshot), Preemption.NEVER, self.config.backfill
        sizes, submitted_s = fixed_sizes(snapshot, self.config.gang, waits), snapshot.jobs.submitted_s[waits]
        ranking = rank(snapshot, waits, sizes, submitted_s, preemption=never, backfill=backfill)
        return reconcile(snapshot, ranking, preemption=never, backfill=backfill), memory
