"""The tables of the router: each prediction is made before its answer is seen, and a replay loses no request."""

import gzip
from pathlib import Path

import pytest

from lab.reproductions import router as report

REQUESTS = [(at * 0.2, (10, 2_000)[at % 2], (20, 600)[at % 2]) for at in range(400)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "llm"
    folder.mkdir()
    rows = [
        f"2023-11-16 18:{15 + int(at_s) // 60:02d}:{at_s % 60:010.7f},{inputs},{outputs}"
        for at_s, inputs, outputs in REQUESTS
    ]
    for trace in ("conv", "code"):
        with gzip.open(folder / f"azure_2023_{trace}.csv.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return tmp_path


def test_a_trace_is_read_in_order_of_arrival(data: Path) -> None:
    found = report.read_trace(data, "conv")
    assert [row[1:] for row in found] == [row[1:] for row in REQUESTS]
    assert found[-1][0] == pytest.approx(REQUESTS[-1][0])


def test_an_answer_is_predicted_before_it_is_learned() -> None:
    scores = report.prequential(REQUESTS[:1], lambda inputs: ["model"])
    assert scores.errors == [180]  # the prior is 200 tokens
    assert report.prequential(REQUESTS, lambda inputs: ["model", inputs]).errors[-1] == pytest.approx(0, abs=1)


def test_every_request_is_served_and_the_cleanest_emits_less() -> None:
    weights, cleanest = (report.replay(REQUESTS, 9, cleanest=way) for way in (False, True))
    assert len(weights.latencies_s) == len(cleanest.latencies_s) == len(REQUESTS)
    assert cleanest.gco2 < weights.gco2
    assert min(cleanest.latencies_s) > report.TTFT_S


def test_the_tables_name_both_traces_and_all_hours(data: Path) -> None:
    assert report.lengths_table(data).count("by model and prompt, learned") == 2
    assert report.places_table(data).count(" % | ") == len(report.HOURS)
