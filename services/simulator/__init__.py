"""What a policy would have done with past jobs: the live scheduling round, run on a simulated cluster.

``workload`` defines the inputs (jobs, profiles, cluster, carbon) as columns; ``engine`` runs them; readers and recipes
build workloads from traces.
"""
