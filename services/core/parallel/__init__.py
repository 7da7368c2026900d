"""Distributed training jobs as graphs: how long an iteration takes on a placement, and which placement is best.

``graph``: what a job is (stages, replicas, bytes per edge); ``edges``: the weights between its replicas; ``layers`` and
``architectures``: the published shapes of common models; ``planner``: how to lay them out on a number of GPUs;
``iteration``: the time of an iteration in any placement; ``heavy_edge``: the greedy cut; ``refine``: its local search;
``exact``: the mixed-integer programme; ``mapping``: the common entry point to the three.

Source: Luo et al., Prediction-Assisted Online Distributed Deep Learning Workload Scheduling in GPU Clusters (A-SRPT),
sections III-B, IV-B and VI.
"""
