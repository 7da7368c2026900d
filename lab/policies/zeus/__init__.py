"""Zeus: each job at the power limit that costs least in energy and time together, on top of any policy.

``cost`` is the paper's trade-off, ``wrapper`` adds it to any policy. Of the paper's two knobs this is one: it also
tries batch sizes across recurring runs of a job, with a bandit. A control plane does not change a user's batch size,
and no trace says which of its jobs recur towards which target: the batch size stays what it is.
"""
