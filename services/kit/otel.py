"""OpenTelemetry spans, sent to a collector by OTLP over HTTP; imported only if traces are on.

A thread sends spans in batches from a queue of bounded length: if the collector is slow or away, spans are lost but
never a request. The destination is set by OpenTelemetry's own variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``.
"""

# The instrumentations have types in part.
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import logging
import os
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
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.kit import traces
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


class OpenTelemetry:
    def __init__(self, process: str, exporter: SpanExporter | None = None) -> None:
        """Start recording and sending spans; ``exporter`` replaces the one to the collector."""
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
        """Record the calls that this process makes through the libraries it has loaded."""
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
        """Return the id of the current trace."""
        found = trace.get_current_span().get_span_context()
        return trace.format_trace_id(found.trace_id) if found.is_valid else None

    def current(self) -> str | None:
        """Return the ``traceparent`` that makes other work a child of the current span."""
        return NotedSpan(trace.get_current_span()).traceparent

    def begin(self, name: str, parent: str | None, attributes: Mapping[str, Attribute]) -> NotedSpan:
        """Begin a span, as a child of ``parent`` or else of the current span."""
        named = {f"wattshift.{key}": value for key, value in attributes.items()}
        trace_of, _, request = (parent or "").partition(";")
        within = None if parent is None else _context_of(trace_of)
        return NotedSpan(self._tracer.start_span(name, within, attributes=named), request or traces.request_id())

    def traced(self, app: ASGIApp) -> ASGIApp:
        """Return an app that records a span for each of its requests."""
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
        """Name the span of the current request after its route."""
        at_hand = trace.get_current_span()
        at_hand.update_name(f"{method} {route}")
        at_hand.set_attribute("http.route", route)

    def enter(self, parent: str) -> object:
        """Make what follows part of a trace; return what ``leave`` needs."""
        return context.attach(_context_of(parent))

    def leave(self, token: object) -> None:
        """Restore the context that was in force before ``enter``."""
        context.detach(cast("Token[Context]", token))

    def stop(self) -> None:
        """Send what has not been sent yet, for ``STOP_WITHIN_S`` at most."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(STOP_WITHIN_S)


class NotedSpan:
    """A piece of work, from its beginning to its end."""

    def __init__(self, span: trace.Span, request: str = "") -> None:
        self._span, self._request = span, request

    @property
    def traceparent(self) -> str | None:
        """The ``traceparent`` that makes other work a child of this span."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span, Context()))
        found = carrier.get("traceparent")
        return f"{found};{self._request}" if found and self._request else found

    def end(self) -> None:
        """Record that the work is over; a second call does nothing."""
        if self._span.is_recording():
            self._span.end()


class PartsOnly(Sampler):
    """Drops calls that belong to no larger span: loops query the database and Redis all day long."""

    def __init__(self, rest: Sampler) -> None:
        self._rest = rest

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        *more: Any,
        **by: Any,
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        if kind is SpanKind.CLIENT and not parent.is_valid:
            return SamplingResult(Decision.DROP)
        return self._rest.should_sample(parent_context, trace_id, name, kind, *more, **by)

    def get_description(self) -> str:
        return f"PartsOnly({self._rest.get_description()})"


class Sending(SpanExporter):
    """Sends spans, and logs once when that begins to fail, and once when it works again."""

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
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: nothing is buffered here."""
        return True


class _Routed:
    """Names the span of a request after the route that a FastAPI app found for it."""

    def __init__(self, app: ASGIApp, tracer: OpenTelemetry) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start" and (route := getattr(scope.get("route"), "path", None)):
                self._tracer.name_request(scope["method"], route)
            await send(message)  # the span is over when the answer is

        await self._app(scope, receive, naming)


def _context_of(traceparent: str) -> Context:
    """Return the context that a ``traceparent`` names; an empty one if it is malformed."""
    if not traces.TRACEPARENT.fullmatch(traceparent):
        return Context()
    return _PROPAGATOR.extract({"traceparent": traceparent}, Context())


def _by_method(scope: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a name for the span of a request whose route is not known yet."""
    return str(scope.get("method") or scope["type"]), {}


def _without_query(span: trace.Span, scope: dict[str, Any]) -> None:
    """Hide the query string: it may contain a secret, such as the code of somebody who signs in."""
    if span.is_recording() and scope.get("query_string"):
        span.set_attribute("url.query", "-")


def _address_alone(url: URL) -> str:
    return str(url.with_query(None).with_user(None))
