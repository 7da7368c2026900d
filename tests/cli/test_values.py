"""Values of ``--param``."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lab.commands.fit import read_points
from services.cli.commands import CliError
from services.cli.serving.pools import LOG_COLUMNS, _read_log
from services.cli.values import duration_s, parameter_value, past_time, text_of, time_of, utc_time


def test_a_value_is_json_or_text() -> None:
    assert parameter_value("0.7") == 0.7
    assert parameter_value("[[0, 900.0]]") == [[0, 900.0]]
    assert parameter_value("min") == "min"


def test_a_file_holds_a_limit_by_the_hour_or_by_time(tmp_path: Path) -> None:
    file = tmp_path / "cap.csv"
    file.write_text("hour,watts\n0,9000\n17.5,6000\n")
    assert parameter_value(f"@{file}") == [[0.0, 9_000.0], [17.5, 6_000.0]]

    file.write_text("2026-01-01T00:00:00+00:00,9000\n2026-01-01T01:00:00,8e3\n")
    assert parameter_value(f"@{file}") == [[1_767_225_600.0, 9_000.0], [1_767_229_200.0, 8_000.0]]


def test_a_file_that_is_none_or_holds_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cap.csv"
    file.write_text("0,9000\nnoon,6000\n")
    with pytest.raises(CliError, match="line 2"):
        parameter_value(f"@{file}")
    with pytest.raises(CliError, match="cannot be read"):
        parameter_value(f"@{tmp_path / 'nowhere'}")


def _fitted(file: Path) -> Any:
    points, lines = read_points(file, ("gpus", "seconds_per_iteration"), energies=False)
    return points.seconds_per_iteration.tolist(), [line - lines[0] for line in lines]


DOORS: dict[str, tuple[Callable[[Path], Any], list[list[str]]]] = {
    "pairs": (lambda file: parameter_value(f"@{file}"), [["hour", "watts"], ["0", "9000.5"], ["17.5", "6000"]]),
    "fit": (_fitted, [["gpus", "seconds_per_iteration"], ["1", "4.5"], ["2", "2.5"], ["4", "1.5"]]),
    "log": (
        lambda file: _read_log(file, None),
        [list(LOG_COLUMNS), ["1760000000.5", "7", "8"], ["1760000009", "1", "2"]],
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_for_tables_reads_every_dialect(tmp_path: Path, door: str) -> None:
    read, rows = DOORS[door]
    file = tmp_path / "table.csv"

    def found(delimiter: str, encoding: str = "utf-8", first: str = "", end: str = "\n") -> Any:
        cells = [[cell.replace(".", ",") if delimiter != "," else cell for cell in row] for row in rows]
        text = first + "".join(delimiter.join(row) + end for row in cells)
        file.write_bytes(text.encode(encoding))
        return read(file)

    plain = found(",")
    assert found(";") == found("\t") == found(";", "utf-16") == found(",", "utf-8-sig", end="\r\n") == plain
    assert found(";", first="sep=;\r\n", end="\r\n") == found("\t", first="sep=\t\n") == plain
    file.write_bytes(gzip.compress(file.read_bytes()))
    assert read(file) == plain
    file.write_bytes(",".join(rows[0]).encode() + b"\n" + ",".join(rows[1]).encode() + b"\n\xff,1\n")
    with pytest.raises(CliError, match="line 3: bytes that are not UTF-8"):
        read(file)
    file.write_text("".join(",".join(row) + "\n" for row in [*rows[:2], [f"{cell}_0" for cell in rows[1]]]))
    with pytest.raises(CliError, match="line 3"):  # Python alone reads 1_0 as ten
        read(file)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file or directory"), (b"\x80\xd5", "it is neither UTF-8 nor UTF-16 text")]
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "given"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(CliError) as caught:
        text_of(file)
    assert str(caught.value) == f"{file} cannot be read: {reason}"


@pytest.mark.parametrize("text", ["9999999d", "999999999:00", "99999999999999999999w"])
def test_a_length_that_no_calendar_has_is_refused(text: str) -> None:
    for read in (lambda: past_time(text, "--since"), lambda: time_of(f"+{text}", "--from", datetime.now(UTC))):
        with pytest.raises(CliError, match=r"is not a duration|is neither an age"):
            read()


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h30m", 5_400), ("2D 6h", 194_400), ("1m 1.5 s", 61.5), ("90", 90), ("1-00:00:01", 86_401)]
)
def test_a_length_may_have_several_parts(text: str, seconds: float) -> None:
    assert duration_s(text, "--for") == seconds


@pytest.mark.parametrize("text", ["", "h", "1h30", "1h-30m", "1h and 30m", "1hour30", "1e3"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(CliError, match="is not a duration"):
        duration_s(text, "--for")


NUMBERS = st.sampled_from(("0", "1", "09", "23", "59", "2026", "9" * 14, "9" * 400, "9" * 5_000))
PARTS = st.sampled_from((*"smhdw:-+. TZ", "min", "fri", "١"))
READERS: tuple[Callable[[str], Any], ...] = (
    lambda text: duration_s(text, "--for"),
    lambda text: time_of(text, "--from", datetime(2026, 1, 1, tzinfo=UTC)),
    lambda text: past_time(text, "--since"),
    lambda text: utc_time(text, "--start"),
)


@example("9" * 400 + ":00")
@example("9" * 400 + "-00:00")
@example("9" * 5_000 + ":00")
@example("99999999999999h")
@example("0001-01-01T00:00")
@example("9999-12-31T23:59")
@given(st.lists(NUMBERS | PARTS, max_size=9).map("".join))
def test_durations_and_times_are_read_or_refused_in_one_sentence(text: str) -> None:
    for read in READERS:
        with suppress(CliError):
            found = read(text)
            assert isinstance(found, datetime) or 0 <= found < 1e10
