"""Values of ``--param key=value``, typed or read from a file, and JSON documents."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.commands import EXIT_NOT_FOUND, EXIT_USAGE, CliError
from services.kit.files import whole
from services.kit.text import decimal, decoded

if TYPE_CHECKING:
    from services.simulator.raw import ReadReport


def text_of(file: Path) -> str:
    """Return the text of a file that a caller names, whose lines end with ``\\n``; ``-`` is standard input."""
    try:
        return decoded(sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes())
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}", EXIT_NOT_FOUND) from None
    except UnicodeDecodeError:
        raise CliError(f"{file} cannot be read: it is neither UTF-8 nor UTF-16 text", EXIT_USAGE) from None


@contextmanager
def made(file: Path) -> Iterator[Path]:
    """Yield where to write a file, which is there only once it is complete; ``CliError`` if it cannot be written."""
    try:
        with whole(file) as part:
            yield part
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror or error}", EXIT_USAGE) from error


def json_document(file: Path) -> Any:
    """Return the document in a JSON file; NaN and infinities, which Python reads and JSON lacks, are refused."""
    try:
        document = json.loads(text_of(file))
    except ValueError as error:
        raise CliError(f"{file} is not JSON: {error}", EXIT_USAGE) from None
    if found := not_finite(document):
        at, value = found
        raise CliError(f"{file}: {f'{at}: ' if at else ''}must be a finite number, not {value}", EXIT_USAGE)
    return document


def json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; see ``json_document``."""
    if not isinstance(document := json_document(file), dict):
        raise CliError(f"{file} is not a JSON object", EXIT_USAGE)
    return document


def not_finite(document: Any) -> tuple[str, float] | None:
    """Return the path of the first number that is not finite, such as ``places.0.price_per_kwh``, and the number."""
    waiting: list[tuple[str, Any]] = [("", document)]
    while waiting:
        at, value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return at, value
        if isinstance(value, dict | list):
            pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
            waiting += [(f"{at}.{key}" if at else str(key), each) for key, each in reversed(pairs)]
    return None


def filled(word: str) -> str:
    """Return a word of a command; ``{python}`` in it is this Python and ``{examples}`` the folder of examples."""
    return word.replace("{python}", sys.executable).replace("{examples}", str(Path(__file__).parents[2] / "examples"))


def with_commands_filled(spec: dict[str, Any], of: str, own: str | None = None) -> dict[str, Any]:
    """Return a spec, which may be wrong anywhere, with the placeholders in the commands of its ``of`` filled in.

    ``own``, if given, is a placeholder for the name of what has the command.
    """

    def fill(each: Any) -> Any:
        if not isinstance(each, dict) or not isinstance(words := each.get("command"), list):
            return each
        name = str(each.get("name", ""))
        texts = [word.replace(own, name) if own and isinstance(word, str) else word for word in words]
        return {**each, "command": [filled(word) if isinstance(word, str) else word for word in texts]}

    having = spec.get(of)
    return {**spec, of: [fill(each) for each in having]} if isinstance(having, list) else spec


def parameter_value(text: str) -> Any:
    """Return the value of ``text``: as JSON if it is valid JSON, as text otherwise.

    ``@FILE`` reads a CSV file of two columns, such as a grid operator's cap: when (an hour of the day, UTC seconds, or
    ISO 8601, which is UTC without an offset) and a number; a header is skipped.
    """
    if text.startswith("@"):
        return _pairs(Path(text[1:]))
    try:
        return json.loads(text)
    except ValueError:
        return text


def _pairs(file: Path) -> list[list[float]]:
    from services.simulator.readers.text import moment_s

    pairs: list[list[float]] = []
    for at, (line, row) in enumerate(read_cells(file)):
        try:
            when, value = row
            pairs.append([moment_s(when.strip()), decimal(value)])
        except ValueError:
            if at:
                raise CliError(f"{file}, line {line}: expected a time and a number, got {row}", EXIT_USAGE) from None
    return pairs


def read_cells(file: Path) -> list[tuple[int, list[str]]]:
    """Return the line number and the cells of each row of a table in which no row may be missing."""
    from services.simulator.raw import ReadReport  # here: few commands read a table, and this loads NumPy
    from services.simulator.readers.text import TraceFormatError, cells_of, open_text

    report = ReadReport(file.name, "table")
    try:
        with open_text(file) as text:
            found = list(cells_of(text, report))
    except (OSError, TraceFormatError) as error:
        raise CliError(f"{file} cannot be read: {error}", EXIT_USAGE if file.exists() else EXIT_NOT_FOUND) from None
    refuse_dropped(file, report)
    return found


def refuse_dropped(file: Path, report: ReadReport) -> None:
    """Refuse a table of which a row could not be read."""
    for reason, lines in report.lines.items():
        raise CliError(f"{file}, line {lines[0]}: {reason}", EXIT_USAGE)


def utc_time(text: str | None, option: str) -> datetime | None:
    """Return a date, or a date and time, in ISO 8601 and UTC unless it says otherwise; None where none was given."""
    try:
        return None if text is None else _utc(text)
    except ValueError:
        raise CliError(f"{option} {text}: must be a date or an ISO 8601 date and time", EXIT_USAGE) from None


def _utc(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_AND_CLOCK = re.compile(rf"(?=.)(?:({'|'.join(_DAYS)})[a-z]*)?\s*(?:([01]?\d|2[0-3]):([0-5]\d))?")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)\s*")
_CLOCK = re.compile(r"(?:(\d{1,9})-(?=(?:[01]?\d|2[0-3]):))?(\d{1,9}):([0-5]\d)(?::([0-5]\d))?")


LONGEST_S = 100 * 366 * 86_400.0  #: What is longer leads beyond the calendar


def duration_s(text: str, option: str) -> float:
    """Return a duration in seconds: ``90``, ``90s``, ``15m``, ``6h``, ``1h30m``, ``2d``, ``HH:MM:SS`` or ``HH:MM``, or
    with days before these, ``D-HH:MM:SS``.
    """
    seconds = LONGEST_S
    if clock := _CLOCK.fullmatch(text.strip()):
        days, *parts = (int(part or 0) for part in clock.groups())
        seconds = days * 86_400.0 + sum(part * size for part, size in zip(parts, (3_600, 60, 1), strict=True))
    elif not _PART.sub("", text.lower()).strip():
        given: list[tuple[str, str]] = _PART.findall(text.lower())
        if given and all(unit in _UNITS_S and (unit or len(given) == 1) for _, unit in given):
            seconds = sum(float(number) * _UNITS_S[unit] for number, unit in given)
    if seconds >= LONGEST_S:
        raise CliError(
            f"{option}: {text!r} is not a duration; write 90 (seconds), 90s, 15m, 1h30m, 2d, 06:00:00 or 1-06:00:00",
            EXIT_USAGE,
        )
    return seconds


def time_of(text: str, option: str, now: datetime) -> datetime:
    """Return a time: ISO 8601, in this machine's time zone unless it has its own, or ``+6h`` from ``now``.

    ``18:00``, ``Tue 9:00`` or ``Friday`` are the next such time in this machine's time zone; ``now`` is ``now``.
    """
    if text == "now":
        return now
    if text.startswith("+"):
        return now + timedelta(seconds=duration_s(text[1:], option))
    if text and (named := _DAY_AND_CLOCK.fullmatch(text.strip().lower())):
        day, hour, minute = named.groups()
        local = now.astimezone()
        at = local.replace(hour=int(hour or 0), minute=int(minute or 0), second=0, microsecond=0, tzinfo=None)
        at += timedelta(days=(_DAYS.index(day) - at.weekday()) % 7 if day else 0)
        days = (0, 7 if day else 1)
        return next(found for more in days for found in _shown(at + timedelta(days=more)) if found > local)
    try:
        found = datetime.fromisoformat(text)
        return found if found.tzinfo else _shown(found)[0]
    except (ValueError, OverflowError):  # also of a calendar's first and last day, which another zone does not have
        raise CliError(
            f"{option}: {text!r} is not a time; write 2026-03-01T18:00 or Tue 9:00 (local time), 2026-03-01T18:00Z or "
            "+6h",
            EXIT_USAGE,
        ) from None


def _shown(at: datetime) -> list[datetime]:
    """Return when local clocks show a time: twice as they are set back; one that they skip is as long after that."""
    both = [at.replace(fold=fold).astimezone() for fold in (0, 1)]
    return both if both[0].replace(tzinfo=None) == at else both[1:]


def past_time(text: str, option: str) -> datetime:
    """Return the time that an age such as ``2d`` means, or an ISO 8601 time."""
    now = datetime.now(UTC)
    try:
        if text[:4].isdigit() and "-" in text:
            return time_of(text, option, now)
        return now - timedelta(seconds=duration_s(text, option))
    except CliError:
        raise CliError(
            f"{option}: {text!r} is neither an age, such as 90s, 15m, 6h or 2d, nor a time, such as 2026-03-01T18:00",
            EXIT_USAGE,
        ) from None


def words_of(text: str, option: str) -> list[str]:
    """Return the words between the commas of an option's value; ``CliError`` for one that is empty or there twice."""
    words = [word.strip() for word in text.split(",")]
    if "" in words:
        raise CliError(f"{option} {text}: a name is missing beside a comma", EXIT_USAGE)
    once(words, option, text)
    return words


def once(names: Iterable[str], option: str, text: str) -> None:
    """Raise a ``CliError`` if a name is given twice."""
    for name, times in Counter(names).items():
        if times > 1:
            raise CliError(f"{option} {text}: {name} is given twice", EXIT_USAGE)


def pair(text: str, option: str) -> tuple[str, str]:
    """Return the key and the value of ``KEY=VALUE``."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise CliError(f"{option}: {text!r} is no KEY=VALUE", EXIT_USAGE)
    return key, value
