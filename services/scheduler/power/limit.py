"""When to check the cluster's power: a policy with a power limit enforces it by measurements.

The policy corrects its models (``services.core.policies.powerflow.watts``); this says when a round is due for it,
and when the measured power can be used. If the controls of devices alone do not keep the limit, a round has to stop
gangs.
"""

import math
from typing import Any

from services.core.cycle.policy import Policy, PowerLimited
from services.core.cycle.snapshot import Snapshot, Trigger
from services.kit.logging import Log

log = Log(__name__)

PATIENCE = 3  #: Checks in a row above the limit after which a round may stop gangs
LONGEST_UNREST = 6.0  #: After this many intervals without rest the draw counts all the same: a busy cluster never rests


class PowerWatch:
    """One scheduler's data on the power drawn; lost with its process, and measured again at the first check."""

    def __init__(self, interval_s: float, settle_s: float) -> None:
        self._interval_s = interval_s
        self._settle_s = settle_s
        self._limited = False
        self._above = 0
        self._began_s: float | None = None
        self._looked_s = self._changed_s = self._measured_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        """Whether a round should be held because of the power drawn."""
        return self._limited and now_s - self._looked_s >= self._interval_s

    @property
    def trigger(self) -> Trigger:
        """The kind of round to hold."""
        return Trigger.ACTIVE if self._above >= PATIENCE else Trigger.PASSIVE

    def at_rest(self, now_s: float) -> bool:
        """Whether the last change has taken effect, also one by a scheduler before this one."""
        if self._began_s is None:
            self._began_s = now_s
        if now_s - self._began_s < self._settle_s:
            return False
        unrest = self._interval_s * LONGEST_UNREST
        return now_s - self._changed_s >= self._settle_s or now_s - self._measured_s >= unrest

    def note(self, snapshot: Snapshot, policy: Policy[Any], *, changed: bool, now_s: float) -> None:
        """Take note of a round that was held: what it saw, and whether it changed what gangs draw."""
        limit_w = policy.power_limit_w(snapshot) if isinstance(policy, PowerLimited) else math.inf
        is_limited = math.isfinite(limit_w)
        self._limited = is_limited or any(order.limits for order in snapshot.orders)
        self._looked_s = now_s
        if changed:
            self._changed_s = now_s
        if math.isfinite(snapshot.measured_w):
            self._measured_s = now_s
            above = is_limited and snapshot.measured_w > limit_w
            if snapshot.trigger is Trigger.ACTIVE:
                self._above = 0
            else:
                self._above = self._above + 1 if above else 0
            if above:
                log.info("power.above_limit", measured_w=round(snapshot.measured_w), limit_w=round(limit_w))
