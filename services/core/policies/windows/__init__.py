"""Windows: times for which GPUs are reserved for a tenant, or nodes are in maintenance, under every policy.

``slots`` finds where and when a reservation fits; ``layer`` keeps what was promised, round by round.
"""
