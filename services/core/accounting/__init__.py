"""One definition of every figure a report shows: energy, emissions, completion times.

``energy`` from samples and counters to joules, and what was spent on nobody; ``carbon`` from joules to gCO2;
``host_power`` what a host draws beside its GPUs; ``efficiency`` progress per joule; ``completion`` how long jobs
took. Pure functions of
numbers: the live ledger and the simulator both call them.
"""
