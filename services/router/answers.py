"""Answers of model servers on their way to the client: what passes, what is added, and what is learned from them."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import orjson

from services.core.domain.serving import SLO_LATENCIES
from services.kit.edge.exchange import Exchange, Header
from services.kit.logging import Log
from services.router import openai
from services.router.expectations import Expectations
from services.router.fleet import Server
from services.router.kinds import Kind, Renamed, tokens_of
from services.router.lanes import Ticket
from services.router.latency import LatencyReporter
from services.router.metrics import Metrics
from services.router.openai import JSON
from services.router.reports import UsageReporter
from services.router.settings import RouterSettings
from services.router.stored_answers import Marked, StoredAnswers
from services.router.streams import Footprint, StreamReader
from services.router.turn import NO_TOKENS, Expected, Tokens, Turn
from services.router.upstream import Connection, UpstreamError

log = Log(__name__)

PASSED_OUT = (b"content-type", b"content-encoding", b"retry-after", b"x-ratelimit-", b"openai-", b"anthropic-")
"""Beginnings of the names of headers that pass to the client."""
LIMITS = b"x-ratelimit-"
UNBUFFERED: Header = (b"x-accel-buffering", b"no")  #: Has nginx pass a stream on as it comes
MOST_TOKENS_PER_S, MOST_AT_ONCE = 100_000.0, 2**17
"""Of one answer: no server makes more. What it has from an earlier one may come at once, and is no longer than this."""
LARGEST_USAGE_BYTES = 256 * 1024  #: The usage of a larger answer is looked for in its last bytes only


@dataclass
class Outcomes:
    """Learns from answers, counts and reports them."""

    expectations: Expectations
    metrics: Metrics
    latency: LatencyReporter
    usage: UsageReporter

    def learn(self, turn: Turn, server: Server, now_s: float, tokens: Tokens) -> None:
        expected, output_tokens = turn.expected, tokens.output
        e2e_s = now_s - turn.received.at_s
        served_s = e2e_s - turn.wait_s
        self.latency.end(server.id, expected.request_class, e2e_s, output_tokens)
        if turn.place is not None:
            away_s = min(server.origin.connect_s or 0.0, served_s)
            first_s = max(turn.first_s - turn.wait_s - away_s, 0.0) if turn.first_s else None
            choices = turn.received.asked.choices
            server.costs.learn(turn.place, first_s, served_s - away_s, output_tokens / choices)
        turn.lane.served_s += 0.05 * (served_s - turn.lane.served_s)
        answer_tokens = max(1, output_tokens // turn.received.asked.choices) if output_tokens else 0
        self.expectations.learn(
            turn.pool.spec.name, expected, tokens.input if tokens.are_stated else None, answer_tokens
        )
        turn.report(tokens.input, output_tokens)
        lat_s = turn.lane.times.latency_s(output_tokens)
        labels = (turn.model, expected.request_class)
        if e2e_s > SLO_LATENCIES * lat_s:
            self.metrics.violations.add(labels)
        if turn.first_s:
            self.metrics.ttft.observe(labels, turn.first_s)
            if output_tokens > 1:
                self.metrics.tbt.observe(labels, (e2e_s - turn.first_s) / (output_tokens - 1))

    def came_at_once(self, turn: Turn, server: Server, now_s: float, tokens: int) -> None:
        """Note how long an answer that was not streamed took, and how many tokens its server says it has.

        An answer of at most one token, such as an embedding, is its own first token.
        """
        e2e_s, request_class = now_s - turn.received.at_s, turn.expected.request_class
        tokens //= turn.received.asked.choices
        if tokens > 1:
            self.latency.whole(server.id, request_class, now_s - e2e_s + turn.wait_s, now_s, tokens)
        else:
            self.latency.first(server.id, request_class, e2e_s, turn.wait_s)

    def end(
        self, turn: Turn, server: Server, status: int, share_s: float, tokens: Tokens, footprint: Footprint
    ) -> None:
        metrics, labels = self.metrics, (turn.model, turn.expected.request_class)
        turn.is_charged = True
        metrics.requests.add((*labels, str(status)))
        e2e_s = time.monotonic() - turn.received.at_s
        metrics.e2e.observe(labels, e2e_s)
        metrics.wait.observe(labels, turn.wait_s)
        place = (turn.model, turn.received.kind.operation, server.origin.name, server.location)
        metrics.gen_ai_duration.observe((*place, "" if status == 200 else str(status)), e2e_s)
        if status == 200:
            if turn.first_s:
                metrics.gen_ai_first.observe(place, turn.first_s)
            metrics.gen_ai_tokens.observe((*place, "input"), tokens.input)
            metrics.gen_ai_tokens.observe((*place, "output"), tokens.output)
            metrics.tokens.add((*labels, "input"), tokens.input)
            metrics.tokens.add((*labels, "output"), tokens.output)
            metrics.estimated.add(labels, not tokens.are_stated)
        else:
            tokens = tokens._replace(input=0)
        if footprint.energy_j is not None:
            metrics.energy.add(labels, footprint.energy_j)
        if footprint.carbon_gco2 is not None:
            metrics.carbon.add(labels, footprint.carbon_gco2)
        turn.received.used_tokens += tokens.input + tokens.output
        request_class = turn.expected.request_class or "any"
        self.usage.served(server, turn.received.key, turn.model, request_class, share_s, tokens, footprint)


class AnswerPasser:
    """Passes answers on."""

    def __init__(self, outcomes: Outcomes, settings: RouterSettings, stored: StoredAnswers) -> None:
        self._outcomes, self._settings, self._stored = outcomes, settings, stored

    async def whole(self, turn: Turn, server: Server, connection: Connection, give_back: Callable[[], float]) -> int:
        """Pass on an answer that is not a stream; return the status that it counts as: 502 if it is not JSON.

        Args:
            connection: The connection, whose headers have arrived.
            give_back: Gives back the server, and returns the request's share of its time in seconds.

        Raises:
            UpstreamError: The answer broke off; nothing was sent to the client.
        """
        content = await connection.whole(self._settings.max_answer_bytes)
        now_s = time.monotonic()
        if connection.status == 200 and turn.place is not None:
            server.costs.has_read(turn.place, now_s)
        share_s = give_back()
        footprint = server.footprint(share_s)
        status, kind, is_plain = connection.status, turn.received.kind, is_identity(connection.headers)
        if status == 200 and is_plain and not _may_be_json(content, kind):
            status = 502  # it passes as it is, and is no answer
        prompt, output = _usage(content) if status == 200 else (None, None)
        output = _possible(output, turn, now_s)
        tokens = _tokens(prompt, output, turn.expected) if status == 200 else NO_TOKENS
        if status == 200:
            self._outcomes.learn(turn, server, now_s, tokens)
            if is_plain:
                content = self._names(turn, server).of(content)
            stated = output if kind.is_answer else 0
            if stated is not None:
                self._outcomes.came_at_once(turn, server, now_s, stated)
        if connection.status >= 400 and not _is_json(connection.headers):
            detail = content[:500].decode(errors="replace").strip() or "The model server refused the request."
            content = openai.error_body(connection.status, "upstream_error", detail, None, kind.errors)
            passed = _passed(turn, connection)
            headers = [JSON, *(each for each in passed if not each[0].startswith(b"content-")), *server.stated]
        else:
            headers = [*_passed(turn, connection), *server.stated]
        if connection.status == 200:
            headers += footprint.headers()
            if turn.received.asked.is_flex and is_plain:
                content = _of_flex(content)
        if turn.model != turn.received.asked.name:
            headers.append((b"x-wattshift-model", turn.model.encode()))
        self._outcomes.end(turn, server, status, share_s, tokens, footprint)
        await turn.received.exchange.answer(connection.status, headers, content)
        return status

    def _names(self, turn: Turn, server: Server) -> Renamed:
        """Return what gives an answer's model the name that it was asked for by, or that of the fallback."""
        asked, tenant_id = turn.received.asked, turn.received.key.identity.tenant_id
        name = orjson.dumps(asked.name if turn.model == asked.model else turn.model)
        if turn.received.kind.errors != "responses":
            return Renamed(name)
        return Marked(name, asked.fields, lambda answer_id: self._stored.mark(answer_id, server.id, tenant_id))

    def left(self, turn: Turn, server: Server, share_s: float) -> None:
        """Count a request whose client left before the answer began, with what the server spent on it."""
        self._outcomes.end(turn, server, 499, share_s, NO_TOKENS, server.footprint(share_s))

    async def stream(
        self, turn: Turn, ticket: Ticket, server: Server, connection: Connection, give_back: Callable[[], float]
    ) -> int:
        """Pass on an answer as it arrives, and state the emissions of a stream of events at its end.

        Returns:
            The status that it counts as: 502 if its server reported a failure in it.

        Raises:
            UpstreamError: It broke off. If the answer had begun, the client was told so by its last event.
        """
        received, exchange = turn.received, turn.received.exchange
        headers = [*_passed(turn, connection), (b"cache-control", b"no-cache"), UNBUFFERED, *server.stated]
        if turn.model != received.asked.name:
            headers.append((b"x-wattshift-model", turn.model.encode()))

        def so_far() -> Footprint:
            return server.footprint(give_back() if ticket.server is None else server.so_far(ticket.share_began_s))

        is_events = is_stream(connection.headers)
        is_plain = is_events and is_identity(connection.headers)
        reader = StreamReader(
            so_far,
            wants_usage=received.asked.wants_usage,
            hides_usage=turn.asks_usage,
            has_comment=wants_comment(exchange, self._settings),
            token_mark=received.kind.token_mark,
            renamed=self._names(turn, server),
        )
        status = connection.status
        # What fails until here was no answer: another server may be asked.
        piece, piece_s = await connection.piece(), connection.last_at_s
        try:
            await exchange.begin(status, headers)
            send, latency, request_class = exchange.send, self._outcomes.latency, turn.expected.request_class
            events, event_s = 0, received.at_s
            while piece:
                out = reader.feed(piece) if is_plain else piece
                if received.asked.is_flex and is_plain:
                    out = _events_of_flex(out)
                if reader.events > events and status == 200:  # a refusal says nothing of how fast a server is
                    if events:
                        latency.gap(server.id, request_class, piece_s - event_s, reader.events - events)
                    else:
                        turn.first_s = piece_s - received.at_s
                        if turn.place is not None:
                            server.costs.has_read(turn.place, piece_s)
                        latency.first(server.id, request_class, turn.first_s, turn.wait_s)
                    events, event_s = reader.events, piece_s
                if out:
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                piece, piece_s = await connection.piece(), connection.last_at_s  # not when its client has read it
        except UpstreamError as error:
            end = b""
            if not reader.is_complete:  # else all of it was there
                log.warning("server.broke_off", server=server.id, reason=error.reason)
                status = 502
                message = f"The model server's answer broke off: {error}"
                end = openai.broken_off(received.kind, message, reader.events)
            if is_events:  # else the connection is closed before the answer's end
                await exchange.send({"type": "http.response.body", "body": end, "more_body": False})
            if not reader.is_complete:
                raise
        except asyncio.CancelledError:
            status = 499  # its client left
            raise
        else:
            end = reader.close() if is_plain else b""
            await exchange.send({"type": "http.response.body", "body": end, "more_body": False})
        finally:
            now_s = connection.last_at_s
            if status == 200 and turn.place is not None:
                server.costs.has_read(turn.place, now_s)
            share_s = give_back()
            if status == 200 and reader.has_failed:
                status = 502
            reader.output_tokens = _possible(reader.output_tokens, turn, now_s)
            tokens = _of_stream(reader, turn.expected, is_plain)
            if status == 200 and reader.is_complete:
                self._outcomes.learn(turn, server, now_s, tokens)
            self._outcomes.end(turn, server, status, share_s, tokens, server.footprint(share_s))
        return status


def passes_as_it_comes(turn: Turn, connection: Connection) -> bool:
    """Whether an answer is passed on in pieces: events, and what is no JSON where that need not be."""
    if is_stream(connection.headers):
        return True
    return connection.status == 200 and not turn.received.kind.is_json and not _is_json(connection.headers)


def _passed(turn: Turn, connection: Connection) -> list[Header]:
    """Return the headers of an answer that pass to the client; limits of its key come before those of the server."""
    passed = [each for each in connection.headers if each[0].startswith(PASSED_OUT)]
    others = [each for each in passed if not each[0].startswith(LIMITS)]
    has_own = len(others) < len(passed) and any(name.startswith(LIMITS) for name, _ in turn.received.exchange.extra)
    return others if has_own else passed


def is_stream(headers: list[Header]) -> bool:
    """Whether an answer is a stream of events."""
    return _content_type(headers).startswith(b"text/event-stream")


def is_identity(headers: list[Header]) -> bool:
    """Whether a body is not encoded, so that something can be appended to it."""
    return not any(name == b"content-encoding" and value not in (b"", b"identity") for name, value in headers)


def wants_comment(exchange: Exchange, settings: RouterSettings) -> bool:
    """Whether a stream to this client ends with a comment line that states its footprint."""
    return settings.stream_comment and exchange.headers.get(b"x-wattshift-comment") != b"off"


def _of_flex(content: bytes) -> bytes:
    """Return an answer that names its service tier, as those of ``flex`` do."""
    try:
        found = orjson.loads(content)
        return orjson.dumps({**found, "service_tier": "flex"})
    except (orjson.JSONDecodeError, TypeError):
        return content


def _events_of_flex(piece: bytes) -> bytes:
    """Return events that name their service tier; a line of a text of the answer cannot begin one, as it is escaped."""
    lines = piece.split(b"\n")
    for at, line in enumerate(lines):
        if line.startswith(b"data:") and (body := line[5:].strip()).startswith(b"{"):
            lines[at] = b"data: " + _of_flex(body)
    return b"\n".join(lines)


def _is_json(headers: list[Header]) -> bool:
    return b"json" in _content_type(headers)


def _content_type(headers: list[Header]) -> bytes:
    for name, value in headers:
        if name == b"content-type":
            return value
    return b""


def _may_be_json(content: bytes, kind: Kind) -> bool:
    """Whether a body begins and ends like JSON; it may be larger or deeper than what is parsed here."""
    return content[:64].lstrip()[:1] + content[-64:].rstrip()[-1:] in ((b"{}",) if kind.is_answer else (b"{}", b"[]"))


def _usage(content: bytes) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer that an answer states; None where it does not."""
    try:
        if len(content) <= LARGEST_USAGE_BYTES:
            found = orjson.loads(content)
        else:
            at = content.rfind(b'"usage"', len(content) - 4_096)
            found = orjson.loads(b"{" + content[at:].rstrip()) if at >= 0 else None
    except orjson.JSONDecodeError:
        return None, None
    return tokens_of(cast("dict[str, Any]", found)) if isinstance(found, dict) else (None, None)


def _possible(output: int | None, turn: Turn, now_s: float) -> int | None:
    """Return the tokens of an answer as its server states them; None for more than it can have made."""
    served_s = now_s - turn.received.at_s - turn.wait_s
    most = turn.received.asked.choices * (MOST_AT_ONCE + MOST_TOKENS_PER_S * served_s)
    return output if output is not None and output <= most else None


def _tokens(prompt: int | None, output: int | None, expected: Expected) -> Tokens:
    """Return tokens of prompt and answer: as the server stated them, or else as expected."""
    if output is None and not expected.contexts:
        output = 0  # vectors are no tokens
    return _or_expected(prompt, output, expected)


def _of_stream(reader: StreamReader, expected: Expected, is_plain: bool) -> Tokens:
    """Return the tokens of a stream as the server stated them; otherwise count its events, if they could be read."""
    tokens = _or_expected(reader.input_tokens, reader.output_tokens, expected)
    return tokens._replace(output=reader.events) if is_plain and reader.output_tokens is None else tokens


def _or_expected(prompt: int | None, output: int | None, expected: Expected) -> Tokens:
    return Tokens(
        expected.input_tokens if prompt is None else prompt,
        round(expected.output_tokens) if output is None else output,
        are_stated=prompt is not None and output is not None,
    )
