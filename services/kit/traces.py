"""Traces: which request or job the current work belongs to.

They are off unless ``WATTSHIFT_TRACES`` switches them on. While they are off nothing here does anything, and nothing of
the extra ``traces`` is imported. Where a trace leaves a process other than by HTTP, it travels as a ``traceparent`` as
defined by W3C Trace Context; text that is not of that form begins a new trace.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from services.kit.settings import SharedSettings

Attribute = str | int | float


class Span(Protocol):
    """A piece of work, from its beginning to its end."""

    @property
    def traceparent(self) -> str | None:
        """The ``traceparent`` that makes other work a child of this span; None while traces are off."""
        ...

    def end(self) -> None:
        """Record that the work is over; a second call does nothing."""
        ...


class Tracer(Protocol):
    """Records spans while traces are on; implemented in ``services.kit.otel``."""

    def trace_id(self) -> str | None:
        """Return the id of the current trace."""
        ...

    def current(self) -> str | None:
        """Return the ``traceparent`` that makes other work a child of the current span."""
        ...

    def begin(self, name: str, parent: str | None, attributes: Mapping[str, Attribute]) -> Span:
        """Begin a span, as a child of ``parent`` or else of the current span."""
        ...

    def traced(self, app: ASGIApp) -> ASGIApp:
        """Return an app that records a span for each of its requests."""
        ...

    def name_request(self, method: str, route: str) -> None:
        """Name the span of the current request after its route."""
        ...

    def enter(self, parent: str) -> object:
        """Make what follows part of a trace; return what ``leave`` needs."""
        ...

    def leave(self, token: object) -> None:
        """Restore the context that was in force before ``enter``."""
        ...

    def stop(self) -> None:
        """Send what has not been sent yet, for a moment at most."""
        ...


class _NoSpan:
    traceparent: str | None = None

    def end(self) -> None:
        """Do nothing."""


_NO_SPAN = _NoSpan()
_tracer: Tracer | None = None


def start(process: str, settings: SharedSettings) -> None:
    """Switch traces on in this process, if ``settings`` say so; ``process`` is the name that its spans carry."""
    global _tracer
    if settings.traces == "otlp" and _tracer is None:
        from services.kit.otel import OpenTelemetry  # not before: it takes time and memory

        tracer = OpenTelemetry(process)
        tracer.instrument()
        _tracer = tracer


def stop() -> None:
    """Send what has not been sent yet, and switch traces off."""
    global _tracer
    if _tracer is not None:
        _tracer.stop()
    _tracer = None


def is_on() -> bool:
    """Return whether this process records spans."""
    return _tracer is not None


def trace_id() -> str | None:
    """Return the id of the current trace; None without one, and while traces are off."""
    return None if _tracer is None else _tracer.trace_id()


def current() -> str | None:
    """Return the current ``traceparent``; None without a trace, and while traces are off."""
    return None if _tracer is None else _tracer.current()


def id_of(traceparent: str) -> str:
    """Return the trace id in a ``traceparent`` of ours."""
    return traceparent[3:35]


def traced(app: ASGIApp) -> ASGIApp:
    """Return an app that records a span for each of its requests while traces are on; otherwise ``app`` itself."""
    return app if _tracer is None else _tracer.traced(app)


def name_request(method: str, route: str) -> None:
    """Name the span of the current request after its route, in which ids have names."""
    if _tracer is not None:
        _tracer.name_request(method, route)


def begin(name: str, parent: str | None = None, **attributes: Attribute) -> Span:
    """Begin a span, which the caller ends.

    Args:
        name: What is done.
        parent: The ``traceparent`` of what it is part of; by default the current span.
        attributes: What else is known about it.
    """
    return _NO_SPAN if _tracer is None else _tracer.begin(name, parent, attributes)


@contextmanager
def within(traceparent: str | None) -> Generator[None]:
    """Make the work of the block part of a trace; without one it remains part of what it was."""
    if (tracer := _tracer) is None or traceparent is None:
        yield
        return
    token = tracer.enter(traceparent)
    try:
        yield
    finally:
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
