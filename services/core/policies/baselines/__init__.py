"""The schedulers everybody knows, to measure the others against.

``fifo``: in order of submission, nobody is preempted. ``las``: Tiresias' discretised least attained service.
``gandiva``: turns by time slice. ``shortest``: shortest job first, and shortest remaining time first, for whoever knows
how long jobs take. They run every job at one size, the smallest or the largest it may have. ``afs`` chooses sizes, by
marginal throughput between shorter and longer jobs.
"""
