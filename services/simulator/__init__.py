"""What a policy would have done with a history of jobs: the live round, run on a simulated cluster.

``workload`` is what goes in (jobs, profiles, cluster, carbon), as columns; ``engine`` runs it; readers and recipes make
workloads of traces; experiments and reports run many and compare them.
"""
