"""Reason codes in words."""

from __future__ import annotations

from services.core.cycle.plan import Reason

SENTENCES: dict[Reason, str] = {
    Reason.IN_ORDER: "First in the policy's order, and its GPUs are free.",
    Reason.OUTRANKED: "Jobs ahead of it in the policy's order need its GPUs.",
    Reason.SCALE_OUT: "It restarts on more GPUs, because it uses their energy well.",
    Reason.SCALE_IN: "It restarts on fewer GPUs.",
    Reason.STANDING_SERVICE: "Standing services come before training jobs, and have the GPUs they need.",
    Reason.NOT_ENOUGH_FREE_GPUS: "Jobs ahead of it, or standing services, hold or take every GPU it could use.",
    Reason.WAITING_FOR_RELEASE: "Its GPUs are being released by jobs that are stopping.",
    Reason.WAITING_FOR_ROUND: "It is placed at the next active round.",
    Reason.NO_ELIGIBLE_NODE: "No node of the cluster has the GPUs it asks for.",
    Reason.TENANT_QUOTA: "Its tenant holds as many GPUs as it may.",
    Reason.LEAST_COST: "Its energy and its time together cost least at this setting.",
    Reason.PROFILING: "It is measured at each setting, for the policy does not know yet what they do to it.",
    Reason.DEFAULT_SETTING: "The policy has no reason to keep the setting it had.",
    Reason.POWER_LIMIT: "The cluster's power limit leaves it no more.",
    Reason.DEFRAGMENTATION: "It restarts elsewhere, which makes room for a gang that waits or lets a node power down.",
    Reason.UNUSED: "Nothing runs on the node.",
    Reason.NEEDED: "Jobs will need the node.",
    Reason.WAITING_FOR_NODE: "A node it starts on is being woken.",
    Reason.GREENER_HOURS: "It waits for hours of lower carbon intensity.",
    Reason.SHORTER_FIRST: "Jobs that are predicted to need less of the cluster come before it.",
    Reason.BETTER_PLACEMENT: "GPUs are free, but too spread for it to run well; it waits a while for better ones.",
}
