"""First in, first out: jobs start in order of submission and run to their end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from services.core.cycle.plan import Plan
from services.core.cycle.ranking import rank_waiting, waiting
from services.core.cycle.reconcile import Preemption, reconcile
from services.core.cycle.snapshot import Snapshot
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import Parameter, check_parameters


@dataclass(frozen=True)
class FifoConfig:
    """Parameters of FIFO."""

    gang: GangParameter = "min"
    backfill: Annotated[
        bool,
        Parameter(
            "Whether later jobs may start while an earlier one waits for more GPUs than are free; "
            "a wide gang can then wait for ever."
        ),
    ] = False

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class FifoMemory:
    """FIFO remembers nothing."""


class Fifo:
    """Jobs in order of submission; users' priorities come first. Never preempts."""

    name = "fifo"

    def __init__(self, config: FifoConfig) -> None:
        self.config = config

    def initial(self) -> FifoMemory:
        """Return the empty memory."""
        return FifoMemory()

    def decide(self, snapshot: Snapshot, memory: FifoMemory) -> tuple[Plan, FifoMemory]:
        """Return the starts that free devices allow, in order of submission."""
        waits, backfill = waiting(snapshot), self.config.backfill
        sizes = fixed_sizes(snapshot, self.config.gang, waits)
        ranking = rank_waiting(snapshot, waits, sizes, snapshot.jobs.submitted_s[waits], backfill=backfill)
        return reconcile(snapshot, ranking, preemption=Preemption.NEVER, backfill=backfill), memory

    def dump(self, memory: FifoMemory) -> dict[str, Any]:
        """Return the memory as JSON values: none."""
        del memory
        return {}

    def load(self, stored: dict[str, Any]) -> FifoMemory:
        """Return the empty memory, whatever was stored."""
        del stored
        return FifoMemory()
