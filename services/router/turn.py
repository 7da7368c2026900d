"""One request at the door: what was asked, what is expected of it, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from services.contracts.identity import ResolvedKey
from services.core.policies.freesh.server_choice import Given
from services.kit.edge.exchange import Exchange
from services.router.fleet import Pool
from services.router.kinds import Kind
from services.router.lanes import Lane
from services.router.openai import Asked


@dataclass(slots=True)
class Expected:
    """What is expected of a request.

    Attributes:
        contexts: The contexts by which its answer's length is learned.
        n_bytes: Size of its prompt; 0 if it teaches nothing about tokens.
        blocks: Hashes of its prompt's beginnings, shortest first.
        block_tokens: Tokens of each block.
    """

    input_tokens: int
    output_tokens: float
    request_class: str
    contexts: tuple[Any, ...]
    n_bytes: int
    blocks: tuple[int, ...]
    block_tokens: float


@dataclass(frozen=True, slots=True)
class Spare:
    """A request that gets only what others leave free: a line of a batch, or one of the service tier ``flex``.

    Attributes:
        patience_s: How long it waits for that.
        places: Those where it may be answered; empty for any.
    """

    patience_s: float
    places: frozenset[str] = frozenset()


@dataclass(slots=True)
class Received:
    """A request as it came.

    Attributes:
        kind: What the router knows of requests to its path.
        path: As it was sent, with its query.
        at_s: When it came, by the monotonic clock; of one that waited for what others left free, when it got that.
        at_utc_s: When it came, UTC seconds.
        spare: Set for one that gets only what others leave free.
    """

    exchange: Exchange
    kind: Kind
    path: str
    key: ResolvedKey
    asked: Asked
    at_s: float
    at_utc_s: float
    spare: Spare | None = None


@dataclass(slots=True)
class Turn:
    """A request on its way to the servers of one model: the one asked for, or a fallback.

    Attributes:
        window: Its entry in the traffic report; the numbers become the lengths of prompt and answer.
        asks_usage: Whether the router had the server state the usage although the client did not ask for it.
        wait_s: Seconds from its arrival until it was sent to a server.
        first_s: Seconds from its arrival to the first token of a stream; 0 before.
        place: Its entry in its server's costs.
    """

    received: Received
    model: str
    pool: Pool
    lane: Lane
    expected: Expected
    window: list[int]
    asks_usage: bool = False
    wait_s: float = 0.0
    first_s: float = 0.0
    place: Given | None = None


class Tokens(NamedTuple):
    """Tokens of a prompt and its answer.

    Attributes:
        are_stated: Whether the server stated both; else one is an estimate.
    """

    input: int
    output: int
    are_stated: bool


NO_TOKENS = Tokens(0, 0, are_stated=True)
