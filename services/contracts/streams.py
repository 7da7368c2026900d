"""Names of streams in Redis."""

from __future__ import annotations

HINTS_STREAM = "wattshift:hints"
"""Messages that wake the scheduler: `kind` = `job` | `rank` | `node` | `policy`. Losing one delays it by a second."""

HINTS_MAX_LENGTH = 10_000

AGENT_GROUP = "agent"
COMMAND_FIELD = "command"
TRACEPARENT_FIELD = "traceparent"
"""The span that a command is a child of, as W3C Trace Context has it; only where traces are on."""


def command_stream(node_id: str) -> str:
    """Return the stream of commands to one node; its agent reads it as consumer group ``AGENT_GROUP``."""
    return f"wattshift:node:{node_id}:commands"


ROUTERS_HASH = "wattshift:routers"
"""Router processes that are alive: by id, `RouterState` as JSON with the time at which it was written."""


ROUTER_LIMITS_HASH = "wattshift:router-limits"
"""What router processes have let through: by id, `LimitsState` as JSON."""


GATEWAY_LIMITS_HASH = "wattshift:gateway-limits"
"""The same of gateways."""


def ended_session(session_id: str) -> str:
    """Return the key that is there for as long as the cookie of a session that has ended would be valid."""
    return f"wattshift:ended-session:{session_id}"


def latency_stream(node_id: str) -> str:
    """Return the stream of what routers saw of the servers on one node: a `LatencyReport` a second as `report`."""
    return f"wattshift:node:{node_id}:latency"


LATENCY_MAX_LENGTH = 120
LATENCY_FIELD = "report"
