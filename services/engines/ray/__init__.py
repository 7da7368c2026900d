"""The bridge to Ray: mirrors its nodes and jobs, and says when the jobs start that wait for it, and how wide.

Users keep ``ray job submit``. Ray has no queue, so a job that is to be steered waits in its own entry point,
``python -m wattshift.ray``, which asks here, makes a placement group of the planned size in the planned zone, and runs
the command in it. Without this process it starts by itself.
"""
