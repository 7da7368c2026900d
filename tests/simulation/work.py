"""Work that workers do: its messages in Celery's broker, claims, the sweeper, and messages that are not settled.

Real are ``WorkQueue``, ``Sweeper``, ``TaskQueue``, ``Worker``, and what ``PatientConsumer`` makes of a message that the
broker was not told to forget. What the table says in SQL is said of rows in memory; the broker gives a connection one
message at a time, and the next once that is settled, as Celery asks it to. A worker's own thread waits as a greenlet
here.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from celery.worker.consumer import consumer as consumer_module
from sqlalchemy.util import await_only, greenlet_spawn

from services.contracts.background import (
    Draft,
    KeyReusedError,
    Submitted,
    TooManyPendingError,
    WorkFailure,
    WorkFailureCode,
    WorkState,
)
from services.contracts.identity import Identity, Role
from services.kit.background import worker as worker_module
from services.kit.background.queue import TaskQueue
from services.kit.background.work_queue import Sweeper, WorkQueue
from services.kit.background.worker import Worker
from services.kit.ids import new_id
from services.kit.problems import ProblemError
from services.kit.repeating import repeat
from services.kit.worker_pulse import PatientConsumer
from tests.simulation.loop import Process, Simulation

LEASE_S, SWEEP_S, RESEND_S = 10.0, 2.0, 3.0
MOST_ATTEMPTS, MOST_PENDING = 3, 4
TENANTS = ("acme", "beta")
SLACK_S = 0.5
"""What an answer of the database may be late."""
CALM_S = 300.0
"""Within this time all work has ended, if nothing fails any more."""
AWAY = ConnectionError("lost")
WRONG_S = 8.0
"""Once in so many seconds the database refuses statements for good."""
ENDED = (WorkState.SUCCEEDED, WorkState.FAILED, WorkState.CANCELLED)
CONFIGURATION = SimpleNamespace(
    broker_connection_retry_on_startup=True, broker_connection_retry=True, broker_connection_max_retries=100
)
"""Of Celery, as far as a worker that connects reads it."""


@dataclass
class _Row:
    """A piece of work.

    Attributes:
        lasts_s: How long it takes; with ``is_wrong`` its problem cannot be solved.
        claims: All that it was ever claimed with.
        settled: How often an end was written.
    """

    id: str
    lasts_s: float
    is_wrong: bool
    tenant_id: str = TENANTS[0]
    state: WorkState = WorkState.QUEUED
    claim: str | None = None
    lease_until_s: float = 0.0
    attempts: int = 0
    enqueued_s: float = -1e9
    result: Any = None
    failure: WorkFailure | None = None
    claims: list[str] = field(default_factory=list[str])
    settled: int = 0

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class _WrongError(Exception):
    """The database refuses a statement for good."""


class _Store:
    """The table, in the place of a ``WorkStore``."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.rows: dict[str, _Row] = {}
        self.working: dict[str, Process] = {}
        self.has_failed = False
        self.refused: set[Process] = set()
        self.away_until_s = 0.0
        self.looked = 0
        self.renewed: dict[str, tuple[float, Any]] = {}
        self.keyed: dict[str, tuple[str, bytes]] = {}
        self.taken: set[str] = set()
        self.begun_s = defaultdict[str, float](lambda: -1.0)

    @property
    def now_s(self) -> float:
        """Virtual seconds."""
        return self._simulation.loop.time()

    async def _ask(self, statement: Any, *, may_repeat: bool = False, by_worker: bool = False) -> Any:
        worker = self._simulation.loop.process_now() if by_worker else None
        self._simulation.check("what is refused for good is not asked again", worker not in self.refused)
        failures = [AWAY, _WrongError()] if worker is not None and self.now_s % WRONG_S < 1.0 else [AWAY]
        try:
            if self.now_s < self.away_until_s:
                await asyncio.sleep(0.1)
                raise AWAY
            return await self._simulation.boundary(statement, *failures, may_repeat=may_repeat)
        except (ConnectionError, _WrongError) as error:
            self.has_failed = True
            if worker is not None and isinstance(error, _WrongError):
                self.refused.add(worker)
            raise

    async def submitted(self, tenant_id: str, key: str, body_sha256: bytes) -> str | None:
        """As of the real one."""
        self._simulation.check("only a key is looked for", bool(key))
        return await self._ask(lambda: self._known(key, body_sha256))

    def _known(self, key: str | None, body_sha256: bytes) -> str | None:
        found = self.keyed.get(key or "")
        if found is not None and found[1] != body_sha256:
            raise KeyReusedError
        return None if found is None else found[0]

    async def submit(self, draft: Draft, most: int) -> Submitted:
        """As of the real one."""
        return await self._ask(lambda: self._submit(draft, most))

    def _submit(self, draft: Draft, most: int) -> Submitted:
        if known := self._known(draft.idempotency_key, draft.body_sha256):
            return Submitted(known, is_new=False)
        mine = [each for each in self.rows.values() if each.tenant_id == draft.tenant_id and each.state not in ENDED]
        if len(mine) >= most:
            raise TooManyPendingError
        self.rows[draft.id] = cast(Any, draft.problem)(draft.id, draft.tenant_id)
        if draft.idempotency_key is not None:
            self.keyed[draft.idempotency_key] = draft.id, draft.body_sha256
        return Submitted(draft.id, is_new=True)

    async def summary(self, work_id: str) -> _Row:
        """As of the real one."""
        return await self._ask(lambda: self.rows[work_id])

    async def find(self, work_id: str, tenant_id: str | None) -> _Row | None:
        """As of the real one."""
        self._simulation.check("the database is asked for nothing that cannot be an id", work_id in self.rows, work_id)
        row = self.rows[work_id]
        return await self._ask(lambda: row if tenant_id in (None, row.tenant_id) else None)

    def record(self, row: _Row) -> _Row:
        """As of the real one."""
        return row

    async def listed(self, tenant_id: str, states: Any, cursor: str | None, limit: int, also: Any) -> list[_Row]:
        """As of the real one."""
        is_one = cursor is None or cursor in self.rows
        self._simulation.check("the database is asked for nothing that cannot be an id", is_one, str(cursor))
        mine = [row for name, row in self.rows.items() if row.tenant_id == tenant_id and name < (cursor or "t")]
        return await self._ask(lambda: mine[::-1][:limit])

    async def cancel(self, work_id: str, caller: Identity) -> bool:
        """As of the real one."""
        return await self._ask(lambda: self._cancel(self.rows[work_id], caller.tenant_id))

    def _cancel(self, row: _Row, tenant_id: str) -> bool:
        if row.state in ENDED or row.tenant_id != tenant_id:
            return False
        row.state, row.claim = WorkState.CANCELLED, None
        return True

    async def mark_enqueued(self, work_id: str) -> None:
        """As of the real one."""
        self._simulation.check("what was sent counts as sent, and nothing else", work_id in self.taken, work_id)
        await self._ask(lambda: setattr(self.rows[work_id], "enqueued_s", self.now_s), may_repeat=True)

    async def fairest(self, work_id: str) -> str:
        """As of the real one."""
        return await self._ask(lambda: self._fairest(work_id), by_worker=True)

    def _fairest(self, work_id: str) -> str:
        waiting = [row for row in self.rows.values() if row.state is WorkState.QUEUED]
        return min(waiting, key=lambda row: (self.begun_s[row.tenant_id], row.id)).id if waiting else work_id

    async def claim(self, work_id: str, claim: str, lease_s: float) -> Any:
        """As of the real one."""
        return await self._ask(lambda: self._claim(self.rows[work_id], claim, lease_s), by_worker=True)

    def _claim(self, row: _Row, claim: str, lease_s: float) -> Any:
        is_abandoned = row.state is WorkState.RUNNING and row.lease_until_s < self.now_s
        if row.state is not WorkState.QUEUED and not is_abandoned:
            return None
        row.state, row.claim, row.lease_until_s = WorkState.RUNNING, claim, self.now_s + lease_s
        self.begun_s[row.tenant_id] = self.now_s
        row.attempts += 1
        row.claims.append(claim)
        return SimpleNamespace(id=row.id, attempts=row.attempts)

    async def renew(self, work_id: str, claim: str, lease_s: float, **progress: Any) -> bool:
        """As of the real one."""
        before_s, written = self.renewed.get(claim, (-1e9, None))
        is_due = self.now_s - before_s >= LEASE_S / 5 - 0.1 or progress != written
        self._simulation.check("a claim is renewed when that is due", is_due, f"{work_id}: {self.now_s - before_s}")
        self.renewed[claim] = self.now_s, progress
        return await self._ask(lambda: self._renew(self.rows[work_id], claim, lease_s), may_repeat=True)

    def _renew(self, row: _Row, claim: str, lease_s: float) -> bool:
        if row.state is not WorkState.RUNNING or row.claim != claim:
            return False
        row.lease_until_s = self.now_s + lease_s
        return True

    async def succeed(self, work_id: str, claim: str, result: Any, **_: Any) -> bool:
        """As of the real one."""
        is_answer = not isinstance(result, WorkFailure)
        self._simulation.check("work is told to have failed as it did", is_answer, work_id)
        return await self._ask(
            lambda: self._end(self.rows[work_id], claim, WorkState.SUCCEEDED, result), by_worker=True
        )

    async def fail(self, work_id: str, claim: str, failure: WorkFailure, **_: Any) -> bool:
        """As of the real one."""
        self._simulation.check("work is told to have failed as it did", self._is_true(work_id, failure), failure.code)
        return await self._ask(lambda: self._end(self.rows[work_id], claim, WorkState.FAILED, failure), by_worker=True)

    def _is_true(self, work_id: str, failure: WorkFailure) -> bool:
        return self.rows[work_id].is_wrong is (failure.code is WorkFailureCode.INTERNAL)

    def _end(self, row: _Row, claim: str, state: WorkState, result: Any) -> bool:
        if row.state is not WorkState.RUNNING or row.claim != claim:
            return False
        row.state, row.claim, row.result = state, None, result
        row.settled += 1
        return True

    async def live(self) -> tuple[int, int, float]:
        """As of the real one; the sweeper does not ask which of the two it is, nor for how long it waits."""
        return await self._ask(lambda: (sum(each.state not in ENDED for each in self.rows.values()), 0, 0.0))

    async def release_abandoned(self, max_attempts: int, lease_s: float) -> Sequence[Any]:
        """As of the real one."""
        return await self._ask(lambda: self._release(max_attempts))

    def _release(self, max_attempts: int) -> list[Any]:
        found: list[Any] = []
        for row in self.rows.values():
            if row.state is not WorkState.RUNNING or row.lease_until_s > self.now_s:
                continue
            process = self.working.get(row.claim or "")
            lives = process is not None and process.is_alive and not self.has_failed
            self._simulation.check("who works keeps the claim", not lives, row.id)
            row.claim, row.enqueued_s = None, -1e9
            row.state = WorkState.QUEUED if row.attempts < max_attempts else WorkState.FAILED
            found.append(SimpleNamespace(id=row.id, state=row.state, attempts=row.attempts))
        return found

    async def queued(self, enqueued_before_s: float) -> Sequence[str]:
        """As of the real one."""
        before_s = self.now_s - enqueued_before_s
        waiting = [each for each in self.rows.values() if each.state is WorkState.QUEUED]
        return await self._ask(lambda: [each.id for each in waiting if each.enqueued_s <= before_s])

    async def forget_older(self, tenant_id: str, *, keep: int) -> None:
        """As of the real one; there are not so many here."""
        await asyncio.sleep(0)

    async def forget_ended(self, keep_days: float) -> int:
        """As of the real one; nothing is that old here."""
        await asyncio.sleep(0)
        self.looked += 1
        return 0


class _Broker:
    """Celery's broker, as it is reached to send messages and to ask how many wait."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.waiting: list[str] = []
        self.taken: set[str] = set()

    def send_task(self, task: str, *, args: list[str]) -> None:
        """Take a message; not always, or in vain."""
        outcome = 0 if self._simulation.is_calm else self._simulation.choices.below(4, often=0.3)
        if outcome != 1:
            self.waiting.append(args[0])
        if outcome in (1, 2):
            raise OSError("the broker is away")
        self.taken.add(args[0])

    async def llen(self, _: str) -> int:
        """Return how many messages wait."""
        return await self._simulation.boundary(lambda: len(self.waiting), AWAY)

    def lose(self) -> None:
        """Forget all messages, as a broker does that starts without its disk."""
        self.waiting.clear()


class _Message:
    """A message at a worker; the broker forgets it once that is told, and has it back when the connection ends."""

    def __init__(self, simulation: Simulation, work_id: str) -> None:
        self._simulation = simulation
        self.work_id = work_id
        self.acknowledged = False

    def ack_log_error(self) -> None:
        """As of kombu: a failure is logged, and that is all."""
        if self._simulation.is_calm or not self._simulation.choices.below(2, often=0.1):
            self.acknowledged = True


class _Connection:
    """A connection to the broker, which takes a while: whoever makes it is called each second.

    Attributes:
        waited: How often somebody was.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._draw = simulation.choices.below
        self.waited = 0

    def ensure_connection(self, *_: Any, callback: Any = None, **__: Any) -> _Connection:
        """As of kombu, which uses it itself, too, and then calls nobody."""
        for second in range(self._draw(4)):
            self.waited = 1 + second
            if callback is not None:
                callback()
        return self


class _Consumer(PatientConsumer):
    """The consumer of a worker, as far as settling and connecting go."""

    def __init__(self, simulation: Simulation, loop: Any) -> None:
        self._simulation = simulation
        self.app = SimpleNamespace(pulse=SimpleNamespace(beat=self._beat), conf=CONFIGURATION)
        self.first_connection_attempt = False
        self.broker_connection_retry_attempt = self._beats = self._asked = 0
        self.failed: list[BaseException] = []
        self.settled = asyncio.Event()
        self.hub = SimpleNamespace(call_soon=lambda work: loop.call_soon(self._run, work))

    def _beat(self) -> None:
        self._beats += 1

    def _ask(self) -> None:
        self._asked += 1

    def connect(self) -> None:
        """Connect to the broker, and once more as kombu does by itself where what it has is lost."""
        before, connection = (self._beats, self._asked), _Connection(self._simulation)
        with patch.object(consumer_module, "maybe_shutdown", self._ask):
            made = self.ensure_connected(connection)
        waited = self._beats - before[0], self._asked - before[1]
        check = self._simulation.check
        check("who waits for the broker has a pulse, and can be ended", waited == (connection.waited,) * 2, str(waited))
        made.ensure_connection()

    def _run(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # the hub hands it to the worker, which connects again
            self.failed.append(error)
        self.settled.set()


class _Loop:
    """The event loop of a worker's own thread, which the simulation's stands in for.

    Attributes:
        is_stopped: Whether its thread has been told to end.
    """

    is_stopped = has_joined = False

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def run_forever(self) -> None:
        """Run, in the thread."""

    def call_soon_threadsafe(self, work: Any) -> None:
        """Run something there."""
        work()

    def stop(self) -> None:
        """Have the thread end."""
        self.is_stopped = True

    def join(self) -> None:
        """Wait for the thread's end."""
        self.simulation.check("a thread is waited for that ends", self.is_stopped)
        self.has_joined = True

    def close(self) -> None:
        """Close it."""
        self.simulation.check("a loop is closed when its thread has ended", self.has_joined)


def _worker(simulation: Simulation, store: _Store, process: Process) -> Worker:
    """Return a worker whose thread is the simulation's."""

    def lost() -> None:
        mine = cast(Any, made)._claimed
        row = store.rows[mine[0]]
        simulation.check("a worker ends when its claim is lost", row.claim != mine[1], str(mine))
        process.kill()

    def answer(work: Any, _: Worker) -> Any:
        row, claim = store.rows[work.id], cast(Any, made)._claimed[1]
        store.working[claim] = process
        simulation.check("work is done by who has claimed it", claim in row.claims, row.id)
        await_only(asyncio.sleep(row.lasts_s))
        made.progress = {"share": 1.0}
        store.working.pop(claim)
        if row.is_wrong:
            raise ArithmeticError("a fault of ours")
        return {"of": row.id}

    def written() -> None:
        cast(Any, process).written += 1

    made = Worker(
        "solve",
        cast(Any, store),
        answer,
        lease_s=LEASE_S,
        took="solve_s",
        is_away=lambda error: isinstance(error, ConnectionError),
        on_lost_claim=lost,
        on_written=written,
    )
    return made


def _thread(*, target: Any, **_: Any) -> Any:
    return SimpleNamespace(start=lambda: None, join=target.__self__.join)


def _threadsafe(work: Coroutine[Any, Any, Any], loop: Any) -> Any:
    """Run what another thread would, in the place of ``asyncio.run_coroutine_threadsafe``."""
    loop.simulation.check("nothing is asked of a thread that ends", not loop.is_stopped)
    task = loop.simulation.loop.create_task(work)

    async def joined() -> Any:
        await asyncio.wait([task])
        return task.result()

    return SimpleNamespace(result=lambda: await_only(joined()), cancel=task.cancel)


async def _work(simulation: Simulation, store: _Store, broker: _Broker, process: Process) -> None:
    """Take one message after the other, each once the last one is settled or the connection is a new one."""
    worker, consumer = _worker(simulation, store, process), _Consumer(simulation, simulation.loop)
    consumer.connect()
    held: list[_Message] = []
    simulation.at_end(held.clear)
    cast(Any, process).held = held
    while True:
        await asyncio.sleep(0.2)
        if held or not broker.waiting:
            continue
        message = _Message(simulation, broker.waiting.pop(0))
        held.append(message)
        before, told = worker._claimed, cast(Any, process).written
        try:
            await greenlet_spawn(worker.run, message.work_id)
        except _WrongError:
            store.refused.discard(process)
        except ConnectionError:  # the database was away for too long; Celery settles the message all the same
            lasts = store.now_s < store.away_until_s + 1.0 or store.has_failed
            simulation.check("an answer is kept while the database is away", lasts, message.work_id)
        is_told = cast(Any, process).written == told + (worker._claimed != before)
        simulation.check("it is told when an answer was written, or could not be", is_told, message.work_id)
        consumer.settled.clear()
        consumer.call_soon_ack(message.ack_log_error)
        await consumer.settled.wait()
        if message.acknowledged:
            held.remove(message)
        if consumer.failed:  # connected anew: what it held is to be had again
            consumer.failed.clear()
            consumer.connect()
            broker.waiting += [each.work_id for each in held]
            held.clear()


async def _keep_working(simulation: Simulation, store: _Store, broker: _Broker) -> None:
    """Have a worker run; when it is killed, the broker has its messages back, and another one begins."""
    draw = simulation.choices.below
    while True:
        process = simulation.process()
        cast(Any, process).held, cast(Any, process).written = [], 0
        process.start(_work(simulation, store, broker, process))
        while process.is_alive:
            await asyncio.sleep(0.5)
            if not simulation.is_calm and draw(2, often=0.03):
                process.kill()
        broker.waiting += [each.work_id for each in cast(Any, process).held]
        await asyncio.sleep((0.1, 1.0, 8.0)[draw(3)])


class _Noted:
    """The queue to which new work is sent, once.

    Attributes:
        sent: Whether that worked, by work.
    """

    def __init__(self, simulation: Simulation, queue: TaskQueue) -> None:
        self._simulation, self._queue = simulation, queue
        self.sent: dict[str, bool] = {}

    async def send(self, work_id: str) -> bool:
        """As of the real one."""
        self._simulation.check("only new work is sent by whoever submits it", work_id not in self.sent, work_id)
        self.sent[work_id] = False
        self.sent[work_id] = await self._queue.send(work_id)
        return self.sent[work_id]


def _of(tenant: str) -> Identity:
    return Identity(tenant_id=tenant, role=Role.USER, key_id="key")


async def _submit(simulation: Simulation, store: _Store, works: WorkQueue, number: int) -> None:
    """Submit work; with a key again and again, or with the key of other work."""
    draw, check, tenant = simulation.choices.below, simulation.check, TENANTS[simulation.choices.below(2, often=0.3)]
    key = f"k{number}" if draw(2) else None
    lasts_s, is_wrong = (0.5, 3.0, 25.0)[draw(3)], draw(8) == 1

    async def resolve() -> Any:
        check("nothing is resolved again", key not in store.keyed or store.has_failed, str(key))
        await asyncio.sleep(0.1 * draw(4, often=0.2))
        return lambda work_id, tenant_id: _Row(work_id, lasts_s, is_wrong, tenant_id)

    told: set[str] = set()
    for attempt in range(1 + (draw(4) if key else 0)):
        body = b"other" if attempt and draw(4) == 1 else b"body"
        try:
            row, is_new = await works.submit(_of(tenant), key, body, resolve)
        except ConnectionError:
            check("who answers is not away", store.has_failed)
            continue
        except ProblemError as problem:
            is_right = problem.status == 429 or (problem.status == 422 and key in store.keyed)
            check("who is refused is told a reason that is true", is_right, str(problem))
            continue
        check("a key is one piece of work", not told or (row.id in told and not is_new), f"{key}: {told}, {row.id}")
        told.add(row.id)
        check("a key is one piece of work", body == b"body" or store.keyed[str(key)][1] == body, str(key))
        is_sent = is_new and cast(Any, works)._queue.sent[row.id]
        is_marked = store.rows[row.id].enqueued_s >= 0 or store.rows[row.id].attempts > 0
        check("what was sent counts as sent, and nothing else", is_marked or not is_sent, row.id)


async def _steer(simulation: Simulation, store: _Store, works: WorkQueue) -> None:
    """Look for work and cancel it, by an id that may be another tenant's or none."""
    draw, check, tenant = simulation.choices.below, simulation.check, TENANTS[simulation.choices.below(2, often=0.3)]
    await asyncio.sleep(0.5 * draw(12))
    names = [*store.rows, "no id", new_id("other")]
    name = names[draw(len(names))]
    row = store.rows.get(name)
    is_mine = row is not None and row.tenant_id == tenant
    try:
        match draw(3):
            case 0:
                found = await works.find(name, _of(tenant))
                check("who looks for work finds his own", is_mine and found is row, name)
            case 1:
                asked: dict[str, Any] = {"cursor": name, "limit": 1, "states": (), "tenant": None}
                rows, after = await works.page(_of(tenant), **asked, shown=lambda row: row)
                check("a page is of what was asked for", row is not None and len(rows) <= 1, name)
                check("a page has one after it if there is more", after is None or after == rows[-1].id, str(after))
            case _:
                found = await works.cancel(name, _of(tenant))
                check("what is cancelled has ended so", is_mine and found.state is WorkState.CANCELLED, f"{found}")
    except ConnectionError:
        check("who answers is not away", store.has_failed)
    except ProblemError as problem:
        is_over = row is not None and row.state in ENDED
        is_right = {404: not is_mine, 409: is_mine and is_over, 422: row is None}.get(problem.status, False)
        check("who is refused is told a reason that is true", is_right, f"{name}: {problem}")


async def play(simulation: Simulation) -> None:
    """Work is submitted, messages are lost or doubled, workers die; then each piece of work has ended, once."""
    draw = simulation.choices.below
    simulation.most_steps = 20_000
    store, broker = _Store(simulation), _Broker(simulation)
    here = SimpleNamespace(
        run_coroutine_threadsafe=_threadsafe, sleep=asyncio.sleep, new_event_loop=lambda: _Loop(simulation)
    )
    threads = SimpleNamespace(Thread=_thread)
    clocks = SimpleNamespace(monotonic=time.monotonic, sleep=lambda s: await_only(asyncio.sleep(s)))
    simulation.instead(worker_module, asyncio=here, time=clocks, threading=threads)
    store.taken = broker.taken
    queue = TaskQueue(cast(Any, broker), cast(Any, broker), "solves", "solve")
    works = WorkQueue("solve", cast(Any, store), cast(Any, _Noted(simulation, queue)), MOST_PENDING)
    settings = SimpleNamespace(max_attempts=MOST_ATTEMPTS, lease_s=LEASE_S, resend_s=RESEND_S, keep_days=30.0)
    sweeper = Sweeper("solve", cast(Any, store), queue, cast(Any, settings))
    running = [
        simulation.loop.create_task(
            repeat(simulation.judged(sweeper.sweep, ConnectionError), SWEEP_S, failed="sweep.failed")
        )
    ]
    running += [simulation.loop.create_task(_keep_working(simulation, store, broker)) for _ in range(1 + draw(2))]
    simulation.holds("work ends once", lambda: next((k for k, each in store.rows.items() if each.settled > 1), None))
    for number in range(1 + draw(6)):
        await asyncio.sleep(0.5 * draw(8))
        simulation.start(_submit(simulation, store, works, number))
        if draw(3) == 1:
            simulation.start(_steer(simulation, store, works))
        if draw(8) == 1:
            broker.lose()
        if draw(8) == 1:
            store.away_until_s = store.now_s + (5.0, 14.0, 70.0)[draw(3)]
    await asyncio.sleep(draw(20))
    simulation.calm_down()
    await asyncio.sleep(CALM_S)
    left = [f"{each.id}: {each.state.value}" for each in store.rows.values() if each.state not in ENDED]
    simulation.check("work that was accepted ends", not left, str(left))
    alone = _Store(simulation)
    alone.rows["w"] = _Row("w", 1.0, False)
    await Sweeper("solve", cast(Any, alone), None, cast(Any, settings)).sweep()  # of work that workers look for
    simulation.check("what is old is looked for", alone.looked == 1 and store.looked > 0)
    last = _worker(simulation, store, simulation.process())
    await greenlet_spawn(last.close, asyncio.sleep(0))
    wrong = [each.id for each in store.rows.values() if each.result == {"of": each.id} and each.is_wrong]
    simulation.check("work that was accepted ends", not wrong, str(wrong))
    simulation.check("no message is left", not broker.waiting, str(broker.waiting))
    for task in running:
        task.cancel()
