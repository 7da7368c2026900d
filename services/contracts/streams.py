"""Names of streams in Redis."""

from __future__ import annotations

HINTS_STREAM = "wattshift:hints"
"""Messages that wake the scheduler: `kind` = `job` | `rank` | `node` | `policy`. Losing one delays it by a second."""

HINTS_MAX_LENGTH = 10_000

AGENT_GROUP = "agent"
COMMAND_FIELD = "command"


def command_stream(node_id: str) -> str:
    """Return the stream of commands to one node; its agent reads it as consumer group ``AGENT_GROUP``."""
    return f"wattshift:node:{node_id}:commands"
