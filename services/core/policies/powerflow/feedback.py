"""Keeping the power limit by measurement: the models' power is corrected by the ratio of measured to modelled power.

The paper trusts its models. They cover GPUs; but hosts and unknown jobs draw power too, and jobs change. So
whenever the cluster's power has been measured in a steady state since the last change, it is compared with what the
models predict for the same gangs at the same control values. If more is drawn, the ratio applies at once; if less, it
falls by half of the difference each round, because a gang that has just begun or is saving a checkpoint draws little
for a while. While gangs are being measured at every control value, it only rises. This is ours, not the paper's.
"""

import math

from services.core.cycle.snapshot import Snapshot
from services.core.policies.powerflow.view import Tables
from services.core.policies.powerflow.watts import present_draw_w

RELAXES = 0.5
LEAST, MOST = 0.5, 4.0
"""Bounds of the ratio: beyond them, something other than the models is wrong."""


def correction(snapshot: Snapshot, tables: Tables, known: float, *, measuring: bool) -> float:
    """Return the ratio of measured to modelled power for this round.

    Args:
        snapshot: The cluster with its measured power; if that is NaN, the known ratio is kept.
        measuring: Whether gangs are being measured at control values other than those counted for them.
    """
    modelled_w = present_draw_w(snapshot, tables) if math.isfinite(snapshot.measured_w) else 0.0
    if modelled_w <= 0:
        return known
    ratio = min(max(snapshot.measured_w / modelled_w, LEAST), MOST)
    if ratio >= known:
        return ratio
    return known if measuring else known + RELAXES * (ratio - known)
