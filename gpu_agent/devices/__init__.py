"""Devices behind one small protocol: NVML, or simulated devices so that everything runs on a laptop."""
