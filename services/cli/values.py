"""Values of ``--param key=value``, typed or read from a file, and JSON documents."""

from __future__ import annotations

import csv
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.cli.client import EXIT_NOT_FOUND, EXIT_USAGE, CliError


def json_document(file: Path) -> Any:
    """Return the document in a JSON file.

    Raises:
        CliError: the file cannot be read, or is not JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}", EXIT_NOT_FOUND) from None
    except ValueError as error:
        raise CliError(f"{file} is not JSON: {error}", EXIT_USAGE) from None


def filled(word: str) -> str:
    """Return a word of a command; ``{python}`` in it is this Python and ``{examples}`` the folder of examples."""
    return word.replace("{python}", sys.executable).replace("{examples}", str(Path(__file__).parents[2] / "examples"))


def parameter_value(text: str) -> Any:
    """Return the value of ``text``: as JSON if it is valid JSON, as text otherwise.

    ``@FILE`` reads a CSV file of two columns, such as a grid operator's cap: when (an hour of the day, UTC seconds, or
    ISO 8601, which is UTC without an offset) and a number; a header is skipped.

    Raises:
        CliError: the file cannot be read, or a row of it.
    """
    if text.startswith("@"):
        return _pairs(Path(text[1:]))
    try:
        return json.loads(text)
    except ValueError:
        return text


def _pairs(file: Path) -> list[list[float]]:
    try:
        rows = [row for row in csv.reader(file.read_text(encoding="utf-8").splitlines()) if row]
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{file} cannot be read: {error}", EXIT_USAGE) from None
    pairs: list[list[float]] = []
    for at, row in enumerate(rows):
        try:
            when, value = row
            pairs.append([moment_s(when.strip()), float(value)])
        except ValueError:
            if at:
                raise CliError(f"{file}, row {at + 1}: expected a time and a number, got {row}", EXIT_USAGE) from None
    return pairs


def moment_s(text: str) -> float:
    """Return a number as it is, and an ISO 8601 date and time, UTC without an offset, in seconds.

    Raises:
        ValueError: it is neither.
    """
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
