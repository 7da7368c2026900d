"""`--workers N`: tests in N processes, forked from one that has collected them: collection is paid once.

Files are handed out one by one, in the order of `tests/support/order.py`; those that share an installation go to one
worker together. What has the session's scope is made in each worker, and outlives its files.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest._io import TerminalWriter
from _pytest.capture import FDCapture

from tests.support import folder_times
from tests.support.order import together

MOST_LOST = 10
"""Once so many workers have ended of themselves, no further one is begun."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the tests in N processes, forked here")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers where there are to be some; pytest itself does so otherwise, and refuses to."""
    options = session.config.option
    if (
        not options.workers
        or options.collectonly
        or (session.testsfailed and not options.continue_on_collection_errors)
    ):
        return None
    assert threading.active_count() == 1, "a thread that collection has left would be missing in the workers"
    _Controller(session).run(options.workers)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class _Worker:
    """A process that runs tests, as its parent knows it: at the other end of a pipe."""

    def __init__(self, session: pytest.Session, number: int, others: Iterable[_Worker]) -> None:
        self.node = SimpleNamespace(gateway=SimpleNamespace(id=f"w{number}"), _workerinfocache=f"[w{number}]")
        """What pytest's terminal knows the report of a worker by; the names are xdist's."""
        self.waiting: deque[int] = deque()  #: Tests that it was given and has not finished
        self.pipe, far_end = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            for pipe in (self.pipe, *(other.pipe for other in others)):
                pipe.close()
            _work_and_exit(session, number, far_end)
        far_end.close()
        self.ended = os.pidfd_open(self._pid)  #: Readable once it has ended, though a child of its holds its pipe

    def give(self, tests: Sequence[int]) -> None:
        """Give it tests, or none: then it ends."""
        self.waiting = deque(tests)
        with contextlib.suppress(ConnectionError):  # it has ended, which is seen when it is heard next
            self.pipe.send(tests)

    def end(self) -> int:
        """Wait for its end; return its exit status, and minus the number of the signal that it died of."""
        self.pipe.close()
        os.close(self.ended)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


class _Controller:
    """In the process that has the terminal: hands out the files, and passes on what workers report."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._config: Any = session.config
        self._files = deque(together(session.items))
        self._workers: dict[Any, _Worker] = {}
        self._begun = self._lost = 0
        self._config._tmp_path_factory.getbasetemp()  # workers have theirs in it

    def run(self, count: int) -> None:
        """Return once all tests have run."""
        try:
            for _ in range(min(count, len(self._files))):
                self._begin_worker()
            while self._workers:
                ends = {worker.ended: worker for worker in self._workers.values()}
                for ready in wait([*self._workers, *ends]):
                    if (worker := self._workers.get(ready)) is not None:
                        self._hear(worker)
                    elif not ends[ready].pipe.closed and not ends[ready].pipe.poll():
                        self._bury(ends[ready])
        finally:
            for worker in self._workers.values():  # interrupted: they are too, or find nobody to report to
                worker.end()

    def _begin_worker(self) -> None:
        self._begun += 1
        worker = _Worker(self._session, self._begun, self._workers.values())
        self._workers[worker.pipe] = worker

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, said = worker.pipe.recv()
        except (EOFError, ConnectionError):
            self._bury(worker)
            return
        if kind == "idle":
            stops = self._session.shouldfail or self._session.shouldstop or not self._files
            worker.give([] if stops else self._files.popleft())
        elif kind == "costs":
            if (summary := self._config.pluginmanager.get_plugin(folder_times.SUMMARY)) is not None:
                summary.add_worker(*said)
        else:
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=said)
            self._pass_on(worker, report, is_last=report.when == "teardown")

    def _pass_on(self, worker: _Worker, report: Any, *, is_last: bool) -> None:
        report.node = worker.node
        self._config.hook.pytest_runtest_logreport(report=report)
        if is_last:
            self._config.hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
            with contextlib.suppress(IndexError):  # what the session alone had was taken down when no test was left
                worker.waiting.popleft()

    def _bury(self, worker: _Worker) -> None:
        """Let a worker that has ended go; the test that ended it fails, and is given to no other: it would end too."""
        del self._workers[worker.pipe]
        status = worker.end()
        if status == 0 and not worker.waiting:
            return
        if worker.waiting:
            item = self._session.items[worker.waiting[0]]
            said = f"{item.nodeid} ended its worker"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", f"{said}: {status}", "call")
            self._pass_on(worker, report, is_last=True)
        else:
            said = f"a worker ended with {status}"
            self._session.testsfailed += 1
        self._config.get_terminal_writer().line(f"\n{said}")
        self._lost += 1
        if worker.waiting:
            self._files.appendleft([*worker.waiting])
        if self._files and not self._session.shouldfail and self._lost < MOST_LOST:
            self._begin_worker()


def _work_and_exit(session: pytest.Session, number: int, pipe: Connection) -> None:
    status = 1
    try:
        _own_things(session.config, number)
        _work(session, pipe)
        status = 0
    except (KeyboardInterrupt, ConnectionError):
        pass  # as its parent
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _own_things(config: Any, number: int) -> None:
    """Give a worker what it must not share with others: files of captured output, a folder, no terminal."""
    captured = config.pluginmanager.get_plugin("capturemanager")._global_capturing
    for each in (captured.out, captured.err):
        if isinstance(each, FDCapture):  # another file, and the same object: what was imported may hold on to it
            with TemporaryFile() as own:
                os.dup2(own.fileno(), each.tmpfile.fileno())
    folders = config._tmp_path_factory
    folders._basetemp = folders._basetemp / f"worker-{number}"
    folders._basetemp.mkdir(mode=0o700)
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    terminal._tw = TerminalWriter(Path(os.devnull).open("w"))  # noqa: SIM115  as long as the process lives


def _work(session: Any, pipe: Connection) -> None:
    """Run what the parent gives, until that is nothing."""
    config = session.config
    if (costs := config.pluginmanager.get_plugin(folder_times.CPU_SECONDS)) is not None:
        costs.begin()
    config.pluginmanager.register(_Reporting(config, pipe), "reporting")
    last: Any = None
    try:
        while tests := _asked(pipe):
            for at, following in zip(tests, [*tests[1:], None], strict=True):
                last = session.items[at]
                # After a file, what the session alone has stays: which file comes next is not known yet.
                next_item = session if following is None else session.items[following]
                last.ihook.pytest_runtest_protocol(item=last, nextitem=next_item)
                if session.shouldfail or session.shouldstop:
                    break
    finally:
        try:
            session._setupstate.teardown_exact(None)
        except Exception:
            report = pytest.TestReport(last.nodeid, last.location, {}, "failed", traceback.format_exc(), "teardown")
            config.hook.pytest_runtest_logreport(report=report)
    if costs is not None:
        pipe.send(("costs", costs.end()))
    _save_coverage()


def _asked(pipe: Connection) -> list[int]:
    pipe.send(("idle", None))
    return pipe.recv()


def _save_coverage() -> None:
    """Write down what was measured, if it was: ``os._exit`` would not."""
    try:
        from coverage import Coverage
    except ImportError:
        return
    if (measured := Coverage.current()) is not None:
        measured.stop()
        measured.save()


class _Reporting:
    """In a worker: sends each report to the parent."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))
