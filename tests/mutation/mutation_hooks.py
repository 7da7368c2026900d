"""A pytest plugin (`-p mutation_hooks`) for both kinds of run; what to do comes in environment variables.

`MUTATION_MAP`: a folder. Every test is measured: which lines of `MUTATION_SOURCES` it executes and how long it takes.
`MUTATION_PLAN`: a file. Only its tests run, in its order, each within its time; the first that fails is written down.

It imports nothing of the project: it must be there before what it measures is imported.
"""

import faulthandler
import functools
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import hypothesis
import pytest

MEASURED_S = 2.0
"""How much of its processor time a test is measured for."""
MEASURED_EXAMPLES = 5
_MAP = os.environ.get("MUTATION_MAP")
_PLAN = os.environ.get("MUTATION_PLAN")

# The same examples in every run, no time for making a failing one smaller. Profiles made later take it from here.
hypothesis.settings.register_profile(
    "mutation",
    derandomize=True,
    database=None,
    deadline=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    suppress_health_check=tuple(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("mutation")


class _Mapper:
    def __init__(self, folder: Path) -> None:
        import coverage

        self._folder = folder
        self._coverage = coverage.Coverage(
            data_file=folder / f"coverage.{os.getpid()}",
            config_file=False,
            include=[f"{place}/*" for place in json.loads(os.environ["MUTATION_SOURCES"])],
        )
        self._coverage.start()
        self._tests: dict[str, dict[str, Any]] = {}
        self._times: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _forget()
        self._times[item.nodeid] = _with_few_examples(item)
        self._coverage.switch_context(item.nodeid)
        # What a test has not executed after seconds of work it hardly will, and measured code is slow.
        stopped: list[int] = []
        signal.signal(signal.SIGVTALRM, lambda number, _: (stopped.append(number), self._coverage.stop()))
        signal.setitimer(signal.ITIMER_VIRTUAL, MEASURED_S)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if stopped:
                self._coverage.start()
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True, "ran": False})
        test["seconds"] += report.duration * self._times[report.nodeid]
        test["passed"] = test["passed"] and not report.failed
        test["ran"] = test["ran"] or (report.when == "call" and report.passed)

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        (self._folder / f"tests.{os.getpid()}.json").write_text(json.dumps(self._tests))
        others = [name for name, module in list(sys.modules.items()) if _is_of_others(module)]
        (self._folder / f"modules.{os.getpid()}.json").write_text(json.dumps(others))


def _with_few_examples(item: pytest.Item) -> float:
    """Let a property be tried on few examples, which execute what more would; return how many times as many it has."""
    test: Any = getattr(item, "obj", None)
    usual: hypothesis.settings | None = getattr(test, "_hypothesis_internal_use_settings", None)
    if usual is None:
        return 1.0
    examples = vars(test).setdefault(
        "_usual_examples", usual.max_examples
    )  # those of a function with parameters share it
    fewer = min(MEASURED_EXAMPLES, examples)
    test._hypothesis_internal_use_settings = hypothesis.settings(usual, max_examples=fewer)
    return examples / fewer


def _forget() -> None:
    """Empty all caches of the measured code: a test that is answered from one would not seem to execute anything."""
    places = json.loads(os.environ["MUTATION_SOURCES"])
    for module in list(sys.modules.values()):
        if (getattr(module, "__file__", None) or "").startswith(tuple(places)):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def _is_of_others(module: ModuleType) -> bool:
    return "site-packages" in (getattr(module, "__file__", None) or "")


class _Planned:
    """One run over one mutant."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._seconds: dict[str, float] = plan["tests"]
        self._answer, self._running = Path(plan["answer"]), Path(plan["running"])
        self._dump = Path(os.devnull).open("w")  # noqa: SIM115  as long as the process lives

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = {item.nodeid: item for item in items}
        items[:] = [known[name] for name in self._seconds if name in known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        def out_of_time(number: int, frame: FrameType | None) -> None:
            if not self._answer.exists():
                self._answer.write_text(f"{item.nodeid} (out of time)")
            pytest.fail("out of time", pytrace=False)

        seconds = self._seconds[item.nodeid]
        signal.signal(signal.SIGALRM, out_of_time)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        # A solver's own loop never comes back to Python for the alarm: then the process ends, and has said where.
        self._running.write_text(f"{item.nodeid} (out of time)")
        faulthandler.dump_traceback_later(2 * seconds + 1, exit=True, file=self._dump)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._running.unlink()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._answer.exists():
            self._answer.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self._answer.exists():
            self._answer.write_text(f"{report.nodeid} (cannot be imported)")


def pytest_configure(config: pytest.Config) -> None:
    """Take part where an environment variable asks for it."""
    if _MAPPER:
        if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
            return  # xdist's controller runs no tests itself
        config.pluginmanager.register(_MAPPER, "mutation-mapper")
    if _PLAN:
        config.pluginmanager.register(_Planned(json.loads(Path(_PLAN).read_text())), "mutation-planned")


_MAPPER = _Mapper(Path(_MAP)) if _MAP else None
