"""The bridge to Ray: mirrors its nodes and jobs, and says when waiting jobs start, and at what size.

Users keep ``ray job submit``. Ray has no queue, so a steered job waits in its own entry point,
``python -m wattshift.ray``, which asks the bridge, makes a placement group of the planned size in the planned zone, and
runs the command in it. Without this process it starts by itself.
"""
