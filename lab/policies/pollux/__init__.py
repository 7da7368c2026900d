"""Pollux (OSDI'21): every GPU where it adds most goodput over a fair share, and jobs that tune their batch to it.

``speedup`` turns goodput into each job's cost at each size, ``allocate`` finds the sizes of the least total cost,
``packing`` fits them to nodes so that no two gangs that span nodes share one, ``policy`` is the round. What a tuned
batch is worth comes with the snapshot (``Snapshot.goodput_curves``); ``core.profiles.goodput`` is the model behind it.
"""
