"""Trace input: jobs and grids from files of many formats, or from what is bundled.

``read_jobs`` and ``read_carbon`` are what the command line and experiments call. ``formats/`` holds one module per job
trace format, ``grids.py`` the carbon files, ``forecasts.py`` forecasts as they were issued. Whatever was left out or
filled in is listed in ``Workload.notes`` and ``CarbonTrace.notes``.
"""

from services.simulator.raw import RawJobs, ReadReport, TraceFormatError
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs, read_raw

__all__ = ["RawJobs", "ReadReport", "TraceFormatError", "read_carbon", "read_jobs", "read_raw"]
