"""Against a real GPU; every test skips where there is none, and none changes a device's settings."""
