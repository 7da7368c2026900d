"""Requests, intensities and pools as they are read, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from lab.serving.rates import read_rates
from lab.serving.requests import read_requests
from lab.serving.site import Site, papers_pools
from services.contracts.serving import PoolSpec
from services.simulator.raw import TraceFormatError

PLACES = [("north", "SE"), ("south", "PL")]


def written(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


def test_the_bundled_hour_is_azures() -> None:
    trace = read_requests("azure-2023-conv")

    assert len(trace) == 19_366
    assert trace.arrival_s[0] == 0
    assert trace.length_s == pytest.approx(58 * 60 + 22, abs=60)
    assert (float(np.median(trace.input_tokens)), float(np.median(trace.output_tokens))) == (1_020, 129)
    assert trace.notes == ()


def test_a_file_of_either_format_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    azure = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.5,7,0\n2023-11-16 18:15:46.0000000,5,3\n",
    )
    assert read_requests(azure).arrival_s.tolist() == [0.0, 4.5]
    assert read_requests(azure).output_tokens.tolist() == [3, 1]

    ours = written(tmp_path, "arrived_at,input_tokens,output_tokens,key\n12.5,7,9,a\nsoon,1,1,b\n14,-1,2,c\n20,1,2,d\n")
    trace = read_requests(ours)
    assert trace.arrival_s.tolist() == [0.0, 7.5]
    assert len(trace.notes) >= 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("a,b,c\n1,2,3\n", "header"), ("arrived_at,input_tokens,output_tokens\nx,1,1\n", "no usable"), ("", "header")],
)
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(TraceFormatError, match=complaint):
        read_requests(written(tmp_path, text))


LINES = """{"timestamp": 500, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]}

{"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [0, 5]}
{"timestamp": 0, "input_length": 600, "hash_ids": [0, 5]}
{"timestamp": 0, "input_length": -6, "output_length": 1}
{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [0.5]}
{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": {}}
{"timestamp": "soon", "input_length": 6, "output_length": 1}
[1]
{
"""


def test_mooncakes_lines_are_read_with_the_blocks_of_their_prompts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(LINES.encode()))

    trace = read_requests(path)

    assert trace.arrival_s.tolist() == [0.0, 0.5]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([600, 1_100], [1, 6])
    assert trace.blocks == ((0, 5), (0, 1, 2))
    assert "2 of 9 rows kept" in trace.notes[0]
    assert read_requests("azure-2023-conv").blocks == ()


def test_copies_of_a_trace_share_no_beginnings(tmp_path: Path) -> None:
    twice = read_requests(written(tmp_path, LINES)).scaled(2)

    ids = [set(blocks) for blocks in twice.blocks]
    assert sorted(map(len, ids)) == [2, 2, 3, 3]
    assert sum(0 in each for each in ids) == sum(6 in each for each in ids) == 2


def test_compressed_tables_are_read(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv.gz"
    path.write_bytes(gzip.compress(b"arrived_at,input_tokens,output_tokens\n1,2,3\n"))
    assert len(read_requests(path)) == 1
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(TraceFormatError, match="not readable"):
        read_requests(path)

    rates = tmp_path / "rates.csv.gz"
    rates.write_bytes(gzip.compress(b"time,north,south\n0,1,2\n300,1,2\n"))
    assert read_rates(rates, PLACES).gco2_per_kwh.shape == (2, 2)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 2.5])
def test_scaled_requests_keep_their_time_and_their_lengths(factor: float) -> None:
    trace = read_requests("azure-2023-conv")

    scaled = trace.scaled(factor, seed=3)

    assert len(scaled) == pytest.approx(factor * len(trace), rel=0.02)
    assert scaled.length_s == pytest.approx(trace.length_s, rel=0.01)
    assert bool((np.diff(scaled.arrival_s) >= 0).all())
    assert float(scaled.output_tokens.mean()) == pytest.approx(float(trace.output_tokens.mean()), rel=0.02)
    assert scaled.arrival_s.tolist() == trace.scaled(factor, seed=3).arrival_s.tolist()


def test_nothing_is_scaled_by_nothing() -> None:
    for factor in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(TraceFormatError):
            read_requests("azure-2023-conv").scaled(factor)


def test_rates_are_found_by_place_or_zone_and_begin_again(tmp_path: Path) -> None:
    rates = read_rates(written(tmp_path, "time,PL,north\n0,1,10\n1800,2,20\n3600,3,30\n"), PLACES)

    assert rates.step_s == 1_800
    assert rates.of_steps(2, 3).tolist() == [[30, 10, 20], [3, 1, 2]]
    assert rates.from_hour(0.5).of_steps(0, 1).tolist() == [[20], [2]]
    for hour in (-1.0, 0.3, float("nan")):
        with pytest.raises(TraceFormatError):
            rates.from_hour(hour)


def test_the_papers_day_has_288_steps_of_three_places() -> None:
    spec = papers_pools()

    rates = read_rates(None, [(place.name, place.zone) for place in spec.places])

    assert (rates.step_s, rates.gco2_per_kwh.shape) == (300, (3, 288))
    assert rates.gco2_per_kwh[0, 0] == pytest.approx(2500.760436 * 0.45359237, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("time,north\n0,1\n300,1\n", "no column for place south"),
        ("time,north,south\n0,1,1\n300,1,x\n", "line 3: south"),
        ("time,north,south\n0,1,1\n300,1,\n", "line 3: south"),
        ("time,north,south\n0,1,1\n300,1,1\n900,1,1\n", "even steps"),
        ("time,north,south\n0,1,1\n", "even steps"),
        ("time,north,south\nsoon,1,1\n", "line 2"),
        ("time\n", "one for each place"),
    ],
)
def test_rates_that_cannot_be_used_are_refused_with_the_reason(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(TraceFormatError, match=complaint):
        read_rates(written(tmp_path, text), PLACES)


def changed(change: str, *path: str | int) -> PoolSpec:
    """Return the paper's pool without one value."""
    document = papers_pools().model_dump(mode="json")
    inside = document
    for part in path:
        inside = inside[part]
    inside[change] = None
    return PoolSpec.model_validate(document)


def test_a_pool_that_states_too_little_is_refused() -> None:
    with pytest.raises(TraceFormatError, match="no gpus for place loc2"):
        Site(changed("gpus", "places", 1))
    with pytest.raises(TraceFormatError, match="SS of partition a, mode A100_TP4 lacks"):
        Site(changed("latency_s", "partitions", 0, "classes", 0, "profiles", 1))


def test_limits_are_those_of_the_file_and_then_the_papers() -> None:
    document = papers_pools().model_dump(mode="json")
    document["partitions"][0]["classes"][0]["max_latency_s"] = 5.0
    site = Site(PoolSpec.model_validate(document))

    assert site.kind("a", "SS", "A100_TP2").limits.e2e_s == 5.0
    assert site.kind("b", "SS", "A100_TP2").limits.e2e_s == 7.0
    assert site.kind("b", "LS", "A100_TP2").limits.ttft_s == pytest.approx(0.6)
    assert site.kind("b", "LS", "H100_TP4").clocks.highest == 1_980
