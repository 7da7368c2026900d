"""Devices behind one small protocol: NVML, or simulated ones so that everything runs on a laptop."""
