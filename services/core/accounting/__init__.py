"""One definition of every figure a report shows: energy, emissions, completion times.

``meters``: from readings to joules that can be; ``host_power``: what a host draws besides its GPUs; ``slices``: what
each slice of a GPU used; ``carbon``: from joules to gCO2; ``uncertainty``: how far off sums may be; ``completion``: how
long jobs took; ``orders``: how far orders of the grid were kept. All are pure functions, called by the live processes
and the simulator alike.
"""
