"""Traces: which request or job the current work belongs to.

Spans are off unless ``WATTSHIFT_TRACES`` switches them on; while they are off nothing of the extra ``traces`` is
imported. The trace that a client named, and the id of its request, are passed on and logged all the same.

Where they leave a process by another way than HTTP, they travel as the text of a ``traceparent``, as W3C Trace Context
has it, followed by ``;`` and the id of the request where there is one; what is not of that form begins a new trace.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp
Attribute = str | int | float


class Span(Protocol):
    """A piece of work; ``services.kit.otel`` documents it and ``Tracer``."""

    @property
    def traceparent(self) -> str | None: ...
    def end(self) -> None: ...


class Tracer(Protocol):
    """Records spans while traces are on."""

    def trace_id(self) -> str | None: ...
    def current(self) -> str | None: ...
    def begin(self, name: str, parent: str | None, attributes: Mapping[str, Attribute]) -> Span: ...
    def traced(self, app: ASGIApp) -> ASGIApp: ...
    def name_request(self, method: str, route: str) -> None: ...
    def enter(self, parent: str) -> object: ...
    def leave(self, token: object) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _NoSpan:
    traceparent: str | None

    def end(self) -> None:
        """Do nothing."""


TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_REQUEST_ID_HEADER = "x-request-id"  # as contracts have it, which the command line does not load
_tracer: Tracer | None = None
_request: ContextVar[str] = ContextVar("request", default="")
_trace: ContextVar[str | None] = ContextVar("trace", default=None)
"""The ``traceparent`` that a client sent; only while spans are off."""


def record_with(tracer: Tracer) -> None:
    global _tracer
    _tracer = tracer


def stop() -> None:
    """Send what has not been sent yet, and switch traces off."""
    global _tracer
    if _tracer is not None:
        _tracer.stop()
    _tracer = None


def is_on() -> bool:
    return _tracer is not None


def trace_id() -> str | None:
    """Return the id of the current trace; None without one."""
    if _tracer is not None:
        return _tracer.trace_id()
    return None if (trace := _trace.get()) is None else id_of(trace)


def request_id() -> str:
    """Return the id of the request that the current work is part of; empty for none."""
    return _request.get()


def usable_id(given: bytes | None) -> str:
    """Return the id of a request as its client sent it; empty for one that is not usable as such."""
    if not given:
        return ""
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else ""


def name(request_id: str) -> None:
    """Make what follows in this task part of a request whose client gave it no id."""
    _request.set(request_id)


def begin_request(request_id: str, traceparent: bytes | None) -> None:
    """Make what follows in this task part of a request, and of the trace that its client named, and of no other."""
    _request.set(request_id)
    if _tracer is None:
        text = None if traceparent is None else traceparent.decode("latin-1")
        _trace.set(text if text is not None and TRACEPARENT.fullmatch(text) else None)


def passed_on() -> dict[str, str]:
    """Return the headers by which another process knows the current request; OpenTelemetry adds its own."""
    found: dict[str, str] = {}
    if request := _request.get():
        found[_REQUEST_ID_HEADER] = request
    if _tracer is None and (trace := _trace.get()) is not None:
        found["traceparent"] = trace
    return found


def current() -> str | None:
    """Return what makes other work part of the current work; None without a trace and a request."""
    return named(_trace.get() if _tracer is None else _tracer.current())


def named(traceparent: str | None) -> str | None:
    """Return a ``traceparent`` with the id of the current request, if there is one."""
    return f"{traceparent or ''};{request}" if (request := _request.get()) else traceparent


def id_of(traceparent: str) -> str | None:
    """Return the trace id in a ``traceparent`` of ours; None where it names a request alone."""
    return traceparent[3:35] or None if traceparent[:1] != ";" else None


def traced(app: ASGIApp) -> ASGIApp:
    """Return an app that records a span for each of its requests while traces are on; otherwise ``app`` itself."""
    return app if _tracer is None else _tracer.traced(app)


def name_request(method: str, route: str) -> None:
    """Name the span of the current request after its route, in which ids have names."""
    if _tracer is not None:
        _tracer.name_request(method, route)


def begin(name: str, parent: str | None = None, **attributes: Attribute) -> Span:
    """Begin a span, which the caller ends, as part of ``parent``, a ``traceparent``, or of the current one."""
    return _NoSpan(parent or current()) if _tracer is None else _tracer.begin(name, parent, attributes)


@contextmanager
def within(traceparent: str | None) -> Generator[None]:
    """Make the work of the block part of a trace and a request; without one it remains part of what it was."""
    if traceparent is None:
        yield
        return
    trace, _, request = traceparent.partition(";")
    tracer, token = _tracer, None
    before = _request.set(usable_id(request.encode()) or _request.get()), _trace.set(_trace.get())
    if tracer is not None:
        token = tracer.enter(trace)
    elif TRACEPARENT.fullmatch(trace):
        _trace.set(trace)
    try:
        yield
    finally:
        _request.reset(before[0])
        _trace.reset(before[1])
        if tracer is not None:
            tracer.leave(token)


@contextmanager
def span(name: str, parent: str | None = None, **attributes: Attribute) -> Generator[Span]:
    """Record the block as a span, and all it does as part of that; arguments as for ``begin``."""
    begun = begin(name, parent, **attributes)
    try:
        with within(begun.traceparent):
            yield begun
    finally:
        begun.end()
