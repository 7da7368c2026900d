"""Streams in Redis: their names, and how telemetry relays a node's own."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from services.contracts.schema import NodeMessage, maybe

HINTS_STREAM = "wattshift:hints"
"""Messages that wake the scheduler: `kind` = `job` | `rank` | `node` | `policy`. Losing one delays it by a second."""

HINTS_MAX_LENGTH = 10_000

FIRST_ENTRY = "0-0"  #: Behind this id are all entries of a stream
NEWEST_ENTRY = "$"  #: Behind this id are those that come from now on
COMMAND_FIELD = "command"
TRACEPARENT_FIELD = "traceparent"
"""What a command is part of: a span, as W3C Trace Context has it, `;` and the id of a request, or one of them."""


def command_stream(node_id: str) -> str:
    """Return the stream of commands to one node; its agent removes what it has carried out."""
    return f"wattshift:node:{node_id}:commands"


ROUTERS_HASH = "wattshift:routers"
"""Router processes that are alive: by id, `RouterState` as JSON with the time at which it was written."""


ROUTER_LIMITS_HASH = "wattshift:router-limits"  #: What router processes have let through: by id, `LimitsState` as JSON


GATEWAY_LIMITS_HASH = "wattshift:gateway-limits"  #: The same of gateways


def ended_session(session_id: str) -> str:
    """Return the key that exists for as long as the cookie of an ended session would be valid."""
    return f"wattshift:ended-session:{session_id}"


def latency_stream(node_id: str) -> str:
    """Return the stream of what routers saw of one node's servers: a `LatencyReport` per second, as `report`."""
    return f"wattshift:node:{node_id}:latency"


LATENCY_MAX_LENGTH = 120
LATENCY_FIELD = "report"


class NodeStream(StrEnum):
    """One of a node's own streams."""

    COMMANDS = "commands"
    LATENCY = "latency"

    @classmethod
    def of(cls, name: str) -> NodeStream:
        """Return which stream of its node has this name."""
        return cls(name.rpartition(":")[2])

    def name_of(self, node_id: str) -> str:
        return (command_stream if self is NodeStream.COMMANDS else latency_stream)(node_id)


EntryId = Annotated[str, Field(pattern=r"^[0-9]{1,19}-[0-9]{1,19}$")]


class StreamRead(NodeMessage):
    """Removes an entry of a node's stream, or waits for others; repeating the request loses nothing."""

    stream: NodeStream
    done: EntryId | None = maybe("A command that is on the node's disk, and is removed.")
    after: EntryId | Literal["$"] | None = maybe(
        "Behind which entries are waited for, two seconds at most; null: none are."
    )


class StreamEntry(NodeMessage):
    """An entry of a node's stream."""

    id: EntryId
    fields: dict[str, str]


class StreamEntries(NodeMessage):
    """What a node's stream has, oldest first."""

    entries: list[StreamEntry]
