"""Structured logging on the standard library: a stable event name and fields.

``log.info("plan.committed", round=7)``. Text for people, JSON in containers.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

from services.kit import traces
from services.kit.text import CONTROLS, visible


class Log:
    """A logger whose messages are event names and whose arguments are fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def _emit(self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exc_info)

    def info(self, event: str, **fields: Any) -> None:
        """Log something that happened as expected."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log something an operator may want to look at."""
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log a failure."""
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Log a failure with the traceback of the exception being handled."""
        self._emit(logging.ERROR, event, fields, exc_info=True)


class _Formatter(logging.Formatter):
    def __init__(self, process: str, *, as_json: bool) -> None:
        super().__init__()
        self._process = process
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        if (trace_id := traces.trace_id()) is not None:
            fields = {**fields, "trace_id": trace_id}
        at = datetime.fromtimestamp(record.created, UTC)
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            import orjson  # in containers only: the command line logs as text, and has no orjson with the base alone

            line = {
                "at": at.isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(),
                "process": self._process,
                "event": visible(record.getMessage()),
                **{name: visible(value) if isinstance(value, str) else value for name, value in fields.items()},
            }
            if trace:
                line["trace"] = visible(trace.strip())
            # What else is in strings, such as those of lists, it leaves as it is from DEL on.
            return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", orjson.dumps(line, default=str).decode())
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        moment = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}"
        return visible(f"{moment} {record.levelname:7} {record.getMessage()} {words}{trace}".rstrip())


def configure_logging(process: str, *, log_format: str = "text", level: str = "INFO") -> None:
    """Send every logger of this process to standard output in one format."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter(process, as_json=log_format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("uvicorn.access", "httpx", "httpcore", "sqlalchemy.pool"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
