"""Starts, probes, drains and replaces instances of model servers until they match the plan in force.

``controller`` is the loop. The decisions are pure: ``diff`` finds what has to change, ``advance`` how one instance
changes state. ``probes`` probes the servers, ``server_jobs`` submits and cancels the jobs they run as.
"""
