"""Spans by OpenTelemetry, sent to a collector by OTLP over HTTP; imported only where traces are on.

Spans are sent by a thread, in groups, from a queue of bounded length: a collector that is slow or away costs spans and
never a request. Where to is said by OpenTelemetry's own variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``.
"""

# The instrumentations have types in part.
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from contextvars import Token
from typing import TYPE_CHECKING, Any, cast

os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http,database")  # the stable names; read at the first import

from opentelemetry import context, trace
from opentelemetry.context.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.propagate import set_global_textmap
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from services.kit.logging import Log
from services.kit.release import RELEASE
from services.kit.traces import Attribute

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from yarl import URL

log = Log(__name__)

SEND_WITHIN_S = 3.0
STOP_WITHIN_S = 2.0
UNTRACED = r"/(healthz|readyz|metrics)$"
"""Paths that are asked all the time, and are part of nobody's work."""
_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class OpenTelemetry:
    """The spans of this process."""

    def __init__(self, process: str, exporter: SpanExporter | None = None) -> None:
        """Begin to note and send them; ``exporter`` stands for the one to the collector."""
        for chatty in ("opentelemetry", "urllib3"):
            logging.getLogger(chatty).setLevel(logging.CRITICAL)  # `Sending` says what is to be said
        about = {"service.name": process, "service.namespace": "wattshift", "service.version": RELEASE}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.sampler = PartsOnly(self._provider.sampler)
        sending = Sending(exporter or OTLPSpanExporter(timeout=SEND_WITHIN_S))
        self._provider.add_span_processor(BatchSpanProcessor(sending))
        self._tracer = self._provider.get_tracer("wattshift", RELEASE)
        set_global_textmap(_PROPAGATOR)  # nothing of a client goes further than the identity of its trace

    def instrument(self) -> None:
        """Note the calls that this process makes by the libraries that it has loaded."""
        given: dict[str, Any] = {"tracer_provider": self._provider}
        if "aiohttp" in sys.modules:
            from opentelemetry.instrumentation.aiohttp_client import AioHttpClientInstrumentor

            AioHttpClientInstrumentor().instrument(**given, url_filter=_address_alone)
        if "asyncpg" in sys.modules:
            from opentelemetry.instrumentation.asyncpg import AsyncPGInstrumentor

            AsyncPGInstrumentor().instrument(**given)
        if "redis" in sys.modules:
            from opentelemetry.instrumentation.redis import RedisInstrumentor

            RedisInstrumentor().instrument(**given)
        if "celery" in sys.modules:
            from opentelemetry.instrumentation.celery import CeleryInstrumentor

            CeleryInstrumentor().instrument(**given)

    def trace_id(self) -> str | None:
        """Return the trace of the work at hand."""
        found = trace.get_current_span().get_span_context()
        return trace.format_trace_id(found.trace_id) if found.is_valid else None

    def current(self) -> str | None:
        """Return what makes other work a child of the work at hand."""
        return NotedSpan(trace.get_current_span()).traceparent

    def begin(self, name: str, parent: str | None, attributes: Mapping[str, Attribute]) -> NotedSpan:
        """Begin a span, as a child of ``parent`` or else of the work at hand."""
        named = {f"wattshift.{key}": value for key, value in attributes.items()}
        within = None if parent is None else _context_of(parent)
        return NotedSpan(self._tracer.start_span(name, within, attributes=named))

    def traced(self, app: ASGIApp) -> ASGIApp:
        """Return an app that notes a span for each of its requests."""
        return cast(
            "ASGIApp",
            OpenTelemetryMiddleware(
                _Routed(app, self),
                excluded_urls=UNTRACED,
                default_span_details=_by_method,
                server_request_hook=_without_query,
                tracer_provider=self._provider,
                exclude_spans=["receive", "send"],
            ),
        )

    def name_request(self, method: str, route: str) -> None:
        """Name the span of the request at hand by its route."""
        at_hand = trace.get_current_span()
        at_hand.update_name(f"{method} {route}")
        at_hand.set_attribute("http.route", route)

    def enter(self, parent: str) -> object:
        """Make what follows part of a trace; returns what ``leave`` wants."""
        return context.attach(_context_of(parent))

    def leave(self, token: object) -> None:
        """Go back to what was before ``enter``."""
        context.detach(cast("Token[Context]", token))

    def stop(self) -> None:
        """Send what has not been sent, for ``STOP_WITHIN_S`` at most."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(STOP_WITHIN_S)


class NotedSpan:
    """A span of OpenTelemetry, as ``services.kit.traces`` has it."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        """What makes other work a child of it."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier.get("traceparent")

    def end(self) -> None:
        """Note that the work is over; the second time does nothing."""
        if self._span.is_recording():
            self._span.end()


class PartsOnly(Sampler):
    """Leaves out calls that are part of nothing: loops ask the database and Redis all day long."""

    def __init__(self, rest: Sampler) -> None:
        self._rest = rest

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Return whether a span is noted."""
        parent = trace.get_current_span(parent_context).get_span_context()
        if kind is SpanKind.CLIENT and not parent.is_valid:
            return SamplingResult(Decision.DROP)
        return self._rest.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        """Return what it does, in a word."""
        return f"PartsOnly({self._rest.get_description()})"


class Sending(SpanExporter):
    """Sends spans, and says once when that begins to fail, and once when it works again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; those that cannot be sent are lost."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # whatever is wrong with a collector, it must not end the thread that sends
            result = SpanExportResult.FAILURE
        if (fails := result is not SpanExportResult.SUCCESS) != self._fails:
            self._fails = fails
            if fails:
                log.warning("traces.not_sent", why="the collector does not take them", spans=len(spans))
            else:
                log.info("traces.sent_again")
        return result

    def shutdown(self) -> None:
        """Close the connection to the collector."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: nothing is held back here."""
        return True


class _Routed:
    """Names the span of a request by the route that an app of FastAPI found for it."""

    def __init__(self, app: ASGIApp, tracer: OpenTelemetry) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start" and (route := getattr(scope.get("route"), "path", None)):
                self._tracer.name_request(scope["method"], route)
            await send(message)  # the span is over when the answer is

        await self._app(scope, receive, naming)


def _context_of(traceparent: str) -> Context:
    """Return the context of work of others; that of none, for what is no ``traceparent``."""
    if not _TRACEPARENT.fullmatch(traceparent):
        return Context()
    return _PROPAGATOR.extract({"traceparent": traceparent}, Context())


def _by_method(scope: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a name for the span of a request whose route is not known yet."""
    return str(scope.get("method") or scope["type"]), {}


def _without_query(span: trace.Span, scope: dict[str, Any]) -> None:
    """Leave out what a query says: it may be a secret, such as the code of somebody who signs in."""
    if span.is_recording() and scope.get("query_string"):
        span.set_attribute("url.query", "-")


def _address_alone(url: URL) -> str:
    return str(url.with_query(None).with_user(None))
