"""Plans of pools: when one is due (``planner``), its outcome (``plans``) and its inputs.

``demand`` predicts the requests, ``problem`` makes the problem to solve from demand, carbon intensity and GPUs.
"""
