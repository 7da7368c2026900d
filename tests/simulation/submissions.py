"""Submissions on their way: the gateway's gatherer, a request between processes, admission's shared commits."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import asyncpg
import orjson

from gateway.gather import Entry, Gatherer
from services.admission.commits import Committer
from services.admission.submissions import Draft, DraftJob
from services.contracts.jobs import SubmissionAnswer, SubmissionEntry
from services.kit.problems import ProblemError
from tests.simulation.loop import Simulation

GROUPS = 2


class _Database:
    """What is on disk: jobs by id, and the submissions that have a key."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.jobs: dict[str, str] = {}
        self.keyed: dict[str, str] = {}
        self._draw = simulation.choices.below

    async def commit(self, drafts: list[Draft]) -> list[SubmissionAnswer]:
        """Store drafts, all or none; the connection may end before or after that."""
        if any(draft.entry.body == "bad" for draft in drafts):
            await asyncio.sleep(0)
            raise asyncpg.DataError("a value that cannot be held")
        lost = asyncpg.ConnectionDoesNotExistError("connection was closed")
        return await self._simulation.boundary(lambda: [self._store(draft) for draft in drafts], lost)

    def _store(self, draft: Draft) -> SubmissionAnswer:
        job_id, key = draft.jobs[0].id, draft.entry.idempotency_key
        if key is not None and self.keyed.setdefault(key, job_id) != job_id:
            return SubmissionAnswer(status=201, body=self.keyed[key], replayed=True)
        self.jobs[job_id] = draft.entry.body
        return SubmissionAnswer(status=201, body=job_id)

    def forget(self, drafts: Any) -> None: ...

    async def close(self) -> None:
        await asyncio.sleep(0)


class _Admission:
    """Admission as the gateway's session reaches it."""

    def __init__(self, simulation: Simulation, committer: Committer) -> None:
        self._simulation, self._committer = simulation, committer
        self._numbers = 0
        self.has_ended = False

    def end(self, running: asyncio.Task[None]) -> None:
        """End the process: nobody reaches it any more."""
        self.has_ended = True
        running.cancel()

    def post(self, url: str, *, data: bytes, headers: Any, timeout: Any) -> _Post:
        return _Post(self._simulation, self, orjson.loads(data)["entries"])

    async def answer(self, entries: list[Entry]) -> bytes:
        """Return what admission answers."""
        if self.has_ended:
            raise asyncio.CancelledError
        drafts = [self._draft(entry) for entry in entries]
        answers = await asyncio.gather(*(self._committer.submit([draft]) for draft in drafts))
        return orjson.dumps({"answers": [answer[0].model_dump(mode="json") for answer in answers]})

    def _draft(self, entry: Entry) -> Draft:
        self._numbers += 1
        job = DraftJob(f"job{self._numbers}", cast(Any, SimpleNamespace(hold=False)), "{}", "{}")
        return Draft(SubmissionEntry.model_validate(entry), (job,), hashlib.sha256(entry["body"].encode()).digest())


class _Post:
    status = 200

    def __init__(self, simulation: Simulation, admission: _Admission, entries: list[Entry]) -> None:
        self._simulation, self._admission, self._entries = simulation, admission, entries
        self._body = b""

    async def __aenter__(self) -> _Post:
        draw = self._simulation.choices.below
        await asyncio.sleep(0.01 * draw(4, often=0.3))
        outcome = draw(4, often=0.3)
        if outcome == 1 or self._admission.has_ended:
            raise aiohttp.ClientConnectorError(
                cast(Any, SimpleNamespace(host="", port=1, ssl=None)), OSError("refused")
            )
        work = self._simulation.start(self._admission.answer(self._entries))
        if outcome == 2:  # it arrived, and its answer is lost
            raise aiohttp.ServerDisconnectedError
        if outcome == 3:
            await asyncio.sleep(1)
            raise TimeoutError
        await asyncio.wait([work])
        if work.cancelled():  # admission ended, and its connections with it
            raise aiohttp.ServerDisconnectedError
        self._body = work.result()
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        return self._body


async def play(simulation: Simulation) -> None:
    """Clients submit, some with keys and again, some leave; accepted is stored, once, and everybody is answered."""
    draw = simulation.choices.below
    database = _Database(simulation)
    committer = Committer(cast(Any, database), lambda: None, max_jobs=1 + draw(4), patience_s=0.4)
    running = simulation.loop.create_task(committer.run())
    admission = _Admission(simulation, committer)
    gatherer = Gatherer(
        cast(Any, admission),
        "http://admission",
        tokens=cast(Any, SimpleNamespace(headers=dict)),
        group_entries=1 + draw(4),
        group_bytes=1_000,
        groups_in_flight=GROUPS,
        timeout_s=5,
    )
    accepted: dict[str, set[str]] = {}
    bodies: list[str] = []
    clients = 1 + draw(8)
    for number in range(clients):
        simulation.start(_client(simulation, gatherer, number, accepted, bodies), may_be_cancelled=True)
    if draw(4) == 1:  # admission ends, in whatever it is at
        simulation.loop.call_later(0.01 * draw(12), admission.end, running)
    simulation.holds("no more groups are under way than may be", lambda: _too_many(gatherer))
    await simulation.everything()
    await simulation.quiet()
    simulation.check("every place of a group is given back", gatherer._free == GROUPS, str(gatherer._free))
    for body, jobs in accepted.items():
        simulation.check("accepted is kept", jobs <= set(database.jobs), f"{body}: {jobs}")
        if body.startswith("keyed"):
            simulation.check("a key is one job", len(jobs) == 1, f"{body}: {jobs}")
    stored = list(database.jobs.values())
    for body in set(stored):
        simulation.check("nothing is stored twice", stored.count(body) == 1, f"{body}: {stored.count(body)} jobs")
    running.cancel()
    await asyncio.wait([running])


async def _client(
    simulation: Simulation, gatherer: Gatherer, number: int, accepted: dict[str, set[str]], bodies: list[str]
) -> None:
    draw = simulation.choices.below
    kind = ("plain", "keyed", "bad")[draw(3)]
    body = "bad" if kind == "bad" else f"{kind}{number}"
    bodies.append(body)
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
    for _ in range(3 if kind == "keyed" else 1):
        try:
            answer = await gatherer.submit(entry.copy())
        except ProblemError:
            continue
        if answer["status"] == 201:
            accepted.setdefault(body, set()).add(answer["body"])
            if draw(2):
                return


def _too_many(gatherer: Gatherer) -> str | None:
    return None if 0 <= gatherer._free <= GROUPS else str(gatherer._free)
