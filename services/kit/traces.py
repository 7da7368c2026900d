"""Traces: which request or job the work at hand belongs to.

They are off unless ``WATTSHIFT_TRACES`` switches them on. While they are off nothing here does anything, and nothing of
the extra ``traces`` is imported. Where a trace leaves a process by another way than HTTP, it travels as the text of a
``traceparent``, as W3C Trace Context has it; what is not of that form begins a new trace.
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
        """What makes other work a child of it; None while traces are off."""
        ...

    def end(self) -> None:
        """Note that the work is over; the second time does nothing."""
        ...


class Tracer(Protocol):
    """What notes spans while traces are on; ``services.kit.otel`` has it."""

    def trace_id(self) -> str | None:
        """Return the trace of the work at hand."""
        ...

    def current(self) -> str | None:
        """Return what makes other work a child of the work at hand."""
        ...

    def begin(self, name: str, parent: str | None, attributes: Mapping[str, Attribute]) -> Span:
        """Begin a span, as a child of ``parent`` or else of the work at hand."""
        ...

    def traced(self, app: ASGIApp) -> ASGIApp:
        """Return an app that notes a span for each of its requests."""
        ...

    def name_request(self, method: str, route: str) -> None:
        """Name the span of the request at hand by its route."""
        ...

    def enter(self, parent: str) -> object:
        """Make what follows part of a trace; returns what ``leave`` wants."""
        ...

    def leave(self, token: object) -> None:
        """Go back to what was before ``enter``."""
        ...

    def stop(self) -> None:
        """Send what has not been sent, for a moment at most."""
        ...


class _NoSpan:
    traceparent: str | None = None

    def end(self) -> None:
        """Do nothing."""


_NO_SPAN = _NoSpan()
_tracer: Tracer | None = None


def start(process: str, settings: SharedSettings) -> None:
    """Switch traces on in this process, if ``settings`` say so; ``process`` is what its spans are of."""
    global _tracer
    if settings.traces == "otlp" and _tracer is None:
        from services.kit.otel import OpenTelemetry  # not before: it takes time and memory

        tracer = OpenTelemetry(process)
        tracer.instrument()
        _tracer = tracer


def stop() -> None:
    """Send what has not been sent, and switch traces off."""
    global _tracer
    if _tracer is not None:
        _tracer.stop()
    _tracer = None


def is_on() -> bool:
    """Return whether this process notes spans."""
    return _tracer is not None


def trace_id() -> str | None:
    """Return the trace of the work at hand; None without one, and while traces are off."""
    return None if _tracer is None else _tracer.trace_id()


def current() -> str | None:
    """Return the ``traceparent`` of the work at hand; None without a trace, and while traces are off."""
    return None if _tracer is None else _tracer.current()


def id_of(traceparent: str) -> str:
    """Return the trace that a ``traceparent`` of ours names."""
    return traceparent[3:35]


def traced(app: ASGIApp) -> ASGIApp:
    """Return an app that notes a span for each of its requests while traces are on; otherwise ``app`` itself."""
    return app if _tracer is None else _tracer.traced(app)


def name_request(method: str, route: str) -> None:
    """Name the span of the request at hand by its route, in which ids have names."""
    if _tracer is not None:
        _tracer.name_request(method, route)


def begin(name: str, parent: str | None = None, **attributes: Attribute) -> Span:
    """Begin a piece of work, which the caller ends.

    Args:
        name: What is done.
        parent: The ``traceparent`` of what it is part of; by default the work at hand.
        attributes: What else is known of it.
    """
    return _NO_SPAN if _tracer is None else _tracer.begin(name, parent, attributes)


@contextmanager
def within(traceparent: str | None) -> Generator[None]:
    """Make the work of the block part of a trace; without one it stays what it was part of."""
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
    """Note the block as a piece of work, of which all that it does is part; arguments as for ``begin``."""
    begun = begin(name, parent, **attributes)
    try:
        with within(begun.traceparent):
            yield begun
    finally:
        begun.end()
