"""Power: nodes powered down and woken, power limits and clocks of devices, and the cluster's power limit."""
