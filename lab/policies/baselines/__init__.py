"""Well-known schedulers, as baselines for the others.

``gandiva``: turns of one quantum each. ``shortest``: shortest job first, and shortest remaining time first, where job
lengths are known. ``predicted_order``: queues by predicted length or work. They run every job at one size, the smallest
or the largest it may have. ``afs`` chooses sizes, by marginal throughput between shorter and longer jobs.
"""
