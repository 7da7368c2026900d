"""Files and batches, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator

import openai
import pytest

from services.contracts.identity import KeyLimits
from services.db.database import connect
from tests.serving.batches import BatchWorld, a_batch_world, line, written
from tests.support.routers import MODEL


@pytest.fixture(scope="module")
async def stage(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[BatchWorld]:
    folder = tmp_path_factory.mktemp("router")
    async with a_batch_world(database_url, redis_url, folder, batch_file_bytes=3_000_000, batch_lines=50) as made:
        yield made


@pytest.fixture
async def world(stage: BatchWorld) -> BatchWorld:
    await stage.reset()
    return stage


async def test_a_batch_from_upload_to_results(world: BatchWorld) -> None:
    lines = [line(f"line {number}") for number in range(20)]
    batch = await world.submit(written(lines), metadata={"night": "yes"})
    assert (batch.status, batch.metadata) == ("validating", {"night": "yes"})
    assert batch.expires_at == batch.created_at + 86_400

    done = await world.until(batch)

    assert done.status == "completed"
    assert done.completed_at is not None
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (20, 20, 0)
    assert done.error_file_id is None
    results = await world.results(done.output_file_id)
    assert set(results) == {each["custom_id"] for each in lines}
    for result in results.values():
        assert result["error"] is None
        assert result["response"]["status_code"] == 200
        assert result["response"]["body"]["choices"][0]["message"]["content"]
    extra = done.model_extra
    assert extra is not None
    assert extra["wattshift"]["wh"] > 0
    assert extra["wattshift"]["repeated_lines"] == 0
    assert len(world.one.seen) + len(world.two.seen) == 20


async def test_lines_that_a_server_refuses_are_in_the_error_file(world: BatchWorld) -> None:
    for server in (world.one, world.two):
        server.status, server.body = 400, b'{"error": {"message": "Too long.", "code": "context_length_exceeded"}}'
    done = await world.until(await world.submit(written([line("a"), line("b")])))

    assert done.status == "completed"
    assert done.output_file_id is None
    errors = await world.results(done.error_file_id)
    assert errors["a"]["response"]["status_code"] == 400
    assert errors["b"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (0, 2)


async def test_a_line_whose_failure_is_refused_too_holds_no_other(world: BatchWorld) -> None:
    connection = await connect(world.settings.database_url, application_name="test")
    await connection.execute("ALTER TABLE batch_lines ADD CONSTRAINT never CHECK (result NOT LIKE '%never%')")
    try:
        held = await world.submit(written([line("never"), line("held")]))
        done = await world.until(await world.submit(written([line("a"), line("b")])))
        assert (done.status, len(await world.results(done.output_file_id))) == ("completed", 2)
        held = await world.until(
            held, lambda batch: batch.request_counts is not None and batch.request_counts.completed == 1
        )
        assert held.request_counts is not None
        assert held.request_counts.failed == 0
    finally:
        await connection.execute("ALTER TABLE batch_lines DROP CONSTRAINT never")
        await connection.close()


async def test_a_file_with_faults_names_each_with_its_line_and_nothing_is_sent(world: BatchWorld) -> None:
    bad = line("streams")
    bad["body"] |= {"stream": True}
    content = written([line("one"), line("one"), line("embeds", url="/v1/embeddings"), line("gets", method="GET")])
    content += b"{not json\n\n" + written([bad, line("other", body={"model": "unheard-of"}), line("", body=7)])
    done = await world.until(await world.submit(content))

    assert done.status == "failed"
    assert done.failed_at is not None
    assert done.errors is not None
    assert done.errors.data is not None
    assert [(each.line, each.code) for each in done.errors.data] == [
        (2, "duplicate_custom_id"),
        (3, "mismatched_url"),
        (4, "invalid_method"),
        (5, "invalid_json_line"),
        (7, "invalid_request"),
        (8, "model_not_found"),
        (9, "invalid_custom_id"),
    ]
    assert world.one.seen == world.two.seen == []


async def test_empty_and_too_long_batches_fail(world: BatchWorld) -> None:
    empty = await world.until(await world.submit(b"\n\n"))
    long = await world.until(await world.submit(written(line(f"{number}") for number in range(51))))

    for batch, code in ((empty, "empty_file"), (long, "too_many_requests")):
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [each.code for each in batch.errors.data] == [code]


async def test_a_batch_knows_the_aliases_of_its_key_and_their_shares(world: BatchWorld) -> None:
    await world.endpoint("two", world.two, "dirty", models=["next-7b"])
    async with asyncio.timeout(60):
        while "next-7b" not in {each.id async for each in world.client.models.list()}:
            await world.router.adopted()
    world.plane.key_limits = KeyLimits(models=[], aliases={"gpt-4o": {MODEL: 3, "next-7b": 1, "gone": 9}})
    asked = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello"}]}
    session = {**asked, "user": "ada"}
    lines = [line(f"{number}", body=asked) for number in range(20)]
    done = await world.until(await world.submit(written([*lines, *(line(f"u{n}", body=session) for n in range(4))])))

    assert done.status == "completed"
    results = await world.results(done.output_file_id)
    answers = [each["response"]["body"] for each in results.values()]
    assert {each["model"] for each in answers} == {"gpt-4o"}
    by = {name: each["response"]["body"]["choices"][0]["message"]["content"][:3] for name, each in results.items()}
    of_each = Counter(by[f"{number}"] for number in range(20))
    assert abs(of_each["one"] - 15) <= 1
    assert of_each["one"] + of_each["two"] == 20
    assert len({by[f"u{number}"] for number in range(4)}) == 1
    assert {json.loads(body)["model"] for body in world.one.seen} == {MODEL}
    assert {json.loads(body)["model"] for body in world.two.seen} == {"next-7b"}


async def test_a_batch_may_name_no_model_that_its_key_may_not(world: BatchWorld) -> None:
    world.plane.key_limits = KeyLimits(models=["next-7b"])
    done = await world.until(await world.submit(written([line("a")])))
    assert done.errors is not None
    assert done.errors.data is not None
    assert [each.code for each in done.errors.data] == ["model_not_found"]


async def test_files_are_listed_read_and_deleted(world: BatchWorld) -> None:
    content = written([line("a")]) * 20_000
    file = await world.client.files.create(
        file=("many.jsonl", content[:2_500_000]),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7_200},
    )
    other = await world.client.files.create(file=("few.jsonl", b"{}\r\n--x"), purpose="batch")

    assert (file.bytes, file.filename, file.purpose) == (2_500_000, "many.jsonl", "batch")
    assert file.expires_at == file.created_at + 7_200
    assert (await world.client.files.content(file.id)).content == content[:2_500_000]
    assert (await world.client.files.content(other.id)).content == b"{}\r\n--x"
    assert [each.id async for each in world.client.files.list(limit=1)] == [other.id, file.id]
    assert [each.id async for each in world.client.files.list(limit=1, order="asc")] == [file.id, other.id]
    assert (await world.client.files.delete(other.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await world.client.files.retrieve(other.id)


async def test_what_no_contract_allows_is_refused_and_leaves_nothing(world: BatchWorld) -> None:
    create = world.client.files.create
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await create(file=("a", b"{}"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="empty"):
        await create(file=("a", b""), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="3600"):
        await create(file=("a", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})
    with pytest.raises(openai.APIStatusError, match="at most 3000000") as refused:
        await create(file=("a", b"x" * 3_000_001), purpose="batch")
    assert refused.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="no file"):
        await world.client.batches.create(
            input_file_id="file_x", endpoint="/v1/chat/completions", completion_window="24h"
        )
    file = await create(file=("a", b"{}"), purpose="batch")
    for wrong in ({"completion_window": "48h"}, {"endpoint": "/v1/files"}, {"metadata": {"a": 7}}):
        given = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **wrong}
        with pytest.raises(openai.BadRequestError):
            await world.client.batches.create(**given)  # pyright: ignore[reportArgumentType]
    assert [each.id async for each in world.client.files.list()] == [file.id]
    assert [each.id async for each in world.client.batches.list()] == []


async def test_a_tenant_sees_only_its_own(world: BatchWorld) -> None:
    batch = await world.until(await world.submit(written([line("a")])))
    assert batch.output_file_id is not None

    assert [each.id async for each in world.stranger.files.list()] == []
    assert [each.id async for each in world.stranger.batches.list()] == []
    for ask in (
        lambda: world.stranger.batches.retrieve(batch.id),
        lambda: world.stranger.batches.cancel(batch.id),
        lambda: world.stranger.files.retrieve(batch.input_file_id),
        lambda: world.stranger.files.content(batch.output_file_id or ""),
        lambda: world.stranger.files.delete(batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask()
    with pytest.raises(openai.BadRequestError):
        await world.stranger.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )


@pytest.mark.parametrize("path", ["/v1/files/../../../routing/keys", "/v1/files/..%2f..%2f..%2frouting%2fkeys"])
async def test_no_path_leads_to_other_routes_of_serving(world: BatchWorld, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.router.url.rpartition(":")[2]))
    key = world.client.api_key
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 404")
    assert b"unknown_url" in answer


async def test_a_cancelled_batch_keeps_what_was_answered(world: BatchWorld) -> None:
    batch = await world.submit(written(line(f"{number}") for number in range(30)))
    await world.until(batch, lambda now: bool(now.request_counts and now.request_counts.completed))
    world.one.gate = world.two.gate = asyncio.Event()  # what comes now waits

    cancelled = await world.client.batches.cancel(batch.id)
    done = await world.until(cancelled)

    assert done.status == "cancelled"
    assert done.cancelled_at is not None
    answered, unanswered = await world.results(done.output_file_id), await world.results(done.error_file_id)
    assert answered
    assert len({**answered, **unanswered}) == len(answered) + len(unanswered) == 30
    assert {each["error"]["code"] for each in unanswered.values()} <= {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        await world.client.batches.cancel(batch.id)


async def test_lines_never_take_a_place_that_others_wait_for(world: BatchWorld) -> None:
    await world.endpoint("one", world.one, "clean", capacity=2)
    await world.endpoint("two", world.two, "dirty", draining=True)
    await world.router.adopted()
    world.one.gate = asyncio.Event()
    batch = await world.submit(written([line("a"), line("b"), line("c")]))
    await world.one.until(lambda: len(world.one.seen) >= 1)

    asked = [asyncio.create_task(world.router.ask()) for _ in range(2)]
    await world.one.until(lambda: world.one.held == 2 and world.one.cancelled >= 1)  # a line has given up its place
    world.one.gate.set()
    answers = await asyncio.gather(*asked)

    assert [each.status_code for each in answers] == [200, 200]
    done = await world.until(batch)
    assert set(await world.results(done.output_file_id)) == {"a", "b", "c"}
