"""Orders of the grid: one layer over every policy that keeps what the cluster draws within them.

A policy decides as if there were no order; ``layer`` then changes its plan as little as the order requires, in a stated
order of means, with PowerFlow's models of what gangs draw. ``feedback`` corrects these models by what is measured.
"""
