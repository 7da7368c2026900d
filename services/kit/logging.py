"""Structured logging on the standard library: a stable event name and fields.

``log.info("plan.committed", round=7)``. Text for people, in which fields are logfmt; JSON in containers. Whatever a
field holds, one event is one line, and a traceback's lines are indented: nothing can pass for another event or field.
"""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from services.kit import traces
from services.kit.text import CONTROLS, visible


class Log:
    """A logger whose messages are event names and whose arguments are fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def _emit(self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        if not self._logger.isEnabledFor(level):
            return
        found = sys.exc_info() if exc_info else None
        # Not by the logger's own methods, which look for the calling line: a quarter of what a line costs.
        record = logging.LogRecord(self._logger.name, level, "", 0, event, (), found)
        record.fields = fields
        self._logger.handle(record)

    def debug(self, event: str, **fields: Any) -> None:
        """Log something that happens all the time."""
        self._emit(logging.DEBUG, event, fields)

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


@lru_cache(maxsize=2)
def _shown(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class _Formatter(logging.Formatter):
    def __init__(self, process: str, *, as_json: bool) -> None:
        super().__init__()
        self._process = process
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        if request_id := traces.request_id():
            fields = {**fields, "request_id": request_id}
        if (trace_id := traces.trace_id()) is not None:
            fields = {**fields, "trace_id": trace_id}
        second, day_and_time = int(record.created), _shown(int(record.created))
        moment = f"{day_and_time}.{int((record.created - second) * 1000):03d}"
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            import orjson  # in containers only: the command line logs as text, and has no orjson with the base alone

            line = {
                "at": f"{moment}+00:00",
                "level": record.levelname.lower(),
                "process": self._process,
                "event": visible(record.getMessage()),
                **{name: visible(value) if isinstance(value, str) else value for name, value in fields.items()},
            }
            if trace:
                line["trace"] = visible(trace.strip())
            # What else is in strings, such as those of lists, it leaves as it is from DEL on.
            return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", orjson.dumps(line, default=str).decode())
        words = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
        event = record.getMessage().replace("\n", "\\n")
        return visible(f"{moment[11:]} {record.levelname:7} {event} {words}".rstrip() + trace.replace("\n", "\n  "))


_PLAIN = re.compile(r'[^\s="\'\\]+')


def _word(value: object) -> str:
    """Return a value as logfmt has it: in quotation marks if it is not one word."""
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f'"{text}"'


def configure_logging(process: str, *, log_format: str = "text", level: str = "INFO") -> None:
    """Send every logger of this process to standard output in one format."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter(process, as_json=log_format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("uvicorn.access", "httpx", "httpcore", "sqlalchemy.pool"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
