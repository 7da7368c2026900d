"""The worker: checks batches, has their lines answered where and when it is cleanest, and writes their files.

One process works at a time, the holder of a session lock; another takes over when it dies. A line is ``sent`` in the
database before it is, and what became of it is written once, under the number of that attempt. Lines whose outcome the
worker does not await are sent again, and counted; one that was answered twice keeps the result that was written first.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy.exc import DBAPIError

from services.contracts.identity import KeyLimits
from services.contracts.routing import RoutedServer
from services.contracts.served_models import ServedModels, servers_of
from services.core.policies.cleanest_fill import Due, Slot, amounts_now, fill_in_time
from services.core.policies.freesh.server_choice import Work, energy_profile
from services.db.database import refuses
from services.db.leadership import Leadership
from services.db.locks import BATCHES
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.repeating import each_apart, pauses, repeat
from services.kit.tasks import end_tasks
from services.serving.batches.lines import LineReader
from services.serving.batches.sending import Room, Sender, mean_intensity, not_stored
from services.serving.batches.service import CHUNK_BYTES
from services.serving.carbon import Forecasts, Grid, Points
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.batch_work import ClaimedLine, Line, OpenBatch, Outcome
from services.serving.routing import Routing
from services.serving.settings import ServingSettings

log = Log(__name__)

LOOK_S = 0.5
FIRST_PAUSE_S = 2.0  #: Before a batch that could not begin or end is tried again; doubled each time
NEXT_STEP_S = 60.0  #: By which the time at which a batch goes on may move unwritten
FORGET_S = 600.0
MARGIN_S = 3_600.0  #: Lines are planned to be answered so long before their batch expires
LINES_AT_ONCE = 500
TYPICAL = Work(500, 200)  #: The request for which servers' energies are compared

LimitsOf = Callable[[str], Awaitable[KeyLimits]]


class _NotBegunError(Exception):
    """Rolls back what was read of a batch's file."""


@dataclass
class Demand:
    """The lines of one model that the same servers can answer, the next to expire first."""

    model: str
    servers: list[RoutedServer]
    batches: list[OpenBatch] = field(default_factory=list[OpenBatch])


class BatchWorker:
    """Works on all open batches while it has the lead."""

    def __init__(
        self,
        repository: ServingRepository,
        routing: Routing,
        forecasts: Forecasts,
        sender: Sender,
        settings: ServingSettings,
        limits_of: LimitsOf,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Take what says what a key may do with models."""
        self._repository, self._routing, self._forecasts = repository, routing, forecasts
        self._sender, self._settings = sender, settings
        self._limits_of, self._now_s = limits_of, now_s
        self._lead = Leadership(settings.database_url, BATCHES, "serving-batches")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outcomes: list[Outcome] = []
        self._unwritten = set[str]()  # lines of which not even the failure is stored; they end with their batch
        self._rooms: dict[tuple[str, str], Room] = {}
        self._next_s: dict[str, float] = {}  # as written
        self._forget_at_s = 0.0
        self._again: dict[str, tuple[float, Iterator[float]]] = {}
        """When batches that could not begin or end, as on a full disk, are tried again, and how long to wait then."""

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            await repeat(self.turn, LOOK_S, failed="batches.not_worked_on", when=self._repository.batch_presence.wait)
        finally:
            self._lead.release()
            await end_tasks(list(self._tasks.values()))

    async def turn(self) -> None:
        """Do what can be done now."""
        if await self._lead.hold():
            await self._work()
        else:
            await self._drop(self._tasks)

    async def _work(self) -> None:
        await self._record()
        # Each time: whoever led before may have claimed lines after this process had taken over, in its last turn.
        async with self._repository.writing() as queries:
            kept = [*self._tasks, *(each.line.id for each in self._outcomes), *self._unwritten]
            await queries.batch_work.take_back(kept)
            batches = await queries.batch_work.open()
        table = await self._routing.table()
        served = ServedModels(table.pools, table.servers)
        running: list[OpenBatch] = []

        limits = await self._limits(batches)

        there = {batch.id for batch in batches}
        self._again = {batch: again for batch, again in self._again.items() if batch in there}
        self._unwritten = {line for line in self._unwritten if line.partition(" ")[0] in there}

        async def look_at(batch: OpenBatch) -> None:
            at_s, waits_s = self._again.get(batch.id, (0.0, pauses(FIRST_PAUSE_S)))
            if time.monotonic() < at_s:
                return
            self._again[batch.id] = time.monotonic() + next(waits_s), waits_s  # unless this succeeds
            if not await self._begin_or_end(batch, served, limits):
                running.append(batch)
            del self._again[batch.id]

        async def begin_or_end() -> None:
            await each_apart(batches, look_at, failed="batches.batch_failed", name=lambda batch: batch.id)

        next_s: dict[str, float] = {}

        async def send() -> None:
            await self._send(running, served, next_s)

        async def expect() -> None:
            await self._expect(next_s)

        steps = (begin_or_end, send, expect, self._forget)
        await each_apart(steps, lambda step: step(), failed="batches.step_failed", name=lambda step: step.__name__)

    async def _forget(self) -> None:
        if time.monotonic() >= self._forget_at_s:
            async with self._repository.writing() as queries:
                await queries.batch_work.forget(self._settings.batch_keep_days * 86_400)
            self._forget_at_s = time.monotonic() + FORGET_S

    async def _limits(self, batches: Sequence[OpenBatch]) -> dict[str, KeyLimits | BaseException]:
        """Return what the keys of new batches may do, or why that is not known; all are asked for at once."""
        keys = sorted({batch.caller.key_id for batch in batches if batch.status == "validating"})
        found = await asyncio.gather(*map(self._limits_of, keys), return_exceptions=True)
        return dict(zip(keys, found, strict=True))

    async def _begin_or_end(
        self, batch: OpenBatch, served: ServedModels, limits: Mapping[str, KeyLimits | BaseException]
    ) -> bool:
        """Check a new batch, end one that is to end, or return False: its lines are to be sent."""
        if batch.status == "validating":
            await self._check(batch, served, limits[batch.caller.key_id])
        elif batch.status == "cancelling":
            await self._end(batch, "cancelled", "batch_cancelled", "The batch was cancelled.")
        elif batch.left_s <= 0:
            detail = "This request could not be executed before the completion window expired."
            await self._end(batch, "expired", "batch_expired", detail)
        elif not batch.waiting and not batch.sent:
            await self._end(batch, "completed", "", "")
        else:
            return False
        return True

    async def _record(self) -> None:
        """Write what has become of lines; what fails to be written is written next time, and refused lines fail."""
        count, refused = len(self._outcomes), None
        while self._outcomes:
            try:
                async with self._repository.writing() as queries:
                    await queries.batch_work.record(self._outcomes[:count])
                del self._outcomes[:count]
            except DBAPIError as error:
                if not refuses(error):
                    raise
                if self._outcomes[0] is refused:
                    self._unwritten.add(self._outcomes.pop(0).line.id)
                elif count == 1:
                    refused = self._outcomes[0] = not_stored(self._outcomes[0].line)
                    log.warning("batches.result_refused", line=refused.line.id, error=str(error.orig))
                count = 1

    async def _drop(self, lines: Iterable[str]) -> None:
        """Stop awaiting the answers of lines."""
        await end_tasks([task for name in list(lines) if (task := self._tasks.pop(name, None)) is not None])

    async def _check(self, batch: OpenBatch, served: ServedModels, limits: KeyLimits | BaseException) -> None:
        """Read a batch's file and begin, or say what is wrong with it; either happens as a whole."""
        models = servers_of(served, batch.caller)
        if isinstance(limits, BaseException):
            log.warning("batches.not_checked", batch=batch.id, error=str(limits) or type(limits).__name__)
            return  # until admission answers
        reader = LineReader(batch.endpoint, limits, models, self._settings.batch_lines)
        named: set[str] = set()
        try:
            async with self._repository.writing() as queries:
                lines: list[Line] = []
                async for number, content in lines_of(queries, batch):
                    line = reader.read(number, content)
                    if line is not None and not reader.errors:
                        lines.append(line)
                        named.add(line.model)
                    if len(lines) >= LINES_AT_ONCE:
                        await queries.batch_work.add_lines(batch.id, lines)
                        lines = []
                reader.check_whole()
                if reader.errors:
                    raise _NotBegunError
                await queries.batch_work.add_lines(batch.id, lines)
                arrival = mean_intensity(server for model in named for server in models[model])
                if not await queries.batch_work.begin(batch.id, reader.total, arrival):
                    raise _NotBegunError
        except _NotBegunError:
            async with self._repository.writing() as queries:
                await queries.batch_work.fail(batch.id, reader.errors)  # unless it was cancelled

    async def _end(self, batch: OpenBatch, status: str, code: str, message: str) -> None:
        """Write a batch's files and end it, in one transaction."""
        await self._drop([name for name in self._tasks if name.startswith(f"{batch.id} ")])
        await self._record()  # what was answered until now counts
        async with self._repository.writing() as queries:
            locked = await queries.batch_work.lock(batch.id)
            if locked is None:
                return
            unanswered = await queries.batch_work.end_lines(batch.id, code, message)
            output = await _write(queries, batch.id, "succeeded", *locked)
            errors = await _write(queries, batch.id, "failed", *locked)
            await queries.batch_work.end(batch.id, status, output, errors, unanswered)
        log.info("batch.ended", batch=batch.id, status=status, unanswered=unanswered)

    async def _send(self, batches: Sequence[OpenBatch], served: ServedModels, next_s: dict[str, float]) -> None:
        """Send what is to be sent now, and note when the next lines of each batch are planned to be, UTC seconds."""
        demands: dict[tuple[str, ...], Demand] = {}
        for batch in batches:
            known = servers_of(served, batch.caller)
            for model in {*batch.waiting, *batch.sent}:
                servers = known.get(model, [])
                key = (model, *sorted(each.id for each in servers))
                demands.setdefault(key, Demand(model, servers)).batches.append(batch)
        servers = {each.id for demand in demands.values() for each in demand.servers}
        points = await self._forecasts.of(zone for name, zone in self._routing.zones.items() if name in servers)

        async def send(demand: Demand) -> None:
            at_s = await self._send_some(demand, points)
            next_s.update({each.id: min(at_s, next_s.get(each.id, at_s)) for each in demand.batches})

        await each_apart(demands.values(), send, failed="batches.model_failed", name=lambda demand: demand.model)

    async def _expect(self, next_s: Mapping[str, float]) -> None:
        """Write when batches go on."""
        self._next_s = {name: at_s for name, at_s in self._next_s.items() if name in next_s}
        for name, at_s in next_s.items():
            if name not in self._next_s or abs(at_s - self._next_s[name]) >= NEXT_STEP_S:
                async with self._repository.writing() as queries:
                    await queries.batch_work.expect(name, at_s or None)
                self._next_s[name] = at_s

    async def _send_some(self, demand: Demand, points: Mapping[Grid, Points]) -> float:
        """Send as many lines as the plan has for now, where it has them, and as there is room for.

        Return when the next ones are planned to be sent, UTC seconds; 0 if some are now.
        """
        now_s, model = self._now_s(), demand.model
        rooms = self._rooms_of(demand)
        slots = self._slots(demand, rooms, points, now_s)
        work = [
            Due(now_s + each.left_s, float(each.waiting.get(model, 0) + each.sent.get(model, 0)))
            for each in demand.batches
        ]
        done = fill_in_time(slots, work, now_s, MARGIN_S)
        now = amounts_now(slots, done, now_s)
        waiting = {each.id: each.waiting.get(model, 0) for each in demand.batches}
        for place, amount in now.items():
            room = rooms[place]
            count = min(room.free(time.monotonic()), math.ceil(amount) - room.in_flight)
            for batch in demand.batches:
                if count > 0 and waiting[batch.id]:
                    sent = await self._begin(batch, model, place, room, min(count, waiting[batch.id]))
                    waiting[batch.id] -= sent
                    count -= sent
        later_s = [slot.start_s for slot, amount in zip(slots, done, strict=True) if amount > 0]
        return 0.0 if now else min(later_s, default=0.0)

    async def _begin(self, batch: OpenBatch, model: str, place: str, room: Room, count: int) -> int:
        async with self._repository.writing() as queries:
            lines = await queries.batch_work.claim(batch.id, model, count)
        await self._drop(each.id for each in lines)  # whoever led before may have taken back what this one awaits
        for line in lines:
            self._tasks[line.id] = asyncio.create_task(self._send_line(batch, line, place, room))
        return len(lines)

    async def _send_line(self, batch: OpenBatch, line: ClaimedLine, place: str, room: Room) -> None:
        began_s = time.monotonic()
        room.in_flight += 1
        try:
            sent = await self._sender.send(line, batch.endpoint, batch.caller, place)
        finally:
            room.in_flight -= 1
            self._tasks.pop(line.id, None)
        now_s = time.monotonic()
        if sent.retry_after_s is not None:
            room.refused(now_s, sent.retry_after_s)
        elif sent.outcome.state == "succeeded":
            room.answered(now_s - began_s)
        self._outcomes.append(sent.outcome)

    def _rooms_of(self, demand: Demand) -> dict[str, Room]:
        by_place: dict[str, list[RoutedServer]] = {}
        for server in demand.servers:
            by_place.setdefault(server.location, []).append(server)
        found: dict[str, Room] = {}
        for place, servers in by_place.items():
            capacity = sum(each.capacity for each in servers)
            room = self._rooms.get((demand.model, place))
            if room is None:
                room = self._rooms[demand.model, place] = Room(capacity, servers[0].latency_s)
            room.capacity = capacity
            found[place] = room
        if not found:  # a pool that has no instance wants one once it is asked
            found[""] = self._rooms.setdefault((demand.model, ""), Room(1))
        return found

    def _slots(
        self, demand: Demand, rooms: Mapping[str, Room], points: Mapping[Grid, Points], now_s: float
    ) -> list[Slot]:
        """Return what places are expected to have free until the last of the batches expires, with its carbon."""
        end_s = now_s + max(each.left_s for each in demand.batches)
        energy = _energy_j(demand.servers)
        found: list[Slot] = []
        for place, room in rooms.items():
            server = next((each for each in demand.servers if each.location == place), None)
            zone = self._routing.zones.get(server.id) if server else None
            ahead = points.get(zone, []) if zone is not None else []
            usual = (server and server.gco2_per_kwh) or 0.0
            line_kwh = energy.get(place, 1.0) * (server.pue if server else 1.0)
            for start_s, until_s, gco2 in curve_within(ahead, now_s, end_s, usual):
                lines = room.lines_per_s * (until_s - start_s)
                found.append(Slot(place, start_s, until_s, gco2 * line_kwh, lines))
        return found


def curve_within(points: Points, now_s: float, end_s: float, usual: float) -> Points:
    """Return the steps of a forecast from now to the end; what it leaves out has the ``usual`` intensity."""
    found: Points = []
    at_s = now_s
    for start_s, until_s, gco2 in [*points, (end_s, end_s, usual)]:
        if (start_s := min(start_s, end_s)) > at_s:
            found.append((at_s, start_s, usual))
            at_s = start_s
        if (until_s := min(until_s, end_s)) > at_s:
            found.append((at_s, until_s, gco2))
            at_s = until_s
    return found


def _energy_j(servers: Sequence[RoutedServer]) -> dict[str, float]:
    """Return what a line adds to the energy of each place, joules; 1 everywhere unless all profiles say."""
    found: dict[str, float] = {}
    for each in servers:
        ttft_s, tbt_s = each.ttft_ms and each.ttft_ms / 1e3, each.tbt_ms and each.tbt_ms / 1e3
        profile = energy_profile(each.full_power_w, each.idle_w, each.max_qps, each.latency_s, ttft_s, tbt_s)
        if profile is None:
            return {server.location: 1.0 for server in servers}
        found[each.location] = min(profile.added_j(TYPICAL), found.get(each.location, math.inf))
    return found


async def lines_of(queries: Queries, batch: OpenBatch) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the lines of a batch's file with their numbers, from 1; the last one is empty, also if the file is gone."""
    begun, number, chunk = list[bytes](), 1, 0  # the pieces of a line that has not ended, each joined once
    while (piece := await queries.batches.chunk(batch.caller.tenant_id, batch.input_file_id, chunk)) is not None:
        rest, *more = piece.split(b"\n")
        begun.append(rest)
        for content in more:
            yield number, b"".join(begun)
            begun, number = [content], number + 1
        chunk += 1
    yield number, b"".join(begun)


async def _write(queries: Queries, batch_id: str, state: str, tenant_id: str, keep_s: float) -> str | None:
    """Write the results of a batch's lines in a state into a new file; return its id, None if there are none."""
    file_id = new_id("file")
    after, number, held = 0, 0, bytearray()
    while results := await queries.batch_work.results(batch_id, state, after, LINES_AT_ONCE):
        if not after:
            name = f"{batch_id}_{'output' if state == 'succeeded' else 'error'}.jsonl"
            await queries.batches.add_file(file_id, tenant_id, name, "batch_output", keep_s)
        after = results[-1][0]
        for _, result in results:
            held += result.encode() + b"\n"
        while len(held) >= CHUNK_BYTES:
            await queries.batches.add_chunk(file_id, tenant_id, number, bytes(held[:CHUNK_BYTES]))
            number += 1
            del held[:CHUNK_BYTES]
    if not after:
        return None
    if held:
        await queries.batches.add_chunk(file_id, tenant_id, number, bytes(held))
    await queries.batches.complete_file(file_id, tenant_id, keep_s)
    return file_id
