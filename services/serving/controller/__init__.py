"""Starts, probes, drains and replaces instances of model servers until they match the plan in force.

``controller`` is the loop. The decisions are pure: ``diff`` finds what has to change, ``advance`` how one instance
changes state, ``handover`` which of the leaving instances may be drained now, ``backoff`` how long a failing place and
mode gets no new instance. ``probes`` probes the servers, ``server_jobs`` submits and cancels the jobs they run as.
"""
