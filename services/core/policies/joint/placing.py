"""Where gangs whose stages and bytes are known sit: by their graphs, rather than on just any GPUs.

Their replicas are mapped by Heavy-Edge, refined (``parallel.mapping``), to the nodes with the most free devices: the
fewest that hold the gang, or a few more if even shares of them are faster. Unlike under A-SRPT, gangs that lose
little are not sent to the emptiest ones: what they free is worth less than what their bytes cost others.

A gang that would run at less than ``least_speed_share`` of its best speed declines, because it would hold its GPUs
correspondingly longer. Those behind it proceed as if it were not there, so that no GPU is idle because of it. It
declines until it has waited as long as the bad seats would delay it, so it loses at most twice what it would have lost
if it had known how long good seats would take to come (ski rental).
"""

from collections.abc import Mapping

import numpy as np

from services.core.cycle.graph_placing import Servers, best_s, mapper_of, seated
from services.core.cycle.placers import PLACERS
from services.core.cycle.placing import FreeDevices
from services.core.cycle.plan import Action, Hold, Plan, PowerNode, Start
from services.core.cycle.ranking import Ranking
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption
from services.core.cycle.snapshot import QUEUED, Snapshot
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import Placement
from services.core.domain.reasons import Reason
from services.core.domain.solving import Method
from services.core.policies.joint.config import JointConfig

MOST_PASSES = 8  #: How often a round is planned anew because gangs declined; what declines then keeps its claim
UNKNOWN_LEFT_S = 1_800.0
"""What a job of unknown length is taken to need where a restart, or better seats, have to pay for themselves."""


class Seating:
    """Places the gangs of one round; a gang without a graph is placed like the cluster's other gangs."""

    def __init__(self, snapshot: Snapshot, config: JointConfig, declined_since_s: Mapping[JobId, float]) -> None:
        self._snapshot, self._config = snapshot, config
        self._others = PLACERS[snapshot.placement]
        self._method = Method.HEAVY_EDGE if config.placement == "heavy-edge" else Method.REFINED
        self._since_s = declined_since_s
        self.until_s: dict[JobId, float] = {}  #: Until when each gang that declined waits, UTC seconds

    def __call__(self, snapshot: Snapshot, job: int, gpus: int, gpu_model: int, free: FreeDevices) -> Placement | None:
        job_id = snapshot.jobs.ids[job]
        graph = snapshot.graphs.get(job_id)
        if graph is None or gpus == 1:
            return self._others(snapshot, job, gpus, gpu_model, free)
        mapper = mapper_of(graph, gpus, snapshot.network)
        found = seated(snapshot, job, gpus, gpu_model, free, method=self._method, servers=Servers.FULLEST)
        if found is None:
            return None
        least_s = best_s(snapshot, mapper, gpu_model)
        if found.time_s * self._config.least_speed_share > least_s:
            until_s = self._since_s.get(job_id, snapshot.now_s) + self._left_s(job) * (found.time_s / least_s - 1.0)
            if snapshot.now_s < until_s:
                self.until_s[job_id] = until_s
                return None
        return free.take(list(found.shares))

    def planned(self, ranking: Ranking, preemption: Preemption) -> Plan:
        """Return the plan of a ranking without the gangs that decline, giving the reason why these wait."""
        snapshot, ids = self._snapshot, self._snapshot.jobs.ids
        for _ in range(MOST_PASSES):
            before = len(self.until_s)
            plan = reconcile(snapshot, ranking, preemption=preemption, place=self)
            if len(self.until_s) == before:
                break
            stays = np.array([ids[job] not in self.until_s for job in ranking.order.tolist()], dtype=np.bool_)
            ranking = Ranking(ranking.order[stays], ranking.gpus[stays], ranking.unranked)
        else:
            plan = reconcile(snapshot, ranking, preemption=preemption, place=self)
        return self._with_reasons(plan)

    def _left_s(self, job: int) -> float:
        predicted_s = self._snapshot.jobs.remaining_s.item(job)
        return predicted_s if predicted_s > 0 else UNKNOWN_LEFT_S

    def _with_reasons(self, plan: Plan) -> Plan:
        """Return the plan with the reason why gangs that declined wait, and when to look again."""
        if not self.until_s:
            return plan
        actions = tuple(map(self._explained, plan.actions))
        return Plan(plan.snapshot_version, actions, plan.nodes, min(self.until_s.values()))

    def _explained(self, action: Action) -> Action:
        if not isinstance(action, Hold) or action.job_id not in self.until_s:
            return action
        return Hold(action.job_id, Reason.BETTER_PLACEMENT, self.until_s[action.job_id])

    def since_s(self) -> Mapping[JobId, float]:
        """Return since when each gang that still waits has been declining offers, UTC seconds."""
        if not self.until_s and not self._since_s:
            return self._since_s
        jobs, now_s = self._snapshot.jobs, self._snapshot.now_s
        since_s = dict.fromkeys(self.until_s, now_s) | dict(self._since_s)
        waits = {job_id for job_id in since_s if (job := jobs.index.get(job_id)) is not None
                 and jobs.phase.item(job) == QUEUED}  # fmt: skip
        return {job_id: at_s for job_id, at_s in since_s.items() if job_id in waits}


def sleeping(
    snapshot: Snapshot, plan: Plan, empty_since_s: Mapping[NodeId, float], after_s: float
) -> tuple[tuple[PowerNode, ...], dict[NodeId, float]]:
    """Return which nodes to power down, and since when the other unused ones have been empty.

    Args:
        empty_since_s: What this function last returned, UTC seconds.
        after_s: How long a node stays empty before it is powered down.
    """
    nodes = snapshot.nodes
    used = {share.node_id for action in plan.actions if isinstance(action, Start) for share in action.placement.shares}
    empty = np.flatnonzero(nodes.may_sleep & ~nodes.asleep & (nodes.free_gpus == nodes.gpus)).tolist()
    unused = [node for node in map(nodes.ids.__getitem__, empty) if node not in used]
    since_s = {node: empty_since_s.get(node, snapshot.now_s) for node in unused}
    due = [node for node, at_s in since_s.items() if snapshot.now_s - at_s >= after_s]
    for node in due:
        del since_s[node]
    return tuple(PowerNode(node, False, Reason.UNUSED) for node in due), since_s
