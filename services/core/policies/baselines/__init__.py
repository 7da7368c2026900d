"""The schedulers everybody knows, to measure the others against.

``fifo``: in order of submission, nobody is preempted. ``las``: Tiresias' discretised least attained service.
``shortest``: shortest job first, and shortest remaining time first, for whoever knows how long jobs take. All run every
job at one size, the smallest or the largest it may have.
"""
