"""Well-known schedulers that use no model of jobs or grids.

``fifo``: in order of submission, without preemption. ``las``: Tiresias' discretised least attained service. They run
every job at one size, the smallest or the largest it may have.
"""
