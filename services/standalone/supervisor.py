"""Keep processes running: start them stage by stage, restart those that die or hang, stop them in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import time
from asyncio import create_subprocess_exec
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from services.kit.tasks import end_tasks
from services.standalone import watching
from services.standalone.data_folder import ProcessStatus, State
from services.standalone.forks import POSSIBLE, Forked, Forks
from services.standalone.probes import Probe
from services.standalone.process import Process, StackError
from services.standalone.processes import PYTHON

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
HEALTHY_AFTER_S = 5.0
"""A process that ran this long is started again at once; one that keeps dying waits twice as long each time."""

REPAIR_AFTER = 3  #: A process that ends so often in a row before it is ready is repaired, where that is possible

EARLY_ENDS = 5  #: A process that ends this often before it was ever ready is given up

PROBE_EVERY_S = 0.05
LACKS_WITHIN_S = 10.0
ROTATE_EVERY_S = 5.0
LOOK_EVERY_S = 5.0
"""At what is being started, whether it works: each look reads the whole table of processes."""

LAST_WORK_S = 3_600.0  #: How long a process may take to end that is put to sleep, and has just begun something

LOG_BYTES = 10_000_000

RESTING = ("stopped", "asleep")

Running = asyncio.subprocess.Process | Forked


class Supervisor:
    """Runs stages of processes; the processes of one stage start and stop together."""

    def __init__(
        self,
        log_folder: Path,
        *,
        on_change: Callable[[], None] = lambda: None,
        start_within_s: float = 90.0,
        watches: bool = True,
    ) -> None:
        """Make a supervisor without processes.

        Args:
            log_folder: Gets one `<name>.log` per process, and one older `<name>.log.1`.
            on_change: Called whenever `status` would answer differently.
            start_within_s: How long a call of `start` continues while nothing that it waits for is working.
            watches: Whether processes are probed, and replaced when they hang, not only when they end.
        """
        self.log_folder = log_folder
        self.on_change = on_change
        self._start_within_s = start_within_s
        self.watches = watches
        self._stages: list[list[_Child]] = []
        self._rotation: asyncio.Task[None] | None = None
        self._forks: Forks | None = None

    def fork(self, environment: Mapping[str, str], preloaded: Sequence[str]) -> None:
        """From now on, fork Python modules from one process, which imports modules in this environment."""
        self._forks = Forks(environment, preloaded) if POSSIBLE else None

    def status(self) -> tuple[ProcessStatus, ...]:
        """Return the status of every process, in the order of their start."""
        return tuple(child.status() for stage in self._stages for child in stage)

    async def start(self, *stages: Sequence[Process]) -> None:
        """Start further stages at once and return when all of them are ready; only stopping them has an order.

        Raises:
            StackError: a process is not ready in time or keeps ending; `stop` still has to be called then.
        """
        self._rotation = self._rotation or asyncio.create_task(self._rotate_logs())
        added = [[_Child(each, self) for each in stage] for stage in stages]
        self._stages += added
        children = [child for stage in added for child in stage]
        if not children:
            return
        for child in children:
            child.start()
        ready, idle_s, last_s = [child.ready for child in children], 0.0, time.monotonic()
        while True:
            done, _ = await asyncio.wait(ready, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_EXCEPTION)
            for future in done:
                future.result()
            late = [child for child in children if not child.ready.done()]
            if not late:
                return
            if idle_s >= self._start_within_s:
                waited = f"not ready after {self._start_within_s:.0f} s without work"
                raise StackError(f"{waited}: {', '.join(child.name for child in late)}; see {self.log_folder}")
            now_s = time.monotonic()
            work = await asyncio.gather(*(asyncio.to_thread(child.is_at_work, now_s - last_s) for child in late))
            idle_s += 0.0 if any(work) else min(now_s - last_s, watching.LONGEST_STEP_S)
            last_s = now_s

    async def set_running(self, name: str, running: bool, environment: Mapping[str, str] | None = None) -> None:
        """Stop one of the processes, or start it again; returns before it is ready.

        Args:
            name: Which one; an unknown name changes nothing.
            environment: Additional environment variables from now on.
        """
        for child in self._named(name):
            if not running:
                await child.stop()
            elif child.status().state in RESTING:
                child.start_again(environment or {})

    def lay_down(self, processes: Sequence[Process]) -> None:
        """Add processes that do not run until `set_running` wakes them."""
        self._stages.append([_Child(each, self) for each in processes])
        for child in self._stages[-1]:
            child.fall_asleep()

    async def put_to_sleep(self, name: str) -> None:
        """Let a process finish its work and end; `set_running` wakes it."""
        for child in self._named(name):
            await child.stop(LAST_WORK_S)
            child.fall_asleep()

    async def replace(self, name: str, environment: Mapping[str, str]) -> None:
        """Stop one of the processes, start it with additional environment variables, and wait until it is ready.

        One that is asleep gets them when it wakes.
        """
        for child in self._named(name):
            child.add_environment(environment)
            if child.status().state == "asleep":
                return
        await self.set_running(name, False)
        await self.set_running(name, True)
        with contextlib.suppress(TimeoutError):  # it is started again and again, as any other that cannot start
            async with asyncio.timeout(self._start_within_s):
                while any(each.name == name and each.state != "running" for each in self.status()):  # noqa: ASYNC110
                    await asyncio.sleep(PROBE_EVERY_S)

    async def finish(self, process: Process) -> None:
        """Run a process that ends by itself, such as a migration; ``StackError`` ends with its last output."""
        child = _Child(process, self)
        try:
            running = await child.spawn()
            if await running.wait() != 0:
                raise StackError(f"{process.name} failed: {child.last_words()}")
        finally:
            await child.end()

    async def stop(self) -> None:
        """Stop everything, the last stage first; processes that do not end in time are killed."""
        for stage in reversed(self._stages):
            await asyncio.gather(*(child.stop() for child in stage))
        if self._rotation:
            self._rotation.cancel()
        if self._forks:
            await self._forks.close()

    def _named(self, name: str) -> list[_Child]:
        return [child for stage in self._stages for child in stage if child.name == name]

    async def launch(self, process: Process, output: int) -> Running:
        """Start a process that writes to a file descriptor."""
        options = process.popen_options(output)
        if self._forks and process.command[: len(PYTHON) + 1] == (*PYTHON, "-m"):
            return await self._forks.spawn(process.command, options)
        return await create_subprocess_exec(*process.command, **options)

    async def _rotate_logs(self) -> None:
        # Copied and emptied, not renamed: the processes write to the file themselves and keep it open.
        while True:
            await asyncio.sleep(ROTATE_EVERY_S)
            for log in self.log_folder.glob("*.log"):
                with contextlib.suppress(OSError):  # of one log, which is gone by now: the others are looked at
                    if log.stat().st_size > LOG_BYTES:
                        with contextlib.suppress(OSError):  # a full disk: then the old lines are what has to go
                            shutil.copyfile(log, log.with_suffix(".log.1"))
                        os.truncate(log, 0)


class _Child:
    """One process, through all its restarts."""

    def __init__(self, process: Process, supervisor: Supervisor) -> None:
        self.name = process.name
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process = process
        self._supervisor = supervisor
        self._log = supervisor.log_folder / f"{process.name}.log"
        self._log_began = 0
        self._running: Running | None = None
        self._state: State = "starting"
        self._restarts = 0
        self._started_at_s: float | None = None
        self._detail = self._replaced = ""
        self._was_ready = False
        self._answered = asyncio.Event()
        self._effort = watching.Effort()
        self._running_task: asyncio.Task[None] | None = None

    def status(self) -> ProcessStatus:
        address = self._process.address
        return ProcessStatus(
            self.name,
            self._state,
            self._running.pid if self._running else None,
            address[1] if isinstance(address, tuple) else None,
            self._restarts,
            self._started_at_s,
            self._detail,
            str(address) if isinstance(address, Path) else "",
        )

    def start(self) -> None:
        self._running_task = asyncio.create_task(self._keep_running(), name=f"keep {self.name}")

    def add_environment(self, environment: Mapping[str, str]) -> None:
        self._process = replace(self._process, environment={**self._process.environment, **environment})

    def start_again(self, environment: Mapping[str, str]) -> None:
        self.add_environment(environment)
        self._become("starting")
        self.start()

    def fall_asleep(self) -> None:
        self._become("asleep")

    async def spawn(self) -> Running:
        if self._process.before_start:
            self._process.before_start()
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._log_began = os.fstat(log).st_size
        try:
            self._running = await self._supervisor.launch(self._process, log)
        finally:
            os.close(log)
        with contextlib.suppress(psutil.Error):
            self._started_at_s = psutil.Process(self._running.pid).create_time()
        return self._running

    def is_at_work(self, after_s: float) -> bool:
        """Return whether a starting process has worked since the last look, and not only waited."""
        pid = self._running.pid if self._running else None
        return pid is not None and self._effort.is_made(after_s, watching.cpu_of(pid), answers=self._answered.is_set())

    async def stop(self, within_s: float | None = None) -> None:
        """Stop the process; if it has not ended within this time, by default its own limit, it is killed."""
        if self._running_task:
            await end_tasks([self._running_task])
        self._become("stopping")
        if self._running:
            with contextlib.suppress(ProcessLookupError):
                self._running.send_signal(self._process.stop_signal)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s or self._process.stop_within_s):
                    await self._running.wait()
        await self.end()
        if self.ready.done():
            self.ready.exception()  # asked for, lest asyncio complains that nobody did
        self._become("stopped")

    async def end(self) -> None:
        """Kill the process if it is running, and what it leaves behind, such as a Celery worker's pool."""
        if self._running is None:
            return
        # Not all of them are in its group: PostgreSQL's have groups of their own.
        lives = self._running.returncode is None
        children = watching.children_of(self._running.pid) if lives and self._process.owns_its_group else []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.owns_its_group:
                os.killpg(self._running.pid, signal.SIGKILL)
            else:
                self._running.kill()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        await self._running.wait()
        self._running = None

    def last_words(self) -> str:
        """Return the last lines of the process's output, which people need to read first."""
        return self._log.read_bytes()[self._log_began :].decode(errors="replace").strip()[-1000:]

    async def _keep_running(self) -> None:
        pause_s = FIRST_PAUSE_S
        early_ends = never_ready = 0
        while True:
            began_s = time.monotonic()
            try:
                ended = f"status {await self._run_once()}; its last output: {self.last_words()}"
            except OSError as error:  # no such program, no memory, no room for the log
                ended = str(error)
            if not self.ready.done():
                early_ends += 1
                if early_ends == EARLY_ENDS:
                    self._become("failed")
                    self.ready.set_exception(StackError(f"{self.name} ended before it was ready: {ended}"))
                    return
            never_ready = 0 if self._was_ready else never_ready + 1
            if never_ready == REPAIR_AFTER and self._process.repair:
                with contextlib.suppress(OSError):
                    self._process.repair()
            if time.monotonic() - began_s > HEALTHY_AFTER_S:
                pause_s = FIRST_PAUSE_S
            self._become("restarting", self._replaced)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            self._restarts += 1

    async def _run_once(self) -> int:
        self._was_ready = False
        self._answered.clear()
        running = await self.spawn()
        self._become("starting", self._replaced)
        tasks = [asyncio.create_task(self._await_ready())]
        if self._process.probe and self._supervisor.watches:
            tasks.append(asyncio.create_task(self._replace_if_hung(running.pid, self._process.probe)))
        try:
            status = await running.wait()
        finally:
            await end_tasks(tasks)
        await self.end()
        return status

    async def _await_ready(self) -> None:
        while self._process.probe and not await self._process.probe.is_ready():  # noqa: ASYNC110, another process
            await asyncio.sleep(PROBE_EVERY_S)
        if not self.ready.done():
            self.ready.set_result(None)
        self._was_ready = True
        self._become("running", self._replaced)

    async def _replace_if_hung(self, pid: int, probe: Probe) -> None:
        """Probe the process while it runs, and kill it if it hangs: another one is started then."""
        why = await self._why_hung(pid, probe)
        self._say(f"{why}, and was killed")
        self._replaced = f"replaced at {datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}: {why}"
        self._become("restarting", self._replaced)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    async def _why_hung(self, pid: int, probe: Probe) -> str:
        """Wait until the process hangs, and return why; until then, update its state from its answers."""
        patience, last_s = watching.Patience(), time.monotonic()
        for number in itertools.count(1):
            if await _answers(probe, patience.timeout_s()):
                patience.answered()
                self._answered.set()
                await self._look_closer(pid, probe, thoroughly=number % watching.THOROUGHLY_EVERY == 0)
            elif found := await asyncio.to_thread(watching.activity, pid):
                if why := patience.missed(time.monotonic() - last_s, found):
                    return why
                if self._was_ready and patience.has_answered and patience.misses > 1:
                    self._become("unresponsive", "it does not answer")
            last_s = time.monotonic()
            await asyncio.sleep(watching.AGAIN_S if patience.misses else watching.EVERY_S)
        raise AssertionError("it counts for ever")

    async def _look_closer(self, pid: int, probe: Probe, *, thoroughly: bool) -> None:
        if self._was_ready and (thoroughly or self._state != "running"):
            with contextlib.suppress(OSError, TimeoutError):  # it ends or hangs just now: the next probe says so
                async with asyncio.timeout(LACKS_WITHIN_S):
                    lacking = await probe.lacks()
                self._become("degraded" if lacking else "running", lacking or self._replaced)
        if thoroughly and self._process.replaces_children:
            for child in await asyncio.to_thread(watching.kill_stopped_children, pid):
                self._say(f"process {child}, one of its own, was stopped, and was killed")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError), self._log.open("a") as log:
            log.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} supervisor: {self.name}: {text}\n")

    def _become(self, state: State, detail: str = "") -> None:
        if (state, detail) == (self._state, self._detail):
            return
        self._state, self._detail = state, detail
        self._supervisor.on_change()


async def _answers(probe: Probe, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await probe.answer()
    except OSError:
        return False
    return True
