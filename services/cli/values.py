"""Values of ``--param key=value``: JSON where it can be, text otherwise, and ``@FILE`` for a list of pairs by time."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.cli.client import EXIT_USAGE, CliError


def parameter_value(text: str) -> Any:
    """Return what ``text`` stands for.

    ``@FILE`` reads a CSV file of two columns, such as a grid operator's cap: when (an hour of the day, UTC seconds, or
    ISO 8601, taken for UTC without an offset) and a number; a header is skipped.

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
            pairs.append([_when(when.strip()), float(value)])
        except ValueError:
            if at:
                raise CliError(f"{file}, row {at + 1}: expected a time and a number, got {row}", EXIT_USAGE) from None
    return pairs


def _when(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
