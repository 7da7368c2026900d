"""Traces of requests: when each arrived, and how many tokens it had."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.simulator.raw import ReadReport, TraceFormatError
from services.simulator.readers.text import first_lines, header_of, number, open_text, table, utc_s, whole

BUNDLED = {"azure-2023-conv": "azure_2023_conv.csv.gz"}
"""Traces known by name."""
FORMATS = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): "azure",
    ("arrived_at", "input_tokens", "output_tokens"): "wattshift",
}
"""Columns -> the format's name; the second is what ``wattshift pools report`` takes."""
MAX_TOKENS = 10_000_000
GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class RequestTrace:
    """Requests in order of arrival.

    Attributes:
        name: Of the file.
        arrival_s: (n_requests,) seconds since the first one.
        input_tokens, output_tokens: (n_requests,) lengths; every answer has at least one token.
        notes: What a reader should know.
    """

    name: str
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @property
    def length_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    def scaled(self, factor: float, seed: int = 1) -> RequestTrace:
        """Return so many times as many requests over the same time, with the same bursts.

        Copies of the trace are laid over it, each turned by another part of its length; of the last, a share is drawn.

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
        row = row[order]
        return RequestTrace(self.name, arrival_s[order], self.input_tokens[row], self.output_tokens[row], self.notes)


def read_requests(source: str | Path) -> RequestTrace:
    """Return the requests of a file, or of a bundled trace by its name.

    Rows that do not state a moment and two lengths are left out and noted.

    Raises:
        TraceFormatError: The file cannot be read, has columns of no known format, or no usable row.
    """
    if str(source) in BUNDLED:
        found = resources.files("services.simulator.bundles").joinpath(BUNDLED[str(source)])
        with resources.as_file(found) as path:
            return _read(path, str(source))
    return _read(Path(source), Path(source).name)


def _read(path: Path, name: str) -> RequestTrace:
    header = header_of(first_lines(path))
    columns = next((columns for columns in FORMATS if set(columns) <= set(header)), None)
    if columns is None:
        known = " or ".join(",".join(each) for each in FORMATS)
        raise TraceFormatError(f"{name} is no trace of requests: its header is not {known}")
    report = ReadReport(name, FORMATS[columns])
    rows: list[tuple[float, int, int]] = []
    with open_text(path) as text:
        for line, row in table(text, columns, report):
            try:
                rows.append(_request(row[columns[0]], row[columns[1]], row[columns[2]]))
            except ValueError as error:
                report.drop(line, str(error))
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
    )


def _request(moment: str, input_tokens: str, output_tokens: str) -> tuple[float, int, int]:
    try:
        time_s = float(moment)
    except ValueError:
        time_s = utc_s(moment, "the arrival")
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
