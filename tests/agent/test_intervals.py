"""What a gang did under its settings: whole iterations, counted from report to report."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_agent.controls import Order
from gpu_agent.intervals import Intervals
from gpu_agent.progress import ProgressReader, Report
from services.contracts.jobs import Progress
from services.contracts.nodes import DeviceControls

DRAW_W = 300.0


def an_order(revision: int = 1, interval_s: float = 10.0) -> Order:
    settings = DeviceControls(revision=revision, power_limit_w=DRAW_W, measure=True, interval_s=interval_s)
    return Order("gang", (0,), settings)


def run(intervals: Intervals, order: Order, reports: list[tuple[float, float]], until_s: float = 0.0) -> list[float]:
    """Look every quarter of a second at a job that reports (when, done); return when an interval was over."""
    ended: list[float] = []
    for now in (at / 4 for at in range(int(4 * (until_s or reports[-1][0])) + 2)):
        at, done = max((each for each in reports if each[0] <= now), default=(0.0, 0.0))
        if intervals.look(order, Report(done, local_batch=16.0), at, now, lambda at: DRAW_W * at):
            ended.append(now)
    return ended


def test_a_slice_holds_whole_iterations_and_ends_with_the_first_report_after_its_share() -> None:
    intervals, order = Intervals(), an_order(interval_s=10.0)

    ended = run(intervals, order, [(0.9 + 3.6 * n, 2.0 * (n + 1)) for n in range(8)])

    (found,) = [intervals.of(order)]
    assert ended == [11.75], "reported at 0.9 + 3 x 3.6 s, seen at the next look"
    assert found is not None
    assert found.over
    assert (found.marks, found.work, found.local_batch) == (4, 6.0, 16.0)
    assert found.elapsed_s == pytest.approx(3 * 3.6), "by when the reports were made, not when they were seen"
    assert found.gpu_energy_j == pytest.approx(DRAW_W * 3 * 3.6), "of exactly that span"


def test_what_was_reported_before_the_settings_were_in_force_does_not_count() -> None:
    intervals, order = Intervals(), an_order(interval_s=1.0)
    intervals.look(order, Report(5.0), 9.0, 10.0, lambda at: at)
    intervals.look(order, Report(6.0), 9.9, 10.25, lambda at: at)
    found = intervals.of(order)
    assert found is not None
    assert (found.marks, found.work) == (0, 0.0)
    intervals.look(order, Report(7.0), 11.0, 11.25, lambda at: at)
    assert not intervals.look(order, Report(8.0), 11.5, 11.75, lambda at: at), "its share of time is not over"
    assert intervals.look(order, Report(9.0), 12.5, 12.75, lambda at: at)


def test_one_report_is_no_measurement_and_a_new_revision_begins_anew() -> None:
    intervals = Intervals()
    assert not run(intervals, an_order(interval_s=0.0), [(1.0, 1.0)], until_s=60.0)
    found = intervals.of(an_order())
    assert found is not None
    assert (found.marks, found.over, found.work) == (1, False, 0.0)
    intervals.forget_all_but([an_order(revision=2)])
    assert intervals.of(an_order()) is None


def test_a_report_is_dated_by_when_it_was_written(tmp_path: Path) -> None:
    file, stdout = tmp_path / "progress", tmp_path / "stdout"
    stdout.touch()
    by_file = ProgressReader(Progress(), file, stdout)
    by_log = ProgressReader(Progress(source="log", pattern=r"step (?P<done>\d+)"), tmp_path / "none", stdout)
    began = by_file.last_at
    for reader, path, text in ((by_file, file, '{"done": 1}\n'), (by_log, stdout, "step 1\n")):
        path.write_text(text)
        assert reader.poll()
        first = reader.last_at
        path.write_text(text + text.replace("1", "2"))
        os.utime(path, (1e9, 1e9))  # the clock was set meanwhile: not before the last look
        assert reader.poll()
        assert began <= first <= reader.last_at
