"""Traces of requests: when each arrived, and how many tokens it had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from lab.bundles import path_of
from services.core.domain.arrays import Floats, Ints
from services.simulator.raw import ReadReport, TraceFormatError
from services.simulator.readers.text import (
    counted,
    first_lines,
    header_of,
    moment_s,
    number,
    numbered,
    open_text,
    table,
    whole,
)

BUNDLED = {"azure-2023-conv": "azure_2023_conv.csv.gz"}
"""Traces known by name."""
FORMATS = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): "azure",
    ("arrived_at", "input_tokens", "output_tokens"): "wattshift",
}
"""Columns -> the format's name; the second is what ``wattshift pools report`` takes."""
MOONCAKE = ("timestamp", "input_length", "output_length")
"""What a line of Mooncake's JSON traces has, in milliseconds and tokens; and perhaps ``hash_ids``."""
BLOCK_TOKENS = 512
"""Of a hash id in Mooncake's traces."""
MAX_TOKENS = 10_000_000
GOLDEN = 0.6180339887498949

Row = tuple[float, int, int, tuple[int, ...]]
"""A request: its arrival in seconds, the lengths of its prompt and its answer, and the prompt's blocks."""


@dataclass(frozen=True)
class RequestTrace:
    """Requests in order of arrival.

    Attributes:
        name: Of the file.
        arrival_s: (n_requests,) seconds since the first one.
        input_tokens, output_tokens: (n_requests,) lengths; every answer has at least one token.
        notes: What a reader should know.
        blocks: The ids of each prompt's blocks of ``BLOCK_TOKENS``, each standing for all before it too; none where the
            trace has none.
    """

    name: str
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    notes: tuple[str, ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @property
    def length_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    def scaled(self, factor: float, seed: int = 1) -> RequestTrace:
        """Return so many times as many requests over the same time, with the same bursts.

        Copies of the trace are laid over it, each turned by another part of its length; of the last, a share is drawn.
        Prompts of one copy share no beginnings with those of another.

        Raises:
            TraceFormatError: The factor is not above 0.
        """
        if not 0 < factor <= 1_000:
            raise TraceFormatError(f"requests are scaled by more than 0 and at most 1,000, not by {factor:g}")
        random = np.random.default_rng(seed)
        length_s = max(self.length_s, 1e-9)
        arrivals, rows = list[Floats](), list[Ints]()
        for copy in range(int(np.ceil(factor))):
            share = min(factor - copy, 1.0)
            kept = np.arange(len(self)) if share >= 1 else np.flatnonzero(random.random(len(self)) < share)
            turned_s = (self.arrival_s[kept] + copy * GOLDEN * length_s) % (length_s * (1 + 1e-12))
            arrivals.append(turned_s)
            rows.append(kept)
        arrival_s, row = np.concatenate(arrivals), np.concatenate(rows)
        order = np.argsort(arrival_s, kind="stable")
        copy_of = np.concatenate([np.full(each.size, at) for at, each in enumerate(rows)])[order]
        row = row[order]
        blocks: tuple[tuple[int, ...], ...] = ()
        if self.blocks:
            ids = 1 + max((max(each, default=0) for each in self.blocks), default=0)
            pairs = zip(row.tolist(), copy_of.tolist(), strict=True)
            blocks = tuple(tuple(block + copy * ids for block in self.blocks[at]) for at, copy in pairs)
        return RequestTrace(
            self.name, arrival_s[order], self.input_tokens[row], self.output_tokens[row], self.notes, blocks
        )


def read_requests(source: str | Path) -> RequestTrace:
    """Return the requests of a file, or of a bundled trace by its name.

    Rows that do not state a moment and two lengths are left out and noted.

    Raises:
        TraceFormatError: The file cannot be read, has columns of no known format, or no usable row.
    """
    if str(source) in BUNDLED:
        return _read(path_of(BUNDLED[str(source)]), str(source))
    return _read(Path(source), Path(source).name)


def _read(path: Path, name: str) -> RequestTrace:
    lines = first_lines(path)
    if _is_json(next((line for line in lines if line.strip()), "")):
        report = ReadReport(name, "mooncake")
        return _trace(name, report, list(_json_rows(path, report)))
    header = header_of(lines)
    columns = next((columns for columns in FORMATS if set(columns) <= set(header)), None)
    if columns is None:
        known = " or ".join(",".join(each) for each in FORMATS)
        raise TraceFormatError(f"{name} is no trace of requests: its header is not {known}, nor is it Mooncake's JSON")
    report = ReadReport(name, FORMATS[columns])
    rows: list[Row] = []
    with open_text(path) as text:
        for line, row in table(text, columns, report):
            try:
                rows.append((*_request(row[columns[0]], row[columns[1]], row[columns[2]]), ()))
            except ValueError as error:
                report.drop(line, str(error))
    return _trace(name, report, rows)


def _is_json(line: str) -> bool:
    try:
        document = orjson.loads(line)
    except ValueError:
        return False
    return isinstance(document, dict) and set(MOONCAKE) <= set(cast("dict[str, Any]", document))


def _json_rows(path: Path, report: ReadReport) -> Iterator[Row]:
    with open_text(path) as text:
        for number, line in counted(numbered(text), report):
            try:
                yield _json_row(orjson.loads(line))
            except ValueError as error:
                report.drop(number, str(error))


def _json_row(document: Any) -> Row:
    values = cast("dict[str, Any]", document)
    if not isinstance(document, dict) or not set(MOONCAKE) <= set(values):
        raise ValueError(f"it does not state {', '.join(MOONCAKE)}")
    at_ms, input_tokens, output_tokens = (str(values[column]) for column in MOONCAKE)
    blocks = values.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(each) is int and each >= 0 for each in cast("list[Any]", blocks)):
        raise ValueError("hash_ids is no list of whole numbers from 0 on")
    arrival_ms, prompt, answer = _request(at_ms, input_tokens, output_tokens)
    return 1e-3 * arrival_ms, prompt, answer, tuple(cast("list[int]", blocks))


def _trace(name: str, report: ReadReport, rows: list[Row]) -> RequestTrace:
    if not rows:
        raise TraceFormatError(f"{name} has no usable request: {'; '.join(report.sentences()) or 'it is empty'}")
    report.kept = len(rows)
    rows.sort(key=lambda each: each[0])
    times_s = np.array([each[0] for each in rows])
    return RequestTrace(
        name,
        times_s - times_s[0],
        np.array([each[1] for each in rows], dtype=np.int64),
        np.array([max(each[2], 1) for each in rows], dtype=np.int64),
        report.sentences() if report.dropped else (),
        tuple(each[3] for each in rows) if any(each[3] for each in rows) else (),
    )


def _request(moment: str, input_tokens: str, output_tokens: str) -> tuple[float, int, int]:
    time_s = moment_s(moment, "the arrival")
    lengths = whole(input_tokens, "the input length"), whole(output_tokens, "the output length")
    if not np.isfinite(time_s) or not 0 <= min(lengths) <= max(lengths) <= MAX_TOKENS:
        raise ValueError("an arrival is finite, and lengths are between 0 and 10,000,000 tokens")
    return time_s, *lengths


def cell(text: str, column: str) -> float:
    """Return a number that must be there and finite.

    Raises:
        ValueError: It is not; the message names the column.
    """
    value = number(text, column)
    if not np.isfinite(value):
        raise ValueError(f"{column} is not a finite number")
    return value
