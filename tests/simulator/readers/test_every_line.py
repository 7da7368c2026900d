"""Whatever a file looks like: rows kept, dropped and merged add up to its lines that are not empty."""

from __future__ import annotations

import base64
import codecs
import csv
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.serving.requests import read_requests
from services.contracts.simulations import InlineFile
from services.core.domain.carbon import Signal
from services.core.domain.errors import DomainError
from services.simulator.raw import ReadReport, TraceFormatError
from services.simulator.readers.carbon import read_forecasts
from services.simulator.readers.grids import read_grid
from services.simulator.readers.jobs import read_raw
from services.simulator.training import unpack
from tests.simulator.readers.test_carbon_files import EM
from tests.simulator.readers.test_job_formats import HISTORY, OPENB, PHILLY, SACCT, SWF

SOME = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
AT = "2023-08-15T00:00:00Z"
REFUSED = ("can be used", "no whole issue")
"""Of a whole file: damage has left nothing."""
QUOTES = ('"', '"half', 'a"b', '""', "'")


def _of_jobs(path: Path) -> ReadReport:
    return read_raw(path).report


def _of_grid(path: Path) -> ReadReport:
    return read_grid(path, Signal.AVERAGE_DIRECT, zone="SE").report


def _of_forecasts(path: Path) -> ReadReport:
    return read_forecasts(path)[1]


def _json_lines(text: str) -> str:
    return "".join(json.dumps(row) + "\n" for row in csv.DictReader(io.StringIO(text)))


@dataclass(frozen=True)
class Kind:
    """A good file, how it is read, how many of its lines are no rows, and how many rows tell its format."""

    text: str
    read: Callable[[Path], ReadReport]
    header: int = 1
    telling: int = 0


KINDS = {
    "sacct": Kind(SACCT, _of_jobs),
    "history": Kind(HISTORY, _of_jobs),
    "history as JSON": Kind(_json_lines(HISTORY), _of_jobs, 0, 1),
    "philly": Kind(PHILLY, _of_jobs),
    "openb": Kind(OPENB, _of_jobs),
    "pai": Kind("arrival_time,length,cpus\n0.0,25.5,1\n1.5,2.0,1\n", _of_jobs),
    "sia": Kind("name,time,application,num_replicas,batch_size\nbert-1,110,bert,6,48\nbert-2,1,bert,1,48\n", _of_jobs),
    "tiresias": Kind("job_id,num_gpu,submit_time,model_name,duration\n0,8,30,vgg,164\n1,0,30,vgg,164\n", _of_jobs),
    "swf": Kind(SWF, _of_jobs, 2, 1),
    "Electricity Maps": Kind(EM, _of_grid),
    "two columns": Kind(f"time,gCO2/kWh\n{AT},200\n2023-08-15T01:00:00Z,-9999\n2023-08-15T02:00:00Z,7e9\n", _of_grid),
    "semicolons": Kind(f"time;gCO2/kWh\n{AT};200,5\n2023-08-15T01:00:00Z;-\n2023-08-15T02:00:00Z;100\n", _of_grid),
    "forecasts": Kind(
        "Datetime (UTC),Carbon Intensity Forecast\n"
        + "".join(
            f"2023-08-{day + hour // 24} {hour % 24:02d}:00,{day + hour}\n"
            for day in (15, 16, 17)
            for hour in range(30)
        ),
        _of_forecasts,
    ),
}


def assert_adds_up(report: ReadReport, content: bytes, header: int) -> None:
    lines = [line for line in content.splitlines() if line.strip()]
    assert report.rows == len(lines) - header
    assert report.kept + sum(report.dropped.values()) + sum(report.merged.values()) == report.rows
    assert report.sentences()[0].endswith(f"{report.kept} of {report.rows} rows kept")
    assert report.kept == report.rows or len(report.sentences()) > 1


@st.composite
def disturbed(draw: st.DrawFn, text: str, first: int) -> bytes:
    """Return the file with quotes, blank lines, rows again, bytes that are not UTF-8, and other line ends."""
    rows = [line.encode() for line in text.splitlines()]
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(first, len(rows) - 1))
        what = draw(st.sampled_from(("quote", "blank", "again", "byte", "short", "spaces")))
        separator = b"|" if b"|" in rows[0] else b";" if b";" in rows[0] else b","
        if what in ("quote", "byte"):
            cells = rows[at].split(separator)
            change = b"bj\xf6rn" if what == "byte" else draw(st.sampled_from(QUOTES)).encode()
            cells[draw(st.integers(0, len(cells) - 1))] = change
            rows[at] = separator.join(cells)
        elif what == "short":
            rows[at] = rows[at].rpartition(separator)[0] or b"x"
        else:
            rows.insert(at, {"blank": b"", "spaces": b"  ", "again": rows[at]}[what])
    end = draw(st.sampled_from((b"\n", b"\r\n")))
    return draw(st.sampled_from((b"", codecs.BOM_UTF8))) + end.join(rows) + draw(st.sampled_from((b"", end, end + end)))


@pytest.mark.parametrize("name", KINDS)
@SOME
@given(data=st.data())
def test_rows_kept_dropped_and_merged_are_the_lines_of_the_file(tmp_path: Path, name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    content = data.draw(disturbed(kind.text, kind.header + kind.telling))
    file = tmp_path / "file.txt"
    file.write_bytes(content)
    refused = ""
    try:
        report = kind.read(file)
    except TraceFormatError as error:
        refused = str(error)
    else:
        assert_adds_up(report, content, kind.header)
    assert not refused or any(words in refused for words in REFUSED), refused


def test_requests_add_up_too(tmp_path: Path) -> None:
    content = b"arrived_at,input_tokens,output_tokens\n1,10,20\n\n1,10,20\n2,x,3\n3,\xf6,3\n"
    file = tmp_path / "requests.csv"
    file.write_bytes(content)

    trace = read_requests(file)

    assert len(trace) == 2  # without ids, two equal requests are two
    assert trace.notes == (
        "requests.csv: read as wattshift; 2 of 4 rows kept",
        "dropped 1: bytes that are not UTF-8 (line 6)",
        "dropped 1: the input length is not a number (line 5)",
    )


SLURM = (
    "JobID|JobName|User|Submit|Start|End|State|ElapsedRaw|AllocTRES|ReqTRES\n"
    f"1|train|ann|{AT}|{AT}|2023-08-15T01:00:00Z|COMPLETED|3600|gres/gpu=2|\n"
    f'2|"half quoted|bob|{AT}|{AT}|2023-08-15T02:00:00Z|COMPLETED|7200|gres/gpu=1|\n'
    f'3|of "three"|cay|{AT}|{AT}|2023-08-15T03:00:00Z|COMPLETED|10800|gres/gpu=4|\n'
    f'4|"|dan|{AT}|{AT}|2023-08-15T01:00:00Z|COMPLETED|3600|gres/gpu=1|\n'
)
JOBS = (
    "job_id,submitted_at,started_at,ended_at,gpus,project\n"
    f"a,{AT},{AT},2023-08-15T04:00:00Z,2,vision\n"
    f'b,{AT},{AT},2023-08-15T04:00:00Z,2,"un,closed"\n'
    f"c,{AT},{AT},2023-08-15T04:00:00Z,2,x\n"
)


def write(folder: Path, content: str | bytes) -> Path:
    file = folder / "file.txt"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_a_quote_between_bars_is_a_character(tmp_path: Path) -> None:
    raw = read_raw(write(tmp_path, SLURM))

    assert (raw.ids, raw.gpus.tolist(), raw.report.sentences()[1:]) == (("1", "2", "3", "4"), [2, 1, 4, 1], ())


@pytest.mark.parametrize(
    ("project", "lines"),
    [('"unclosed', {"a quoted cell that does not end on its line": [3]}), ('"two\nlines"', None), ('a "b" c', {})],
)
def test_a_quoted_cell_that_does_not_end_on_its_line_costs_no_other_row(
    tmp_path: Path, project: str, lines: dict[str, list[int]] | None
) -> None:
    assert read_raw(write(tmp_path, JOBS)).tenants == ("vision", "un,closed", "x")

    content = JOBS.replace('"un,closed"', project)
    raw = read_raw(write(tmp_path, content))

    assert raw.ids == (("a", "c") if lines != {} else ("a", "b", "c"))
    assert_adds_up(raw.report, content.encode(), 1)
    two = {"a quoted cell that does not end on its line": [3], "1 cells where the header has 6": [4]}
    assert raw.report.lines == (two if lines is None else lines)


def test_a_bad_byte_costs_its_row_and_no_other(tmp_path: Path) -> None:
    for text in (SLURM.replace("train", "tr\xe4in"), JOBS.replace("vision", "visi\xf3n")):
        raw = read_raw(write(tmp_path, text.encode("latin-1")))

        assert raw.report.lines == {"bytes that are not UTF-8": [2]}
        assert len(raw) == raw.report.rows - 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("text", [SLURM, JOBS, KINDS["history as JSON"].text])
def test_encodings_of_editors_are_understood(tmp_path: Path, text: str, encoding: str) -> None:
    plain = read_raw(write(tmp_path, text))

    raw = read_raw(write(tmp_path, text.replace("\n", "\r\n").encode(encoding)))

    assert (raw.ids, raw.tenants, raw.report.rows) == (plain.ids, plain.tenants, plain.report.rows)


def test_two_exports_one_behind_the_other_count_what_they_share_once(tmp_path: Path) -> None:
    late = SLURM.replace("|train|", "|renamed since|").replace("\n4|", "\n5|")
    raw = read_raw(write(tmp_path, SLURM.encode() + codecs.BOM_UTF8 + late.encode()))

    assert raw.ids == ("1", "2", "3", "4", "5")
    assert raw.report.sentences() == (
        "file.txt: read as sacct; 5 of 9 rows kept",
        "dropped 1: the header again (line 6)",
        "3 rows occur twice and count once (line 7, 8, 9)",
    )


def test_one_job_of_our_history_counts_once_however_it_is_written(tmp_path: Path) -> None:
    again = f'a,{AT},{AT},2023-08-15T04:00:00Z,2,"vision"\n' + f"a,{AT},{AT},2023-08-15T05:00:00Z,2,vision\n"
    raw = read_raw(write(tmp_path, JOBS + again))

    assert raw.ids == ("a", "b", "c", "a~2")
    assert "1 row occurs twice and counts once (line 5)" in raw.report.sentences()


def test_jobs_without_ids_that_are_equal_are_several(tmp_path: Path) -> None:
    raw = read_raw(write(tmp_path, "arrival_time,length,cpus\n1.5,2.0,1\n1.5,2.0,1\n"))

    assert len(raw) == 2
    assert "1 rows are equal to earlier ones: without ids, each is a job" in raw.report.notes


def test_semicolons_and_decimal_commas(tmp_path: Path) -> None:
    series = read_grid(write(tmp_path, f"time;gCO2/kWh\n{AT};200,5\n2023-08-15T01:00:00Z;1.000\n"), Signal.MARGINAL)

    assert series.intensity_gco2_per_kwh.tolist() == [200.5, 1.0]
    assert series.report.notes == ["commas in numbers are read as decimal commas, as no comma separates the cells"]


def test_a_file_that_is_sent_is_whole_and_may_have_a_bad_byte() -> None:
    content = SLURM.replace("train", "tr\xe4in").encode("latin-1")

    def sent(packed: bytes) -> bytes:
        file = InlineFile(name="sacct.txt", gzip_base64=base64.b64encode(packed).decode())
        return unpack(file, 100_000).data

    assert sent(gzip.compress(content)) == content
    for packed in (gzip.compress(content)[:-12], gzip.compress(content) + gzip.compress(content)):
        with pytest.raises(DomainError, match="cut short, or holds more than one packed text"):
            sent(packed)
