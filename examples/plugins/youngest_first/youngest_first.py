"""A policy in a package of its own: the job submitted last starts first, and runs to its end."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.cycle.plan import Plan
from services.core.cycle.policy import StatelessPolicy
from services.core.cycle.ranking import rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, waiting
from services.core.cycle.snapshot import Snapshot
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import check_parameters
from services.core.policies.registry import PolicyEntry


@dataclass(frozen=True)
class YoungestFirstConfig:
    """Parameters of youngest first."""

    gang: GangParameter = "min"

    def __post_init__(self) -> None:
        check_parameters(self)


class YoungestFirst(StatelessPolicy):
    """Jobs in reverse order of submission; users' priorities come first. Never preempts."""

    name = "youngest-first"

    def __init__(self, config: YoungestFirstConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the starts that free devices allow, the youngest job first."""
        waits = waiting(snapshot)
        sizes = fixed_sizes(snapshot, self.config.gang, waits)
        ranking = rank(snapshot, waits, sizes, -snapshot.jobs.submitted_s[waits], preemption=Preemption.NEVER)
        return reconcile(snapshot, ranking, preemption=Preemption.NEVER), memory


POLICY = PolicyEntry(
    summary="The job submitted last starts first.",
    paper="",
    config=YoungestFirstConfig,
    build=YoungestFirst,
    preempts=False,
)
