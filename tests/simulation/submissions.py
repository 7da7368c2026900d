"""Submissions on their way: the gateway's gatherer, a request between processes, admission's checks and commits."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import asyncpg
import orjson

from gateway.gather import ATTEMPTS, Entry, Gatherer, _NotAnsweredError
from services.admission import service
from services.admission.capacity import CapacityCache, DeviceKind
from services.admission.service import Committer, References, Submissions
from services.admission.submissions import Draft, refused
from services.contracts.jobs import SubmissionAnswer, SubmissionEntry
from services.db.engine import is_connection_error
from services.kit.disk import DiskWatch
from services.kit.problems import ProblemError
from tests.simulation.kept import kept
from tests.simulation.loop import Simulation

GROUPS, GROUP_BYTES = 2, 1_000
PATIENCE_S = 0.4
LONG = "x" * 600
KNOWN_S = 0.1
"""Capacity is not read again for so long."""
LARGE = 99
THERE, GONE = "there", "gone"
"""A job, a secret or a cell that there is, and one that there is not."""
LOST = asyncpg.ConnectionDoesNotExistError("connection was closed")  # pyright: ignore[reportAttributeAccessIssue]

_GROUP: ContextVar[tuple[str, ...]] = ContextVar("group", default=())
"""The bodies of the entries that are answered together, in the task that does so."""


class _Database:
    """What is on disk: jobs by id, and the submissions that have a key."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.jobs: dict[str, str] = {}
        self.keyed: dict[str, str] = {}
        self.told = 0
        self.has_failed = False
        self.failed: set[str] = set()
        self._asked_s: dict[str, float] = {}
        self._is_refused = False

    async def commit(self, drafts: list[Draft]) -> list[SubmissionAnswer]:
        """Store drafts, all or none; the connection may end before or after that."""
        self._is_refused = False
        for draft in drafts:
            self._asked_s.setdefault(draft.jobs[0].id, self._simulation.loop.time())
        if any(draft.jobs[0].spec.name.startswith("bad") for draft in drafts):
            await asyncio.sleep(0)
            self._is_refused = True
            raise asyncpg.DataError("a value that cannot be held")
        try:
            return await self._simulation.boundary(
                lambda: [self._store(draft) for draft in drafts], LOST, RuntimeError("a fault of ours")
            )
        except Exception as error:
            self.has_failed = True
            self.failed.update(draft.entry.body for draft in drafts)
            self._is_refused = error is not LOST
            raise

    def tell(self) -> None:
        """Say that something was accepted."""
        is_new = len(self.jobs) > self.told or self.has_failed
        self._simulation.check("only what is new is told", is_new)
        self.told = len(self.jobs)

    def _store(self, draft: Draft) -> SubmissionAnswer:
        job_id, key = draft.jobs[0].id, draft.entry.idempotency_key
        if key is not None and self.keyed.setdefault(key, job_id) != job_id:
            return SubmissionAnswer(status=201, body=self.keyed[key], replayed=True)
        if draft.problem is not None:
            return refused(draft.problem)
        self.jobs[job_id] = draft.entry.body
        return SubmissionAnswer(status=201, body=job_id)

    def forget(self, drafts: list[Draft]) -> None:
        """Take in that drafts are given up."""
        waited_s = self._simulation.loop.time() - min(self._asked_s[draft.jobs[0].id] for draft in drafts)
        is_right = self._is_refused or waited_s >= PATIENCE_S - 1e-6
        self._simulation.check("a lost connection is waited for", is_right, f"{waited_s:.2f} s")

    async def close(self) -> None:
        await asyncio.sleep(0)


class _Known:
    """What admission's checks ask the database: capacity, and what jobs refer to.

    Attributes:
        has_large_s: When a node registers that can hold the largest jobs.
        lost: Bodies for whose sake it was asked in vain.
        broken, faulty: Tasks, and bodies, for whose sake it was asked what is our own fault.
        open: Spans that have not ended.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.has_large_s = float("inf")
        self.lost: set[str] = set()
        self.broken: set[Any] = set()
        self.faulty: set[str] = set()
        self.open = 0
        self.capacity = CapacityCache(self._read, KNOWN_S)
        self.references = References(cast(Any, self))

    @property
    def has_large(self) -> bool:
        return self._simulation.loop.time() >= self.has_large_s

    async def _ask(self, answer: Callable[[], Any], what: str) -> Any:
        is_wanted = any(what in body for body in _GROUP.get())
        self._simulation.check("nothing is asked for nobody", is_wanted, f"{what}: {_GROUP.get()}")
        try:
            return await self._simulation.boundary(answer, LOST, RuntimeError("a fault of ours"))
        except Exception as error:
            if error is LOST:
                self.lost.update(_GROUP.get())
            else:
                self.broken.add(asyncio.current_task())
                self.faulty.update(_GROUP.get())
            raise

    async def _read(self) -> Sequence[DeviceKind]:
        is_old = self._simulation.loop.time() - self.capacity._read_at_s > KNOWN_S
        return await self._ask(lambda: self._kinds(), "command" if is_old else "large")

    def _kinds(self) -> Sequence[DeviceKind]:
        return [DeviceKind("a", 80.0, "here", LARGE if self.has_large else 2)]

    async def find(self, tenant: str, project: str | None, words: Collection[str]) -> dict[str, list[str]]:
        """Return the jobs that words mean."""
        return await self._ask(lambda: {each: [each] if each == THERE else [] for each in words}, '"after"')

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[_Known]:
        """Yield a transaction."""
        await self._ask(lambda: None, GONE if not any(THERE in each for each in _GROUP.get()) else THERE)
        yield self

    async def sizes(self, tenant: str, wanted: Sequence[Any]) -> list[tuple[int, str, int | None]]:
        """As of the repository of secrets."""
        return await self._ask(
            lambda: [(each.position, each.name, None if each.name == GONE else 1) for each in wanted], '"secrets"'
        )

    async def cells(self) -> list[Any]:
        """As of the repository of cells."""
        return await self._ask(lambda: [SimpleNamespace(name=THERE)], '"cells"')

    def span(self, *_: Any) -> Any:
        """Begin one."""
        self.open += 1

        def end() -> None:
            self.open -= 1

        return SimpleNamespace(traceparent=None, end=end)


class _Admission:
    """Admission as the gateway's session reaches it."""

    def __init__(self, simulation: Simulation, database: _Database, known: _Known, committer: Committer) -> None:
        self._simulation = simulation
        self._submissions = Submissions(committer, known.capacity, known.references, known.find, DiskWatch(None, 0))
        self.database, self.known = database, known
        self.has_ended = False
        self.sent: dict[str, list[str]] = {}
        self.odd = 0
        self.open = 0
        self.has_failed = False

    def note(self, entries: list[Entry], outcome: str) -> None:
        """Keep what became of a request with these entries."""
        self.has_failed |= outcome != "answered"
        for each in entries:
            self.sent.setdefault(each["key_id"], []).append(outcome)

    def end(self, running: asyncio.Task[None]) -> None:
        """End the process: nobody reaches it any more."""
        self.has_ended = True
        running.cancel()

    def post(self, url: str, *, data: bytes, headers: Any, timeout: Any) -> _Post:
        return _Post(self._simulation, self, orjson.loads(data)["entries"])

    async def answer(self, entries: list[Entry]) -> bytes | None:
        """Return what admission answers; None where it has failed, as its handler has it."""
        if self.has_ended:
            raise asyncio.CancelledError
        _GROUP.set(tuple(each["body"] for each in entries))
        try:
            answers = await self._submissions.submit([SubmissionEntry.model_validate(each) for each in entries])
        except RuntimeError:
            return None
        is_told = asyncio.current_task() not in self.known.broken or any(each.status >= 400 for each in answers)
        self._simulation.check("a fault of ours is told", is_told)
        return orjson.dumps({"answers": [each.model_dump(mode="json") for each in answers]})


class _Post:
    def __init__(self, simulation: Simulation, admission: _Admission, entries: list[Entry]) -> None:
        check = simulation.check
        size = sum(len(each["body"]) for each in entries)
        check("a group is as large as it may be", len(entries) > 0 and (len(entries) == 1 or size <= GROUP_BYTES))
        for each in entries:
            before = admission.sent.get(each["key_id"], ())
            check("nothing is sent again that may be under way", "late" not in before, str(before))
        self.status = 200
        self._simulation, self._admission, self._entries = simulation, admission, entries
        self._body = b""

    async def __aenter__(self) -> _Post:
        self._admission.open += 1
        try:
            return await self._send()
        finally:
            self._admission.open -= 1

    async def _send(self) -> _Post:
        draw = self._simulation.choices.below
        await asyncio.sleep(0.01 * draw(4, often=0.3))
        outcome = draw(5, often=0.3)
        if outcome == 1 or self._admission.has_ended:
            self._admission.note(self._entries, "refused")
            raise aiohttp.ClientConnectorError(
                cast(Any, SimpleNamespace(host="", port=1, ssl=None)), OSError("refused")
            )
        if outcome == 4:
            self._admission.note(self._entries, "failed")
            self.status, self._body = 500, b'{"code": "internal"}'
            return self
        work = self._simulation.start(self._admission.answer(self._entries))
        if outcome in (2, 3) and draw(2):  # admission sees that its caller has left
            self._simulation.loop.call_later(0.01 * draw(4), work.cancel)
        if outcome == 2:  # it arrived, and its answer is lost
            self._admission.note(self._entries, "lost")
            raise aiohttp.ServerDisconnectedError
        if outcome == 3:
            self._admission.note(self._entries, "late")
            await asyncio.sleep(1)
            raise TimeoutError
        await asyncio.wait([work])
        if work.cancelled():  # admission ended, and its connections with it
            self._admission.note(self._entries, "lost")
            raise aiohttp.ServerDisconnectedError
        if (answered := work.result()) is None:
            self._admission.note(self._entries, "failed")
            self.status, self._body = 500, b'{"code": "internal"}'
            return self
        self._body, cut = answered, self._simulation.choices.below(8)
        if 0 < cut <= 2:  # what came is no answer to these
            told = orjson.loads(answered)["answers"]
            self._body = (orjson.dumps({"answers": told[:-1]}), answered[:-1])[cut - 1]
            self._admission.odd += 1
        self._admission.note(self._entries, "failed" if 0 < cut <= 2 else "answered")
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        return self._body


async def play(simulation: Simulation) -> None:
    """Clients submit, some with keys and again, some leave; accepted is stored, once, and everybody is answered."""
    draw = simulation.choices.below
    database = _Database(simulation)
    committer = Committer(cast(Any, database), database.tell, max_jobs=1 + draw(4), patience_s=PATIENCE_S)
    has_begun = asyncio.Event()

    async def run() -> None:
        has_begun.set()
        await committer.run()

    running = simulation.loop.create_task(run())
    await has_begun.wait()  # as admission has by its first request; a task that is cancelled before does nothing at all
    known = _Known(simulation)
    known.has_large_s = 0.01 * draw(12) if draw(2) else float("inf")
    stand_ins = {
        "traces": SimpleNamespace(begin=known.span, within=lambda _: nullcontext()),
        **dict.fromkeys(("SecretRepository", "CellRepository"), lambda connection: connection),
    }
    simulation.instead(service, **stand_ins)
    admission = _Admission(simulation, database, known, committer)
    gatherer = Gatherer(
        cast(Any, admission),
        "http://admission",
        tokens=cast(Any, SimpleNamespace(headers=dict)),
        group_entries=1 + draw(4),
        group_bytes=GROUP_BYTES,
        groups_in_flight=GROUPS,
        timeout_s=5,
    )
    accepted: dict[str, set[str]] = {}
    clients = 1 + draw(8)
    for number in range(clients):
        simulation.start(_client(simulation, gatherer, admission, number, accepted), may_be_cancelled=True)
    if draw(4) == 1:  # admission ends, in whatever it is at
        simulation.loop.call_later(0.01 * draw(12), admission.end, running)
    odd = _judge_the_log(simulation)
    simulation.instead(Gatherer, _next_group=_gathered(simulation, Gatherer._next_group))
    simulation.holds("no more groups are under way than may be", lambda: _too_many(gatherer))
    simulation.rests("what may be sent is sent", lambda: _unsent(gatherer, admission))
    await simulation.everything()
    await simulation.quiet()
    simulation.check("every place of a group is given back", gatherer._free == GROUPS, str(gatherer._free))
    left = kept(gatherer) | ({} if admission.has_ended else kept(committer))
    simulation.check("nothing is kept of who has gone", not left, str(left))
    for body, jobs in accepted.items():
        simulation.check("accepted is kept", jobs <= set(database.jobs), f"{body}: {jobs}")
        if "keyed" in body:
            simulation.check("a key is one job", len(jobs) == 1, f"{body}: {jobs}")
    is_told = database.told == len(database.jobs) or database.has_failed
    simulation.check("what is new is told", is_told or admission.has_ended, f"{database.told} of {database.jobs}")
    stored = list(database.jobs.values())
    for body in set(stored):
        simulation.check("nothing is stored twice", stored.count(body) == 1, f"{body}: {stored.count(body)} jobs")
    simulation.check("what has begun ends", not known.open, str(known.open))
    simulation.check("what is no answer is told", len(odd) == admission.odd, f"{odd}, and {admission.odd} were odd")
    running.cancel()
    await asyncio.wait([running])


def _judge_the_log(simulation: Simulation) -> list[str]:
    """Only a fault of ours is logged as one, and a line names a user if there was one; return what was no answer."""
    odd: list[str] = []

    def expected(_: Any) -> str | None:
        error = sys.exception()
        is_fault = not isinstance(error, _NotAnsweredError | ProblemError) and not is_connection_error(cast(Any, error))
        return None if is_fault else repr(error)

    simulation.says("submission.not_checked", expected)
    simulation.says("submissions.not_carried", expected)
    simulation.says("submissions.not_carried", lambda _: odd.append(repr(sys.exception())))
    simulation.says("submission.answered", lambda said: "there is no user" if "user_id" in said else None)
    return odd


def _body(kind: str, name: str, *, is_there: bool, is_long: bool) -> str:
    """Return the body of a submission, which names what is there or is not."""
    if kind == "invalid":
        return "{" + name
    word = THERE if is_there else GONE
    more: dict[str, dict[str, Any]] = {
        "large": {"gpus": {"min": LARGE}},
        "after": {"after": {"ok": [word]}},
        "secret": {"secrets": [{"name": word, "env": "WORD"}]},
        "cell": {"cells": [word]},
    }
    spec = {"name": name, "command": ["work", LONG] if is_long else ["work"]} | more.get(kind, {})
    return orjson.dumps(spec).decode()


async def _client(
    simulation: Simulation, gatherer: Gatherer, admission: _Admission, number: int, accepted: dict[str, set[str]]
) -> None:
    draw = simulation.choices.below
    kind = ("plain", "keyed", "bad", "large", "after", "secret", "cell", "invalid")[draw(8)]
    is_there = draw(2) == 1
    body = _body(kind, f"{kind}{number}", is_there=is_there, is_long=draw(3) == 1 and kind != "bad")
    may_fail = kind in ("bad", "invalid", "large") or (kind in ("after", "secret", "cell") and not is_there)
    may_succeed = kind not in ("bad", "invalid") and (kind == "large" or not may_fail)
    entry = Entry(
        tenant_id="acme",
        key_id="key",
        idempotency_key=f"k{number}" if kind == "keyed" else None,
        batch=False,
        body=body,
        user_id=None,
        project=None,
    )
    await asyncio.sleep(0.01 * draw(6))
    for attempt in range(3 if kind == "keyed" else 1):
        entry["key_id"] = f"{number}.{attempt}"
        asked_s = simulation.loop.time()
        try:
            answer = await gatherer.submit(entry.copy())
        except ProblemError:
            sent = admission.sent.get(entry["key_id"], [])
            is_final = sent[-1:] in (["failed"], ["late"]) or (kind != "keyed" and sent[-1:] == ["lost"])
            simulation.check("who is refused was not answered", is_final or len(sent) == ATTEMPTS, f"{number}: {sent}")
            continue
        was_away = body in admission.known.lost or body in admission.database.failed
        true = {201: may_succeed, 400: kind == "invalid", 422: may_fail, 503: was_away}
        is_true = (true | {500: body in admission.known.faulty}).get(answer["status"], False)
        if kind == "large":
            has_room = asked_s >= admission.known.has_large_s
            is_true &= (answer["status"] == 201) <= (admission.known.has_large or was_away)
            is_true &= (answer["status"] == 422) <= (not has_room)
        simulation.check("an answer is a true one", is_true, f"{body}: {answer}")
        if answer["status"] == 201:
            accepted.setdefault(body, set()).add(answer["body"])
            if draw(2):
                return


def _gathered(simulation: Simulation, gather: Any) -> Any:
    """Have a group be of those who wait for it, in their order, and as many as it may have."""

    def judge(self: Gatherer) -> Any:
        here = [each for each in self._waiting if not each.answer.done()]
        group = gather(self)
        most = here[: len(group) + 1][: self._group_entries]
        size = sum(len(each.entry["body"]) for each in most)
        is_full = len(most) == len(group) or (bool(group) and size > self._group_bytes)
        is_so = group == here[: len(group)] and is_full
        simulation.check("a group has who waits, and as many as it may", is_so, f"{len(group)} of {len(here)}")
        return group

    return judge


def _too_many(gatherer: Gatherer) -> str | None:
    return None if 0 <= gatherer._free <= GROUPS else str(gatherer._free)


def _unsent(gatherer: Gatherer, admission: _Admission) -> str | None:
    under_way = GROUPS - gatherer._free
    if gatherer._waiting and gatherer._free:
        return f"{len(gatherer._waiting)} wait"
    if not admission.has_failed and under_way != admission.open:
        return f"{under_way} groups are under way, and {admission.open} requests"
    return None
