"""The worker on batches: what a crash at each of its writes leaves, where lines go, and how batches end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.batches import Batch, BatchRequest
from services.contracts.identity import NO_KEY_LIMITS, Identity, KeyLimits, Role
from services.db.database import connect
from services.db.engine import create_engine
from services.kit.disk import DiskWatch
from services.kit.problems import ProblemError, unavailable
from services.kit.tasks import end_tasks
from services.serving.batches.sending import Room, Sender, Sent
from services.serving.batches.service import Batches
from services.serving.batches.worker import FIRST_PAUSE_S, BatchWorker, Demand, curve_within, lines_of
from services.serving.carbon import Forecasts, Grid, Points
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.batch_work import ClaimedLine, OpenBatch, Outcome
from services.serving.repository.batches import BatchRows
from services.serving.settings import ServingSettings
from tests.serving.batches import line, written
from tests.support.batches import Known, Table, unlimited
from tests.support.routers import MODEL
from tests.support.tokens import TOKEN, tokens

CALLER = Identity(tenant_id="acme", role=Role.USER, key_id="key_acme")
OTHER = Identity(tenant_id="umbra", role=Role.USER, key_id="key_umbra")


class CrashError(BaseException):
    """The process is gone."""


class Crashing(ServingRepository):
    """Crashes at one of its transactions that write: before its commit, or after it and before that is known."""

    def __init__(self, engine: AsyncEngine, at: int, *, is_committed: bool) -> None:
        super().__init__(engine)
        self.left, self.is_committed = at, is_committed

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[Queries]:
        self.left -= 1
        async with super().writing() as queries:
            yield queries
            if self.left == 0 and not self.is_committed:
                raise CrashError
        if self.left == 0:
            raise CrashError


class Answering(Sender):
    """Answers at once, or as its test says."""

    def __init__(self, state: str = "succeeded", retry_after_s: float | None = None) -> None:
        self.sent: list[tuple[str, str]] = []
        self.state, self.retry_after_s = state, retry_after_s

    async def send(self, line: ClaimedLine, endpoint: str, caller: Identity, place: str) -> Sent:
        self.sent.append((line.custom_id, place))
        await asyncio.sleep(0)
        result = json.dumps({"custom_id": line.custom_id}) if self.state != "waiting" else None
        outcome = Outcome(line, self.state, result, has_failed=False, energy_j=3_600.0, carbon_gco2=0.25)
        return Sent(outcome, self.retry_after_s)


class Place:
    """A database with the service on it, and workers of which one lives at a time."""

    def __init__(self, engine: AsyncEngine, settings: ServingSettings) -> None:
        self.engine, self.settings = engine, settings
        self.repository = ServingRepository(engine)
        self.batches = Batches(self.repository, settings)
        self.workers: list[BatchWorker] = []

    def worker(
        self,
        sender: Sender,
        repository: ServingRepository | None = None,
        forecasts: Forecasts | None = None,
        places: Sequence[str] = ("here",),
    ) -> BatchWorker:
        made = repository or self.repository
        worker = BatchWorker(made, Table(*places), forecasts or Known(), sender, self.settings, unlimited)
        self.workers.append(worker)
        return worker

    async def submit(self, lines: Sequence[dict[str, Any]]) -> str:
        file = await upload(self.batches, written(lines))
        request = BatchRequest(
            input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h", metadata=None
        )
        return (await self.batches.create(CALLER, request)).id

    async def results(self, file_id: str | None) -> Counter[str]:
        content = b"".join([piece async for piece in self.batches.content(CALLER, file_id or "")])
        return Counter(json.loads(each)["custom_id"] for each in content.splitlines())

    async def ended(self, worker: BatchWorker, batch_id: str) -> Batch:
        """Have a worker take turns until a batch has ended."""
        for _ in range(200):
            await worker.turn()
            await asyncio.sleep(0.001)
            found = await self.batches.find(CALLER, batch_id)
            if found.status in ("completed", "failed", "expired", "cancelled"):
                return found
        raise AssertionError("it does not end")

    async def execute(self, query: str, *values: object) -> None:
        connection = await connect(self.settings.database_url, application_name="test")
        await connection.execute(query, *values)
        await connection.close()


async def upload(batches: Batches, content: bytes, caller: Identity = CALLER) -> str:
    async def form() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + content + b"\r\n--x--\r\n"

    return (await batches.upload(caller, "multipart/form-data; boundary=x", form())).id


def kill(worker: BatchWorker) -> list[asyncio.Task[None]]:
    """End a worker as a killed process ends: what it knew and awaited is gone, and so is its connection."""
    worker._lead.release()
    return list(worker._tasks.values())


@pytest.fixture
async def place(database_url: str) -> AsyncIterator[Place]:
    engine = create_engine(database_url)
    made = Place(engine, ServingSettings.model_validate({"database_url": database_url, "service_token": TOKEN}))
    await made.execute("DELETE FROM batches")
    await made.execute("DELETE FROM batch_files")
    yield made
    for worker in made.workers:
        await end_tasks(kill(worker))
    await engine.dispose()


@pytest.mark.parametrize("is_committed", [False, True])
async def test_a_crash_at_any_write_loses_no_line_and_no_result(place: Place, *, is_committed: bool) -> None:
    names = [f"line {number}" for number in range(7)]
    crashes = 0
    for at in range(1, 100):
        batch = await place.submit([line(name) for name in names])
        sender, repository = Answering(), Crashing(place.engine, at, is_committed=is_committed)
        first = place.worker(sender, repository)
        try:
            found = await place.ended(first, batch)
        except CrashError:
            crashes += 1
            await end_tasks(kill(first))
            second = place.worker(sender)
            found = await place.ended(second, batch)
            first = second
        await end_tasks(kill(first))

        assert found.status == "completed"
        assert await place.results(found.output_file_id) == Counter(names)
        counts, sent = found.request_counts, Counter(name for name, _ in sender.sent)
        assert (counts.total, counts.completed, counts.failed) == (7, 7, 0)
        assert set(sent) == set(names)
        assert found.wattshift.repeated_lines >= sent.total() - len(names)
        assert found.wattshift.wh == pytest.approx(7)  # what is computed twice is counted once
        if repository.left > 0:
            break
    assert crashes >= 5


async def test_one_worker_works_at_a_time_and_another_takes_over(place: Place) -> None:
    batch = await place.submit([line("a")])
    first, second = place.worker(Answering()), place.worker(sender := Answering())
    await first.turn()
    await second.turn()
    assert sender.sent == []

    await end_tasks(kill(first))
    found = await place.ended(second, batch)
    assert found.status == "completed"


async def test_the_first_of_two_results_of_a_line_stays(place: Place) -> None:
    batch = await place.submit([line("a")])
    worker = place.worker(Answering(state="waiting", retry_after_s=0.0))
    await worker.turn()  # it is read
    async with place.repository.writing() as queries:
        (old,) = await queries.batch_work.claim(batch, MODEL, 5)
        await queries.batch_work.take_back(())
        (new,) = await queries.batch_work.claim(batch, MODEL, 5)
        await queries.batch_work.record([Outcome(old, "failed", "late")])
        await queries.batch_work.record([Outcome(new, "succeeded", '{"custom_id": "a"}')])
        await queries.batch_work.record([Outcome(new, "failed", "again")])
    found = await place.ended(worker, batch)

    assert (found.request_counts.completed, found.request_counts.failed) == (1, 0)
    assert await place.results(found.output_file_id) == Counter(["a"])


async def test_lines_wait_for_a_cleaner_hour_and_go_to_the_cleaner_place(place: Place) -> None:
    batch = await place.submit([line("a"), line("b")])
    now_s = datetime.now(UTC).timestamp()
    night = [(now_s - 60, now_s + 7_200, 500.0), (now_s + 7_200, now_s + 90_000, 50.0)]
    sender = Answering()
    waits = place.worker(sender, forecasts=Known(clean=night, dirty=[(now_s - 60, now_s + 90_000, 400.0)]))
    waits._routing = Table("dirty", "clean")
    for _ in range(3):
        await waits.turn()
        await asyncio.sleep(0)
    await end_tasks(kill(waits))
    assert sender.sent == []

    clean = [(now_s - 60, now_s + 90_000, 50.0)]
    goes = place.worker(sender, forecasts=Known(clean=clean, dirty=night), places=("dirty", "clean"))
    await place.ended(goes, batch)
    assert {where for _, where in sender.sent} == {"clean"}


async def test_a_batch_waits_until_admission_says_what_its_key_may(place: Place) -> None:
    worker, answers = place.worker(Answering()), [unavailable("Admission")]

    async def limits_of(key_id: str) -> KeyLimits:
        assert key_id == CALLER.key_id
        if answers:
            raise answers.pop()
        return NO_KEY_LIMITS

    worker._limits_of = limits_of
    batch = await place.submit([line("a")])
    await worker.turn()
    assert (await place.batches.find(CALLER, batch)).status == "validating"
    assert (await place.ended(worker, batch)).status == "completed"


async def test_a_batch_that_waits_for_cleaner_hours_says_until_when(place: Place) -> None:
    batch = await place.submit([line("a"), line("b")])
    now_s = datetime.now(UTC).timestamp()
    clean_s = now_s + 7_200
    known = Known(here=[(now_s - 60, clean_s, 900.0), (clean_s, now_s + 90_000, 1.0)])
    worker = place.worker(sender := Answering(), forecasts=known)
    for _ in range(3):
        await worker.turn()
    assert sender.sent == []
    assert (await place.batches.find(CALLER, batch)).wattshift.next_at == int(clean_s)

    known.points["here"] = [(now_s - 60, clean_s + 30, 900.0), (clean_s + 30, now_s + 90_000, 1.0)]
    await worker.turn()
    assert (await place.batches.find(CALLER, batch)).wattshift.next_at == int(clean_s), "half a minute is no news"

    known.points["here"] = [(now_s - 60, now_s + 90_000, 1.0)]
    other = place.worker(Answering(), forecasts=known)  # what a process before it wrote is not left behind
    await worker._drop(list(worker._tasks))
    worker._lead.release()
    await other.turn()
    await other.turn()
    assert (await place.batches.find(CALLER, batch)).wattshift.next_at is None
    found = await place.ended(other, batch)
    assert (found.status, found.wattshift.next_at) == ("completed", None)


async def test_lines_go_when_it_is_late_however_dirty_it_is(place: Place) -> None:
    batch = await place.submit([line("a")])
    await place.execute("UPDATE batches SET expires_at = now() + interval '30 seconds' WHERE id = $1", batch)
    now_s = datetime.now(UTC).timestamp()
    worker = place.worker(
        Answering(), forecasts=Known(here=[(now_s - 60, now_s + 25, 900.0), (now_s + 25, now_s + 90_000, 1.0)])
    )
    found = await place.ended(worker, batch)
    assert found.status == "completed"


async def test_an_expired_batch_says_so_of_each_line_without_an_answer(place: Place) -> None:
    batch = await place.submit([line("a"), line("b")])
    worker = place.worker(Answering(state="waiting", retry_after_s=60.0))
    await worker.turn()
    await place.execute("UPDATE batches SET expires_at = now() WHERE id = $1", batch)
    found = await place.ended(worker, batch)

    assert (found.status, found.request_counts.failed) == ("expired", 2)
    content = b"".join([piece async for piece in place.batches.content(CALLER, found.error_file_id or "")])
    assert {json.loads(each)["error"]["code"] for each in content.splitlines()} == {"batch_expired"}


async def test_what_is_past_its_time_goes(place: Place) -> None:
    worker = place.worker(Answering())
    batch = await place.submit([line("a")])
    found = await place.ended(worker, batch)
    await place.execute("UPDATE batch_files SET expires_at = now() WHERE id = $1", found.output_file_id)
    with pytest.raises(ProblemError):
        await place.batches.file(CALLER, found.output_file_id or "")
    await place.execute("UPDATE batches SET ended_at = now() - interval '31 days'")
    await end_tasks(kill(worker))
    async with place.repository.writing() as queries:
        await queries.batch_work.forget(30 * 86_400)

    assert (await place.batches.page(CALLER, 10, None)).data == []
    assert [each.purpose for each in (await place.batches.files(CALLER, 10, None, None, ascending=False)).data] == [
        "batch"
    ]


async def test_a_full_disk_refuses_an_upload_and_keeps_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class DiskFullError(Exception):
        sqlstate = "53100"

    async def cannot(*_: object) -> None:
        raise DBAPIError("INSERT", None, DiskFullError())

    with monkeypatch.context() as patch:
        patch.setattr(DiskWatch, "problem", lambda _: "is nearly full.")
        with pytest.raises(ProblemError, match="nearly full") as nearly:
            await upload(place.batches, b"{}")
    with monkeypatch.context() as patch:
        patch.setattr(BatchRows, "add_chunk", cannot)
        with pytest.raises(ProblemError, match="disk is full") as full:
            await upload(place.batches, b"{}")
    assert (nearly.value.status, full.value.status) == (503, 503)
    assert (await place.batches.files(CALLER, 10, None, None, ascending=False)).data == []


async def test_a_tenant_has_a_quota(place: Place, database_url: str) -> None:
    settings = ServingSettings.model_validate(
        {"database_url": database_url, "service_token": TOKEN, "batch_quota_bytes": 1_024}
    )
    small = Batches(place.repository, settings)
    await upload(small, b"x" * 1_000)
    with pytest.raises(ProblemError, match="1024 bytes in all"):
        await upload(small, b"x" * 100)
    await upload(small, b"x" * 100, OTHER)


async def test_batches_that_have_not_ended_count_for_the_quota(place: Place, database_url: str) -> None:
    """Each holds the lines of its file, whose size would else be stored as often as a tenant likes."""
    size = len(written([line("a")]))
    known = {"database_url": database_url, "service_token": TOKEN, "batch_quota_bytes": max(1_024, 3 * size)}
    place.batches = Batches(place.repository, ServingSettings.model_validate(known))
    await upload(place.batches, b"x" * (known["batch_quota_bytes"] - 3 * size))
    batch = await place.submit([line("a")])  # its file, and its lines
    file = await upload(place.batches, written([line("b")]))
    request = BatchRequest(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h", metadata=None)
    with pytest.raises(ProblemError, match="bytes in all") as caught:
        await place.batches.create(CALLER, request)
    assert caught.value.status == 403
    worker = place.worker(Answering("failed"))
    ended = await place.ended(worker, batch)
    await place.batches.remove_file(CALLER, ended.error_file_id or "")
    assert (await place.batches.create(CALLER, request)).status == "validating"


async def test_what_is_being_uploaded_counts_and_what_breaks_off_does_not(place: Place, database_url: str) -> None:
    known = {"database_url": database_url, "service_token": TOKEN, "batch_quota_bytes": 3 * 2**20}
    tight = Batches(place.repository, ServingSettings.model_validate(known))
    is_taken_in, is_refused = asyncio.Event(), asyncio.Event()

    async def breaks_off() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + b"x" * 2**21
        is_taken_in.set()
        await is_refused.wait()
        raise ConnectionResetError

    first = asyncio.create_task(tight.upload(CALLER, "multipart/form-data; boundary=x", breaks_off()))
    await is_taken_in.wait()
    with pytest.raises(ProblemError, match="in all"):
        await upload(tight, b"x" * 5 * 2**19)
    is_refused.set()
    with pytest.raises(ConnectionResetError):
        await first
    assert await stored_bytes(place) == 0
    await upload(tight, b"x" * 2**20)


async def stored_bytes(place: Place) -> int:
    async with place.repository.reading() as queries:
        found = await queries.connection.execute(text("SELECT coalesce(sum(length(data)), 0) FROM batch_file_chunks"))
        return int(found.scalar_one())


def test_room_grows_with_answers_and_halves_with_refusals() -> None:
    room = Room(64)
    room.in_flight = 4
    assert room.free(0.0) == 0
    for _ in range(12):
        room.answered(2.0)
    assert room.free(0.0) == 12
    room.in_flight = 16
    room.refused(10.0, 3.0)
    room.refused(10.5, 3.0)
    assert room.free(12.9) == 0
    room.in_flight = 0
    assert room.free(13.0) == 8


def test_a_forecast_with_gaps_is_filled_with_what_is_usual() -> None:
    assert curve_within([(5.0, 10.0, 1.0), (12.0, 30.0, 2.0)], 0.0, 20.0, 9.0) == [
        (0.0, 5.0, 9.0),
        (5.0, 10.0, 1.0),
        (10.0, 12.0, 9.0),
        (12.0, 20.0, 2.0),
    ]
    assert curve_within([], 0.0, 20.0, 9.0) == [(0.0, 20.0, 9.0)]
    assert curve_within([(30.0, 40.0, 1.0)], 0.0, 20.0, 9.0) == [(0.0, 20.0, 9.0)]


async def test_a_batch_that_cannot_be_checked_keeps_no_other_from_ending(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = await place.submit([line("a")]), await place.submit([line("b")])
    check = BatchWorker._check

    async def failing(self: BatchWorker, batch: OpenBatch, *given: Any) -> None:
        if batch.id == bad:
            raise ZeroDivisionError
        await check(self, batch, *given)

    monkeypatch.setattr(BatchWorker, "_check", failing)
    worker = place.worker(Answering())
    with pytest.raises(ZeroDivisionError):
        await worker.turn()
    for _ in range(3):
        await worker.turn()  # it is tried again later: what fails on a full disk is not written twice a second
    assert [(await place.batches.find(CALLER, each)).status for each in (bad, good)] == ["validating", "completed"]
    assert worker._forget_at_s > 0, "and what is past its time goes nevertheless"
    waits_s = worker._again[bad][1]
    worker._again[bad] = 0.0, waits_s
    with pytest.raises(ZeroDivisionError):
        await worker.turn()
    assert next(waits_s) > 2 * FIRST_PAUSE_S, "later and later"
    monkeypatch.undo()
    worker._again[bad] = 0.0, waits_s
    assert ((await place.ended(worker, bad)).status, worker._again) == ("completed", {})


WEIRD = ["a\0b", "\ufffe", "\U0001f4a9" * 300, "\x1b[31m", "'; DROP TABLE batches; --", "{0}", "%s"]


@pytest.mark.parametrize("weird", WEIRD, ids=ascii)
async def test_no_text_in_a_file_keeps_other_batches_from_ending(place: Place, weird: str) -> None:
    poisoned = [
        await place.submit([line("a", body={"model": weird})]),
        await place.submit([line(weird[:512])]),
        await place.submit([{**line("a"), "method": weird, "url": weird}]),
    ]
    good = await place.submit([line("b")])
    worker = place.worker(Answering())
    for _ in range(4):
        await worker.turn()
    assert (await place.batches.find(CALLER, good)).status == "completed"
    assert {(await place.batches.find(CALLER, each)).status for each in poisoned} <= {"failed", "completed"}


async def sent_to(answered: bytes) -> Sent:
    """Send a line to a router that answers with these bytes."""

    async def answer(_: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        out.write(answered)
        await out.drain()
        out.close()

    claimed = ClaimedLine("batch_1", 1, 1, "a", MODEL, "{}", 0)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
        port = server.sockets[0].getsockname()[1]
        sender = Sender(session, f"http://127.0.0.1:{port}", tokens("router", issuer="serving"))
        return await sender.send(claimed, "/v1/chat/completions", CALLER, "here")


HEADERS = [
    b"retry-after: \xb2",
    b"retry-after: nan",
    b"x-request-id: \xff\xfe",
    b"x-wattshift-wh: nan",
    b"x-wattshift-gco2: -1",
]


@pytest.mark.parametrize("header", HEADERS, ids=ascii)
@pytest.mark.parametrize("status", [200, 400, 429])
async def test_no_answer_makes_sending_raise(header: bytes, status: int) -> None:
    """What a line's task raised was never asked for, and the line was awaited until its batch expired."""

    sent = await sent_to(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\nconnection: close\r\n%s\r\n\r\n{}" % (status, header))
    assert sent.outcome.state == {200: "succeeded", 400: "failed", 429: "waiting"}[status]
    assert (sent.outcome.energy_j, sent.outcome.carbon_gco2, sent.retry_after_s) in [(0.0, 0.0, None), (0.0, 0.0, 1.0)]
    assert sent.outcome.result is None or json.loads(sent.outcome.result)["response"]["status_code"] == status


@pytest.mark.parametrize(
    ("header", "state"), [(b"x-wattshift-location: here", "failed"), (b"x-other: here", "waiting")], ids=ascii
)
async def test_that_a_server_does_not_have_what_is_asked_is_its_answer(header: bytes, state: str) -> None:
    """A server without an endpoint says 404 each time: lines for it were sent again until their batch expired."""
    sent = await sent_to(b"HTTP/1.1 404 X\r\ncontent-length: 2\r\nconnection: close\r\n%s\r\n\r\n{}" % header)
    assert (sent.outcome.state, sent.retry_after_s is None) == (state, state == "failed")


async def test_a_model_whose_lines_cannot_be_sent_keeps_those_of_no_other_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.submit([line("a", body={"model": "broken", "messages": []})])
    good = await place.submit([line("b")])
    some = BatchWorker._send_some

    async def failing(self: BatchWorker, demand: Demand, points: Mapping[Grid, Points]) -> float:
        if demand.model == "broken":
            raise ZeroDivisionError
        return await some(self, demand, points)

    monkeypatch.setattr(BatchWorker, "_send_some", failing)
    worker = place.worker(Answering())
    table = worker._routing
    assert isinstance(table, Table)
    table.servers.insert(0, table.servers[0].model_copy(update={"id": "b", "models": ["broken"]}))
    for _ in range(5):
        with contextlib.suppress(ZeroDivisionError):
            await worker.turn()
        await asyncio.sleep(0.001)
    assert (await place.batches.find(CALLER, good)).status == "completed"


async def test_what_is_ahead_of_all_grids_is_asked_for_at_once(place: Place) -> None:
    """One after the other, each place whose forecast does not come kept all lines back for its own time-out."""
    batch = await place.submit([line("a")])
    asked: list[list[Grid]] = []

    class Counting(Known):
        async def of(self, wanted: Iterable[Grid]) -> dict[Grid, Points]:
            asked.append(sorted(wanted, key=str))
            return {}

    places = [f"place-{number}" for number in range(5)]
    worker = place.worker(Answering(), forecasts=Counting(), places=places)
    await worker.turn()
    await worker.turn()
    assert asked[-1] == [(name, None) for name in places]
    assert (await place.ended(worker, batch)).status == "completed"


async def test_a_batch_that_cannot_be_read_keeps_no_other_from_ending(place: Place) -> None:
    odd, good = await place.submit([line("a")]), await place.submit([line("b")])
    await place.execute("""UPDATE batches SET caller = caller || '{"role": "sovereign"}' WHERE id = $1""", odd)
    assert (await place.ended(place.worker(Answering()), good)).status == "completed"


async def test_a_line_in_many_pieces_costs_no_more_than_its_length() -> None:
    pieces = 20_000

    class Pieces:
        async def chunk(self, tenant: str, file: str, number: int) -> bytes | None:
            assert (tenant, file) == ("acme", "file_1")
            return None if number > pieces else b"x" * 4_096 if number < pieces else b"y\nz"

    class Rows:
        batches = Pieces()

    batch = OpenBatch("batch_1", CALLER, "/v1/embeddings", "file_1", "validating", 60.0, {}, {})
    began_s = time.process_time()
    found = [(number, len(content)) async for number, content in lines_of(Rows(), batch)]  # type: ignore[arg-type]
    assert found == [(1, 4_096 * pieces + 1), (2, 1)]
    assert time.process_time() - began_s < 5, "joining each piece to all before it takes a minute"
