"""Who runs now, and on how many GPUs: one package per paper, and the baselines they are measured against.

A policy ranks the jobs of a snapshot and hands the ranking to ``cycle.reconcile``; what it must remember between
rounds is its memory. ``registry`` names every policy and builds one from an operator's parameters; ``parameters`` is
how a config dataclass declares them.
"""
