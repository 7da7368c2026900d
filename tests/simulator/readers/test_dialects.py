"""The same figures in every dialect of their files: what separates cells, numbers, times, units, encodings, ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.domain.carbon import Signal
from services.simulator.raw import TraceFormatError
from services.simulator.readers.grids import read_grid
from services.simulator.readers.jobs import read_raw
from services.simulator.readers.text import NO_ZONE
from tests.simulator.readers.test_every_line import assert_adds_up

SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
START_S = int(datetime(2023, 8, 15, tzinfo=UTC).timestamp())
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")
EAST = timezone(timedelta(hours=5, minutes=30))
TIMES: dict[str, Callable[[int], str]] = {
    "zulu": lambda s: datetime.fromtimestamp(s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    "offset": lambda s: datetime.fromtimestamp(s, EAST).isoformat(),
    "slurm": lambda s: datetime.fromtimestamp(s, EAST).strftime("%Y-%m-%dT%H:%M:%S%z"),
    "without zone": lambda s: datetime.fromtimestamp(s, UTC).strftime("%Y-%m-%d %H:%M:%S"),
    "seconds": str,
    "seconds with a point": lambda s: f"{s}.0",
    "milliseconds": lambda s: str(s * 1_000),
}
UNITS = {
    "gCO2/kWh": 1.0,
    "kgCO2_per_kWh": 1_000.0,
    "tCO2/MWh": 1_000.0,
    "kg CO₂eq / MWh": 1.0,
    "lbs_co2_per_mwh": 0.45359237,
    "CO2 lb/MWh": 0.45359237,
    "metric tons CO2 per GWh": 1.0,
}
JOULES = {"energy_j": 1.0, "energy_kJ": 1e3, "energy_Wh": 3_600.0, "energy_kWh": 3.6e6, "energy_MWh": 3.6e9}


@st.composite
def dialects(draw: st.DrawFn, delimiters: str) -> dict[str, Any]:
    return {
        "delimiter": draw(st.sampled_from(delimiters)),
        "is_comma_decimal": draw(st.booleans()),
        "time": draw(st.sampled_from(sorted(TIMES))),
        "encoding": draw(st.sampled_from(ENCODINGS)),
        "end": draw(st.sampled_from(("\n", "\r\n"))),
        "blank": draw(st.booleans()),
    }


def written(rows: list[list[str]], dialect: dict[str, Any]) -> bytes:
    lines = [dialect["delimiter"].join(row) for row in rows]
    if dialect["blank"]:
        lines.insert(1, "")
    return (dialect["end"].join(lines) + dialect["end"]).encode(dialect["encoding"])


def decimal(value: float, dialect: dict[str, Any]) -> str:
    text = f"{value:.6f}"
    return text.replace(".", ",") if dialect["is_comma_decimal"] and dialect["delimiter"] != "," else text


def put(folder: Path, content: bytes) -> Path:
    file = folder / "file.txt"
    file.write_bytes(content)
    return file


@SOME
@given(
    st.lists(st.floats(1, 900), min_size=2, max_size=8),
    dialects(",;\t|"),
    st.sampled_from(sorted(UNITS)),
    st.booleans(),
)
def test_a_grid_is_the_same_in_every_dialect(
    tmp_path: Path, grams: list[float], dialect: dict[str, Any], unit: str, is_damaged: bool
) -> None:
    time = TIMES[dialect["time"]]
    rows = [[time(START_S + 3_600 * at), decimal(value / UNITS[unit], dialect)] for at, value in enumerate(grams)]
    bad = [[time(START_S - 3_600), "n/a"], [time(START_S - 7_200), decimal(-5, dialect)], ["45153", "1"]]
    content = written([["time", unit], *(bad if is_damaged else []), *rows], dialect)

    series = read_grid(put(tmp_path, content), Signal.AVERAGE_DIRECT)

    assert series.times_s.tolist() == [START_S + 3_600 * at for at in range(len(grams))]
    np.testing.assert_allclose(series.intensity_gco2_per_kwh, grams, atol=1e-3)
    assert_adds_up(series.report, content.decode(dialect["encoding"]).encode(), 1)
    assert sum(series.report.dropped.values()) == 3 * is_damaged
    assert (NO_ZONE in series.report.notes) == (dialect["time"] == "without zone")
    assert any("converted" in note for note in series.report.notes) == (UNITS[unit] != 1)


@SOME
@given(
    st.lists(st.tuples(st.integers(1, 50_000), st.integers(1, 64), st.floats(1e3, 1e9)), min_size=1, max_size=6),
    dialects(",;\t"),
    st.sampled_from([*sorted(JOULES), "power_w", "power_kW"]),
    st.booleans(),
)
def test_a_history_is_the_same_in_every_dialect(
    tmp_path: Path, jobs: list[tuple[int, int, float]], dialect: dict[str, Any], column: str, is_json: bool
) -> None:
    time = TIMES[dialect["time"]]
    head = ["job_id", "submitted_at", "started_at", "ended_at", "gpus", column.lower()]

    def cell(seconds: int, joules: float) -> str:
        size = JOULES.get(column) or seconds * (1e3 if column == "power_kW" else 1.0)
        return repr(joules / size) if is_json else f"{joules / size:.12f}"

    rows = [
        [f"j{at}", time(START_S), time(START_S + 60), time(START_S + 60 + s), str(gpus), cell(s, joules)]
        for at, (s, gpus, joules) in enumerate(jobs)
    ]
    if is_json:
        lines = [json.dumps(dict(zip(head, row, strict=True))) for row in rows]
        content = (dialect["end"].join(lines) + dialect["end"]).encode(dialect["encoding"])
    else:
        content = written([head, *rows], dialect)

    raw = read_raw(put(tmp_path, content))

    assert raw.submitted_s.tolist() == [START_S] * len(jobs)
    assert raw.duration_s.tolist() == [s for s, _, _ in jobs]
    assert raw.gpus.tolist() == [gpus for _, gpus, _ in jobs]
    np.testing.assert_allclose(raw.energy_j, [joules for _, _, joules in jobs], rtol=1e-3)
    assert_adds_up(raw.report, content.decode(dialect["encoding"]).encode(), not is_json)


STATES = ("COMPLETED", "FAILED", "TIMEOUT", "REQUEUED", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "CANCELLED by 7")
WHOLE_GPUS = (
    "gres/gpu={}",
    "gres/gpu:a100={}",
    "billing=9,gres/gpu={},gres/gpu:h100={},node=1",
    "gres/gpu={0},gres/shard=2",
)
NAMED = {
    "cpu=4,gres/shard=2": "a share of a GPU",
    "cpu=4,node=1": "no GPU",
    "gres/gpu:a100_1g.5gb=2": "several slices",
    "gres/gpu:a100_3g.20gb=1,gres/gpu:a100=1,gres/gpu=2": "a slice beside whole GPUs",
    "gres/gpu:a30_2g.12gb=1": "a part of a card that has quarters",
}
NAMES = ("train", '"half', 'a "b" c', "1,5", "naïve", "", "'", "#x")


@st.composite
def slurm_rows(draw: st.DrawFn) -> tuple[list[list[str]], float, dict[str, int], bool]:
    """Return rows as sacct has them, the GPU seconds that they held, and what drops by reason."""
    rows: list[list[str]] = []
    held, named = 0.0, dict[str, int]()
    time = TIMES[draw(st.sampled_from(("zulu", "slurm", "seconds", "without zone")))]
    for number in range(draw(st.integers(1, 12))):
        ran_s, gpus = draw(st.integers(1, 90_000)), draw(st.integers(1, 16))
        state, name = draw(st.sampled_from(STATES)), draw(st.sampled_from(NAMES))
        what = draw(st.sampled_from(("whole", "whole", "het", "named", "pending", "step", "again")))
        resources = draw(st.sampled_from(WHOLE_GPUS)).format(gpus, gpus)
        times = [time(START_S), time(START_S + 5), time(START_S + 5 + ran_s)]
        if what == "named":
            resources = draw(st.sampled_from(sorted(NAMED)))
            reason = NAMED[resources]
        elif what == "pending":
            times[1:], state, reason = ["Unknown", "Unknown"], "PENDING", "not ended (pending)"
        else:
            reason = "a step of a job" if what == "step" else ""
        parts = ("+0", "+1") if what == "het" else (".batch",) if what == "step" else ("",)
        for part in parts:
            rows.append([f"{number}{part}", name, *times, state, str(ran_s), resources])
            held += 0 if reason else gpus * ran_s
        if what == "again":
            rows.append(rows[-1])
        if reason:
            named[reason] = named.get(reason, 0) + 1
    return rows, held, named, bool(held)


@SOME
@given(slurm_rows(), dialects("|"))
def test_slurm_s_history_keeps_every_gpu_second_in_every_dialect(
    tmp_path: Path, drawn: tuple[list[list[str]], float, dict[str, int], bool], dialect: dict[str, Any]
) -> None:
    rows, held, named, has_jobs = drawn
    head = ["JobID", "JobName", "Submit", "Start", "End", "State", "ElapsedRaw", "AllocTRES"]
    content = written([head, *rows], dialect)
    if not has_jobs:
        with pytest.raises(TraceFormatError, match="no job can be used"):
            read_raw(put(tmp_path, content))
        return

    raw = read_raw(put(tmp_path, content))

    assert float((raw.gpus * raw.duration_s).sum()) == pytest.approx(held)
    assert raw.report.dropped == named
    assert_adds_up(raw.report, content.decode(dialect["encoding"]).encode(), 1)


def test_a_history_says_which_column_of_energy_it_does_not_read(tmp_path: Path) -> None:
    rows = (
        "job_id,submitted_at,started_at,ended_at,gpus,energy_btu\na,2023-08-15T00Z,2023-08-15T00Z,2023-08-15T01Z,1,5\n"
    )
    raw = read_raw(put(tmp_path, rows.encode()))
    assert raw.report.notes == [
        "the column 'energy_btu' is not read: it ends with none of the units j, kj, mj, wh, kwh, mwh, w, kw"
    ]


def test_sacct_says_that_no_column_tells_gpus(tmp_path: Path) -> None:
    rows = "JobID|Submit|Start|End|State|ElapsedRaw\n1|2023-08-15T00Z|2023-08-15T00Z|2023-08-15T01Z|COMPLETED|3600\n"
    with pytest.raises(TraceFormatError, match="no column tells GPUs: export AllocTRES"):
        read_raw(put(tmp_path, rows.encode()))


@pytest.mark.parametrize("time", ["45153.25", "20230815", "202308150000", "20230815000000", "1692057600000000", "-1"])
def test_a_number_that_is_no_clocks_is_named_and_not_1970(tmp_path: Path, time: str) -> None:
    with pytest.raises(TraceFormatError, match=r"neither seconds nor milliseconds.* \(line 2\)"):
        read_grid(put(tmp_path, f"time,gCO2/kWh\n{time},200\n".encode()), Signal.AVERAGE_DIRECT)
