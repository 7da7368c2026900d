"""Names in Redis."""

from __future__ import annotations

HINTS_STREAM = "wattshift:hints"
"""Short notes that wake the scheduler: `kind` = `job` | `rank` | `node` | `policy`. Losing one costs a second, not a
job."""

HINTS_MAX_LENGTH = 10_000

AGENT_GROUP = "agent"
COMMAND_FIELD = "command"


def command_stream(node_id: str) -> str:
    """Return the stream of commands to one node; its agent reads it as consumer group ``AGENT_GROUP``."""
    return f"wattshift:node:{node_id}:commands"
