"""GPUs, control values and places for given jobs: one round of PowerFlow without a cluster around it."""
