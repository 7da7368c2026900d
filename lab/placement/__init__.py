"""One job on given free GPUs: Heavy-Edge and its refinement beside the placement with the shortest iteration.

``mapping``: the three methods; ``exact``: the mixed-integer programme; ``layers`` and ``architectures``: the published
shapes of common models; ``planner``: how to lay them out on a number of GPUs; ``jobs``: what a placement is asked for.
"""
