"""Requests on their way through the router: the real doors, lanes, breakers and connections, before model servers.

Clients send requests of two classes, which have servers in common, and leave at any time, also in the middle of an
answer. Servers answer at once or in pieces, are busy, fail, break off, keep silent, and are taken out and put back.
With limits, keys have a number of requests and tokens a minute, and some requests get what others leave free.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import orjson

from services.contracts.identity import NO_KEY_LIMITS, Identity, KeyLimits, ResolvedKey, Role, TenantLimits
from services.contracts.routing import RoutedServer, RoutingTable
from services.core.policies.freesh.laxity import PREEMPTION_MARGIN_S, Order, preempted_by
from services.core.policies.freesh.server_choice import (
    ALIKE,
    ALIKE_PACE,
    BALANCE_REQUESTS,
    BALANCE_SHARE,
    Given,
    ServerCosts,
)
from services.kit.credentials import caller_key
from services.kit.edge.limits import RateLimiter
from services.kit.networks import read_networks
from services.kit.problems import ProblemError
from services.kit.tokens import Outgoing
from services.router import expectations, upstream
from services.router.answers import AnswerPasser, Outcomes
from services.router.app import Router
from services.router.breaker import FAILURES, Breaker
from services.router.dispatch import Dispatcher
from services.router.door import BATCH, BATCH_MODEL, Door
from services.router.expectations import Expectations
from services.router.fleet import Fleet, Server
from services.router.gate import Gate, KeyRules
from services.router.lanes import (
    WANTED_WITHIN_S,
    Lane,
    LaneRules,
    Lanes,
    NoServerError,
    NoSpareError,
    QueueFullError,
    Ticket,
)
from services.router.metrics import Metrics
from services.router.openai import NO_QUOTA, DoorError
from services.router.outgoing import RequestWriter
from services.router.probes import Trials, probe
from services.router.reports import unreported
from services.router.settings import RouterSettings
from services.router.stored_answers import StoredAnswers
from services.router.turn import ACCURACY, Received, Tokens, Turn
from services.router.upstream import CHECK_S, KEPT_S, Connection, Limits, Origin, UpstreamError
from tests.simulation.kept import kept
from tests.simulation.loop import EPOCH_S, SimulatedServer, Simulation
from tests.support.routers import MODEL, a_routed_pool

LONG_WORDS = 60
TENANTS = ("acme", "beta")
AT_ONCE = 4
PROFILE = {"full_power_w": 400.0, "idle_w": 100.0, "max_qps": 4.0, "latency_s": 1.0, "ttft_ms": 200.0, "tbt_ms": 30.0}
"""Of a server that says all that there is to say of its energy."""
REFUSALS = frozenset({429, 500, 502, 503, 504})
"""What a client may be told instead of an answer, where servers fail."""
LIMITS = Limits(connect_s=1.0, first_byte_s=3.0, silence_s=1.5, total_s=8.0)
BODY_BYTES, BODIES_BYTES, ANSWER_BYTES, WAITING_BYTES, HEAD_BYTES = 2_000, 3_000, 1_500, (60, 600), 2_000
"""What requests, all of them, answers, their unread parts and their heads may have: little, so that it is reached."""
BUSY, CLOSES, SILENT, BROKEN, NONSENSE, BREAKS_OFF = 1, 2, 3, 4, 5, 6
TELLS_EARLY, CLOSES_AFTER, ANSWERS_TWICE, HAS_NO_LENGTH = 7, 8, 9, 10
HAS_LARGE_HEAD, HAS_NO_STATUS, IS_LARGE, SWITCHES = 11, 12, 13, 14
REFUSES_KEY, HAS_TRAILERS, IS_ENCODED, IN_EVENTS = 15, 16, 17, 18
"""What a model server does instead of answering as it should; from the second line on, to whole answers alone."""
IN_EVENTS_ANSWER = (
    b"HTTP/1.1 400 No\r\ncontent-type: text/event-stream\r\ncontent-length: 39\r\n\r\n"
    b'data: {"error": {"message": "refused"}}\n\n'
).replace(b"39", b"41")
STATUS_OF = {
    "queue_full": 429,
    "no_server": 503,
    "upstream_timeout": 504,
    "upstream_busy": 503,
    "upstream_rate_limited": 429,
} | dict.fromkeys(("upstream_malformed", "upstream_too_large", "upstream_closed", "upstream_connect"), 502)
MALFORMED = (NONSENSE, HAS_LARGE_HEAD, HAS_NO_STATUS, SWITCHES)
FOOTPRINT = {b"x-wattshift-wh", b"x-wattshift-gco2"}
SERVED = "weights-v7"
"""What servers call their model."""
LESS_PCT, MORE_PCT = 70.0, 90.0
"""Accuracies of variants; what a request may ask for is the second."""
JOINT = "joint"
"""A registered endpoint that has the first model, too, perhaps for some tenants alone."""
OTHER_MODEL = "small"
"""Is asked while no server of the first model answers."""
INSIDE, OUTSIDE = "127.0.0.0/8", "10.0.0.1"
"""Where endpoints may be, and where one is that may not."""
NAMES_AGE_S = 1.0
"""For so long the addresses of a name are known."""
BLOCK_CHARACTERS = 64
"""Prompts are told apart, and found to be alike, by so many."""
HUNG_S = 0.5
"""A stream that its server does not begin within this time may be requested from another."""
ARRIVES_S = 1.0
"""Within this time the first of an answer arrives."""
MOST_OWED = 2.5
"""Requests by which a server's turns may be ahead of its weight or behind it, once it was passed over for others."""


KEPT = frozenset(
    f"{name}.{each}"
    for name, known in {
        "RouterSettings": ("__dict__", "__pydantic_fields_set__", "network_ms"),
        "Dispatcher": ("_network_s", "_usual_network_s"),
        "Fleet": ("servers", "pools"),
        "Pool": ("servers", "by_class"),
        "Server": ("lanes", "_refused"),
        "Lanes": ("_lanes",),
        "WeightedRoundRobin": ("_credit",),
        "Lane": ("servers", "others"),
        "MonthCounts": ("_own",),
        "ServerCosts": ("_sessions", "adapters"),
        "PrefixCache": ("_blocks",),
        "Origin": ("_addresses",),
        "RequestWriter": ("_heads",),
        "Incoming": ("_callers", "_known"),
        "RateLimiter": ("_buckets",),
        "Expectations": ("_counters",),
        "AnswerLengths": ("_contexts",),
        "_Context": ("counts", "sums", "shares"),
        "Counter": ("values",),
        "Histogram": ("_found",),
    }.items()
    for each in known
)
"""What a router knows of its table, its tenants and what it has learned, whether or not a request is there."""


class _Requests:
    """What reached model servers, which write it down as it arrives.

    Attributes:
        worked_on: How often each request was worked on, by its number.
        outcomes: What became of it each time.
        has_changed: Whether a server was taken out or put back.
        has_fallback: Whether another model is asked, which may have no server.
        flex: How many requests in eight get only what others leave free.
        lines: Whether some are lines of batches, which only get that, too.
        is_crowd: Whether all come at once, to one server that has one place, and wait for long.
        limits: Of each key.
        let_in: How many requests each key was let in with.
        used: How many tokens each key has used.
        expected, settled: Of who is there, and of who was, as the limits of keys have it.
        excess: Why a key has used up a budget.
        spare: Who holds a place that others left.
        holders: Who holds any place.
        failed: The servers that failed a request in a lane.
        turns: How often a request was brought to a lane.
        firsts: How many answers that began are noted, by figure.
        refuse_usage: Servers that know no such option of a request.
        with_key: Servers that the router has a key for.
        arrived: Requests that were counted for the planner.
        refused: By the number of each request, the servers that refused the key.
        carried: Requests that a gateway carries, and so sends once, each with the servers that it reaches; None: all.
        answered_between: Those that it answered itself, as their server did not.
        charged: How often each was charged.
        began_s: When a server sent the first event or the end of its answer to a request, by number and server.
        sent_s: When it sent each event, by number, server and place.
        numbers: Of those that were at a server.
        may_use: Which servers each request may reach, by its number.
        encoded: Bodies whose encoding only their client knows.
        usage_s: When each server that knows no such option was asked without it, by one that had asked with it.
        at_work: The connections on which a server has a request, by its name.
        capacity: Of each server.
        wants_usage: Whether a client has asked for its usage itself.
        refused_usage: Which servers have refused that option to which request.
        spoilt: Connections on which more was sent than was asked for.
        whole: Of which requests and servers the whole answer was sent.
        learned: How often each request was learned from.
        tokens: By request and server, those of its prompt and answer, as they are to be counted, and whether it stated
            both; None where nobody can know.
    """

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, str], tuple[int | None, int | None, bool]] = {}
        self.whole: set[tuple[int, str]] = set()
        self.learned = Counter[int]()
        self.refuse_usage: set[str] = set()
        self.with_key: set[str] = set()
        self.refused: dict[int, list[str]] = {}
        self.carried, self.answered_between = dict[int, frozenset[str] | None](), set[int]()
        self.charged = Counter[int]()
        self.began_s: dict[tuple[int, str], float] = {}
        self.sent_s: dict[tuple[int, str, int], float] = {}
        self.may_use: dict[int, Callable[[str], bool]] = {}
        self.encoded: dict[tuple[int, str], bytes] = {}
        self.usage_s: dict[str, float] = {}
        self.capacity: dict[str, int] = {}
        self.wants_usage: dict[int, bool] = {}
        self.refused_usage: set[tuple[int, str]] = set()
        self.at_work: dict[str, set[Any]] = {}
        self.numbers: dict[Ticket, int] = {}
        self.spoilt: set[Any] = set()
        self.arrived = self.served = 0
        self.worked_on: dict[int, int] = {}
        self.outcomes: dict[int, list[int]] = {}
        self.has_changed = False
        self.has_fallback = False
        self.flex, self.lines, self.is_crowd = 0, False, False
        self.limits = NO_KEY_LIMITS
        self.let_in, self.used = Counter[str](), Counter[str]()
        self.expected, self.settled, self.excess = Counter[str](), Counter[str](), dict[str, str]()
        self.spare: set[Ticket] = set()
        self.holders: set[Ticket] = set()
        self.failed: dict[Ticket, set[str]] = {}
        self.firsts = Counter[str]()
        self.turns = 0


class _ModelServer(asyncio.Protocol):
    """A connection to a model server, which speaks HTTP as one does."""

    def __init__(self, simulation: Simulation, name: str, requests: _Requests) -> None:
        self._simulation = simulation
        self._name = name
        self._requests = requests
        self._received = b""
        self._transport: Any = None
        self._answering: asyncio.Task[None] | None = None
        self._has_ended = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._simulation.choices.below(2, often=0.02):  # it has too many connections
            self._simulation.loop.has_cut = True
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        self._simulation.check("nobody asks where an answer was to be the last", not self._has_ended, self._name)
        self._received += data
        head, mark, body = self._received.partition(b"\r\n\r\n")
        if not mark:
            return
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
        if len(body) < length:
            return
        self._received = b""
        asked = orjson.loads(body) if length else {}
        if "user" in asked:
            number, requests = int(asked["user"]), self._requests
            self._simulation.check("a server serves whom it may", requests.may_use[number](self._name), f"{number}")
            here = requests.at_work[self._name] = {
                each for each in requests.at_work.get(self._name, ()) if not (each._is_closed or each.peer._is_closed)
            } | {self._transport}
            most = self._requests.capacity[self._name]
            self._simulation.check("a server works on no more than it may", len(here) <= most, f"{len(here)} of {most}")
        work = self._answer(asked) if "user" in asked else self._be_healthy()
        self._answering = self._simulation.loop.create_task(work)

    async def _be_healthy(self) -> None:
        status = (200, 500)[self._simulation.choices.below(2, often=0.2)]
        self._send(b"HTTP/1.1 %d OK\r\ncontent-length: 0\r\n\r\n" % status)

    async def _answer(self, asked: Mapping[str, Any]) -> None:
        draw = self._simulation.choices.below
        number = int(asked["user"])
        outcome = draw(8 if asked.get("stream") else 18, often=0.5)
        outcome = IN_EVENTS if asked.get("stream") and outcome == 7 else outcome
        wants_usage = "stream_options" in asked
        if wants_usage and self._name in self._requests.refuse_usage:
            is_own = self._requests.wants_usage[number]
            is_known = self._requests.usage_s.get(self._name, math.inf) < time.monotonic() - ARRIVES_S
            is_told = is_known and not is_own and not self._requests.has_changed
            self._simulation.check("a server is not asked for what it has refused", not is_told, self._name)
            self._requests.refused_usage.add((number, self._name))
            self._send(b"HTTP/1.1 400 Odd\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            return
        if outcome == IS_LARGE and number in self._requests.carried:  # of which its gateway takes more than the router
            self._rest()
        if (number, self._name) in self._requests.refused_usage and outcome != IN_EVENTS:  # else it was not that
            self._requests.usage_s.setdefault(self._name, time.monotonic())
        self._requests.outcomes.setdefault(number, []).append(outcome)
        if outcome == BUSY:  # it works on none of it
            status = (503, 429)[draw(2)]
            self._send(b"HTTP/1.1 %d Busy\r\ncontent-length: 4\r\n\r\nbusy" % status)
            return
        if outcome == REFUSES_KEY:
            self._requests.refused.setdefault(number, []).append(self._name)
            self._send(b"HTTP/1.1 401 No\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            return
        if outcome == IN_EVENTS:
            self._requests.usage_s.pop(self._name, None)  # it may have been that
            self._send(IN_EVENTS_ANSWER)
            return
        self._requests.worked_on[number] = self._requests.worked_on.get(number, 0) + 1
        await asyncio.sleep(0.05 * draw(40))
        if outcome == CLOSES:
            self._transport.close()
            return
        if outcome == SILENT:
            return
        if outcome == BROKEN:
            self._send(b"HTTP/1.1 500 Broken\r\ncontent-length: 6\r\n\r\nbroken")
            return
        if outcome in MALFORMED:
            self._send(_malformed(outcome))
            return
        if asked.get("stream"):
            await self._stream(number, outcome, wants_usage)
        else:
            await self._whole(number, outcome, makes_vectors="input" in asked)

    async def _whole(self, number: int, outcome: int, *, makes_vectors: bool) -> None:
        draw = self._simulation.choices.below
        usage: dict[str, Any] = {"prompt_tokens": 3}
        if not makes_vectors:
            usage |= ({"completion_tokens": 4}, {}, {"completion_tokens": "odd"})[draw(3, often=0.2)]
        output = 0 if makes_vectors else cast(int | None, usage.get("completion_tokens"))
        output = output if isinstance(output, int) else None
        self._requests.tokens[number, self._name] = 3, output, output is not None
        padding = "x" * (2 * ANSWER_BYTES if outcome == IS_LARGE else 0)
        body = orjson.dumps({"model": SERVED, "for": number, "by": self._name, "usage": usage, "padding": padding})
        if outcome == IS_ENCODED:
            self._requests.encoded[number, self._name] = body
        early = b"HTTP/1.1 102 Processing\r\nx-progress: 1\r\n\r\n" if outcome == TELLS_EARLY else b""
        length = b"" if outcome == HAS_NO_LENGTH else b"content-length: %d\r\n" % len(body)
        ends = b"connection: close\r\n" if outcome in (CLOSES_AFTER, HAS_NO_LENGTH) else b""
        if outcome == HAS_TRAILERS:
            length = b"transfer-encoding: chunked\r\n"
            body = b"%x\r\n%s\r\n0\r\ncontent-type: text/odd\r\n\r\n" % (len(body), body)
        ends += b"content-encoding: odd\r\n" if outcome == IS_ENCODED else b""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + length + ends + b"\r\n"
        second = head + body.replace(b'"for":', b'"not_for":') if outcome == ANSWERS_TWICE else b""
        second = second.replace(b"200 OK", b"500 Odd") if draw(2) else second
        answer = early + head + (body[:9] if outcome == BREAKS_OFF else body)
        size = 400 if outcome == IS_LARGE else len(answer)
        if outcome != BREAKS_OFF:
            self._requests.whole.add((number, self._name))
        self._requests.began_s[number, self._name] = time.monotonic()
        if second:  # it has begun by then: what comes later nobody could tell from the answer to the next request
            self._requests.spoilt.add(self._transport.peer)
            begun = 1 + draw(len(second))
            self._rest()
            self._transport._send(answer + second[:begun])
            await asyncio.sleep(0.05 * draw(8))
            answer = second[begun:]
        for at in range(0, len(answer), size):
            self._send(answer[at : at + size], is_last=at + size >= len(answer))
            if size < len(answer):
                await asyncio.sleep(0.05)
        self._has_ended = outcome in (CLOSES_AFTER, HAS_NO_LENGTH)
        if outcome in (BREAKS_OFF, HAS_NO_LENGTH) or (outcome == CLOSES_AFTER and draw(2)):
            self._transport.close()
        elif draw(8, often=0.3) == 1:  # it keeps no connections for long
            self._simulation.loop.call_later(0.05 * draw(10), self._close_unused)

    def _close_unused(self) -> None:
        if self._answering is None or self._answering.done():
            self._simulation.loop.has_cut = True
            self._transport.close()

    async def _stream(self, number: int, outcome: int, wants_usage: bool) -> None:
        draw = self._simulation.choices.below
        self._send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n", is_last=False
        )
        pieces = 1 + draw(3)
        self._requests.tokens[number, self._name] = (3 if wants_usage else None), pieces, wants_usage
        for at in range(pieces):
            await asyncio.sleep((0.02, 0.2, 2.0)[draw(3, often=0.3)])
            if outcome == BREAKS_OFF and at == pieces - 1:
                self._transport.close()
                return
            self._requests.sent_s[number, self._name, at] = time.monotonic()
            self._requests.began_s.setdefault((number, self._name), time.monotonic())
            self._chunk(
                b"data: " + orjson.dumps({"model": SERVED, "for": number, "by": self._name, "at": at}) + b"\n\n"
            )
            if not at and self._transport.was_cut:  # whoever reads its end slowly cannot tell when it came
                self._requests.began_s[number, self._name] = math.nan
        if wants_usage:
            usage = {"prompt_tokens": 3, "completion_tokens": pieces}
            self._chunk(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n")
        self._requests.whole.add((number, self._name))
        self._chunk(b"data: [DONE]\n\n")
        self._send((b"0\r\n\r\n", b"0\r\nretry-after: 9\r\n\r\n")[draw(2, often=0.2)])

    def _chunk(self, data: bytes) -> None:
        self._send(b"%x\r\n%s\r\n" % (len(data), data), is_last=False)

    def _send(self, data: bytes, *, is_last: bool = True) -> None:
        if is_last:
            self._rest()
        self._transport.write(data)

    def _rest(self) -> None:
        """Have no request at work any more."""
        self._requests.at_work.get(self._name, set()).discard(self._transport)


def _malformed(outcome: int) -> bytes:
    match outcome:
        case _ if outcome == HAS_LARGE_HEAD:
            return b"HTTP/1.1 200 OK\r\nx-filler: " + b"x" * 2 * HEAD_BYTES
        case _ if outcome == HAS_NO_STATUS:
            return b"HTTP/1.1 700 Odd\r\ncontent-length: 0\r\n\r\n"
        case _ if outcome == SWITCHES:
            return b"HTTP/1.1 101 Switching Protocols\r\nupgrade: odd\r\nconnection: upgrade\r\n\r\nodd"
        case _:
            return b"nonsense\r\n\r\n"


class _Client:
    """One request of a client, as an ASGI server passes it on."""

    def __init__(self, simulation: Simulation, number: int, requests: _Requests) -> None:
        draw, flex = simulation.choices.below, requests.flex
        self.number = number
        self.is_line = requests.lines and draw(4) == 1
        self._place = (b"", b"here,there")[draw(2)] if self.is_line else b""
        self.is_stranger = self.is_line and draw(4) == 1
        self.tenant = TENANTS[draw(2, often=0.3)]
        self.is_stream = draw(2) == 1
        self._wants_vectors = not self.is_stream and draw(4) == 1
        self.may_repeat = draw(4) != 1
        words = "word " * (LONG_WORDS if draw(2) else 2)
        body = {"model": MODEL, "user": str(number), "messages": [{"role": "user", "content": words}]}
        self.wants_usage = self.is_stream and draw(4) == 1
        body |= ({}, {"max_tokens": 1}, {"max_tokens": 400})[draw(3)]
        body |= {"stream": True} if self.is_stream else {}
        body |= {"stream_options": {"include_usage": True}} if self.wants_usage else {}
        body |= {} if self.may_repeat else {"store": True}
        body |= {"input": words} if self._wants_vectors else {}
        self.is_flex = flex > 0 and draw(8) < flex
        body |= {"service_tier": "flex"} if self.is_flex else {}
        if draw(8, often=0.3) == 1:
            body |= {"padding": "x" * (BODY_BYTES, BODY_BYTES - 600)[draw(2)]}
        self._body = orjson.dumps(body)
        self._announces = draw(2) == 1
        self.least_pct = 0.0 if requests.is_crowd else MORE_PCT * draw(2, often=0.2)
        self._pieces = 1 + draw(3, often=0.3)
        self.asked_s = 0.0
        self.beside = 0
        """How many lived as it asked: some leave between its refusal and the end of its answer."""
        self._leaves_in_s = 0.1 * draw(40) if draw(3) == 1 else None
        self._simulation = simulation
        self._requests = requests
        self._sent = self._events = 0
        requests.wants_usage[number] = self.wants_usage
        self._slow_s = 0.0
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.content = b""
        self.is_complete = False
        self.has_left = False
        self.is_broken = False

    @property
    def scope(self) -> dict[str, Any]:
        """The request's head."""
        who = _of_serving(None if self.is_stranger else self.tenant) if self.is_line else self.tenant
        headers = [(b"authorization", who.encode()), (b"content-type", b"application/json")]
        headers += [(BATCH, self._place), (BATCH_MODEL, MODEL.encode())] if self.is_line else []
        headers += [(b"content-length", b"%d" % len(self._body))] if self._announces else []
        headers += [(ACCURACY, b"%g" % self.least_pct)] if self.least_pct else []
        path = "/v1/embeddings" if self._wants_vectors else "/v1/chat/completions"
        return {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}

    async def receive(self) -> Any:
        """Return the body in pieces; then wait until the client leaves."""
        draw = self._simulation.choices.below
        if self._sent < self._pieces:
            await asyncio.sleep(0.01 * draw(4, often=0.1))
            if self._sent and draw(8, often=0.1) == 1:
                self.has_left = True
                return {"type": "http.disconnect"}
            size = -(-len(self._body) // self._pieces)
            piece = self._body[self._sent * size : (self._sent + 1) * size]
            self._sent += 1
            return {"type": "http.request", "body": piece, "more_body": self._sent < self._pieces}
        if self._leaves_in_s is None:
            await asyncio.Event().wait()
        await asyncio.sleep(self._leaves_in_s or 0.0)
        self.has_left = True
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Take in a part of the answer."""
        draw = self._simulation.choices.below
        self.take(self.content + message.get("body", b""))
        slow_s = (0.0, 0.05, 0.05, 2.5)[draw(4, often=0.1)]
        self._slow_s += slow_s
        await asyncio.sleep(slow_s)
        check = self._simulation.check
        has_asked = self._sent == self._pieces or not self.has_left
        check("who left before he had asked gets no answer", has_asked, str(self.number))
        if message["type"] == "http.response.start":
            check("a request has one answer", not self.status, f"{self.number}: {self.status}, {message['status']}")
            self.status = message["status"]
            self.headers = dict(message["headers"])
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            check("an answer is whole, and one server's", len(kinds) == 1 and b"odd" not in kinds[0], str(kinds))
            return
        is_last = not message.get("more_body", False)
        check("no piece without anything in it is sent", bool(message["body"]) or is_last, str(self.number))
        if self.status == 200 and draw(2, often=0.01):
            self.has_left = self.is_broken = True
            raise ConnectionResetError("its connection ended")
        check("a request has one answer", bool(self.status) and not self.is_complete, str(self.number))
        self.content += message["body"]
        self.is_complete = not message.get("more_body", False)

    def take(self, content: bytes) -> None:
        """Have each event of a stream be here soon after its server has sent it, but for what this client takes."""
        if not self.is_stream or self.status not in (0, 200):
            return
        found = [each.strip() for each in content.split(b"\n\n")[:-1] if b'"at":' in each]
        for event in found[self._events :]:
            told = orjson.loads(event[5:])
            late_s = time.monotonic() - self._slow_s - self._requests.sent_s[self.number, told["by"], told["at"]]
            self._simulation.check("a stream passes as it comes", late_s <= ARRIVES_S, f"{event!r}: {late_s:.2f} s")
        self._events = len(found)

    @property
    def is_too_large(self) -> bool:
        """Whether the request has more bytes than it may."""
        return len(self._body) > BODY_BYTES

    def wrong(self, *, is_carried: bool = False) -> str | None:
        """Return what is wrong with the answer, None for nothing."""
        if self.is_stranger:
            return None if self.status == 401 else f"{self.status} to who is not serving"
        if self.is_too_large:
            if self._announces and self._sent:
                return "it was read, though it said that it is too large"
            return None if self.status in (413, 429, 503) else f"{self.status} to {len(self._body)} bytes"
        if b"The router failed" in self.content or b"None" in self.content:
            return self.content.decode()
        if (self.is_flex or self.is_line) and b"x-wattshift-model" in self.headers:
            return "another model answers who gets only what is left"
        if self.is_stream and self.status == 400 and b"refused" in self.content:
            return None
        if self.status == 401 or (self.status == 400 and (self.wants_usage or (is_carried and self.is_stream))):
            return None
        if self.status != 200:
            if FOOTPRINT & set(self.headers):
                return f"{self.status} with a footprint"
            return None if self.status in REFUSALS and self.is_complete else f"{self.status}: {self.content[:80]!r}"
        if not self.is_stream:
            if len(self.content) > 2 * ANSWER_BYTES:
                return f"{len(self.content)} bytes"
            found = orjson.loads(self.content)
            is_encoded = b"content-encoding" in self.headers
            if is_encoded and self.content != self._requests.encoded[self.number, found["by"]]:
                return f"{self.content!r}, and it was encoded"
            if not is_encoded and found["model"] == SERVED:
                return "the model has a name that nobody asked for"
            if (b"x-wattshift-model" in self.headers) != found["by"].startswith(OTHER_MODEL):
                return f"an answer by {found['by']} says {self.headers}"
            if (found.get("service_tier") == "flex") is not (self.is_flex and b"content-encoding" not in self.headers):
                return f"the tier {found.get('service_tier')}, where flex was {self.is_flex}"
            return None if found["for"] == self.number else f"the answer to {found['for']}"
        events = [each.strip() for each in self.content.split(b"\n\n") if each.startswith(b"data:")]
        told = [orjson.loads(each[5:]) for each in events if b"[DONE]" not in each]
        pieces = [each for each in told if "for" in each]
        if any(each["model"] == SERVED for each in pieces):
            return "the model has a name that nobody asked for"
        if any((each.get("service_tier") == "flex") is not self.is_flex for each in pieces):
            return f"another tier than was asked for, where flex was {self.is_flex}"
        stated = sum(each.get("usage") is not None for each in told)
        if stated and not self.wants_usage:
            return "usage that was not asked for"
        if any(each["for"] != self.number for each in pieces) or len({each["by"] for each in pieces}) > 1:
            return "pieces of other answers"
        if pieces and (b"x-wattshift-model" in self.headers) != pieces[0]["by"].startswith(OTHER_MODEL):
            return f"an answer by {pieces[0]['by']} says {self.headers}"
        if [each["at"] for each in pieces] != list(range(len(pieces))):
            return "pieces are missing"
        is_whole = any(b"[DONE]" in each for each in events)
        if is_whole and self.wants_usage and stated != 1:
            return f"usage is told {stated} times"
        return None if is_whole != any("error" in each for each in told) else "it breaks off, and does not say so"


class _Keys:
    """The keys of callers: their tenants' names."""

    def __init__(self, requests: _Requests) -> None:
        self._requests = requests

    async def caller(self, authorization: bytes | None, *_: Any) -> ResolvedKey:
        """Return the caller, some time later."""
        await asyncio.sleep(0)
        tenant = (authorization or b"").decode().removeprefix("Bearer ")
        return self._of(tenant)

    async def find(self, tenant: str) -> ResolvedKey:
        """Return a key, whether it works still or not."""
        await asyncio.sleep(0)
        return self._of(tenant)

    def _of(self, tenant: str) -> ResolvedKey:
        return _key(tenant).model_copy(
            update={"key_limits": self._requests.limits, "excess": self._requests.excess.get(tenant)}
        )


@cache
def _key(tenant: str) -> ResolvedKey:
    identity = Identity(tenant_id=tenant, role=Role.USER, key_id=tenant)
    return ResolvedKey(identity=identity, limits=TenantLimits())


@cache
def _of_serving(tenant: str | None) -> str:
    """Return how serving shows who it is, and for whom it asks; None: for nobody."""
    credential = _settings().credential
    key = caller_key(credential.secrets[0], "serving")
    return Outgoing("serving", credential.name, key).authorization(_key(tenant).identity if tenant else None)


@cache
def _settings() -> RouterSettings:
    return RouterSettings.model_construct(service_token="s" * 40)


class _UpstreamKeys:
    def is_wanted(self, _: Any) -> bool:
        return False

    def of(self, _: Any) -> None:
        return None


def _router(simulation: Simulation, requests: _Requests) -> Router:
    """Return a router as it is after its start, less what it says to others."""
    draw = simulation.choices.below
    changes = {
        "service_token": "s" * 40,
        "order": (Order.LLF, Order.FCFS, Order.SRTF)[draw(3)],
        "queue_timeout_s": (0.3, 0.05, 6.0)[draw(3)],
        "preemptions": (1, 0, 2)[draw(3)],
        "placement": ("carbon", "weights")[draw(2, often=0.3)],
        "max_queue": (6, 2)[draw(2)],
        "network_ms": ({}, {"default": {"there": 300.0}})[draw(2)],
        "flex_wait_s": 3.0,
        "stream_first_byte_timeout_s": HUNG_S,
        "max_requests_per_tenant": AT_ONCE,
        "max_body_bytes": BODY_BYTES,
        "max_buffered_bytes": BODIES_BYTES,
        "max_answer_bytes": ANSWER_BYTES,
    } | ({"queue_timeout_s": 6.0, "max_queue": 6} if requests.is_crowd else {})
    settings = RouterSettings.model_construct(**cast(Any, changes))
    router = Router.__new__(Router)
    made = cast(Any, router)
    made.settings = settings
    _put_together(router, simulation.loop.time, requests)
    return router


def _put_together(router: Router, clock_s: Callable[[], float], requests: _Requests) -> None:
    settings, made = router.settings, cast(Any, router)
    made.metrics, made.fleet = Metrics(), Fleet(read_networks(INSIDE))
    made.assigner = SimpleNamespace(check=lambda: None, adopt=lambda _: None)
    made.peers = SimpleNamespace(processes=1)
    made.lanes = Lanes(LaneRules(settings.order, settings.placement, settings.max_queue, settings.preemptions))
    made.limits = LIMITS
    made.upstream_keys = _UpstreamKeys()
    expectations = made.expectations = Expectations()
    stubs: dict[str, Any] = dict.fromkeys(("end", "first", "gap", "whole", "served"), lambda *_: None)

    def served(_: Server, key: ResolvedKey, *what: Any) -> None:
        if key.key_limits == requests.limits:  # those of lines lack some
            requests.used[key.identity.tenant_id] += what[3].input + what[3].output

    nothing = cast(Any, SimpleNamespace(**stubs | {"gap": _gap, "served": served}))

    def arrived(*_: Any) -> Callable[[int, int], None]:
        requests.arrived += 1
        return unreported

    writer = RequestWriter(settings.order, router.upstream_keys)
    made.trials = Trials(router.fleet, router.lanes, writer)
    made.gate = Gate(settings, cast(Any, _Keys(requests)))
    made.gate.limiter = RateLimiter(clock_s)
    made.gate.rules = KeyRules(made.gate.limiter, made.gate.months)
    stored = StoredAnswers((b"key",))
    dispatcher = Dispatcher(
        settings,
        router.fleet,
        router.lanes,
        router.gate.rules,
        expectations,
        router.upstream_keys,
        writer,
        AnswerPasser(Outcomes(expectations, router.metrics, nothing, nothing), settings, stored),
        stored,
        router.metrics,
        arrived,
        made.limits,
    )
    made.door = Door(router.fleet, router.gate, dispatcher, cast(Any, None), settings.flex_wait_s)


def _gap(server: str, request_class: str, gap_s: float, events: int) -> None:
    """Take in the time between events of a stream; its own failure is the router's, which the client sees."""
    assert gap_s >= 0
    assert events > 0, "there was an event"


class _Servers:
    """The model servers of a pool, and the routing table that has them."""

    def __init__(self, simulation: Simulation, requests: _Requests) -> None:
        draw = simulation.choices.below
        self._known: dict[str, dict[str, Any]] = {}
        self._requests = requests
        names = [*("a", "b", "c")[: 1 + draw(3)], *(OTHER_MODEL, f"{OTHER_MODEL}2")[: draw(3)]]
        names += [JOINT][: draw(2, often=0.4)]
        names = names[:1] if requests.is_crowd else names
        requests.has_fallback = self._has_fallback = draw(2) == 1
        for name in names:
            listening = SimulatedServer(simulation.loop, lambda name=name: _ModelServer(simulation, name, requests))
            is_endpoint = len(name) > 1
            host = ("127.0.0.1", f"{name}.example")[draw(2, often=0.5)]
            host = OUTSIDE if is_endpoint and draw(4) == 1 else host
            self._known[name] = {
                "id": name,
                "pool": None if is_endpoint else "chat",
                "models": [MODEL if name == JOINT else OTHER_MODEL] if is_endpoint else [],
                "tenants": [*TENANTS[: 1 + (not is_endpoint or draw(2, often=0.5) == 0)]],
                "url": f"http://{host}:{listening.port}",
                "tenant_id": "acme",
                "location": ("here", "there")[draw(2, often=0.3)],
                "state": "ready",
                "request_class": (None, "S", "L")[draw(3)],
                "capacity": 1 if requests.is_crowd else 1 + draw(3),
                "power_w": 400.0,
                "gco2_per_kwh": (100.0, 104.0, 108.0, 200.0, None)[draw(5)],
                "ttft_ms": (None, 4_000.0)[draw(2, often=0.2)],
                "weight": (1.0, 2.0, 0.5)[draw(3, often=0.3)],
                "accuracy_pct": None if is_endpoint else (None, LESS_PCT, MORE_PCT)[draw(3, often=0.5)],
                **({}, PROFILE, PROFILE | {"full_power_w": 700.0})[draw(3)],
                "upstream_secret_set_at": (None, datetime.fromtimestamp(EPOCH_S, UTC))[draw(2)],
            }
            requests.capacity[name] = self._known[name]["capacity"]
            if is_endpoint or self._known[name]["upstream_secret_set_at"] is not None:
                requests.with_key.add(name)

    def may_serve(self, client: _Client, name: str) -> bool:
        """Whether a server is for a client's tenant, and as accurate as its request asks for."""
        each = self._known[name]
        return client.tenant in each["tenants"] and (each["accuracy_pct"] or math.inf) >= client.least_pct

    def change(self, which: int) -> None:
        """Take a server out, or put it back."""
        each = list(self._known.values())[which % len(self._known)]
        self._requests.has_changed = True
        each["state"] = "draining" if each["state"] == "ready" else "ready"

    def take_out(self) -> None:
        """Take all servers out."""
        self._requests.has_changed = True
        for each in self._known.values():
            each["state"] = "draining"

    def table(self) -> RoutingTable:
        """Return the routing table as it is now."""
        pool = a_routed_pool(
            tenants=list(TENANTS),
            input_tokens=LONG_WORDS // 2,
            classes=[{"name": "SS"}, {"name": "LS"}],
            fallback=["gone", OTHER_MODEL] if self._has_fallback else [],
        )
        other = a_routed_pool(OTHER_MODEL, models=[OTHER_MODEL], tenants=list(TENANTS), starting=1)
        servers = [
            RoutedServer.model_validate(each | {"request_class": each["request_class"] and each["request_class"] + "S"})
            for each in self._known.values()
        ]
        return RoutingTable(made_at=datetime.fromtimestamp(EPOCH_S, UTC), pools=[pool, other], servers=servers)


Handle = Callable[[Router, _Client], Awaitable[None]]
"""Brings a client's request to a router, and the answer back."""


async def _at_the_door(router: Router, client: _Client) -> None:
    await router.door.handle(client.scope, client.receive, client.send)


async def play(simulation: Simulation) -> None:
    """Requests arrive, wait, leave, are refused, preempted and answered; at the end every place is free."""
    await _play(simulation, _Requests())


async def crowd(simulation: Simulation) -> None:
    """As before, but many wait for one place, also while its server is ejected and tried."""
    requests = _Requests()
    requests.is_crowd = True
    await _play(simulation, requests)


async def limits(simulation: Simulation) -> None:
    """As before, but keys have limits, and some requests get what others leave free."""
    draw, requests = simulation.choices.below, _Requests()
    requests.flex, requests.lines = draw(8), True
    per_min = {"requests_per_min": (None, 2, 5)[draw(3)], "tokens_per_min": (None, 40, 400)[draw(3)]}
    requests.limits = KeyLimits.model_validate(per_min)
    await _play(simulation, requests)


async def budgets(simulation: Simulation) -> None:
    """As before, but keys have monthly budgets of tokens, and some have used up another budget."""
    draw, requests = simulation.choices.below, _Requests()
    requests.limits, requests.lines = KeyLimits(month_tokens=(20, 60, 300)[draw(3)]), True
    requests.excess = {tenant: "All is used up." for tenant in TENANTS if draw(4) == 1}
    simulation.instead(
        KeyRules,
        admit=_admitted(simulation, KeyRules.admit),
        take_tokens=_within(simulation, requests, KeyRules.take_tokens),
        settle=_settled(requests, KeyRules.settle),
    )
    await _play(simulation, requests)
    for tenant in TENANTS:
        is_so = requests.settled[tenant] == requests.used[tenant] and not requests.expected[tenant]
        what = f"{requests.settled} of {requests.used}, {requests.expected} are expected"
        simulation.check("a key is charged for what it has used", is_so, what)


def _admitted(simulation: Simulation, admit: Any) -> Any:
    def judge(self: KeyRules, key: ResolvedKey) -> Any:
        simulation.check("who is let in has a budget", (told := admit(self, key)) is not None and not key.excess)
        return told

    return judge


def _within(simulation: Simulation, requests: _Requests, take: Any) -> Any:
    """Have nobody let in whose budget may be used up by who is there, nor anybody refused whose is not."""

    def judge(self: KeyRules, received: Received, tokens: int) -> None:
        tenant, most = received.key.identity.tenant_id, received.key.key_limits.month_tokens or 0
        may = requests.settled[tenant] + requests.expected[tenant] < most
        is_let_in = False
        try:
            take(self, received, tokens)
            is_let_in = True
        except DoorError as error:
            is_used_up = requests.settled[tenant] >= most
            simulation.check("who is refused is told a reason that is true", (error.code == NO_QUOTA) is is_used_up)
            raise
        finally:
            simulation.check("a budget of a key is kept", is_let_in is may, f"{tenant}: {requests.settled} of {most}")
        requests.expected[tenant] += tokens

    return judge


def _settled(requests: _Requests, settle: Any) -> Any:
    def judge(self: KeyRules, received: Received) -> None:
        if received.taken_tokens is not None:
            requests.expected[received.key.identity.tenant_id] -= received.taken_tokens
            requests.settled[received.key.identity.tenant_id] += received.used_tokens
        settle(self, received)

    return judge


async def _play(simulation: Simulation, requests: _Requests, handle: Handle = _at_the_door) -> None:
    draw = simulation.choices.below
    requests.refuse_usage = {name for name in ("a", "b", "c", OTHER_MODEL) if draw(6) == 1}
    servers = _Servers(simulation, requests)
    router = _router(simulation, requests)
    router._adopt(servers.table())
    clients = [_Client(simulation, number, requests) for number in range(2 + draw(7))]
    for client in clients:
        requests.may_use[client.number] = functools.partial(servers.may_serve, client)
    simulation.holds("no server has more than it may", lambda: _too_many(router))
    simulation.holds("every place has a living owner", lambda: _without_owner(router, requests))
    simulation.rests("nobody waits beside who only gets what is left", lambda: _goes_before(router))
    simulation.holds("a server on trial has one request, which lives", lambda: _tried_for_nobody(router))
    simulation.rests("no server with room stands beside a request that may use it", lambda: _stands_by(router))
    simulation.holds("no more is held in memory than may be", lambda: _too_much(router))
    simulation.holds("a server is read until as much waits as may", lambda: _read_no_further(router))
    simulation.holds("who has lost its place is sent to no server", lambda: _sent_without_a_place(router))
    simulation.holds("only a server that has failed is ejected", lambda: _ejected_for_nothing(simulation, router))
    simulation.rests("who waits is in the queue", lambda: _waits_beside(router))
    simulation.rests("a gate that is closed is empty when nobody is in it", lambda: _not_told(router))
    closes = draw(3) == 1
    simulation.instead(
        Lane,
        take=_judged(simulation, Lane.take),
        take_spare=_left_over(simulation, Lane.take_spare),
        choose=_chosen(simulation, Lane.choose),
        _begin=_begun(requests, Lane._begin),
        leave=_left(requests, Lane.leave),
        _withdraw=_withdrawn(simulation, Lane._withdraw),
        _preempt=_preempting(simulation, Lane._preempt),
    )
    if requests.lines:
        simulation.instead(Lane, _take_spare_back=_waiting(simulation, router, servers, Lane._take_spare_back))
    simulation.instead(
        Dispatcher,
        serve=_served(requests, Dispatcher.serve),
        _in_lane=_brought(requests, Dispatcher._in_lane),
        _ask=_left_to_others(simulation, requests, Dispatcher._ask),
        _note_failure=_noted(simulation, requests, Dispatcher._note_failure),
    )
    simulation.instead(
        Outcomes,
        end=_counted(simulation, requests, clients, Outcomes.end),
        learn=_learned(simulation, requests, Outcomes.learn),
        came_at_once=_came(simulation, requests, Outcomes.came_at_once),
    )
    simulation.instead(
        Breaker, failed=ejected(simulation, Breaker.failed), abandoned=_abandoned(simulation, Breaker.abandoned)
    )
    simulation.instead(ServerCosts, has_read=_read(simulation, requests, ServerCosts.has_read))
    simulation.instead(
        Connection,
        check=_in_time(simulation, Connection.check),
        _fail=_first(simulation, Connection._fail),
        release=_given_back(simulation, requests, Connection.release),
    )
    simulation.instead(
        Origin,
        connection=_used_again(simulation, requests, Origin.connection),
        _resolve=_resolved(simulation, Origin._resolve),
    )
    simulation.loop.addresses = (OUTSIDE, "127.0.0.1", "127.0.0.2")
    simulation.instead(upstream, NAMES_AGE_S=NAMES_AGE_S, HIGH_WATER=WAITING_BYTES[draw(2)], MOST_HEAD_BYTES=HEAD_BYTES)
    simulation.instead(expectations, BLOCK_CHARACTERS=BLOCK_CHARACTERS)
    asked = [
        simulation.start(_ask(simulation, router, requests, client, handle), may_be_cancelled=True)
        for client in clients
    ]
    looking = simulation.loop.create_task(_look(simulation, router, servers, requests))
    if closes:
        simulation.loop.call_later(0.1 * draw(30), _close, simulation, router)
    await asyncio.wait(asked)
    looking.cancel()
    await simulation.everything()
    await router.trials.end()
    lanes, fleet = router.lanes.all(), router.fleet
    held = {server.id: server.held for server in fleet.every_server() if server.held}
    check = simulation.check
    check("every place is given back", not held, str(held))
    check("nothing waits for nobody", not any(len(lane.queue) or lane.unanswered for lane in lanes))
    check("no tenant is in service", not any(lane.in_service for lane in lanes), str([x.in_service for x in lanes]))
    check("nobody counts as being here", not router.gate.in_flight and not router.gate.at_once.open)
    check("no body is held", router.gate.bodies._free == router.settings.max_buffered_bytes)
    busy = [server.id for server in fleet.every_server() if server.origin.busy]
    check("every connection is given back", not busy, str(busy))
    check("a request is counted once", requests.arrived <= requests.served, f"{requests.arrived} of {requests.served}")
    counted = sum(router.metrics.requests.values.values())
    check("a request is counted once", counted == requests.turns, f"{counted} of {requests.turns}")
    for name in ("ttft", "gen_ai_first"):
        noted = sum(sum(found[:-1]) for _, found in getattr(router.metrics, name).amounts())
        check("a first token is noted where there was one", noted == requests.firsts[name], f"{noted} {name}")
    for name, wrong in _limits(simulation, router, requests).items():
        check(name, wrong is None, str(wrong))
    for client in clients:
        outcomes, may_go_on = requests.outcomes.get(client.number, []), simulation.loop.has_cut
        may_go_on |= requests.has_fallback and client.may_repeat
        may_go_on |= client.is_stream and client.may_repeat  # it has begun no stream for long
        waits = SILENT not in outcomes[:-1] or may_go_on or router.settings.preemptions > 0 or client.is_flex
        check("who has waited for long enough is not sent elsewhere", waits, f"{client.number}: {outcomes}")
        worked_on = requests.worked_on.get(client.number, 0)
        may_repeat = client.may_repeat and client.number not in requests.carried
        check("what may not be repeated is not", may_repeat or worked_on <= 1, f"{client.number}: {worked_on}")
        most = 2 * (router.settings.attempts + router.settings.preemptions)
        check(
            "no request is tried oftener than it may be",
            worked_on <= most or client.is_flex,
            f"{client.number}: {worked_on}",
        )
    cast(Any, router).trials = SimpleNamespace(begin=lambda *_: None)  # each would open a connection
    for _ in range(3):
        await asyncio.sleep(KEPT_S / 2)
        await router._check()
    await asyncio.sleep(1.0)
    left = kept(router, but=KEPT - (set() if requests.limits.month_tokens else {"MonthCounts._own"}))
    check("nothing is kept of who has gone", not left, str(left))
    idle = [server.id for server in fleet.every_server() if server.origin.idle]
    check("what nobody has used for long is closed", not idle, str(idle))


async def _look(simulation: Simulation, router: Router, servers: _Servers, requests: _Requests) -> None:
    """Do what the router repeats, and change the table now and then."""
    draw, often = simulation.choices.below, (0.3, 0.9)[simulation.choices.below(2)]
    often = 0.02 if requests.is_crowd else often
    for turn in range(10_000):
        await asyncio.sleep(CHECK_S)
        if draw(4, often=often) == 1:
            servers.change(draw(3))
            router._adopt(servers.table())
            waits = next(filter(None, map(_waits_in_vain, router.lanes.all())), None)
            simulation.check("nobody waits where no server may be asked", waits is None, str(waits))
        await router._check()
        keeps = [each.request.id for each in requests.holders if _is_answered(each)]
        simulation.check("a place is given back when the answer is there", not keeps, str(keeps))
        idle = next(filter(None, map(_stands_idle, router.lanes.all())), None)
        simulation.check("no server with room stands beside a request that may use it", idle is None, str(idle))
        if requests.is_crowd or turn % 4 == 3:
            simulation.start(_probe(router))


def _is_answered(ticket: Ticket) -> bool:
    """Whether all of an answer is there, which only a slow client has yet to take."""
    connection = ticket.connection
    return connection is not None and bool(connection.complete) and connection.on_over is not None


async def _probe(router: Router) -> None:
    await asyncio.gather(*(probe(server, router.limits) for server in router.fleet.servers.values()))
    for lane in router.lanes.all():
        lane.pump()


async def _ask(simulation: Simulation, router: Router, requests: _Requests, client: _Client, handle: Handle) -> None:
    often = 0.8 if requests.is_crowd else 0.3
    await asyncio.sleep((0.05, 0.4)[simulation.choices.below(2, often=often)] * simulation.choices.below(12))
    client.asked_s, client.beside = simulation.loop.time(), simulation.living
    try:
        await handle(router, client)
    except ProblemError as problem:
        simulation.check("a request has one answer", False, str(problem))
    except ConnectionResetError:
        simulation.check("an answer is whole, and one server's", client.is_broken, str(client.number))
        return
    if not client.has_left:
        wrong = client.wrong(is_carried=client.number in requests.carried)
        simulation.check("an answer is whole, and one server's", wrong is None, str(wrong))
        is_whole = client.status == 200 and (not client.is_stream or b"[DONE]" in client.content)
        learned = requests.learned[client.number]
        simulation.check(
            "a whole answer is learned from once", learned == is_whole, f"{client.number}: {learned} times"
        )
        if not client.is_too_large:
            untrue = _untrue(simulation, router, requests, client)
            simulation.check("who is refused is told a reason that is true", untrue is None, str(untrue))


def _untrue(simulation: Simulation, router: Router, requests: _Requests, client: _Client) -> str | None:
    """Say why the answer cannot be true; None if it can."""
    outcomes = requests.outcomes.get(client.number, [])
    waited_s = simulation.loop.time() - client.asked_s
    is_json = client.status >= 400 and client.content.startswith(b"{")
    code = orjson.loads(client.content).get("error", {}).get("code", "") if is_json else ""
    settings, servers = router.settings, router.fleet.servers.values()
    is_true = {
        "queue_full": waited_s >= settings.queue_timeout_s - 0.01 or client.beside > settings.max_queue,
        "no_server": requests.has_changed
        or requests.has_fallback
        or any(each.breaker.opened_s is not None for each in servers)
        or waited_s > 0
        or not any(requests.may_use[client.number](each.id) for each in servers if each.id[:5] != OTHER_MODEL)
        or requests.carried.get(client.number) is not None,
        "upstream_timeout": SILENT in outcomes or waited_s > HUNG_S,
        "upstream_busy": BUSY in outcomes or client.number in requests.answered_between,
        "upstream_rate_limited": BUSY in outcomes,
        "upstream_malformed": bool(set(MALFORMED) & set(outcomes)) or ANSWERS_TWICE in outcomes,
        "upstream_too_large": IS_LARGE in outcomes,
        "upstream_closed": CLOSES in outcomes or BREAKS_OFF in outcomes or simulation.loop.has_cut,
    }.get(code, True)
    if code and STATUS_OF.get(code, client.status) != client.status:
        return f"{client.number}: {client.status} for {code}"
    if code in STATUS_OF and client.status in (429, 503) and b"retry-after" not in client.headers:
        return f"{client.number}: {code}, and not when to come again"
    if client.status == 401 and not client.is_stranger:
        is_true = not requests.with_key.issuperset(requests.refused.get(client.number, requests.with_key))
    if code == "no_server" and not requests.has_fallback:  # of the pool it is not known
        is_true &= b"starting" not in client.content
    if client.status == 500:
        is_true = BROKEN in outcomes
    if code == "upstream_error":
        is_true = client.status not in (429, 502, 503, 504)  # another server is asked
    if client.status == 200 and not client.is_stream:
        is_true = outcomes[-1:] not in ([BROKEN], [BUSY])
    return None if is_true else f"{client.number}: {client.status} {code}, {outcomes}, after {waited_s:.2f} s"


def _too_many(router: Router) -> str | None:
    for server in router.fleet.servers.values():
        if not 0 <= server.held <= server.limit:
            return f"{server.id} holds {server.held} of {server.limit}"
    return None


def _limits(simulation: Simulation, router: Router, requests: _Requests) -> dict[str, str | None]:
    """Say which key was charged for other tokens than it has used, and which was let in too often."""
    buckets, most, found = router.gate.limiter._buckets, requests.limits.requests_per_min, dict[str, str | None]()
    for tenant in TENANTS:
        bucket, used = buckets.get(f"{tenant} tokens"), requests.used[tenant]
        is_right = bucket is None or bucket.taken == used
        found["a key is charged for what it has used"] = None if is_right else f"{tenant}: {bucket}, and not {used}"
        if most is not None and requests.let_in[tenant] > most * (1.0 + simulation.loop.time() / 60):
            found["no key is let in too often"] = f"{tenant}: {requests.let_in[tenant]}"
    return found


def _begun(requests: _Requests, begin: Any) -> Any:
    def judge(self: Lane, ticket: Ticket, server: Server) -> None:
        if ticket.is_spare:
            requests.spare.add(ticket)
        requests.holders.add(ticket)
        begin(self, ticket, server)

    return judge


def _read(simulation: Simulation, requests: _Requests, has_read: Any) -> Any:
    """Have a server count as having read a prompt only once its answer has begun, and not by a failure."""

    def judge(self: ServerCosts, given: Given, now_s: float) -> None:
        for each in requests.holders:
            if each.place is given and each.connection and each.server is not None:
                status, began_s = each.connection.status, requests.began_s.get((requests.numbers[each], each.server.id))
                is_so = status == 200 and began_s is not None and not now_s < began_s - 1e-6  # it may not be known
                what = f"{status}, begun at {began_s}, said to be by {now_s}"
                simulation.check("only an answer says how fast a server reads", is_so, what)
        has_read(self, given, now_s)

    return judge


def _left(requests: _Requests, leave: Any) -> Any:
    def judge(self: Lane, ticket: Ticket, server: Server) -> float:
        requests.spare.discard(ticket)
        requests.holders.discard(ticket)
        return leave(self, ticket, server)

    return judge


def _goes_before(router: Router) -> str | None:
    """Say who waits for a server that somebody holds who should have given it up."""
    for lane in router.lanes.all():
        for request in lane.queue:
            for server in lane.servers:
                keeps = [each.request.id for each in server.spare if each.may_repeat and not each.is_preempted]
                may_be_asked = server.breaker.opened_s is None and _may_use(lane._tickets[request.id], server)
                if may_be_asked and len(keeps) == server.held > 0:
                    return f"{request.id} waits, and {keeps} hold {server.id}"
    return None


def _without_owner(router: Router, requests: _Requests) -> str | None:
    held = sum(server.held for server in router.fleet.every_server())
    if held > router.gate.in_flight:
        return f"{held} places are held, and {router.gate.in_flight} requests live"
    in_service = sum(sum(lane.in_service.values()) for lane in router.lanes._lanes.values())
    in_service += len(requests.spare)
    return None if held == in_service else f"{held} places are held, and the lanes count {in_service}"


def _may_use(ticket: Ticket, server: Server) -> bool:
    """Whether a request may go to a server: for its tenant, accurate, reached by its gateway, which did not fail it."""
    reaches = ticket.among is None or server.origin.authority in ticket.among
    is_accurate = server.spec.accuracy_pct is None or server.spec.accuracy_pct >= ticket.least_accuracy_pct
    is_for = ticket.request.tenant in server.spec.tenants and is_accurate
    return is_for and reaches and server.id not in ticket.request.excluded


def _left_to_others(simulation: Simulation, requests: _Requests, ask: Any) -> Any:
    """Have a server that a request leaves be given to who waits for it, on trial, too."""

    async def judge(self: Dispatcher, turn: Turn, ticket: Ticket, server: Server) -> None:
        requests.numbers[ticket] = int(turn.received.asked.fields["user"])
        try:
            return await ask(self, turn, ticket, server)
        finally:
            idle = next(filter(None, (_stands_idle(lane, only=server) for lane in self.lanes.all())), None)
            simulation.check("who leaves a server leaves it to who waits", idle is None, str(idle))

    return judge


def ejected(simulation: Simulation, failed: Any) -> Any:
    """Have an ejected server's pause and trial depend on what becomes of that trial alone."""

    def judge(self: Breaker, now_s: float, request: object | None = None, **how: Any) -> bool:
        before, is_trial = (self.opened_s, self.ejections, self.trial), request is not None and self.trial is request
        found = failed(self, now_s, request, **how)
        is_same = not found and before == (self.opened_s, self.ejections, self.trial)
        is_new = found and (now_s, before[1] + 1, None) == (self.opened_s, self.ejections, self.trial)
        is_right = is_new if is_trial else is_same or (is_new and before[0] is None)
        simulation.check("an ejected server's trial alone says how it is", is_right, f"{before}, then {self}")
        return found

    return judge


def _abandoned(simulation: Simulation, abandon: Any) -> Any:
    def judge(self: Breaker, request: object) -> None:
        trial = self.trial
        abandon(self, request)
        is_right = self.trial is (None if trial is request else trial)
        simulation.check("an ejected server's trial alone says how it is", is_right, f"{trial}, then {self.trial}")

    return judge


def _withdrawn(simulation: Simulation, withdraw: Any) -> Any:
    """Have a server that was given to who leaves be given to who waits for it."""

    def judge(self: Lane, ticket: Ticket) -> None:
        server = ticket.server
        withdraw(self, ticket)
        idle = _stands_idle(self, only=server) if server is not None else None
        simulation.check("who leaves a server leaves it to who waits", idle is None, str(idle))

    return judge


def _stands_idle(lane: Lane, *, may_be_tried: bool = True, only: Server | None = None) -> str | None:
    """Say which server has room though a request waits that may be sent to it; ``only`` that one, if one is named.

    Servers that time gives back count only if they ``may_be_tried``.
    """
    now_s = time.monotonic()
    for request in lane.queue:
        ticket = lane._tickets[request.id]
        others = [each for each in (*lane.servers, *lane.others) if _may_use(ticket, each)]
        is_last = may_be_tried and all(each.breaker.opened_s is not None for each in others)
        for server in lane.servers if only is None else {only} & {*lane.servers}:
            may_be_asked = server.breaker.passes(now_s) if is_last else server.breaker.opened_s is None
            if server.held < server.limit and may_be_asked and _may_use(ticket, server):
                return f"{request.id} waits, and {server.id} holds {server.held} of {server.limit}"
    return None


def _waits_beside(router: Router) -> str | None:
    for lane in router.lanes.all():
        there = {each.id for each in lane.queue}
        for name, ticket in lane._tickets.items():
            if ticket.given is not None and not ticket.given.done() and name not in there:
                return name
    return None


def _waits_in_vain(lane: Lane) -> str | None:
    """Say who waits though each server is ejected, excluded or gone."""
    now_s = time.monotonic()
    for request in lane.queue:
        ticket = lane._tickets[request.id]
        known = [each for each in (*lane.servers, *lane.others) if _may_use(ticket, each)]
        if ticket.waits_since_s is None and not any(
            each.breaker.opened_s is None or now_s >= each.breaker.opened_s + each.breaker.pause_s for each in known
        ):
            return request.id
    return None


def _stands_by(router: Router) -> str | None:
    """As ``_stands_idle``, but for servers that time alone gives back."""
    return next(filter(None, (_stands_idle(lane, may_be_tried=False) for lane in router.lanes.all())), None)


def _tried_for_nobody(router: Router) -> str | None:
    servers = router.fleet.every_server()
    tried = [server.id for server in servers if server.breaker.trial is not None]
    if len(tried) > router.gate.in_flight:
        return f"{tried}, and {router.gate.in_flight} requests live"
    ejected = [server.id for server in servers if tried and server.breaker.opened_s is not None]
    return None if set(tried) <= set(ejected) else f"{tried} are tried, and {ejected} are ejected"


def _judged(simulation: Simulation, take: Any) -> Any:
    """Have nobody wait for servers none of which may be given requests, nor be refused while one of them may."""

    async def judge(self: Lane, ticket: Ticket, timeout_s: float, first_s: float = 0.0) -> Any:
        now_s = simulation.loop.time()
        known = [each for each in (*self.servers, *self.others) if _may_use(ticket, each)]
        passes = [each.id for each in known if each.breaker.passes(now_s)]
        taking = take(self, ticket, timeout_s, first_s)
        try:
            return await taking
        except NoServerError:
            there = (*self.servers, *self.others)
            still = [each.id for each in there if each.id in passes and each.breaker.passes(now_s)]
            waited_s = simulation.loop.time() - now_s
            simulation.check("who is told that there is no server has none", waited_s > 0 or not still, str(still))
            is_early = ticket.waits_since_s is not None and not there and waited_s < first_s - 1e-3
            may_wait = is_early and self.starting is not None and (self.starting > 0 or waited_s < WANTED_WITHIN_S)
            simulation.check("who may wait for a first server does", not may_wait, f"after {waited_s} s of {first_s} s")
            raise
        except QueueFullError:
            waits = bool(passes) or (self.starting is not None and first_s > 0)
            simulation.check("nobody waits where no server may be asked", waits, ticket.request.id)
            is_there = bool(self.servers or self.others) or simulation.loop.time() == now_s
            simulation.check("who is told that servers are full has some", is_there, ticket.request.id)
            raise

    return judge


def _left_over(simulation: Simulation, take: Any) -> Any:
    """Have nobody refused what others leave while a server has nothing to do."""

    async def judge(self: Lane, ticket: Ticket, until_s: float, places: Any) -> Any:
        try:
            return await take(self, ticket, until_s, places)
        except NoSpareError:
            sound = [
                [each for each in group if _may_use(ticket, each) and each.breaker.opened_s is None]
                for group in (self.servers, self.others)
            ]
            idle = [
                each.id
                for each in next(filter(None, sound), [])
                if not (
                    each.held or each.held_elsewhere or each.costs.queued or (places and each.location not in places)
                )
            ]
            is_so = bool(len(self.queue)) or not idle
            simulation.check("nobody is refused what others leave", is_so, f"{ticket.request.id}: {idle}")
            raise

    return judge


def _chosen(simulation: Simulation, choose: Any) -> Any:
    """Have each request go where the rules of its lane say, which are stated here in other words."""
    turns = dict[Lane, _Turns]()

    def judge(self: Lane, ticket: Ticket, now_s: float) -> Server | None:
        groups = [
            [each for each in group if _may_use(ticket, each) and _may_be_asked(each, now_s)]
            for group in (self.servers, self.others)
        ]
        sound = [[each for each in group if each.breaker.opened_s is None] for group in groups]
        free = [each for each in next(filter(None, (*sound, *groups)), []) if each.held < each.limit]
        left_s = ticket.request.arrival_s + ticket.limit_s - now_s
        outlooks = {each.id: _outlook(each, ticket, now_s, left_s) for each in free}  # before it is given
        turns_before = self._turns._credit
        found, wrong = choose(self, ticket, now_s), None
        if found is None or found not in free:
            wrong = f"it goes to {found and found.id}, of {[*outlooks]}" if found or free else None
        elif self._rules.placement == "weights":
            wrong = turns.setdefault(self, _Turns()).wrong(free, found) if len(free) > 1 else None
        else:
            wrong = _passed_over(outlooks, found)
        if len(free) < 2 and self._turns._credit is not turns_before:
            wrong = "a turn counts in which there was no choice"
        simulation.check("a request goes where its lane's rules say", wrong is None, str(wrong))
        return found

    return judge


def _may_be_asked(server: Server, now_s: float) -> bool:
    """Whether a server is not ejected, or has been for long enough and is tried by nobody else."""
    breaker = server.breaker
    return breaker.opened_s is None or (breaker.trial is None and now_s - breaker.opened_s >= breaker.pause_s)


@dataclass(frozen=True)
class _Outlook:
    """What is predicted of a server for a request.

    Attributes:
        end_s: Until the end of its answer.
        joules, gco2_per_kwh: What it adds, and how dirty that is; None if unknown.
        away_s: Time to the server and back.
        work_s: Of each of its places, in seconds of what it holds.
        spare_s: How much of that does not count.
    """

    id: str
    end_s: float
    is_in_time: bool
    joules: float | None
    gco2_per_kwh: float | None
    away_s: float
    work_s: float
    spare_s: float


def _outlook(server: Server, ticket: Ticket, now_s: float, left_s: float) -> _Outlook:
    costs, work = server.costs, ticket.work
    away_s, place_s = ticket.network_s.get(server.location, 0.0), costs.token_s / server.limit
    end_s = away_s + costs.end_s(work, now_s, costs.cached_tokens(work))
    return _Outlook(
        server.id,
        end_s,
        end_s <= left_s,
        server.energy and server.energy.added_j(work),
        server.gco2_per_kwh,
        away_s,
        (costs.held_tokens + costs.others_tokens) * place_s,
        BALANCE_REQUESTS * work.tokens * place_s,
    )


def _passed_over(outlooks: Mapping[str, _Outlook], found: Server) -> str | None:
    """Say which server was to be preferred to the one that was chosen.

    Of those that are not much fuller than one no dirtier and no farther: who is in time goes before who is late, the
    cleaner of two in time before the dirtier, and of two that are alike in this the earlier; by more than what counts
    as alike.
    """
    every = [*outlooks.values()]
    are_all_known = all(each.joules is not None for each in every if each.gco2_per_kwh is not None)

    def carbon(each: _Outlook) -> float:
        if each.gco2_per_kwh is None:
            return math.inf
        return each.gco2_per_kwh * ((each.joules or 0.0) if are_all_known else 1.0)

    def is_much_fuller(one: _Outlook) -> bool:
        beside = [each for each in every if carbon(each) <= carbon(one) and each.away_s <= one.away_s]
        most_s = (1.0 + BALANCE_SHARE) * min(each.work_s for each in beside) + one.spare_s
        return one.work_s > most_s + 1e-9

    def is_earlier(one: _Outlook, other: _Outlook) -> bool:
        return (1.0 + ALIKE_PACE) * one.end_s < other.end_s - 1e-9

    def is_cleaner(one: _Outlook, other: _Outlook) -> bool:
        return carbon(one) + (ALIKE + 1e-9) * abs(carbon(one)) < carbon(other)

    chosen = outlooks[found.id]
    if is_much_fuller(chosen):
        return f"{found.id} is much fuller than another: {every}"
    for each in every:
        if is_much_fuller(each):
            continue
        is_better = each.is_in_time > chosen.is_in_time or (
            each.is_in_time == chosen.is_in_time
            and (
                (is_cleaner(each, chosen) and each.is_in_time)
                or (is_earlier(each, chosen) and (not chosen.is_in_time or carbon(each) <= carbon(chosen)))
            )
        )
        if is_better:
            return f"{each.id} is better than {found.id}: {every}"
    return None


class _Turns:
    """How often each of some servers was chosen by its weight, since others could be."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._chosen: dict[str, int] = {}
        self._most_owed = 0.0

    def wrong(self, free: Sequence[Server], found: Server) -> str | None:
        """Take in a choice; say who has had more or less than its share by more than turns explain.

        What one is owed from before, at most a round, is had besides.
        """
        weights = {each.id: each.spec.weight for each in free}
        if weights != self._weights:
            self._most_owed = 1.0 if not self._weights else MOST_OWED
            self._weights, self._chosen = weights, dict.fromkeys(weights, 0)
        self._chosen[found.id] += 1
        times = sum(self._chosen.values())
        for name, weight in weights.items():
            share = times * weight / sum(weights.values())
            if abs(self._chosen[name] - share) > self._most_owed + 1e-9:
                return f"{name} was chosen {self._chosen[name]} times of {times}, which is not by {weights}"
        return None


def _preempting(simulation: Simulation, preempt: Any) -> Any:
    """Have the most urgent of those that wait take the place of one that is later, if that may be."""

    def judge(self: Lane) -> None:
        rules, before = self._rules, self.preempted
        head = self.queue.peek(now_s=simulation.loop.time())
        may_leave = [
            each.request
            for each in self.unanswered.values()
            if each.may_repeat
            and each.preemptions < rules.most_preemptions
            and each.connection is not None
            and not each.is_preempted
            and each.server is not None
            and head is not None
            and _may_use(self._tickets[head.id], each.server)
        ]
        waiting = self._tickets[head.id] if head is not None else None
        leaving = _leaving(self, waiting)
        found = None
        if leaving < len(self.queue) and head is not None and rules.order is not Order.FCFS and not head.is_late:
            found = preempted_by(head, may_leave, rules.order, self.times, margin_s=PREEMPTION_MARGIN_S)
        preempt(self)
        done = self.preempted - before
        may_preempt = rules.most_preemptions > 0 and rules.order is not Order.FCFS
        simulation.check("nobody loses his place where nobody may", may_preempt or not done, str(self.preempted))
        simulation.check("who is more urgent takes a place", found is None or done == 1, str(found and found.id))
        rest = [each.request.id for each in _spare(self, waiting) if each.may_repeat and not each.is_preempted]
        is_needed = not done or (found is None or (leaving < len(self.queue) and not rest))
        simulation.check("nobody loses his place in vain", is_needed, f"{leaving} leave, {rest} have what is left")
        is_last = found is None or self.unanswered[found.id].is_preempted
        simulation.check("who is more urgent takes a place", is_last, str(found and found.id))

    return judge


def _waiting(simulation: Simulation, router: Router, servers: _Servers, take_back: Any) -> Any:
    """Have all servers taken out, at times, in the moment in which somebody who waits is given one, or leaves."""
    watched = set[Any]()

    def at_once(_: Any) -> None:
        if simulation.choices.below(2, often=0.02):
            servers.take_out()
            router._adopt(servers.table())

    def watch(self: Lane) -> None:
        for ticket in self._tickets.values():
            if ticket.given is not None and ticket.given not in watched:
                watched.add(ticket.given)
                ticket.given.add_done_callback(at_once)
        take_back(self)

    return watch


def _spare(lane: Lane, waiting: Ticket | None) -> list[Ticket]:
    """Return those who only have what others left, where a request may go; None: any."""
    groups = [
        [each for each in group if each.breaker.opened_s is None and (waiting is None or _may_use(waiting, each))]
        for group in (lane.servers, lane.others)
    ]
    return [ticket for server in groups[0] or groups[1] for ticket in server.spare]


def _leaving(lane: Lane, waiting: Ticket | None) -> int:
    """Return how many give up a place that a request may have."""
    holds = [*lane.unanswered.values(), *(each for server in lane.servers for each in server.spare)]
    servers = [each.server for each in holds if each.is_preempted and each.server is not None]
    return sum(waiting is None or _may_use(waiting, each) for each in servers)


def _counted(simulation: Simulation, requests: _Requests, clients: Sequence[_Client], end: Any) -> Any:
    """Have the tokens of an answer counted as its server has stated them, and those it did not state be estimates."""

    def judge(self: Outcomes, turn: Turn, server: Server, status: int, share_s: float, tokens: Tokens, _: Any) -> None:
        number, expected = int(turn.received.asked.fields["user"]), turn.expected
        requests.charged[number] += 1
        simulation.check("a request is charged once", requests.charged[number] == 1, str(number))
        if status == 200 and not clients[number].is_broken:
            prompt, output, are_stated = requests.tokens[number, server.id]
            prompt = expected.input_tokens if prompt is None else prompt
            output = round(expected.output_tokens) if output is None else output
            is_right = tokens == Tokens(prompt, output, are_stated)
            simulation.check("tokens are counted as they were stated", is_right, f"{number}: {tokens}, not {output}")
        if turn.first_s:
            requests.firsts["gen_ai_first"] += status == 200
            late_s = turn.received.at_s + turn.first_s - requests.began_s[number, server.id]
            is_right = math.isnan(late_s) or -1e-6 <= late_s <= ARRIVES_S
            simulation.check("it is told when an answer began", is_right, f"{number}: {late_s:.2f} s")
        end(self, turn, server, status, share_s, tokens, _)

    return judge


def _came(simulation: Simulation, requests: _Requests, came_at_once: Any) -> Any:
    """Have an answer that is no stream begin when it came."""

    def judge(self: Outcomes, turn: Turn, server: Server, now_s: float, tokens: int) -> None:
        number = int(turn.received.asked.fields["user"])
        late_s = now_s - requests.began_s[number, server.id]
        simulation.check("it is told when an answer began", -1e-6 <= late_s <= ARRIVES_S, f"{number}: {late_s:.2f} s")
        came_at_once(self, turn, server, now_s, tokens)

    return judge


def _given_back(simulation: Simulation, requests: _Requests, release: Any) -> Any:
    """Have a connection kept that can be used again."""

    def judge(self: Connection) -> None:
        names = {name for name, _ in self.headers}
        ends = (b"connection", b"close") in self.headers or not names & {b"content-length", b"transfer-encoding"}
        is_open = (
            self._transport is not None and not self._transport.is_closing() and self._transport not in requests.spoilt
        )
        may_be_kept = self.complete and self.error is None and is_open and not (ends or self._paused)
        release(self)
        is_kept = self in self.origin.idle or not may_be_kept or requests.has_changed
        simulation.check("a connection that may be used again is kept", is_kept, self.origin.url)

    return judge


def _learned(simulation: Simulation, requests: _Requests, learn: Any) -> Any:
    """Have whole answers learned from, and nothing else."""

    def judge(self: Outcomes, turn: Turn, server: Server, now_s: float, tokens: Tokens) -> None:
        number = int(turn.received.asked.fields["user"])
        is_whole = (number, server.id) in requests.whole
        simulation.check("only whole answers are learned from", is_whole, f"{number} by {server.id}")
        requests.learned[number] += 1
        requests.firsts["ttft"] += turn.first_s > 0
        learn(self, turn, server, now_s, tokens)

    return judge


def _used_again(simulation: Simulation, requests: _Requests, connect: Any) -> Any:
    """Have a connection that is kept be used, before another one is made, unless it has more than was asked for."""

    async def judge(self: Origin, limits: Limits, **how: Any) -> Connection:
        kept_s = how.get("unused_s", KEPT_S)
        kept = [each for each in self.idle if each.is_open and time.monotonic() - each.idle_since_s <= kept_s]
        before = [*self.idle]
        found = await connect(self, limits, **how)
        simulation.check("a connection that is kept is used", found in kept or not kept, self.url)
        transport: Any = found._transport
        is_clean = found not in before or (transport not in requests.spoilt and not transport.is_closing())
        simulation.check("a connection is used again if it is open and nothing is on it", is_clean, self.url)
        return found

    return judge


def _in_time(simulation: Simulation, check: Any) -> Any:
    """Have nobody's time be over before it is."""

    def judge(self: Connection, limits: Limits, now_s: float) -> None:
        before, took_s = self.error, now_s - self.began_at_s
        check(self, limits, now_s)
        least_s = {"slow_client": self._longest_s or limits.total_s, "timeout": limits.silence_s, "hung": HUNG_S}
        if self.error is not None and before is None:
            least = least_s.get(self.error.reason, 0.0)
            simulation.check("whose time is over has had it", took_s > least - 1e-6, f"{self.error}: {took_s:.2f} s")

    return judge


def _first(simulation: Simulation, fail: Any) -> Any:
    """Have a request fail for the first reason."""

    def judge(self: Connection, error: UpstreamError) -> None:
        before = self.error
        fail(self, error)
        simulation.check("a request fails for the first reason", self.error is (before or error), str(error))

    return judge


def _resolved(simulation: Simulation, resolve: Any) -> Any:
    """Have a name asked for again when what is known of it is old, and only then; connections go where they may."""
    known_s = dict[Origin, float]()

    async def judge(self: Origin, loop: Any) -> Any:
        since_s = time.monotonic() - known_s.get(self, -math.inf)
        simulation.check("a name is asked for when it is not known", since_s > NAMES_AGE_S - 1e-6, f"{since_s:.2f} s")
        found = await resolve(self, loop)
        known_s[self] = time.monotonic()
        elsewhere = [each for each in found if self.networks and each[0] == OUTSIDE]
        simulation.check("nobody is connected to where endpoints may not be", not elsewhere, self.url)
        return found

    return judge


def _served(requests: _Requests, serve: Any) -> Any:
    async def count(*arguments: Any) -> Any:
        requests.served += 1
        key = arguments[1].key
        requests.let_in[key.identity.tenant_id] += key.key_limits == requests.limits
        return await serve(*arguments)

    return count


def _brought(requests: _Requests, bring: Any) -> Any:
    async def count(*arguments: Any) -> Any:
        requests.turns += 1
        return await bring(*arguments)

    return count


def _close(simulation: Simulation, router: Router) -> None:
    """Have the router say when nobody is in it any more."""
    router.gate.close()
    is_right = router.gate.is_empty.is_set() is (router.gate.in_flight == 0)
    simulation.check("a gate that is closed is empty when nobody is in it", is_right, str(router.gate.in_flight))


def _not_told(router: Router) -> str | None:
    gate = router.gate
    if gate._is_closing:
        return None if gate.in_flight or gate.is_empty.is_set() else "it is not told"
    return "it is not closed" if gate.is_empty.is_set() else None


def _noted(simulation: Simulation, requests: _Requests, note: Any) -> Any:
    """Have each failure count that is a server's own."""

    def judge(self: Dispatcher, ticket: Ticket, server: Server, error: UpstreamError) -> None:
        before, failed = server.breaker.failures, requests.failed.setdefault(ticket, set())
        is_so = ticket.failures == len(failed)
        simulation.check("who failed a request counts once", is_so, f"{ticket.failures} of {failed}")
        failed.update({server.id} if error.reason != "preempted" else ())
        note(self, ticket, server, error)
        is_own = error.reason not in ("preempted", "no_key", "rate_limited", "slow_client")
        counts = server.breaker.failures == before + is_own
        simulation.check("what a server has failed in counts", counts, f"{server.id}: {error.reason}")
        is_so = error.reason != "hung" or (ticket.may_repeat and ticket.connection is not None)
        simulation.check("only who may be sent elsewhere is not waited for", is_so, ticket.request.id)
        is_ejected = error.reason != "connect" or server.breaker.opened_s is not None
        simulation.check("who cannot be reached is ejected", is_ejected, server.id)
        is_outside = server.spec.url.startswith(f"http://{OUTSIDE}:")
        is_unasked = ticket.connection is None and error.reason != "closed"  # as a gateway has that has gone
        is_told = (error.reason == "refused_address") is (is_outside and is_unasked)
        simulation.check("nobody is connected to where endpoints may not be", is_told, f"{server.id}: {error.reason}")

    return judge


def _ejected_for_nothing(simulation: Simulation, router: Router) -> str | None:
    for server in router.fleet.every_server():
        breaker = server.breaker
        is_refused = server.origin.port in simulation.loop.refused_at or server.origin.host == OUTSIDE
        if breaker.opened_s is not None and breaker.failures < FAILURES and not is_refused:
            return f"{server.id} after {breaker.failures} failures"
    return None


def _too_much(router: Router) -> str | None:
    free = router.gate.bodies._free
    if not 0 <= free <= BODIES_BYTES:
        return f"{free} bytes are free"
    for server in router.fleet.every_server():
        for connection in server.origin.busy:
            if connection._size > max(WAITING_BYTES) + 2 * HEAD_BYTES:
                return f"{connection._size} bytes wait to be read of {server.id}"
    return None


def _read_no_further(router: Router) -> str | None:
    """Say which server is read no further though little of its answer waits: its end would not be seen."""
    for server in router.fleet.every_server():
        for connection in server.origin.busy:
            transport: Any = connection._transport
            if transport is not None and transport._is_paused and connection._size <= upstream.HIGH_WATER:
                return f"{server.id}: {connection._size} bytes wait"
    return None


def _sent_without_a_place(router: Router) -> str | None:
    for lane in router.lanes.all():
        for ticket in (*lane.unanswered.values(), *_spare(lane, None)):
            connection = ticket.connection
            if ticket.is_preempted and connection is not None and ticket.server is not None:
                is_sent = connection in ticket.server.origin.busy and not connection.complete
                if is_sent and connection.error is None:
                    return ticket.request.id
    return None
