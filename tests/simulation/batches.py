"""Batches of requests: serving's files, batches and workers on a real PostgreSQL, with a router that may do anything.

Two serving processes die, lose connections and take over from each other, while lines are refused, fail, are answered
late, or are answered and nobody hears it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import orjson

from services.contracts.batches import BATCH_MODEL_HEADER, Batch, BatchRequest
from services.contracts.identity import Identity, Role
from services.db.engine import create_engine
from services.serving.batches.sending import Sender, Sent
from services.serving.batches.service import Batches
from services.serving.batches.worker import BatchWorker
from services.serving.repository import ServingRepository
from services.serving.repository.batch_work import ClaimedLine
from services.serving.settings import ServingSettings
from tests.simulation import model_servers, postgres, system
from tests.simulation.loop import Simulation
from tests.simulation.postgres import SimulatedPostgres
from tests.support.batches import Known, Table, unlimited
from tests.support.routers import MODEL

STEPS = 60_000
CALM_S = 400
"""A place that has refused lines is asked again within a minute."""
ENDPOINT = "/v1/chat/completions"
PLACES = ("clean", "dirty")
TENANTS = ("acme", "umbra")
ENDED = frozenset({"completed", "cancelled", "expired"})
REFUSED = b'{"id": "refused"}'
_REFUSES = "ALTER TABLE batch_lines ADD CHECK (result NOT LIKE '%\"refused\"%')"
"""An answer that the database does not take, as of too large a number."""
WATCHED = frozenset({"batches", "batch_lines", "batch_files"})
_WRONG = """
SELECT 'counts are those of lines', b.id FROM batches b, LATERAL (
    SELECT count(*) FILTER (WHERE state = 'succeeded') AS completed, count(*) FILTER (WHERE state = 'failed') AS failed,
           count(*) AS total FROM batch_lines WHERE batch_id = b.id) l
 WHERE b.ended_at IS NULL AND (b.completed, b.failed) <> (l.completed, l.failed)
    OR b.status = 'in_progress' AND b.total <> l.total
UNION ALL
SELECT 'a batch that has ended has all its results', id FROM batches
 WHERE status IN ('completed', 'cancelled', 'expired') AND ended_at IS NOT NULL AND completed + failed <> total
UNION ALL
SELECT 'a result is written once', batch_id || ' ' || number FROM batch_lines
 WHERE (state IN ('succeeded', 'failed')) <> (result IS NOT NULL)
UNION ALL
SELECT 'no line is left of what has ended', b.id FROM batches b JOIN batch_lines l ON l.batch_id = b.id
 WHERE b.ended_at IS NOT NULL
UNION ALL
SELECT 'what has ended has its files', b.id FROM batches b WHERE EXISTS (
    SELECT FROM unnest(ARRAY[b.output_file_id, b.error_file_id]) AS f (id)
     WHERE f.id IS NOT NULL AND NOT EXISTS (SELECT FROM batch_files x WHERE x.id = f.id AND x.is_complete))
"""


class World(system.World):
    """Also what the router saw.

    Attributes:
        sends: How often each line came to the router.
        told: How often its sender learned that it must be sent again.
        answers: The answers of servers to each line, by their ids, with their energy, Wh.
        made: Batches whose user was told that they are, with the ``custom_id`` of each line.
    """

    sends: Counter[str]
    told: Counter[str]
    answers: dict[str, dict[str, float]]
    made: dict[str, tuple[Identity, list[str]]]


_LINE: ContextVar[ClaimedLine] = ContextVar("line")
"""What is being sent, in the task that does so."""


class _Sender(Sender):
    """The sender of one process, which sends no line that it awaits."""

    def __init__(self, world: World) -> None:
        super().__init__(cast(Any, _Router(world)), "http://router", cast(Any, SimpleNamespace(headers=_named)))
        self._world, self._here = world, set[str]()

    async def send(self, line: ClaimedLine, endpoint: str, caller: Identity, place: str) -> Sent:
        """As its base."""
        if line.id in self._here:
            self._world.fail("no process sends a line that it awaits", line.id)
        if place not in PLACES or caller.tenant_id not in TENANTS:
            self._world.fail("a line is its tenant's, and sent to a place", f"{line.id}: {caller}, {place}")
        self._here.add(line.id)
        _LINE.set(line)
        try:
            return await super().send(line, endpoint, caller, place)
        finally:
            self._here.discard(line.id)


def _named(caller: Identity) -> dict[str, str]:
    return {"authorization": caller.tenant_id}


class _Router:
    """The router as a session reaches it: it answers, now or later, well or not, or nobody hears it."""

    def __init__(self, world: World) -> None:
        self._world = world

    @asynccontextmanager
    async def post(self, url: str, *, data: bytes, headers: Any, timeout: Any) -> AsyncIterator[Any]:
        """Answer a line."""
        world, line, draw = self._world, _LINE.get(), self._world.simulation.choices.below
        is_own = headers[BATCH_MODEL_HEADER] == line.model and orjson.loads(data)["user"] == line.custom_id
        world.simulation.check("a line is sent as it is", is_own and url == f"http://router{ENDPOINT}", line.id)
        way = 0 if world.simulation.is_calm else draw(10, often=0.4)
        if way == 6:
            key: Any = SimpleNamespace(host="", port=1, ssl=None)
            raise aiohttp.ClientConnectorError(key, OSError("refused"))
        world.sends[line.id] += 1
        if way in (1, 7):
            world.told[line.id] += 1
            yield _answer((429, 404)[way == 7], {"retry-after": str(draw(3))}, b"")
            return
        await asyncio.sleep((0.2, 1.0, 5.0, 90.0)[draw(4)])
        if way == 2:
            world.told[line.id] += 1
            yield _answer(502, {}, b'{"error": {}}')
            return
        number = len(world.answers[line.id])
        wh = 1.0 + number
        told = {"x-request-id": f"{line.id} {number}", "x-wattshift-wh": str(wh)}
        world.answers[line.id][told["x-request-id"]] = wh
        if way == 3:
            raise aiohttp.ServerDisconnectedError
        yield _answer(400 if way == 4 else 200, told, REFUSED if way > 7 else b'{"id": "answer"}')


def _answer(status: int, headers: dict[str, str], content: bytes) -> Any:
    async def read() -> bytes:
        await asyncio.sleep(0)
        return content

    return SimpleNamespace(status=status, headers=headers, read=read)


@functools.cache
def _settings() -> ServingSettings:
    return cast(Any, ServingSettings)(WATTSHIFT_SERVICE_TOKEN=system.JOIN, DATABASE_URL=postgres.URL, pool_size=3)


async def _begin(world: World) -> Batches:
    repository = ServingRepository(create_engine(postgres.URL, application_name="serving"))
    worker = BatchWorker(
        repository, Table(*PLACES), Known(), _Sender(world), _settings(), unlimited, now_s=lambda: time.time()
    )
    world.simulation.loop.create_task(worker.run())
    return Batches(repository, _settings())


def _checks(world: World) -> Any:
    def check(changed: frozenset[str]) -> None:
        if not changed & WATCHED:
            return
        for name, detail in world.database.rows(_WRONG):
            world.fail(str(name), str(detail))
        states = {str(row[0]): str(row[1]) for row in world.database.rows("SELECT id, status FROM batches")}
        for each, before in world.states.items():
            if before in ENDED and states.get(each) != before:
                world.fail("what has ended stays so", f"{each}: {before}, then {states.get(each)}")
        if lost := set(world.made) - set(states):
            world.fail("accepted is kept", str(lost))
        world.states = states

    return check


def play(simulation: Simulation) -> Coroutine[Any, Any, None]:
    """Users upload files and have batches of them answered; at the end each line has one result."""
    system.server()  # before virtual time begins, which would pass while it starts
    return _play(simulation)


async def _play(simulation: Simulation) -> None:
    draw = simulation.choices.below
    simulation.most_steps = STEPS
    database = SimulatedPostgres(simulation, system.server())
    try:
        nothing = cast(Any, SimpleNamespace(all={}, agents={}))
        world = World(simulation, database, nothing, nothing, nothing)
        world.sends, world.told, world.answers, world.made = Counter(), Counter(), defaultdict(dict), {}
        database.rows(_REFUSES)
        database.on_commit = _checks(world)
        database.trouble(4)
        world.most_deaths = (2, 0, 6)[draw(3)]
        world.has_two = "serving"
        simulation.holds("processes die", world.step)
        names = ("serving", "serving" + system.SECOND)
        processes = [
            simulation.loop.create_task(world.keep(name, functools.partial(_begin, world)))
            for name in names[: 1 + draw(2)]
        ]
        if len(processes) == 1:
            world.has_two = None
        users = [simulation.start(_use(world, number)) for number in range(1 + draw(2))]
        disturbing = simulation.loop.create_task(_disturb(world))
        await asyncio.wait(users)
        await asyncio.sleep(5.0 * draw(6))
        disturbing.cancel()
        world.calm_down()
        left: list[Any] = []
        for _ in range(CALM_S):
            await asyncio.sleep(1)
            if not (left := database.rows("SELECT id, status FROM batches WHERE ended_at IS NULL")):
                break
        simulation.check("every batch ends", not left, str(left))
        for each in world.made:
            await _check(world, each)
        for task in processes:
            task.cancel()
    finally:
        database.close()


async def _check(world: World, batch_id: str) -> None:
    """Check that a batch has one result of each line, and that servers gave those that it says they gave."""
    check, (caller, names) = world.simulation.check, world.made[batch_id]
    batch: Batch = await model_servers.insist(world, "serving", lambda it: it.find(caller, batch_id))
    check("a batch ends as it may", batch.status in ENDED, f"{batch_id}: {batch.status}, {batch.errors}")
    found: list[str] = []
    used_wh, answered = 0.0, 0
    for file in filter(None, (batch.output_file_id, batch.error_file_id)):
        results = [json.loads(each) for each in (await _content(world, caller, file)).splitlines()]
        order = [names.index(each["custom_id"]) for each in results]
        check("results are in the file's order", order == sorted(order), f"{file}: {order}")
        for each in results:
            found.append(each["custom_id"])
            if each["response"] is not None:
                line = f"{batch_id} {1 + names.index(each['custom_id'])}"
                request = each["response"]["request_id"]
                if request or each["response"]["status_code"] != 502:
                    check("a result is an answer to its line", request in world.answers[line], f"{line}: {each}")
                    used_wh += world.answers[line][request]
                answered += each["response"]["status_code"] == 200
    if batch.status != "cancelled" or batch.request_counts.total:  # it may have ended before it was checked
        check("each line has one result", sorted(found) == sorted(names), f"{batch_id}: {found}")
    counts, extra = batch.request_counts, batch.wattshift
    check("counts are those of files", (counts.completed, counts.total) == (answered, len(found)), f"{counts}")
    check("energy is that of results", abs(extra.wh - used_wh) < 1e-6, f"{batch_id}: {extra.wh} Wh, not {used_wh}")
    again = sum(
        max(0, sends - 1 - world.told[line]) for line, sends in world.sends.items() if line.startswith(f"{batch_id} ")
    )
    check("what is sent again is counted", again <= extra.repeated_lines, f"{batch_id}: {again}, {extra}")


async def _content(world: World, caller: Identity, file: str) -> bytes:
    async def read(service: Batches) -> bytes:
        return b"".join([piece async for piece in service.content(caller, file)])

    return cast(bytes, await model_servers.insist(world, "serving", read))


async def _use(world: World, number: int) -> None:
    """Have batches answered, and cancel some."""
    draw = world.simulation.choices.below
    caller = Identity(tenant_id=TENANTS[number], role=Role.OPERATOR, key_id="key")
    for count in range(1 + draw(2)):
        await asyncio.sleep(0.5 * draw(10))
        names = [f"{number} {count} {at}" for at in range(1 + draw(6))]
        file = await model_servers.insist(world, "serving", lambda it, n=names: it.upload(caller, *_form(n)))
        if file is None:
            continue
        request = BatchRequest(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", metadata=None)
        batch = await model_servers.insist(world, "serving", lambda it, r=request: it.create(caller, r))
        if batch is None:
            continue
        world.made[batch.id] = caller, names
        await asyncio.sleep(1.0 * draw(8))
        match draw(4):
            case 1:
                await model_servers.insist(world, "serving", lambda it, b=batch: it.cancel(caller, b.id))
            case 2:
                sooner = f"UPDATE batches SET expires_at = now() + interval '{draw(20)} s'"
                open_ = f"SELECT id FROM batches WHERE id = '{batch.id}' AND ended_at IS NULL FOR UPDATE SKIP LOCKED"
                world.database.rows(f"{sooner} WHERE id = ({open_})")
            case _:
                pass


def _form(names: list[str]) -> tuple[str, AsyncIterator[bytes]]:
    lines = [
        {"custom_id": name, "method": "POST", "url": ENDPOINT, "body": {"model": MODEL, "user": name}} for name in names
    ]
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n',
        *(json.dumps(each).encode() + b"\n" for each in lines),
        b"\r\n--x--\r\n",
    ]

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return "multipart/form-data; boundary=x", body()


async def _disturb(world: World) -> None:
    """Restart the database and set its clock now and then."""
    draw = world.simulation.choices.below
    while True:
        await asyncio.sleep(0.5 * (1 + draw(8)))
        match draw(6, often=0.4):
            case 1:
                world.database.restart()
            case 2:
                world.database.clock.ahead_s += (-30.0, -1.0, 1.0, 30.0)[draw(4)]
            case _:
                pass
