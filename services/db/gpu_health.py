"""Which GPUs get no new work although their nodes do: sick ones, and those that an operator has taken out of service.

Telemetry writes the table ``gpu_health``; the scheduler and serving leave these GPUs out.
"""

UNUSABLE = "(h.cause IS NOT NULL OR h.drained)"
"""Whether a GPU gets no new work, of a row ``h`` of ``gpu_health``."""
