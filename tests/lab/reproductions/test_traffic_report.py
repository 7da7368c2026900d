"""The tables of traffic forecasts: what is read, how a log is cut, and what a cell says."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

from lab.reproductions import traffic as report
from lab.reproductions.traffic_lstm import Lstm
from services.core.profiles.traffic import LastPeak, backtest
from services.learning.traffic_boosting import Boosting

SHORT, LONG = 10, 1_000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with 55 minutes of requests, and days of peaks that are short."""
    folder = tmp_path / "llm"
    folder.mkdir()
    start = np.datetime64("2023-11-16T18:15:00")
    rows = [
        f"{str(start + np.timedelta64(100 * at, 'ms')).replace('T', ' ')}0000,{(SHORT, LONG)[at % 2]},{SHORT}"
        for at in range(0, 33_010, 3)
    ]
    for trace in ("conv", "code"):
        with gzip.open(folder / f"azure_2023_{trace}.csv.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    peaks = [f"{2 + at % 3}.0,0.2,30.0,{4 + at % 2}.0" for at in range(60)]
    for partition in ("a", "b"):
        (folder / f"freesh_qps_partition_{partition}.csv").write_text("\n".join(["ss,sl,ls,ll", *peaks]))
    return tmp_path


def test_a_log_is_cut_from_each_minute_of_its_first_step(data: Path) -> None:
    cuts = report.hours(data, "conv", "a")
    assert [len(cut) for cut in cuts] == [11, 10, 10, 10, 10]
    assert cuts[0].counts is not None
    assert cuts[0].counts.sum() == 11_000
    per_window = 5.0 / 0.3 / 2  # a request every 0.3 s, short and long inputs in turn
    np.testing.assert_allclose(cuts[0].peaks_qps[:, [0, 2]] * 5, per_window, atol=1.0)
    assert not cuts[0].peaks_qps[:, [1, 3]].any()


def test_a_row_says_errors_shares_and_what_is_spare(data: Path) -> None:
    peaks = report.day_of_peaks(data, "a")
    rows = report.table([backtest(peaks, LastPeak(), [57])])  # 4 and 4 before; then 2, 3, 4 and 5, 4, 5
    assert rows == [
        "| *mean peak* | *3.00* | *0.20* | *30.00* | *4.67* | *37.87* | |",
        "| last peak | 1.00, 0 % | 0.00, 0 % | 0.00, 0 % | 0.67, 67 % | **1.67** | 12 % |",
    ]


def test_a_page_is_filled(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = filled_page(data, monkeypatch, torch=object())
    assert "old" not in text
    assert [text.count(each) for each in ("before", "between", "after", "Partition a", "Code, partition b")] == [1] * 5
    assert text.count("| gradient boosting p90 |") == 2 + 4
    assert "Not compared: LSTM on windows (" in text


def test_without_torch_tables_with_an_lstm_stay_as_they_are(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = filled_page(data, monkeypatch, torch=None)
    assert "<!-- day -->\nold\n<!-- end -->" in text
    assert text.count("| gradient boosting p90 |") == 4, "the hours without an LSTM are made anew"
    assert capsys.readouterr().err == "left as they are, for their LSTM's rows need torch: day, hour-lstm, speed\n"


def filled_page(data: Path, monkeypatch: pytest.MonkeyPatch, torch: object) -> str:
    """Return a page after the report ran on a machine with or without torch."""
    page = data / "page.md"
    page.write_text("before\n<!-- day -->\nold\n<!-- end -->\nbetween\n<!-- hour -->\n<!-- end -->\nafter\n")
    monkeypatch.setattr(sys, "argv", ["traffic", str(page), str(data)])
    monkeypatch.setattr(report, "forecasters", lambda: [LastPeak(), Lstm("windows")])
    monkeypatch.setattr(report, "HIGH", Boosting(quantile=0.9, rounds=1))
    monkeypatch.setattr(report, "find_spec", {"torch": torch}.get)
    report.main()
    return page.read_text()
