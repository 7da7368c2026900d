"""Plans of pools: when one is due (``planner``), what becomes of it (``plans``) and what it is made from.

``demand`` predicts the requests, ``problem`` makes the problem to solve from demand, carbon intensity and GPUs.
"""
