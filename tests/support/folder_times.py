"""At the end of a run: how long each folder of tests took, summed over all workers, and how long the whole run did.

Seconds are those of setup, call and teardown. CPU seconds are those of the test process and of its children that have
ended by then, in user mode only: what a kernel takes for the same calls differs by a factor between machines, and for
tests that start many processes that is a third of all. What several tests share counts for the one that starts or ends
it, and what the session ends for `tests/support`. Collection counts for none, and what a failure took is no cost of its
folder: a property then looks for its smallest example.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import PurePath
from statistics import mean

import pytest

from tests import costs

CPU_SECONDS, SUMMARY = "cpu-seconds", "folder-times"
"""Names of the plugins."""
_CPU_S = "cpu_s"
_TURNS, _MEASURED_TURNS = 10_000_000, 1_000_000
_OF_ALL = "tests/support"
"""The folder that what the session has, such as a database server, counts for when it ends."""


class CpuSeconds:
    """In each process that runs tests: adds the CPU seconds of each phase to its report, and has a measure of them."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin anew, as a process does that was forked."""
        self._first_loop_s = _loop_s()
        self._before_s = _cpu_s()

    def pytest_collection_finish(self) -> None:
        self._before_s = _cpu_s()

    def end(self) -> tuple[float, float]:
        """Return the measure, and the CPU seconds since the last report."""
        since_s = _cpu_s() - self._before_s
        return (self._first_loop_s + _loop_s()) / 2, since_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = _cpu_s()
        report.user_properties.append((_CPU_S, now_s - self._before_s))
        self._before_s = now_s
        return report


class _Summary:
    """In the process that has the terminal: adds the reports up."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._folders: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._failed_s: defaultdict[str, float] = defaultdict(float)  #: CPU seconds of what failed
        self._loops_s: list[float] = []

    def add_worker(self, loop_s: float, cpu_s: float) -> None:
        """Add what a process of its own has measured by its end."""
        self._loops_s.append(loop_s)
        self._folders[_OF_ALL][2] += cpu_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        parts = PurePath(report.nodeid.partition("::")[0]).parts
        folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        row = self._folders[folder]
        cpu_s = [float(str(value)) for name, value in report.user_properties if name == _CPU_S]
        row[0] += report.when == "call"
        row[1] += report.duration
        row[2] += sum(cpu_s)
        self._failed_s[folder] += sum(cpu_s) * report.failed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time per folder, summed over workers")
        terminalreporter.line(f"{'tests':>7} {'seconds':>9} {'user s':>8}  folder")
        for folder, row in sorted(self._folders.items(), key=lambda each: -each[1][1]):
            terminalreporter.line(f"{row[0]:7.0f} {row[1]:9.1f} {row[2]:8.1f}  {folder}")
        total = [sum(row[column] for row in self._folders.values()) for column in range(3)]
        wall_s = time.monotonic() - self._began_s
        terminalreporter.line(f"{total[0]:7.0f} {total[1]:9.1f} {total[2]:8.1f}  all; {wall_s:.0f} s by the clock")
        if self._loops_s and costs.LAST.parent.is_dir():
            loop_s = mean(self._loops_s)
            terminalreporter.line(f"ten million turns of a loop took {loop_s:.2f} user s meanwhile")
            found = {folder: (row[2] - self._failed_s[folder]) / loop_s for folder, row in self._folders.items()}
            costs.LAST.write_text(json.dumps(found))


def pytest_configure(config: pytest.Config) -> None:
    """Count in every process, and show the sums in the one that has the terminal."""
    config.pluginmanager.register(CpuSeconds(), CPU_SECONDS)
    if not hasattr(config, "workerinput"):  # of xdist's workers
        config.pluginmanager.register(_Summary(), SUMMARY)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Measure the one process that ran tests, if it was this one."""
    if not session.config.getoption("--workers", 0) and (summary := session.config.pluginmanager.get_plugin(SUMMARY)):
        counting: CpuSeconds = session.config.pluginmanager.get_plugin(CPU_SECONDS)
        summary.add_worker(*counting.end())


def _cpu_s() -> float:
    now = os.times()
    return now.user + now.children_user


def _loop_s() -> float:
    """Return the CPU seconds of ten million turns of a loop, by a tenth of them."""
    before_s, total = time.process_time(), 0
    for at in range(_MEASURED_TURNS):
        total += at * at
    return (time.process_time() - before_s) * _TURNS / _MEASURED_TURNS
