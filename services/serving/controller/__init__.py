"""Starts, probes, drains and replaces instances of model servers until they are as the plan in force says.

``controller`` is the loop. The decisions are pure: ``diff`` says what is to change, ``advance`` how one instance moves
on, ``handover`` which of those that leave may be drained now, ``backoff`` how long a failing place and mode is left
alone. ``probes`` asks the servers, ``server_jobs`` submits and cancels the jobs that they run as.
"""
