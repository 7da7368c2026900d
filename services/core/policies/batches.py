"""The batch sizes of gangs that start, where users let policies choose them."""

from dataclasses import replace

from services.core.cycle.plan import Plan, Start
from services.core.cycle.snapshot import Snapshot


def with_batches(snapshot: Snapshot, plan: Plan) -> Plan:
    """Return the plan with a batch for each gang that starts: the one for which its goodput is predicted.

    A job whose user does not permit it, or for which nothing is predicted, keeps the user's batch. A gang keeps its
    batch until it starts again.
    """
    batches = snapshot.goodput_batches
    if not batches.size or not plan.actions:
        return plan
    jobs, largest = snapshot.jobs, int(batches.shape[-1])

    def chosen(start: Start) -> Start:
        job = jobs.index[start.job_id]
        curve, low, high = jobs.goodput_curve.item(job), jobs.batch_min.item(job), jobs.batch_max.item(job)
        if curve < 0 or low < 0:
            return start
        over_nodes = int(len(start.placement.shares) > 1)
        batch_size = batches.item(curve, over_nodes, min(start.gpus, largest) - 1)
        return replace(start, batch_size=min(max(batch_size, low), high)) if batch_size > 0 else start

    actions = tuple(chosen(each) if isinstance(each, Start) else each for each in plan.actions)
    return replace(plan, actions=actions)
