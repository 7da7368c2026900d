"""Job traces: each format's units, what it drops and how it names bad rows, on files of a few lines."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from services.simulator.catalogue import catalogue
from services.simulator.raw import TraceFormatError
from services.simulator.readers.jobs import read_raw

PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-09 06:13:03,2951.0,4,11804.0,6214e9
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-09 08:00:00,soon,1,0.0,6214e9
2017-10-09 08:00:00,-5,1,0.0,6214e9
2017-10-09 08:00:00,10
"""
OPENB = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
a,12000,16384,1,1000,,LS,Running,0,100,40
b,6000,12288,1,460,,BE,Succeeded,10,100,20
c,6000,12288,0,0,,BE,Succeeded,10,100,20
d,6000,12288,2,1000,,BE,Pending,10,100,
"""
SWF = """; Version: 2.2
; UnixStartTime: 1000000
1 0 10 3600 4 -1 -1 4 7200 -1 1 7 1 1 1 1 -1 -1
2 60 -1 -1 -1 -1 -1 2 7200 -1 5 7 1 1 1 1 -1 -1
3 90 5 50 -1 -1 -1 8 7200 -1 0 -1 1 1 1 1 -1 -1
4 90 5 50
"""
SACCT = """JobID|User|Submit|Start|End|State|ElapsedRaw|AllocTRES|ReqTRES
7|ann|2024-05-01T10:00:00+0200|2024-05-01T10:05:00+0200|2024-05-01T11:05:00+0200|COMPLETED|3600|cpu=4,gres/gpu:a100=2|
7.batch||2024-05-01T10:00:00+0200|2024-05-01T10:05:00+0200|2024-05-01T11:05:00+0200|COMPLETED|3600|cpu=4|
8|bob|2024-05-01T09:00:00+0200|2024-05-01T09:05:00+0200|2024-05-01T09:06:00+0200|CANCELLED by 5||gres/gpu=1|
9|bob|2024-05-01T09:00:00+0200|Unknown|Unknown|PENDING|0||gres/gpu=1
10|bob|2024-05-01T09:00:00+0200|2024-05-01T09:05:00+0200|Unknown|RUNNING|99|gres/gpu=1|
11|bob|2024-05-01T09:00:00+0200|2024-05-01T09:05:00+0200|2024-05-01T09:06:00+0200|FAILED|60|cpu=1|cpu=1
"""
HISTORY = """job_id,project,submitted_at,started_at,ended_at,gpus,run_s,energy_j
j1,vision,2024-05-01T10:00:00Z,2024-05-01T10:05:00Z,2024-05-01T11:05:00Z,2,1800,900000
j2,vision,2024-05-01T10:00:00Z,2024-05-01T10:05:00Z,2024-05-01T11:05:00Z,1,,
j3,vision,2024-05-01T10:00:00Z,,,1,,
j4,vision,yesterday,2024-05-01T10:05:00Z,2024-05-01T11:05:00Z,1,,
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "trace.txt"
    file.write_text(text, encoding="utf-8")
    return file


def test_philly_is_sorted_and_repeated_rows_are_one_job(tmp_path: Path) -> None:
    raw = read_raw(write(tmp_path, PHILLY))

    assert raw.report.format == "philly"
    assert raw.duration_s.tolist() == [2951.0, 66.0]
    assert raw.gpus.tolist() == [4, 1]
    assert raw.submitted_s[1] - raw.submitted_s[0] == 48 * 60 + 52
    assert raw.report.rows == 6
    assert raw.report.lines == {
        "row occurs twice and counts once": [4],
        "duration is not a number": [5],
        "no duration above 0 s": [6],
        "2 cells where the header has 5": [7],
    }


def test_openb_runs_from_scheduling_to_deletion(tmp_path: Path) -> None:
    raw = read_raw(write(tmp_path, OPENB))

    assert (raw.ids, raw.duration_s.tolist(), raw.absolute) == (("a", "b"), [60.0, 80.0], False)
    assert raw.report.lines == {"no GPU": [4], "never scheduled (phase Pending)": [5]}
    assert any("share of one GPU" in note for note in raw.report.notes)


@pytest.mark.parametrize(
    ("rows", "format", "expected_s"),
    [
        ("0.0,25.5,1\n1.5,2.0,1\n", None, [25.5 * 3600, 2 * 3600]),
        ("0.0,6302.0,1\n68.0,1000.0,1\n", None, [6302.0, 1000.0]),
        ("0.0,2.0,1\n68.0,1.0,1\n", "pai-hours", [7200.0, 3600.0]),
    ],
)
def test_pai_counts_hours_or_seconds(tmp_path: Path, rows: str, format: str | None, expected_s: list[float]) -> None:
    raw = read_raw(write(tmp_path, "arrival_time,length,cpus\n" + rows), format)

    assert raw.duration_s.tolist() == expected_s
    assert raw.gpus.tolist() == [0, 0]
    assert "times are assumed to be in" in raw.report.notes[0]


def test_sia_leaves_durations_open(tmp_path: Path) -> None:
    raw = read_raw(write(tmp_path, "name,time,application,num_replicas,batch_size\nbert-1,110,bert,6,48\n"))

    assert np.isnan(raw.duration_s).all()
    assert (raw.application, raw.gpus.tolist(), raw.batch_size.tolist()) == (("bert",), [6], [48])


def test_tiresias(tmp_path: Path) -> None:
    head = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"
    raw = read_raw(write(tmp_path, head + "0,8,30,606,vgg19,164,30\n1,0,30,606,vgg19,164,30\n"))

    assert (raw.gpus.tolist(), raw.duration_s.tolist()) == ([8], [164.0])
    assert raw.report.lines == {"no GPU": [3]}


def test_swf_takes_processors_and_says_what_never_ran(tmp_path: Path) -> None:
    raw = read_raw(write(tmp_path, SWF))

    assert raw.submitted_s.tolist() == [1_000_000.0, 1_000_090.0]
    assert (raw.gpus.tolist(), raw.tenants, raw.absolute) == ([4, 8], ("user-7", ""), True)
    assert raw.report.lines == {"cancelled before it ran": [4], "4 fields instead of 18": [6]}


def test_sacct_keeps_allocations_with_gpus_that_ended(tmp_path: Path) -> None:
    raw = read_raw(write(tmp_path, SACCT))

    assert (raw.ids, raw.gpus.tolist(), raw.duration_s.tolist()) == (("8", "7"), [1, 2], [60.0, 3600.0])
    assert raw.tenants == ("bob", "ann")
    assert raw.report.lines == {
        "a step of a job": [3],
        "not ended (pending)": [5],
        "not ended (running)": [6],
        "no GPU": [7],
    }


def test_our_own_history_as_csv_and_as_json_lines(tmp_path: Path) -> None:
    raw = read_raw(write(tmp_path, HISTORY))

    assert (raw.ids, raw.duration_s.tolist()) == (("j1", "j2"), [1800.0, 3600.0])
    assert raw.energy_j[0] == 900_000
    assert raw.report.lines == {"never started": [4], "submitted_at is not a date and time": [5]}
    line = (
        '{"job_id": "x", "submitted_at": "2024-05-01T10:00:00Z", "started_at": "2024-05-01T10:00:00Z", '
        '"ended_at": "2024-05-01T10:01:00Z", "gpus": 2, "energy_j": null}\n'
    )
    raw = read_raw(write(tmp_path, line + "{broken\n"))
    assert (raw.duration_s.tolist(), raw.gpus.tolist(), raw.report.lines) == ([60.0], [2], {"not a JSON object": [2]})


def test_a_resized_job_runs_its_gpu_time_on_its_last_gang(tmp_path: Path) -> None:
    times = "2024-05-01T00Z,2024-05-01T00Z,2024-05-02T00Z"
    rows = f"a,{times},4,200,500\nb,{times},4,200,800\n"
    raw = read_raw(write(tmp_path, f"job_id,submitted_at,started_at,ended_at,gpus,run_s,gpu_s\n{rows}"))

    assert raw.duration_s.tolist() == [125.0, 200.0]
    assert raw.report.notes == ["jobs that were resized run all their GPU time on their last gang"]


def test_a_parquet_table_is_read_as_its_csv(tmp_path: Path) -> None:
    columns = list(csv.DictReader(HISTORY.splitlines()))
    parquet.write_table(pyarrow.Table.from_pylist(columns), tmp_path / "jobs")
    (tmp_path / "broken").write_bytes(b"PAR1 and no more")

    assert read_raw(tmp_path / "jobs").ids == read_raw(write(tmp_path, HISTORY)).ids
    with pytest.raises(TraceFormatError, match="not a readable Parquet"):
        read_raw(tmp_path / "broken")


def test_ids_that_occur_again_stay_unique(tmp_path: Path) -> None:
    rows = SACCT.splitlines()
    raw = read_raw(write(tmp_path, "\n".join([rows[0], rows[1], rows[1].replace("10:05", "10:06"), rows[1]])))

    assert raw.ids == ("7", "7~2")
    assert raw.report.lines == {"row occurs twice and counts once": [4]}


def test_ids_that_look_like_those_made_up_stay_unique(tmp_path: Path) -> None:
    header, first, *_ = HISTORY.splitlines()
    rows = [first, first.replace("2024", "2025"), first.replace("2024", "2026").replace("j1", "j1~2")]

    assert read_raw(write(tmp_path, "\n".join([header, *rows]))).ids == ("j1", "j1~2", "j1~2~2")


def test_a_line_of_brackets_is_no_more_than_a_bad_row(tmp_path: Path) -> None:
    row = '{"job_id": "a", "submitted_at": "2026-01-01T00:00:00Z", "started_at": "2026-01-01T00:00:00Z", '
    row += '"ended_at": "2026-01-01T01:00:00Z", "gpus": 1}\n'
    found = read_raw(write(tmp_path, row + '{"job_id": ' + "[" * 100_000 + "\n"))

    assert found.ids == ("a",)
    assert found.report.dropped == {"not a JSON object": 1}


def test_packed_files_and_byte_order_marks(tmp_path: Path) -> None:
    file = tmp_path / "packed"
    file.write_bytes(gzip.compress(b"\xef\xbb\xbf" + PHILLY.encode()))

    assert len(read_raw(file)) == 2


@pytest.mark.parametrize("name", sorted(each.name for each in catalogue().formats))
def test_a_file_of_another_format_is_one_clear_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceFormatError, match=r"not of format|no job can be used"):
        read_raw(write(tmp_path, "colour,taste\nred,sweet\n"), name)


@pytest.mark.parametrize("text", ["", "colour,taste\n", "\x00\x01", "{}\n"])
def test_what_no_format_knows_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceFormatError, match="not a known job trace"):
        read_raw(write(tmp_path, text))


def test_no_file_unknown_format_and_binary(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="there is no file"):
        read_raw(tmp_path / "nothing.csv")
    with pytest.raises(TraceFormatError, match="unknown trace format"):
        read_raw(write(tmp_path, PHILLY), "excel")
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\xfa\x00\xd8")
    with pytest.raises(TraceFormatError, match="not a known job trace"):
        read_raw(file)
    file.write_bytes(gzip.compress(SACCT.encode())[:-4])
    with pytest.raises(TraceFormatError, match="not readable text"):
        read_raw(file)


def test_a_job_of_our_history_may_ask_for_a_slice(tmp_path: Path) -> None:
    head = "job_id,submitted_at,started_at,ended_at,gpus,slice,ran_on\n"
    at = "2024-05-01T10:00:00Z,2024-05-01T10:00:00Z,2024-05-01T11:00:00Z"
    rows = [f"a,{at},1,2g,", f"b,{at},1,2g,whole", f"c,{at},1,,", f"d,{at},2,2g,", f"e,{at},1,9g,", f"f,{at},1,,3g"]

    raw = read_raw(write(tmp_path, head + "\n".join(rows) + "\n"))

    assert raw.slice_sevenths is not None
    assert raw.ran_sevenths is not None
    assert (raw.slice_sevenths.tolist(), raw.ran_sevenths.tolist()) == ([2, 2, 0], [2, 7, 0])
    assert raw.take(np.array([2])).slice_sevenths == np.array([0])
    assert raw.report.lines == {
        "a slice and several GPUs": [5],
        "there is no slice '9g'; slices are 1g, 2g, 3g, 4g, 7g": [6],
        "ran_on without a slice": [7],
    }
    without = read_raw(write(tmp_path, head + f"c,{at},1,,\n"))
    assert without.slice_sevenths is None


def test_sacct_names_the_slices_of_jobs(tmp_path: Path) -> None:
    at = "2024-05-01T10:00:00+0000|2024-05-01T10:05:00+0000|2024-05-01T11:05:00+0000|COMPLETED|3600"
    rows = [
        f"1|ann|{at}|cpu=4,gres/gpu:a100_2g.10gb=1,gres/gpu=1|",
        f"2|ann|{at}|gres/gpu:1g.5gb+me=1|",
        f"3|ann|{at}|gres/gpu=2,gres/gpu:1g.5gb=2|",
        f"4|ann|{at}|gres/gpu:a100=1|",
        f"5|ann|{at}||gres/gpu:h100_3g.40gb=1",
    ]

    raw = read_raw(write(tmp_path, SACCT.splitlines()[0] + "\n" + "\n".join(rows) + "\n"))

    assert raw.slice_sevenths is not None
    assert dict(zip(raw.ids, raw.slice_sevenths.tolist(), strict=True)) == {"1": 2, "2": 1, "4": 0, "5": 3}
    assert raw.gpus.tolist() == [1, 1, 1, 1]
    assert raw.report.lines == {"several slices": [4]}


SLURM_AT = "2024-05-01T10:00:00Z|2024-05-01T10:05:00Z|2024-05-01T11:05:00Z"
SLURM_HEAD = "JobID|User|Submit|Start|End|State|ElapsedRaw|AllocTRES|ReqTRES\n"


@pytest.mark.parametrize(
    "state", ["REQUEUED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "CANCELLED by 7", "SUSPENDED"]
)
def test_sacct_keeps_every_run_that_held_gpus_and_ended(tmp_path: Path, state: str) -> None:
    open_end = f"2|ann|{SLURM_AT.rpartition('|')[0]}|Unknown|{state}|3600|gres/gpu=2|\n"

    raw = read_raw(write(tmp_path, f"{SLURM_HEAD}1|ann|{SLURM_AT}|{state}|3600|gres/gpu=2|\n{open_end}"))

    assert (raw.ids, raw.duration_s.tolist()) == (("1",), [3600.0])
    assert raw.report.lines == {f"not ended ({state.split()[0].lower()})": [3]}


def test_sacct_names_shares_of_gpus_and_slices_that_are_no_sevenths(tmp_path: Path) -> None:
    held = (
        *("gres/shard=4,node=1", "gres/mps=50", "gres/gpu:a100_3g.20gb=1,gres/gpu:a100=1,gres/gpu=2"),
        *("gres/gpu:a30_1g.6gb=1", "gres/gpu:a30_4g.24gb=1,gres/gpu=1", "gres/gpu:mig-3g.40gb=1", "gres/gpu:1g.23gb=1"),
        *("gres/gpu:h100_1g.12gb.me=1", "gres/gpu=0,gres/gpu:a100=2", "cpu=1", "gres/gpu:a100_4g.20gb=1,gres/gpu=2"),
    )
    rows = "".join(f"{at}|ann|{SLURM_AT}|COMPLETED|3600|{each}|\n" for at, each in enumerate(held))

    raw = read_raw(write(tmp_path, SLURM_HEAD + rows))

    assert raw.slice_sevenths is not None
    sizes = dict(zip(raw.ids, zip(raw.slice_sevenths.tolist(), raw.gpus.tolist(), strict=True), strict=True))
    assert sizes == {"4": (7, 1), "5": (3, 1), "6": (1, 1), "7": (1, 1), "8": (0, 2)}
    assert raw.report.lines == {
        "a share of a GPU": [2, 3],
        "a slice beside whole GPUs": [4, 12],
        "a part of a card that has quarters": [5],
        "no GPU": [11],
    }
    assert raw.report.notes == []


def test_sacct_without_gpus_says_what_slurm_needs_to_count_them(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="AccountingStorageTRES"):
        read_raw(write(tmp_path, f"{SLURM_HEAD}1|ann|{SLURM_AT}|COMPLETED|3600|cpu=4|cpu=4\n"))


def test_the_parts_of_a_heterogeneous_job_are_one_gang_with_their_gpu_time(tmp_path: Path) -> None:
    rows = [
        f"801+0|ann|{SLURM_AT}|COMPLETED|3600|gres/gpu=6|",
        f"801+1|ann|{SLURM_AT}|COMPLETED|1800|gres/gpu=2|",
        f"801+2|ann|{SLURM_AT}|COMPLETED|3600|cpu=4|",
        f"802+0|ann|{SLURM_AT.replace('10:05', '10:06')}|COMPLETED|3600|gres/gpu=1|",
        f"801+1|ann|{SLURM_AT.replace('10:05', '10:07')}|COMPLETED|60|gres/gpu=2|",
    ]

    raw = read_raw(write(tmp_path, SLURM_HEAD + "\n".join(rows)))

    assert dict(zip(raw.ids, raw.gpus.tolist(), strict=True)) == {"801": 8, "802+0": 1, "801+1": 2}
    assert (raw.gpus[0] * raw.duration_s[0], raw.report.kept) == (6 * 3600 + 2 * 1800, 3)
    assert raw.report.lines == {
        "row is a further part of a heterogeneous job and counts with the first": [3],
        "no GPU": [4],
    }


def test_a_table_of_parquet_may_have_lines_in_its_cells(tmp_path: Path) -> None:
    columns = [{**row, "project": "two\nlines"} for row in csv.DictReader(HISTORY.splitlines())]
    parquet.write_table(pyarrow.Table.from_pylist(columns), tmp_path / "jobs")

    assert read_raw(tmp_path / "jobs").tenants == ("two lines", "two lines")


@pytest.mark.parametrize(
    ("gpus", "duration_s", "reason"),
    [(10**9, 60.0, "more than 1048576 GPUs"), (2, 1e15, "a run of more than ten years")],
)
@pytest.mark.parametrize("kind", ["sacct", "wattshift"])
def test_what_no_cluster_could_have_run_is_dropped(
    kind: str, gpus: int, duration_s: float, reason: str, tmp_path: Path
) -> None:
    """A job of a milliard GPUs took the machine's memory, and one of a million years all time."""
    begun = "2023-08-15T00:00:00Z"
    if kind == "sacct":
        head = "JobID|User|Submit|Start|End|State|ElapsedRaw|AllocTRES\n"
        rows = [
            f"{at}|ann|{begun}|{begun}|{begun}|COMPLETED|{s:.0f}|gres/gpu={n}\n" for at, n, s in _two(gpus, duration_s)
        ]
    else:
        head = "job_id,submitted_at,started_at,ended_at,gpus,run_s\n"
        rows = [f"{at},{begun},{begun},{begun},{n},{s}\n" for at, n, s in _two(gpus, duration_s)]

    raw = read_raw(write(tmp_path, head + "".join(rows)))

    assert (raw.ids, raw.report.lines) == (("1",), {reason: [3]})


def _two(gpus: int, duration_s: float) -> list[tuple[int, int, float]]:
    return [(1, 2, 60.0), (2, gpus, duration_s)]
