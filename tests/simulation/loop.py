"""An event loop on virtual time whose every choice is drawn: which callback runs, which timer fires, who is cancelled.

An ordinary loop runs callbacks in the order in which they became ready. Nothing promises that to a program whose
callbacks become ready by sockets, threads and timers, so here any ready callback may be next, a timer may fire before
callbacks that are ready, and a task may be cancelled between any two of them. Time does not pass by itself: it jumps to
the next timer when nothing else is to be done, or when a choice says that everything else is late.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import heapq
import inspect
import itertools
import os
import random
import socket
import sys
import time
import warnings
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast
from unittest.mock import patch

from services.kit.logging import Log

EPOCH_S = 1_700_000_000.0
"""UTC seconds at which virtual time begins."""
TIMERS_AT_ONCE_S = 1e-3
"""Timers due within this time of the first may fire in any order, as a real clock has no finer meaning to them."""

LATEST_S, MOST_HASTY = 0.1, 3
"""A timer fires before callbacks that are ready only if it is so near, and so often in a row: nothing starves."""
OWN_STEPS = 2
"""Steps of a task that only sleeps."""
ENTROPIES = 64
"""What a program draws for itself, such as a jitter, differs in so many ways; it is no choice, and is not shortened."""
MOST_ROUNDS, MOST_DISPOSED, CANCELLED_AGAIN = 10, 20_000, 1_000
"""Rounds, and steps of each, in which what a run has left may end; in those it is cancelled again now and then."""
SILENT_S = 600.0
"""A boundary that does not answer is silent for so long, which outlives every time limit."""

_CUT = b"cut"
"""Comes behind what is the last that arrives."""
_UNAWAITED = "_warn_unawaited_coroutine"
"""What the interpreter calls in ``warnings`` when a coroutine ends that was never begun."""

T = TypeVar("T")
P = ParamSpec("P")

_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


GIVES_BACK = "PoolConnectionHolder.release"
"""asyncpg's own task: it ends the connection if its server does not stop work in time, and may tell nobody."""


OURS = (AttributeError, TypeError, NameError, LookupError, AssertionError)
"""What only a fault of the program raises; of what is read from others, these may be."""
OF_OTHERS = frozenset({"server.not_registered", "workload.not_scaled"})


class BreachError(AssertionError):
    """An invariant does not hold.

    Attributes:
        name: Of the invariant.
    """

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


class KilledError(BaseException):
    """A process was killed within a step: whatever it would still do in that step it does not."""


class Choices:
    """The choices of one run: drawn from a seed, or read from the record of an earlier run.

    The smallest choice, 0, is always what an ordinary loop would do: the first ready callback, no cancellation, an
    answer at once. A record that is used up goes on with it, or with what is drawn from another seed.

    Attributes:
        made: So far.
        sizes: Of how many each was one.
    """

    def __init__(
        self, source: int | Sequence[int], *, then: int | None = None, sizes: Sequence[int] | None = None
    ) -> None:
        """Take a seed, or a record and perhaps the seed that follows it.

        With ``sizes`` a record counts as used up where other choices are to be made than when it was: what it says of
        those would make a schedule that is wilder than any that is drawn.
        """
        self.made: list[int] = []
        self.sizes: list[int] = []
        self._expected = iter(sizes) if sizes is not None else None
        seed, record = (source, None) if isinstance(source, int) else (then, source)
        self._random = random.Random(seed) if seed is not None else None
        self._left: Iterator[int] | None = iter(record) if record is not None else None

    def below(self, n: int, *, often: float = 1.0) -> int:
        """Return a choice of ``n``: with probability ``often`` any of them alike, else the first."""
        if n <= 1:
            return 0
        read = next(self._left, None) if self._left is not None else None
        if read is not None and self._expected is not None and next(self._expected, n) != n:
            self._left = read = None
        if read is not None:
            made = min(read, n - 1)
        elif self._random is None or (often < 1.0 and self._random.random() >= often):
            made = 0
        else:
            made = int(self._random.random() * n)
        self.made.append(made)
        self.sizes.append(n)
        return made


@dataclass
class Clock:
    """The clock of a host, which anybody may set; a steady one nobody may.

    Attributes:
        ahead_s: Of virtual time.
    """

    ahead_s: float = 0.0


class Process:
    """A process of a simulation: the tasks that it started, and theirs. One that is killed does nothing more.

    Attributes:
        clock: Of its host, which is that of who started it.
    """

    def __init__(self, loop: SimulatedLoop, clock: Clock | None = None) -> None:
        self._loop = loop
        parent = _PROCESS.get()
        self.clock = clock or (parent.clock if parent is not None else Clock())

    @property
    def is_alive(self) -> bool:
        """Whether it was not killed yet."""
        return self not in self._loop.dead

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of this process."""
        token = _PROCESS.set(self)
        try:
            return self._loop.create_task(work)
        finally:
            _PROCESS.reset(token)

    def kill(self) -> None:
        """End it between two steps, as ``kill -9`` does: no ``finally`` and no callback of its runs any more."""
        self._loop.dead.add(self)

    def stand_still(self, length_s: float) -> None:
        """Do nothing for a while, as a process does that is stopped, and then go on between the same two steps."""
        if self not in self._loop.still:
            self._loop.still[self] = []
            self._loop.call_later(length_s, self._go_on, context=contextvars.Context())

    def _go_on(self) -> None:
        self._loop._ready.extend(self._loop.still.pop(self, []))  # type: ignore[attr-defined]


class SimulatedLoop(asyncio.BaseEventLoop):
    """The loop; ``Simulation`` runs it.

    Attributes:
        steps: Callbacks run so far.
        dead: Processes that were killed.
        still: Processes that stand still, each with what is ready in it.
        lacks_threads: How often a thread cannot be started.
        sockets: What connects to each Unix socket, by its path.
        has_cut: Whether a connection was cut.
        refused_at: Ports at which a connection was refused, or whose host's name could not be resolved.
        addresses: Of every name.
    """

    def __init__(self, choices: Choices, *, disorder: float, haste: float, cuts: float) -> None:
        """Take how often another callback than the first runs, a timer fires before those, and a connection is cut."""
        super().__init__()
        self.set_task_factory(self._new_task)
        self._choices = choices
        self._disorder, self._haste = disorder, haste
        self._now_s = 0.0
        self._hasty = 0
        self._cuts = cuts
        self._tasks: list[asyncio.Task[Any]] = []
        self._process_of: dict[asyncio.Task[Any], Process] = {}
        self.steps = 0
        self._threads: list[tuple[Process | None, Callable[..., Any]]] = []
        self.dead: set[Process] = set()
        self.still: dict[Process, list[Any]] = {}
        self.lacks_threads = 0.0
        self.has_cut = False
        self.refused_at: set[int] = set()
        self.addresses: Sequence[str] = ()
        self.before_step: Callable[[], None] | None = None
        self.failure: BaseException | None = None
        self.listening: dict[int, SimulatedServer] = {}
        self.sockets: dict[str, Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]] = {}
        self.numbers = itertools.count()
        self.set_exception_handler(self._note)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now_s

    def sleep(self, length_s: float) -> None:
        """Have a step take time, in the place of ``time.sleep``: everything else waits."""
        self._now_s += length_s

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        given_back = getattr(getattr(context.get("future"), "get_coro", str)(), "__qualname__", "") == GIVES_BACK
        expected = (asyncio.CancelledError, KilledError, *([TimeoutError] if given_back else []))
        if self.failure is None and not isinstance(error, expected):
            text = f"{context.get('message')}: {error!r} {context.get('future', '')}"
            self.failure = error if isinstance(error, BreachError) else BreachError("nothing fails unseen", text)

    def note_unawaited(self, work: Coroutine[Any, Any, Any]) -> None:
        """Fail the run for a coroutine that is given up before it has begun, and say who does so, if that is known."""
        if self.failure is None:
            frame, code = sys._getframe(1), cast(Any, work).cr_code
            by = frame.f_code
            where = "" if by.co_filename == __file__ else f" by {by.co_qualname} ({by.co_filename}:{frame.f_lineno})"
            text = f"{work.__qualname__} ({code.co_filename}:{code.co_firstlineno}) is forgotten{where}"
            self.failure = BreachError("every coroutine is awaited", text)

    def forget_ended(self) -> None:
        """Let go of what has ended; coroutines that only its tracebacks still had are then known to be forgotten."""
        self._tasks = [task for task in self._tasks if not task.done()]
        self._process_of.clear()
        gc.collect(0)  # nothing older is of this run, in which nothing was collected

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
        if handle._cancelled or (self.dead and handle._context.get(_PROCESS) in self.dead):
            return
        if self.still and (waiting := self.still.get(handle._context.get(_PROCESS))) is not None:
            waiting.append(handle)
            return
        self.steps += 1
        handle._run()

    def _new_task(self, loop: asyncio.AbstractEventLoop, work: Any, context: Any = None) -> asyncio.Task[Any]:
        """Return a task that is kept until the run is over: what has failed unseen is then told, and not by chance."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        self._tasks.append(task)
        if (process := _PROCESS.get()) is not None:
            self._process_of[task] = process
        return task

    @property
    def threads(self) -> list[Callable[..., Any]]:
        """What threads of processes that live are at now: functions that were handed to them and have not ended."""
        return [work for process, work in self._threads if process not in self.dead]

    def unseen(self) -> BaseException | None:
        """Return what a task has failed with that nobody has looked at; None if there is none."""
        for task in self._tasks:
            of_asyncpg = (
                getattr(task.get_coro(), "__qualname__", "") == "PoolConnectionHolder.release"
            )  # shielded there
            of_the_dead = self._process_of.get(task) in self.dead  # whoever would have looked does nothing more
            is_failed = task.done() and not (task.cancelled() or of_asyncpg or of_the_dead)
            if is_failed and task._log_traceback and not isinstance(error := task.exception(), KilledError):  # type: ignore[attr-defined]
                return error
        return None

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

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, ssl: Any = None, **_: Any
    ) -> Any:
        """Connect to a port of the simulated network: late, in vain, or at once; nobody speaks TLS there."""
        if ssl is not None:
            raise ConnectionResetError(f"no TLS is spoken at {port}")
        await asyncio.sleep(0.01 * self._choices.below(4, often=0.3))
        server = self.listening.get(port)
        if server is None or self._choices.below(2, often=0.1):
            self.refused_at.add(port)
            raise ConnectionRefusedError(f"nothing listens at {port}")
        here, there = protocol_factory(), server.protocol_factory()
        ours, theirs = SimulatedTransport(self, here), SimulatedTransport(self, there)
        ours.peer, theirs.peer = theirs, ours
        there.connection_made(theirs)
        here.connection_made(ours)
        await asyncio.sleep(0)  # meanwhile it may have ended again
        return ours, here

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:  # type: ignore[override]
        """Resolve a name: late, in vain, or at once."""
        await asyncio.sleep(0.01 * self._choices.below(4, often=0.3))
        if self._choices.below(2, often=0.1):
            self.refused_at.add(port)
            raise socket.gaierror(f"{host} cannot be resolved")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, port)) for each in self.addresses]

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:  # type: ignore[override]
        """Connect to a Unix socket of the simulated host."""
        if path not in self.sockets:
            raise FileNotFoundError(path)
        return await self.sockets[path](protocol_factory)

    def process_now(self) -> Process | None:
        """Return the process of which a step runs; None: none of them."""
        return _PROCESS.get()

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run what would run in a thread in one go, on the loop: later, and its end is known later still.

        A thread that has begun does not end because nobody waits for it any more.
        """
        if self.lacks_threads and self._choices.below(2, often=self.lacks_threads):
            raise RuntimeError("can't start new thread")
        future: asyncio.Future[T] = self.create_future()
        is_wrapped = isinstance(func, functools.partial) and len(func.args) > 0  # by ``asyncio.to_thread``
        work: Callable[..., Any] = func.args[0] if is_wrapped else func  # type: ignore[attr-defined]
        mine = _PROCESS.get(), work

        def begin() -> None:
            if future.cancelled():
                return
            self._threads.append(mine)
            self.call_later(0.02 * self._choices.below(16, often=0.2), run)

        def run() -> None:
            try:
                result, failure = func(*args), None
            except Exception as error:
                result, failure = None, error
            self.call_soon(end, result, failure)

        def end(result: Any, failure: Exception | None) -> None:
            self._threads.remove(mine)
            if future.done():
                return
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

        self.call_soon(begin)
        return future


class SimulatedServer:
    """A port of the simulated network."""

    def __init__(self, loop: SimulatedLoop, protocol_factory: Callable[[], Any]) -> None:
        self._loop = loop
        self.protocol_factory = protocol_factory
        self.port = 1 + next(loop.numbers)
        loop.listening[self.port] = self
        self.sockets = (self,)

    def getsockname(self) -> tuple[str, int]:
        """Return its address, as the one socket that it has."""
        return ("simulated", self.port)

    def close(self) -> None:
        """Listen no more."""
        self._loop.listening.pop(self.port, None)


class SimulatedTransport(asyncio.Transport):
    """One end of a connection: bytes arrive in order, late and in pieces, until either end closes or it is cut.

    Attributes:
        number: In the order of their making; a set of connections has none that repeats.
        was_cut: Whether anything was sent in pieces.
    """

    peer: SimulatedTransport

    def __init__(self, loop: SimulatedLoop, protocol: Any) -> None:
        super().__init__()
        self._loop = loop
        self.number = next(loop.numbers)
        self.was_cut = False
        self.protocol = protocol
        self._arriving: list[bytes | None] = []
        self._is_closed = False
        self._is_paused = False

    def write(self, data: Any) -> None:
        """Send."""
        if self._is_closed or self.peer._is_closed:
            return
        choices = self._loop._choices
        is_cut = self._loop._cuts and choices.below(3, often=self._loop._cuts)
        self._loop.has_cut |= bool(is_cut)
        if is_cut == 1:
            self.abort()
            return
        data = bytes(data)
        cut = choices.below(2, often=0.1) and len(data) // 2
        self.was_cut |= bool(cut)
        for piece in (data[:cut], data[cut:]) if cut else (data,):
            self._send(piece)
        if is_cut:
            self.peer._arriving.append(_CUT)

    def _send(self, piece: bytes | None) -> None:
        self.peer._arriving.append(piece)
        self._loop.call_later(0.01 * self._loop._choices.below(6, often=0.2), self.peer._arrive)

    def _arrive(self) -> None:
        """Take in what was sent first, which is not what became ready first."""
        if not self._arriving or self._is_closed or self._is_paused:
            return
        piece = self._arriving.pop(0)
        if piece is None:
            self._is_closed = True
            self._loop.call_soon(self.protocol.connection_lost, None)
        else:
            self.protocol.data_received(piece)
            if self._arriving[:1] == [_CUT]:  # before anybody who was woken has run
                self.abort()

    def pause_reading(self) -> None:
        """Have what arrives wait."""
        self._is_paused = True

    def resume_reading(self) -> None:
        """Take in what has waited."""
        self._is_paused = False
        for _ in self._arriving:
            self._loop.call_soon(self._arrive)

    def close(self) -> None:
        """End the connection here, and at the other end after what was sent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon(self.protocol.connection_lost, None)
            self._send(None)

    def abort(self) -> None:
        """End the connection at both ends; what is on its way is lost."""
        for each in (self, self.peer):
            if not each._is_closed:
                each._is_closed = True
                self._loop.call_soon(each.protocol.connection_lost, None)

    def is_closing(self) -> bool:
        """Whether it has ended."""
        return self._is_closed


class Simulation:
    """One run: its loop, its choices, its invariants, and the tasks that may be cancelled.

    Attributes:
        choices: Of this run.
        loop: That runs.
        most_steps: Of a run; one that takes more does not end.
        is_calm: Whether nothing fails any more.
    """

    def __init__(
        self,
        choices: Choices,
        *,
        disorder: float = 0.3,
        haste: float = 0.02,
        cancels: float = 0.01,
        cuts: float = 0.0,
        steps: int = 4_000,
    ) -> None:
        """Take the choices and how often they are other than an ordinary loop's, and the most steps of a run."""
        self.choices = choices
        self.loop = SimulatedLoop(choices, disorder=disorder, haste=haste, cuts=cuts)
        self.loop.before_step = self._before_step
        self._cancels = cancels
        self.is_calm = False
        self.most_steps = steps
        self._invariants: list[tuple[str, Callable[[], str | None]]] = []
        self._may_be_cancelled: list[asyncio.Task[Any]] = []
        self._all: set[asyncio.Task[Any]] = set()
        self._at_end = ExitStack()
        self._lines: dict[str, list[Callable[[dict[str, Any]], str | None]]] = {}

    @property
    def living(self) -> int:
        """How many of the tasks that were started have not ended."""
        return len(self._all)

    def holds(self, name: str, wrong: Callable[[], str | None]) -> None:
        """Check after every step that ``wrong`` has nothing to say."""
        self._invariants.append((name, wrong))

    def rests(self, name: str, wrong: Callable[[], str | None]) -> None:
        """As ``holds``, whenever nothing is ready: all has been done that waits for no time and for nobody else."""
        self.holds(name, lambda: None if self.loop._ready else wrong())  # type: ignore[attr-defined]

    def says(self, event: str, wrong: Callable[[dict[str, Any]], str | None]) -> None:
        """Check of each line of the log of an event that ``wrong`` has nothing to say of its fields."""
        self._lines.setdefault(event, []).append(wrong)

    def says_once(self, event: str, since: Callable[[dict[str, Any]], Hashable], *which: str) -> None:
        """Check that what lasts is said once: by a process, with the fields ``which``, until ``since`` is another."""
        said: dict[Any, Hashable] = {}

        def wrong(fields: dict[str, Any]) -> str | None:
            key, now = (_PROCESS.get(), *(fields[name] for name in which)), since(fields)
            before, said[key] = said.get(key, said), now
            return f"{fields} again" if before == now else None

        self.says(event, wrong)

    def at_end(self, undo: Callable[[], Any]) -> None:
        """Undo something when the run is over, however it ends."""
        self._at_end.callback(undo)

    def instead(self, where: Any, **stand_ins: Any) -> None:
        """Have stand-ins take the places of what a module or class has, until the run is over."""
        for name, stand_in in stand_ins.items():
            had = vars(where).get(name, self)
            if had is self:  # it is inherited
                self._at_end.callback(delattr, where, name)
            else:
                self._at_end.callback(setattr, where, name, had)
            setattr(where, name, stand_in)

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
            self.check("nobody is cancelled whom nobody cancels", not task.cancelled())

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

    def calm_down(self) -> None:
        """Let nothing fail any more, so that what is left to do can be done."""
        self.is_calm = True
        self._cancels = self.loop._cuts = self.loop.lacks_threads = 0.0

    def process(self, clock: Clock | None = None) -> Process:
        """Return a process of its own, for what may be killed; on a host with a clock of its own if one is given."""
        return Process(self.loop, clock)

    def judged(
        self, work: Callable[P, Coroutine[Any, Any, T]], *may: type[Exception]
    ) -> Callable[P, Coroutine[Any, Any, T]]:
        """Return ``work`` that may fail by such errors alone, where the program lives on after any."""

        async def judge(*arguments: P.args, **named: P.kwargs) -> T:
            try:
                return await work(*arguments, **named)
            except BreachError:
                raise
            except Exception as error:
                self.check("nothing fails unseen", isinstance(error, may), repr(error))
                raise

        return judge

    async def boundary(
        self,
        answer: Callable[[], T],
        *failures: type[Exception] | Exception,
        may_be_silent: bool = False,
        may_repeat: bool = False,
    ) -> T:
        """Ask something beyond the process: it may answer late, refuse, or answer in vain after it took effect.

        Args:
            answer: Takes effect, and returns the answer.
            failures: Raised before that, or after it as if the answer had been lost.
            may_be_silent: Whether it may leave the question open, before or after it took effect, for longer than
                anybody waits.
            may_repeat: Whether what was asked may take effect twice, as a request that is sent again on its way.
        """
        late = self.choices.below(3)
        late_s = 0.01 * (1 + self.choices.below(8)) if late else 0.0
        await asyncio.sleep(late_s if late == 1 else 0.0)
        ways = 2 * (len(failures) + may_be_silent) + may_repeat
        outcome = self.choices.below(1 + ways, often=0.4) if ways and not self.is_calm else 0
        if not outcome:
            found = answer()
            if late == 2:  # meanwhile it may be so no longer
                await asyncio.sleep(late_s)
            return found
        which, effect = divmod(outcome - 1, 2)
        if which == len(failures) + may_be_silent:
            answer()
            return answer()
        if effect:
            answer()
            await asyncio.sleep(0)
        if which == len(failures):
            await asyncio.sleep(SILENT_S)
            raise TimeoutError
        raise failures[which]

    def run(self, play: Coroutine[Any, Any, None]) -> None:
        """Run to the end.

        Raises:
            BreachError: An invariant did not hold, a task failed unseen, or the run did not end.
        """
        loop = self.loop
        try:
            with (
                _virtual_world(loop, self.choices.below(ENTROPIES)),
                patch.object(warnings, _UNAWAITED, loop.note_unawaited),
                patch.object(Log, "emit", self._logged),
            ):
                main = loop.create_task(play)
                loop.run_until_complete(main)
                self._look()
                if (failure := loop.failure or loop.unseen()) is not None:
                    raise failure
                loop.forget_ended()
                if loop.failure is not None:
                    raise loop.failure
        finally:
            _dispose(loop)
            self._at_end.close()

    def _logged(self, level: int, event: str, fields: dict[str, Any], *_: Any, **__: Any) -> None:
        error = sys.exception()
        for wrong in self._lines.get(event, ()):
            if (said := wrong(fields)) is not None and self.loop.failure is None:
                self.loop.failure = BreachError("the log says what is so, and once", f"{event}: {said}")
        if isinstance(error, OURS) and not isinstance(error, BreachError) and event not in OF_OTHERS:
            self.loop.failure = self.loop.failure or BreachError("nothing fails unseen", f"{event}: {error!r}")

    def _before_step(self) -> None:
        self._look()
        if self.loop.steps > self.most_steps:
            raise BreachError("everything ends", f"not over after {self.most_steps} steps")
        victims = self._may_be_cancelled
        if victims and (victim := self.choices.below(1 + len(victims), often=self._cancels)):
            victims.pop(victim - 1).cancel()  # and is no longer one of them when it ends

    def _look(self) -> None:
        for name, wrong in self._invariants:
            said = wrong()
            if said is not None:
                raise BreachError(name, said)


@contextmanager
def _virtual_world(loop: SimulatedLoop, entropy: int) -> Iterator[None]:
    """Have clocks tell the loop's time, and what is drawn at random follow from the run; garbage waits for its end."""

    def utc_s() -> float:
        process = _PROCESS.get()
        return EPOCH_S + loop.time() + (process.clock.ahead_s if process is not None else 0.0)

    def in_ns(clock_s: Callable[[], float]) -> Callable[[], int]:
        return lambda: round(clock_s() * 1e9)

    drawn = random.Random(entropy)
    instead: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "perf_counter", loop.time),
        (time, "time", utc_s),
        (time, "sleep", loop.sleep),
        (time, "clock_gettime", lambda _: loop.time()),
        (time, "monotonic_ns", in_ns(loop.time)),
        (time, "time_ns", in_ns(utc_s)),
        (os, "urandom", drawn.randbytes),
        (random, "_urandom", drawn.randbytes),  # behind ``SystemRandom`` and ``secrets``
    ]
    real = [(module, name, getattr(module, name)) for module, name, _ in instead]
    state, is_collecting = random.getstate(), gc.isenabled()
    random.seed(entropy)
    gc.disable()
    for module, name, function in instead:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in real:
            setattr(module, name, function)
        random.setstate(state)
        if is_collecting:
            gc.enable()


def _dispose(loop: SimulatedLoop) -> None:
    """End what a run has left, while its loop runs: what is only cleared away later would ask for a loop of its own."""
    loop.before_step = None
    loop.failure = None
    loop.dead.clear()
    loop.set_exception_handler(lambda *_: None)
    asyncio.events._set_running_loop(loop)
    try:
        with (
            patch.object(sys, "unraisablehook", lambda _: None),
            patch.object(warnings, _UNAWAITED, lambda _: None),  # what was killed before it began
        ):
            for _ in range(MOST_ROUNDS):  # what is ended may begin others, and leave generators to be ended
                if not loop._tasks and not loop._ready:  # type: ignore[attr-defined]
                    break
                _end_all(loop)
    finally:
        asyncio.events._set_running_loop(None)
    loop.close()


def _end_all(loop: SimulatedLoop) -> None:
    """Cancel all tasks, let them end, and let go of them."""
    ready: Any = loop._ready  # type: ignore[attr-defined]
    timers: list[Any] = loop._scheduled  # type: ignore[attr-defined]
    for task in loop._tasks:
        task.cancel()
        work = task.get_coro()
        if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()  # its process was killed before it began
    for step in range(1, MOST_DISPOSED):
        if not ready and not timers:
            break
        if step % CANCELLED_AGAIN == 0:  # whoever took it for a time limit's
            for task in loop._tasks:
                task.cancel()
        handle = ready.popleft() if ready else heapq.heappop(timers)
        if not handle._cancelled:
            with suppress(BaseException):  # what is left over may fail as it likes
                handle._run()
    for task in loop._tasks:  # what waits in its ``finally``, or is never tired of beginning again
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        if not task.done() and inspect.iscoroutine(work := task.get_coro()):
            _end(work)
    loop._process_of.clear()
    loop._tasks.clear()


def _end(work: Coroutine[Any, Any, Any]) -> None:
    """End a coroutine, however often it waits on its way out; what SQLAlchemy suspends in it ends with it."""
    for _ in range(CANCELLED_AGAIN):
        with suppress(BaseException):
            work.close()
            return
