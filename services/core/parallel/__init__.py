"""Distributed training jobs as graphs: how long an iteration takes on a placement, and which placement is good.

``graph``: what a job is (stages, replicas, bytes per edge); ``edges``: the weights between its replicas;
``iteration``: the time of an iteration in any placement; ``heavy_edge``: the greedy cut; ``refine``: its local search;
``mapping``: the common entry point to both. The lab has the best placement, to compare with, and layouts of models.

Source: Luo et al., Prediction-Assisted Online Distributed Deep Learning Workload Scheduling in GPU Clusters (A-SRPT),
sections III-B, IV-B and VI.
"""
