"""One definition of every figure a report shows: energy, emissions, completion times.

``energy``: from device counters to joules. ``host_power``: what a host draws beside its GPUs. ``carbon``: from joules
to gCO2. ``completion``: how long jobs took. They are pure functions of numbers, called by the live ledger and the
simulator.
"""
