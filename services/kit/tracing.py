"""Switches traces on; apart from what asks which trace the current work belongs to, as logging does."""

from services.kit import traces
from services.kit.settings import SharedSettings


def start(process: str, settings: SharedSettings) -> None:
    """Switch traces on in this process, if ``settings`` say so; ``process`` is the name that its spans carry."""
    if settings.traces == "otlp" and not traces.is_on():
        from services.kit.otel import OpenTelemetry  # not before: it takes time and memory

        tracer = OpenTelemetry(process)
        tracer.instrument()
        traces.record_with(tracer)
