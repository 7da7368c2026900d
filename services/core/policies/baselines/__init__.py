"""The schedulers everybody knows, to measure the others against.

``fifo``: in order of submission, nobody is preempted. ``las``: Tiresias' discretised least attained service. Both run
every job at one size, the smallest or the largest it may have.
"""
