"""Requests as they are sent to model servers, with the keys of servers that ask for one."""

import re
import time
from typing import Any, cast

from services.contracts.identity import REQUEST_ID_HEADER
from services.core.policies.freesh.laxity import Order
from services.router.fleet import Server
from services.router.gate import priority_of
from services.router.kinds import OTHER
from services.router.lanes import Ticket
from services.router.stored_answers import FIELD, own_id
from services.router.turn import Turn
from services.router.upstream_keys import UpstreamKeys

UUID = re.compile(rb"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")
"""A request id that every model server takes: ``llama_cpp.server`` refuses any other."""
REQUEST_ID = REQUEST_ID_HEADER.encode()
PASSED_ON = (b"traceparent", b"tracestate", b"anthropic-version", b"anthropic-beta")
"""Headers of the client: by which its traces and the model server's are one, and which form it speaks."""
AFTER_OTHERS_S = 86_400.0
"""By how much requests that only get what others leave are less urgent inside a server than if they were others."""
ASK_USAGE = b'"stream_options":{"include_usage":true},'


class RequestWriter:
    """Writes requests: head and body."""

    def __init__(self, order: Order, keys: UpstreamKeys) -> None:
        """Take the order of waiting requests, from which their priority is derived."""
        self._order, self._keys = order, keys

    def write(self, turn: Turn, ticket: Ticket, server: Server) -> bytes:
        """Return the request as it is sent, with usage asked of streams; ``UpstreamError`` without a known key."""
        received, spec, pool = turn.received, server.spec, turn.pool.spec
        asked = received.asked
        changes: dict[str, Any] = {}
        if (name := spec.upstream_model or turn.model) != asked.name:
            changes["model"] = name
        now_s, usual = time.monotonic(), 0
        if pool.passes_priority and received.kind.asks_usage:
            order_s = turn.lane.priority(ticket.request) - received.at_s
            if self._order is not Order.SRTF:
                order_s += received.at_utc_s
            if received.spare is not None:
                order_s += AFTER_OTHERS_S
            usual = round(order_s * 1e3)
        if "priority" in asked.fields and received.kind is not OTHER:
            usual = priority_of(received.key.key_limits, asked.fields, usual)
        if usual != asked.fields.get("priority", 0):
            changes["priority"] = usual
        if ticket.only_at is not None:
            changes[FIELD] = own_id(asked.fields[FIELD])
        options = asked.fields.get("stream_options")
        turn.asks_usage = (
            asked.is_stream
            and not asked.wants_usage
            and received.kind.asks_usage
            and (options is None or isinstance(options, dict))  # the server refuses anything else
            and server.may_have("usage", now_s)
        )
        if turn.asks_usage and (changes or "stream_options" in asked.fields):
            given = cast("dict[str, Any]", options or {}).items()
            changes["stream_options"] = {name: value for name, value in given if name != "continuous_usage_stats"}
            changes["stream_options"]["include_usage"] = True
        body = asked.with_fields(**changes) if changes else asked.content
        if turn.asks_usage and not changes:
            body = b"{" + ASK_USAGE + body.lstrip()[1:]
        form = received.exchange.headers[b"content-type"] if asked.places is not None else None
        head, request_id = self.head(server, received.path, form), received.exchange.request_id
        turn.extras = ("usage",) if turn.asks_usage else ()
        if request_id == received.exchange.headers.get(REQUEST_ID):  # else the client gave it none
            is_usual = UUID.fullmatch(request_id) is not None
            if is_usual or server.may_have("id", now_s):
                head += b"x-request-id: %s\r\n" % request_id
                turn.extras = turn.extras if is_usual else ("id", *turn.extras)
        for name in PASSED_ON:
            if (value := received.exchange.headers.get(name)) is not None:
                head += b"%s: %s\r\n" % (name, value)
        return b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body)

    def head(self, server: Server, path: str, form: bytes | None = None) -> bytes:
        """Return the part of a head that the server says; ``form`` is the content type of a request that is a form.

        Raises:
            UpstreamError: The server's key is not known.
        """
        origin = server.origin
        head = (
            b"POST %s%s HTTP/1.1\r\nhost: %s\r\naccept: */*\r\n"
            b"accept-encoding: identity\r\nuser-agent: wattshift-router\r\ncontent-type: %s\r\n"
        ) % (origin.path, path.encode(), origin.authority, form or b"application/json")
        key = self._keys.of(server)
        if key is not None and path.startswith("/v1/messages"):
            head += b"x-api-key: %s\r\n" % key
        return head if key is None else b"%sauthorization: Bearer %s\r\n" % (head, key)
