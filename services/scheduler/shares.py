"""How GPUs are shared between tenants, for operators."""

import math
from collections.abc import Sequence

from services.contracts.policies import TenantShare, TenantShares
from services.core.accounting.completion import jain_index
from services.core.domain.errors import PolicyConfigError
from services.core.policies.fair import Fair
from services.core.policies.registry import build_policy
from services.scheduler.repository.rounds import State
from services.scheduler.repository.shares import ShareRow

S_PER_HOUR = 3_600.0


def shares_of(state: State, rows: Sequence[ShareRow]) -> TenantShares:
    """Return what tenants are due and have had, with the usage that the policy in force remembers."""
    used_gpu_s = used_by(state)
    whole = sum(row.weight for row in rows)
    items = [
        TenantShare(
            tenant_id=row.tenant_id,
            weight=row.weight,
            share=row.weight / whole,
            gpus=row.gpus,
            waiting_jobs=row.waiting_jobs,
            used_gpu_hours=None if used_gpu_s is None else used_gpu_s.get(row.tenant_id, 0.0) / S_PER_HOUR,
        )
        for row in rows
    ]
    waits = [each for each in items if each.waiting_jobs and each.used_gpu_hours is not None]
    jain = jain_index((each.used_gpu_hours or 0.0) / each.weight for each in waits) if len(waits) > 1 else math.nan
    return TenantShares(
        policy=state.policy, active=used_gpu_s is not None, jain=None if math.isnan(jain) else jain, items=items
    )


def used_by(state: State) -> dict[str, float] | None:
    """Return the GPU seconds that count against each tenant now; None if the policy does not share GPUs out."""
    try:
        policy = build_policy(state.policy, state.parameters)
    except PolicyConfigError:
        return None
    if not isinstance(policy, Fair):
        return None
    usage = policy.load(state.memory or {}).usage.at(state.now_s, policy.config.share_half_life_s)
    return dict(usage.used_gpu_s)
