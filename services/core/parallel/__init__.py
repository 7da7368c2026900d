"""Distributed training jobs as graphs, how long an iteration takes where they sit, and where they should sit.

``graph`` what a job is (stages, replicas, bytes per edge) and ``edges`` the weights between its replicas; ``layers``
and ``architectures`` the published shapes of common models, and ``planner`` the layout it gives them on so many GPUs;
``iteration`` the time of an iteration in any placement; ``heavy_edge`` the greedy cut, ``refine`` its local search,
``exact`` the mixed-integer programme; ``mapping`` one door to the three.

Source: Luo et al., Prediction-Assisted Online Distributed Deep Learning Workload Scheduling in GPU Clusters (A-SRPT),
sections III-B, IV-B and VI.
"""
