"""Structured logging on the standard library: a stable event name and fields.

``log.info("plan.committed", round=7)``. Text for people, in which fields are logfmt; JSON in containers. Whatever a
field holds, one event is one line, and a traceback's lines are indented: nothing can pass for another event or field.
"""

import asyncio
import logging
import re
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from threading import RLock
from typing import IO, Any, cast

from services.kit import traces
from services.kit.text import CONTROLS, visible


class Known:
    """Fields of many lines, written once."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    @cached_property
    def words(self) -> str:
        return _words(self.fields.items())

    @cached_property
    def json(self) -> str:
        return _json(self.fields)[1:-1]


class Log:
    """A logger whose messages are event names and whose arguments are fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def is_on(self, level: int) -> bool:
        return self._logger.isEnabledFor(level)

    def emit(
        self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False, known: Known | None = None
    ) -> None:
        """Log an event at one of the levels of ``logging``, with the exception being handled if so."""
        if not self._logger.isEnabledFor(level):
            return
        found = sys.exc_info() if exc_info else None
        if len(_ROOT.handlers) == 1 and type(output := _ROOT.handlers[0]) is _Output and not output.filters:
            output.put(level, event, fields, found, known)
            return
        # Not by the logger's own methods, which look for the calling line: a quarter of what a line costs.
        record = logging.LogRecord(self._logger.name, level, "", 0, event, (), found)
        record.fields = fields if known is None else known.fields | fields
        self._logger.handle(record)

    def info(self, event: str, **fields: Any) -> None:
        """Log something that happened as expected."""
        self.emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log something an operator may want to look at."""
        self.emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self.emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Log a failure with the traceback of the exception being handled."""
        self.emit(logging.ERROR, event, fields, exc_info=True)


_ROOT = logging.getLogger()
_LEVELS = {level: logging.getLevelName(level) for level in range(logging.CRITICAL + 1)}


@lru_cache(maxsize=2)
def _shown(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class _Formatter(logging.Formatter):
    def __init__(self, process: str, *, as_json: bool) -> None:
        super().__init__()
        self._process, self._as_json = process, as_json

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        fields: dict[str, Any] = getattr(record, "fields", {})
        return self.line(record.created, record.levelno, record.getMessage(), fields, trace)

    def line(
        self, at_s: float, level: int, event: str, fields: dict[str, Any], trace: str, known: Known | None = None
    ) -> str:
        if request_id := traces.request_id():
            fields = {**fields, "request_id": request_id}
        if (trace_id := traces.trace_id()) is not None:
            fields = {**fields, "trace_id": trace_id}
        second = int(at_s)
        moment = f"{_shown(second)}.{int((at_s - second) * 1000):03d}"
        if self._as_json:
            line = {"at": f"{moment}+00:00", "level": _LEVELS[level].lower(), "process": self._process, "event": event}
            if trace:
                fields = {**fields, "trace": trace.strip()}
            text = _json({**line, **fields})
            return text if known is None else f"{text[:-1]},{known.json}}}"
        words = f"{known.words} {_words(fields.items())}" if known is not None else _words(fields.items())
        event = event.replace("\n", "\\n")
        text = f"{moment[11:]} {_LEVELS[level]:7} {event} {words}".rstrip()
        return visible(text + "\n  " + trace.replace("\n", "\n  ") if trace else text)


def _json(fields: dict[str, Any]) -> str:
    import orjson  # in containers only: the command line logs as text, and has no orjson with the base alone

    shown = {name: visible(value) if isinstance(value, str) else value for name, value in fields.items()}
    text = orjson.dumps(shown, default=str).decode()
    # What else is in strings, such as those of lists, orjson leaves as it is from DEL on.
    return text if text.isprintable() else CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _Output(logging.StreamHandler[IO[str]]):
    """Writes lines: those of a turn of the event loop at once at its end, warnings and what is worse without delay."""

    def __init__(self, formatter: _Formatter) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(formatter)
        self._lines = formatter
        self._lock = cast("RLock", self.lock)
        self._waiting: list[str] = []
        self._turn: asyncio.AbstractEventLoop | None = None  #: At the end of whose turn it writes

    def put(self, level: int, event: str, fields: dict[str, Any], exc_info: Any, known: Known | None) -> None:
        trace = self._lines.formatException(exc_info) if exc_info else ""
        line = self._lines.line(time.time(), level, event, fields, trace, known) + "\n"
        loop = asyncio._get_running_loop() if level < logging.WARNING else None  # pyright: ignore[reportPrivateUsage]
        with self._lock:
            self._waiting.append(line)
            if loop is None:
                self.flush()
            elif self._turn is not loop:
                self._turn = loop
                loop.call_soon(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of another library."""
        self._waiting.append(self.format(record) + "\n")
        self.flush()

    def flush(self) -> None:
        with self._lock:
            self._turn = None
            if not self._waiting:
                return
            text, self._waiting = "".join(self._waiting), []
            try:
                self.stream.write(text)
                self.stream.flush()
            except (OSError, ValueError):
                return  # nobody reads it any more, or the disk is full


_PLAIN = re.compile(r'[^\s="\'\\]+')


def _words(fields: Iterable[tuple[str, Any]]) -> str:
    return " ".join([f"{name}={_word(value)}" for name, value in fields])


def _word(value: object) -> str:
    """Return a value as logfmt has it: in quotation marks if it is not one word."""
    text = str(value)
    if type(value) is int or type(value) is float or text.isalnum() or _PLAIN.fullmatch(text):
        return text
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f'"{text}"'


def configure_logging(process: str, *, log_format: str = "text", level: str = "INFO") -> None:
    """Send every logger of this process to standard output in one format."""
    _ROOT.handlers[:] = [_Output(_Formatter(process, as_json=log_format == "json"))]
    _ROOT.setLevel(level)
    for chatty in ("uvicorn.access", "httpx", "httpcore", "sqlalchemy.pool"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_of_note)


def _is_of_note(record: logging.LogRecord) -> bool:
    """Whether the server's line is more than the traceback of an answer that was cut off as the process stopped."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
