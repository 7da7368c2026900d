"""Trace input: jobs and grids from files of many formats, or from what is bundled.

``read_jobs`` and ``read_carbon`` are what the command line and experiments call. ``formats/`` holds one module per job
trace format, ``grids.py`` the carbon files; ``carbon.py`` also reads forecasts as they were issued. Whatever was left
out or filled in is listed in ``Workload.notes`` and ``CarbonTrace.notes``.
"""
