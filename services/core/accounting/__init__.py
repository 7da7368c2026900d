"""One definition of every figure a report shows: energy, emissions, completion times, latencies of requests.

``energy``: from device counters to joules. ``host_power``: what a host draws besides its GPUs. ``carbon``: from joules
to gCO2. ``completion``: how long jobs took. ``serving``: how well requests were served. All are pure functions of
numbers, called by the live processes and the simulator alike.
"""
