"""Clover: inference with model variants of mixed quality on slices of GPUs, chosen anew as the grid changes.

``layouts``: what can be cut from a GPU; ``config_graph``: a configuration and its neighbours; ``objective``: what is
maximised; ``application``: the measured profile; ``evaluation``: what a configuration would do;
``prediction``: the same in closed form; ``anneal``: the paper's search; ``screen``: ours; ``measured``: the search on
real traffic; ``optimum``: an upper bound by an integer programme; ``partition``: a fleet for several applications.
"""
