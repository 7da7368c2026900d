"""At the end of a run: how long each folder of tests took, summed over all workers, and how long the whole run did.

Seconds are those of setup, call and teardown. CPU seconds are those of the test process and of its children that have
ended by then. What several tests share counts for the one that starts or ends it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import PurePath

import pytest

_CPU_S = "cpu_s"


class _CpuSeconds:
    """In each process that runs tests: adds the CPU seconds of each phase to its report."""

    def __init__(self) -> None:
        self._before_s = _cpu_s()

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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        parts = PurePath(report.nodeid.partition("::")[0]).parts
        row = self._folders["/".join(parts[:2]) if len(parts) > 2 else parts[0]]
        row[0] += report.when == "call"
        row[1] += report.duration
        row[2] += sum(float(str(value)) for name, value in report.user_properties if name == _CPU_S)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time per folder, summed over workers")
        terminalreporter.line(f"{'tests':>7} {'seconds':>9} {'CPU s':>8}  folder")
        for folder, row in sorted(self._folders.items(), key=lambda each: -each[1][1]):
            terminalreporter.line(f"{row[0]:7.0f} {row[1]:9.1f} {row[2]:8.1f}  {folder}")
        total = [sum(row[column] for row in self._folders.values()) for column in range(3)]
        wall_s = time.monotonic() - self._began_s
        terminalreporter.line(f"{total[0]:7.0f} {total[1]:9.1f} {total[2]:8.1f}  all; {wall_s:.0f} s by the clock")


def pytest_configure(config: pytest.Config) -> None:
    """Count in every process, and show the sums in the one that has the terminal."""
    config.pluginmanager.register(_CpuSeconds(), "cpu-seconds")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Summary(), "folder-times")


def _cpu_s() -> float:
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system
