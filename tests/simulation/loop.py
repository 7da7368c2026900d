"""An event loop on virtual time whose every choice is drawn: which callback runs, which timer fires, who is cancelled.

An ordinary loop runs callbacks in the order in which they became ready. Nothing promises that to a program whose
callbacks become ready by sockets, threads and timers, so here any ready callback may be next, a timer may fire before
callbacks that are ready, and a task may be cancelled between any two of them. Time does not pass by itself: it jumps to
the next timer when nothing else is to be done, or when a choice says that everything else is late.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

EPOCH_S = 1_700_000_000.0
"""UTC seconds at which virtual time begins."""
TIMERS_AT_ONCE_S = 1e-3
"""Timers due within this time of the first may fire in any order, as a real clock has no finer meaning to them."""

LATEST_S, MOST_HASTY = 0.1, 3
"""A timer fires before callbacks that are ready only if it is so near, and so often in a row: nothing starves."""
OWN_STEPS = 2
"""Steps of a task that only sleeps."""

T = TypeVar("T")


class BreachError(AssertionError):
    """An invariant does not hold.

    Attributes:
        name: Of the invariant.
    """

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


class Choices:
    """The choices of one run: drawn from a seed, or read from the record of an earlier run.

    The smallest choice, 0, is always what an ordinary loop would do: the first ready callback, no cancellation, an
    answer at once. A record that is used up goes on with it.
    """

    def __init__(self, source: int | Sequence[int]) -> None:
        self.made: list[int] = []
        self._random = random.Random(source) if isinstance(source, int) else None
        self._left: Iterator[int] = iter(()) if isinstance(source, int) else iter(source)

    def below(self, n: int, *, often: float = 1.0) -> int:
        """Return a choice of ``n``: with probability ``often`` any of them alike, else the first."""
        if n <= 1:
            return 0
        if self._random is None:
            made = min(next(self._left, 0), n - 1)
        elif often < 1.0 and self._random.random() >= often:
            made = 0
        else:
            made = int(self._random.random() * n)
        self.made.append(made)
        return made


class SimulatedLoop(asyncio.BaseEventLoop):
    """The loop; ``Simulation`` runs it."""

    def __init__(self, choices: Choices, *, disorder: float, haste: float) -> None:
        """Take how often another callback than the first runs, and how often a timer fires before ready callbacks."""
        super().__init__()
        self._choices = choices
        self._disorder, self._haste = disorder, haste
        self._now_s = 0.0
        self._hasty = 0
        self.steps = 0
        self.before_step: Callable[[], None] | None = None
        self.failure: BaseException | None = None
        self.listening: dict[int, SimulatedServer] = {}
        self.set_exception_handler(self._note)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now_s

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.failure is None and not isinstance(error, asyncio.CancelledError):
            text = f"{context.get('message')}: {error!r}"
            self.failure = error if isinstance(error, BreachError) else BreachError("nothing fails unseen", text)

    def _run_once(self) -> None:
        """Run one callback."""
        if self.failure is not None:
            raise self.failure
        if self.before_step is not None:
            self.before_step()
        ready: Any = self._ready  # type: ignore[attr-defined]
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        is_near = bool(timers) and timers[0]._when - self._now_s <= LATEST_S and self._hasty < MOST_HASTY
        if timers and (not ready or (is_near and self._choices.below(2, often=self._haste) == 1)):
            self._hasty += bool(ready)
            handle = self._next_timer(timers)
            self._now_s = max(self._now_s, handle._when)
        elif ready:
            self._hasty = 0
            index = self._choices.below(len(ready), often=self._disorder)
            handle = ready[index]
            del ready[index]
        else:
            raise BreachError("everything ends", "nothing is ready and no timer is set, but the run is not over")
        if not handle._cancelled:
            self.steps += 1
            handle._run()

    def _next_timer(self, timers: list[Any]) -> Any:
        first = heapq.heappop(timers)
        first._scheduled = False
        at_once: list[Any] = []
        while timers and timers[0]._when <= first._when + TIMERS_AT_ONCE_S and len(at_once) < 8:
            each = heapq.heappop(timers)
            if not each._cancelled:
                at_once.append(each)
            else:
                each._scheduled = False
        index = self._choices.below(1 + len(at_once), often=self._disorder)
        if index:
            at_once[index - 1], first = first, at_once[index - 1]
            first._scheduled = False
        for each in at_once:
            each._scheduled = True
            heapq.heappush(timers, each)
        return first

    def _timer_handle_cancelled(self, handle: Any) -> None:
        """Cancelled timers are dropped when they come first."""

    def _process_events(self, event_list: Any) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """There are no threads."""

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Listen at a port of the simulated network."""
        return SimulatedServer(self, protocol_factory)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        """Connect to a port of the simulated network: late, in vain, or at once."""
        await asyncio.sleep(0.01 * self._choices.below(4, often=0.3))
        server = self.listening.get(port)
        if server is None or self._choices.below(2, often=0.1):
            raise ConnectionRefusedError(f"nothing listens at {port}")
        here, there = protocol_factory(), server.protocol_factory()
        ours, theirs = SimulatedTransport(self, here), SimulatedTransport(self, there)
        ours.peer, theirs.peer = theirs, ours
        there.connection_made(theirs)
        here.connection_made(ours)
        return ours, here

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run what would run in a thread in turn, later, on the loop."""
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if future.done():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(run)
        return future


class SimulatedServer:
    """A port of the simulated network."""

    def __init__(self, loop: SimulatedLoop, protocol_factory: Callable[[], Any]) -> None:
        self._loop = loop
        self.protocol_factory = protocol_factory
        self.port = 1 + len(loop.listening)
        loop.listening[self.port] = self
        self.sockets = (self,)

    def getsockname(self) -> tuple[str, int]:
        """Return its address, as the one socket that it has."""
        return ("simulated", self.port)

    def close(self) -> None:
        """Listen no more."""
        self._loop.listening.pop(self.port, None)


class SimulatedTransport(asyncio.Transport):
    """One end of a connection: bytes arrive in order, late and in pieces; what is on its way at its end is lost."""

    peer: SimulatedTransport

    def __init__(self, loop: SimulatedLoop, protocol: Any) -> None:
        super().__init__()
        self._loop = loop
        self.protocol = protocol
        self._arriving: list[bytes] = []
        self._is_closed = False

    def write(self, data: Any) -> None:
        """Send."""
        if self._is_closed or self.peer._is_closed:
            return
        data = bytes(data)
        cut = self._loop._choices.below(2, often=0.1) and len(data) // 2
        for piece in (data[:cut], data[cut:]) if cut else (data,):
            self.peer._arriving.append(piece)
            late_s = 0.01 * self._loop._choices.below(6, often=0.2)
            self._loop.call_later(late_s, self.peer._arrive)

    def _arrive(self) -> None:
        """Take in what was sent first, which is not what became ready first."""
        if self._arriving and not self._is_closed:
            self.protocol.data_received(self._arriving.pop(0))

    def abort(self) -> None:
        """End the connection at both ends."""
        for each in (self, self.peer):
            if not each._is_closed:
                each._is_closed = True
                self._loop.call_soon(each.protocol.connection_lost, None)

    close = abort

    def is_closing(self) -> bool:
        """Whether it has ended."""
        return self._is_closed


class Simulation:
    """One run: its loop, its choices, its invariants, and the tasks that may be cancelled.

    Attributes:
        choices: Of this run.
        loop: That runs.
    """

    def __init__(
        self, choices: Choices, *, disorder: float = 0.3, haste: float = 0.02, cancels: float = 0.01, steps: int = 4_000
    ) -> None:
        """Take the choices and how often they are other than an ordinary loop's, and the most steps of a run."""
        self.choices = choices
        self.loop = SimulatedLoop(choices, disorder=disorder, haste=haste)
        self.loop.before_step = self._before_step
        self._cancels = cancels
        self._most_steps = steps
        self._invariants: list[tuple[str, Callable[[], str | None]]] = []
        self._may_be_cancelled: list[asyncio.Task[Any]] = []
        self._all: set[asyncio.Task[Any]] = set()

    def holds(self, name: str, wrong: Callable[[], str | None]) -> None:
        """Check after every step that ``wrong`` has nothing to say."""
        self._invariants.append((name, wrong))

    def check(self, name: str, is_so: bool, detail: str = "") -> None:
        """Check once.

        Raises:
            BreachError: It is not so.
        """
        if not is_so:
            self.loop.failure = self.loop.failure or BreachError(name, detail)  # whoever catches it here
            raise self.loop.failure

    def start(self, work: Coroutine[Any, Any, T], *, may_be_cancelled: bool = False) -> asyncio.Task[T]:
        """Start a task, which may be cancelled between any two of its awaits if that is said."""
        task = self.loop.create_task(work)
        self._all.add(task)
        task.add_done_callback(self._ended)
        if may_be_cancelled:
            self._may_be_cancelled.append(task)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._all.discard(task)
        if task in self._may_be_cancelled:
            self._may_be_cancelled.remove(task)

    async def everything(self) -> None:
        """Wait until all tasks that were started have ended, whatever their outcome."""
        while self._all:
            await asyncio.wait(set(self._all))

    async def quiet(self) -> None:
        """Wait until nothing is to be done but what waits for a time to come, and what was due has been done."""
        for _ in range(200):
            before = self.loop.steps
            await asyncio.sleep(10)
            if self.loop.steps - before <= OWN_STEPS and not self.loop._ready:  # type: ignore[attr-defined]
                return

    async def boundary(self, answer: Callable[[], T], *failures: type[Exception] | Exception) -> T:
        """Ask something beyond the process: it may answer late, refuse, or answer in vain after it took effect.

        ``answer`` takes effect; the failures are raised before it, or after it as if its answer had been lost.
        """
        if self.choices.below(3) == 1:
            await asyncio.sleep(0.01 * (1 + self.choices.below(8)))
        else:
            await asyncio.sleep(0)
        outcome = self.choices.below(1 + 2 * len(failures), often=0.4) if failures else 0
        if not outcome:
            return answer()
        which, effect = divmod(outcome - 1, 2)
        if effect:
            answer()
            await asyncio.sleep(0)
        raise failures[which]

    def run(self, play: Coroutine[Any, Any, None]) -> None:
        """Run to the end.

        Raises:
            BreachError: An invariant did not hold, a task failed unseen, or the run did not end.
        """
        loop = self.loop
        try:
            with _virtual_time(loop):
                main = loop.create_task(play)
                loop.run_until_complete(main)
                if loop.failure is not None:
                    raise loop.failure
                self._look()
        finally:
            _dispose(loop)

    def _before_step(self) -> None:
        self._look()
        if self.loop.steps > self._most_steps:
            raise BreachError("everything ends", f"not over after {self._most_steps} steps")
        victims = self._may_be_cancelled
        if victims and (victim := self.choices.below(1 + len(victims), often=self._cancels)):
            victims.pop(victim - 1).cancel()

    def _look(self) -> None:
        for name, wrong in self._invariants:
            said = wrong()
            if said is not None:
                raise BreachError(name, said)


@contextmanager
def _virtual_time(loop: SimulatedLoop) -> Iterator[None]:
    real = (time.monotonic, time.time, time.perf_counter)
    time.monotonic = loop.time
    time.perf_counter = loop.time
    time.time = lambda: EPOCH_S + loop.time()
    try:
        yield
    finally:
        time.monotonic, time.time, time.perf_counter = real


def _dispose(loop: SimulatedLoop) -> None:
    """Forget what a run that failed has left; its tasks would complain that they were never ended."""
    loop.before_step = None
    loop.failure = None
    loop.set_exception_handler(lambda *_: None)
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.cancel()
    for _ in range(1_000):
        if not loop._ready:  # type: ignore[attr-defined]
            break
        handle = loop._ready.popleft()  # type: ignore[attr-defined]
        if not handle._cancelled:
            asyncio.events._set_running_loop(loop)
            try:
                handle._run()
            except BaseException:  # what is left over may fail as it likes
                pass
            finally:
                asyncio.events._set_running_loop(None)
    loop.close()
