"""What a policy would have done with a history of jobs: the live round, run on a simulated cluster.

``workload`` has the inputs (jobs, profiles, cluster, carbon), as columns; ``engine`` runs them; readers and recipes
make workloads from traces; experiments and reports run many and compare them.
"""
