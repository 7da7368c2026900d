"""Counters of the scheduler, for ``/metrics``."""

from services.kit.metrics import LONG_S, counter, histogram

ROUNDS = counter("wattshift_scheduler_rounds_total", "Rounds that were held, by what they were held for.", ["trigger"])
PHASES = histogram(
    "wattshift_scheduler_round_duration_seconds",
    "Time that a round spent on reading the cluster, deciding, and writing its plan.",
    ["phase"],
)
ACTIONS = counter("wattshift_scheduler_actions_total", "What rounds did: to gangs, and to nodes.", ["action"])
FAILURES = counter(
    "wattshift_scheduler_turn_failures_total", "Failures in turns of the loop: of a turn, or over one job."
)
WAITS = histogram(
    "wattshift_job_wait_seconds",
    "How long jobs were queued before a gang of theirs was started: their first one, or a later one.",
    ["gang"],
    LONG_S,
)
GANGS_ENDED = counter(
    "wattshift_gangs_ended_total",
    "Gangs that ended: why, and the state that their jobs are in then.",
    ["reason", "job"],
)
NODES_LOST = counter("wattshift_nodes_lost_total", "Nodes that were given up because their leases had ended.")
