"""Against real GPUs; every test skips where there is none, and the settings of the devices are as before after it."""
