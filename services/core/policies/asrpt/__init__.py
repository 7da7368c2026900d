"""A-SRPT: jobs queue in the order in which a single virtual machine, as fast as the whole cluster, would finish them.

``virtual_machine`` schedules the predicted lengths preemptively; ``policy`` starts gangs, without preemption, in the
order in which they end there.

Source: Luo et al., Prediction-Assisted Online Distributed Deep Learning Workload Scheduling in GPU Clusters.
"""
