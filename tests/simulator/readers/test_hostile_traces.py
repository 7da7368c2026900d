"""Traces that are damaged, or made up to hurt: each is read as far as it can be used, or refused in a sentence.

Nothing else may happen: no other exception, no value that a simulation could not go on with.
"""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.core.domain.errors import DomainError
from services.simulator.catalogue import catalogue
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs, read_raw
from services.simulator.readers.text import LONGEST_LINE
from tests.simulator.readers.test_carbon_files import EM
from tests.simulator.readers.test_job_formats import HISTORY, OPENB, PHILLY, SACCT, SWF

JOBS = (PHILLY, OPENB, SWF, SACCT, HISTORY)
GRIDS = (EM, "time,intensity\n1577836800,218.3\n1577840400,200\n", "Time,Carbon Intensity\n2019-12-20 00:00:00,218.3\n")
CELLS = (
    *("nan", "NaN", "inf", "-inf", "-1", "0", "1e308", "1e400", "-1e308", "9" * 400, "0x10", "1_000", "١٢", "", " "),
    *("9999-12-31T23:59:59Z", "0001-01-01T00:00:00+14:00", "10000-01-01", "2017-02-30 00:00:00", "253402300800"),
    *('"', '"\n', "\x00", "\ufeff", "\u2028", "=1+1", "../../etc/passwd", "'; DROP TABLE jobs;--", "x" * 200_000),
)
SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def damaged(draw: st.DrawFn, texts: tuple[str, ...]) -> bytes:
    """Return a file with some of its cells, lines or bytes changed."""
    text = draw(st.sampled_from(texts))
    lines = text.splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        separator = "|" if "|" in lines[at] else "," if "," in lines[at] else " "
        cells = lines[at].rstrip("\n").split(separator)
        cells[draw(st.integers(0, len(cells) - 1))] = draw(st.sampled_from(CELLS) | st.text(max_size=8))
        lines[at] = separator.join(cells) + "\n"
    content = "".join(lines).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 3)))):
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(max_size=3)) + content[at + draw(st.integers(0, 2)) :]
    if draw(st.booleans()):
        return content
    packed = gzip.compress(content)
    if draw(st.booleans()):
        at = draw(st.integers(0, len(packed) - 1))
        packed = packed[:at] + bytes([packed[at] ^ draw(st.integers(1, 255))]) + packed[at + 1 :]
    return packed[: draw(st.sampled_from((len(packed), len(packed) // 2)))]


def write(folder: Path, content: bytes) -> Path:
    file = folder / "trace.txt"
    file.write_bytes(content)
    return file


@SOME
@given(content=damaged(JOBS), format_name=st.sampled_from([None, *(each.name for each in catalogue().formats)]))
def test_a_damaged_job_trace_is_read_as_far_as_it_holds_or_refused(
    tmp_path: Path, content: bytes, format_name: str | None
) -> None:
    file = write(tmp_path, content)
    try:
        raw = read_raw(file, format_name)
        read_jobs(file, format=format_name)
    except DomainError:
        return
    assert np.isfinite(raw.submitted_s).all()
    assert ((raw.duration_s > 0) | np.isnan(raw.duration_s)).all()
    assert not np.isinf(raw.duration_s).any()
    assert (raw.gpus >= 0).all()
    assert (np.isnan(raw.energy_j) | (np.isfinite(raw.energy_j) & (raw.energy_j >= 0))).all()
    assert len(set(raw.ids)) == len(raw.ids)


@SOME
@given(content=damaged(GRIDS), signal=st.sampled_from(("direct", "lifecycle", "marginal")))
@example(content=b"time,intensity\n" + b"9" * 400 + b",218.3\n", signal="direct")
def test_a_damaged_grid_is_read_as_far_as_it_holds_or_refused(tmp_path: Path, content: bytes, signal: str) -> None:
    try:
        trace = read_carbon(write(tmp_path, content), signal=signal)
    except DomainError:
        return
    assert np.isfinite(trace.curve.intensity_gco2_per_kwh).all()
    assert np.isfinite(trace.curve.times_s).all()
    assert (np.diff(trace.curve.times_s) > 0).all()


@pytest.mark.parametrize("start", [*JOBS, *GRIDS, ""])
def test_a_few_kilobytes_that_unpack_to_one_endless_line_are_refused(tmp_path: Path, start: str) -> None:
    bomb = write(tmp_path, gzip.compress(start.encode() + b"0" * (LONGEST_LINE + 2**20)))
    read = read_carbon if start in GRIDS else read_raw

    with pytest.raises(DomainError, match=r"a line has more than \d+ characters"):
        read(bomb)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("text", [*JOBS, *GRIDS])
def test_one_hostile_cell_in_every_place_is_no_more_than_a_bad_row(tmp_path: Path, text: str, cell: str) -> None:
    read = read_raw if text in JOBS else read_carbon
    lines = text.splitlines(keepends=True)
    separator = "|" if "|" in lines[0] else "," if "," in lines[0] else " "
    cells = lines[-2].rstrip("\n").split(separator)
    for place in range(len(cells)):
        changed = [*cells[:place], cell, *cells[place + 1 :]]
        content = "".join([*lines[:-2], separator.join(changed) + "\n", lines[-1]]).encode()
        with contextlib.suppress(DomainError):
            assert read(write(tmp_path, content)) is not None
