"""One request at the door: what was asked, what is expected of it, and how far it has come."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from services.contracts.identity import ResolvedKey
from services.core.policies.freesh.server_choice import Given
from services.kit.edge.exchange import Exchange
from services.router.fleet import Extra, Pool, Server
from services.router.kinds import Kind
from services.router.lanes import Lane
from services.router.openai import Asked, DoorError
from services.router.upstream import Connection

ACCURACY = b"x-wattshift-least-accuracy"
CARRIER = "wattshift.carrier"  #: Where the scope of a request that a gateway carries has the ``Carrier``


class Carrier(Protocol):
    """Who sends a request to the server that it is given, where the router does not do that itself."""

    @property
    def reaches(self) -> frozenset[bytes] | None:
        """The addresses, ``host:port``, that it can send the request to; None for any."""
        ...

    @property
    def has_told(self) -> bool:
        """Whether it was told a server, after which it can be told no other."""
        ...

    def connection(self, server: Server) -> Connection:
        """Return what stands in for a connection to a server; it carries one request."""
        ...


@dataclass(slots=True)
class Expected:
    """What is expected of a request."""

    input_tokens: int
    output_tokens: float
    request_class: str
    contexts: tuple[Any, ...]  #: The contexts by which its answer's length is learned
    n_bytes: int  #: Size of its prompt; 0 if it teaches nothing about tokens
    blocks: tuple[int, ...]  #: Hashes of its prompt's beginnings, shortest first
    block_tokens: float  #: Tokens of each block


@dataclass(frozen=True, slots=True)
class Spare:
    """A request that gets only what others leave free: a line of a batch, or one of the service tier ``flex``."""

    patience_s: float  #: How long it waits for that
    places: frozenset[str] = frozenset()  #: Those where it may be answered; empty for any


@dataclass(slots=True)
class Received:
    """A request as it came."""

    exchange: Exchange
    kind: Kind  #: What the router knows of requests to its path
    path: str  #: As it was sent, with its query
    key: ResolvedKey
    asked: Asked
    at_s: float  #: When it came, by the monotonic clock; of one that waited for what others left free, when it got that
    at_utc_s: float  #: When it came, UTC seconds
    spare: Spare | None = None  #: Set for one that gets only what others leave free
    least_accuracy_pct: float = 0.0  #: Of variants of its model, only those that are as accurate may answer it
    taken_tokens: int | None = None  #: How many its key's limits were charged before; None until then
    used_tokens: int = 0  #: How many it has used, all its tries together
    carrier: Carrier | None = None  #: Who sends it to its server; None if the router does


@dataclass(slots=True)
class Turn:
    """A request on its way to the servers of one model: the one asked for, or a fallback."""

    received: Received
    model: str
    pool: Pool
    lane: Lane
    expected: Expected
    report: Callable[[int, int], None]  #: To be called with the lengths of its prompt and answer, for the planner
    asks_usage: bool = False
    """Whether the router had the server state the usage although the client did not ask for it."""
    extras: tuple[Extra, ...] = ()  #: What it was sent with that some servers refuse
    wait_s: float = 0.0  #: Seconds from its arrival until it was sent to a server
    first_s: float = 0.0  #: Seconds from its arrival to the first token of a stream; 0 before
    place: Given | None = None  #: Its entry in its server's costs
    is_charged: bool = False  #: Whether what its last server spent on it is counted


class Tokens(NamedTuple):
    """Tokens of a prompt and its answer."""

    input: int
    output: int
    are_stated: bool  #: Whether the server stated both; else one is an estimate


NO_TOKENS = Tokens(0, 0, are_stated=True)


def least_accuracy_pct(exchange: Exchange, key: ResolvedKey) -> float:
    """Return the accuracy that a request asks for at least, or its key: whichever is higher, per cent."""
    of_key = key.key_limits.least_accuracy_pct or 0.0
    given = exchange.headers.get(ACCURACY)
    if given is None:
        return of_key
    if re.fullmatch(rb"\d{1,3}(\.\d{1,6})?", given) is None or float(given) > 100:
        raise DoorError(400, "invalid_value", f"{ACCURACY.decode()} must be a number between 0 and 100.")
    return max(float(given), of_key)
