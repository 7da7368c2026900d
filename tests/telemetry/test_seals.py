"""The ledger is only added to; each batch is hashed with the one before it, and each day signed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import asyncpg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from services.db.sealing import Sealer
from services.kit.ids import utc_now
from services.telemetry.repository.seals import NOTHING
from services.telemetry.seals import Signer, close_days
from tests.support.control_plane import accept_job, allocate, usage
from tests.support.ledger import end_day, fold_now

DAY_S = 86_400.0
COLUMNS = (
    *("node_id", "boot_id", "sequence", "owner", "job_id", "start_at", "end_at", "gpus", "gpu_energy_j"),
    *("cpu_energy_j", "static_energy_j", "source", "cpu_source", "zone", "signal", "intensity_gco2_per_kwh"),
    *("intensity_estimated", "pue", "carbon_gco2", "basis", "reported_energy_j", "devices", "provider", "fetched_at"),
    *("intensity_kind", "release"),
)
INSERT = """
INSERT INTO energy_usages (node_id, boot_id, sequence, owner, start_at, end_at, gpus, gpu_energy_j, cpu_energy_j,
    static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue, carbon_gco2)
SELECT 'n' || i, 'b', $1, '', now(), now(), 1, i / 3.0, 1e-7, 1e15, 'counter', 'DE', 'average', 300, false, 1.2, 5
FROM generate_series(1, 3) i
"""


async def rows(plane: Any, query: str, *arguments: Any) -> list[Any]:
    async with plane.database.connection() as connection:
        return await connection.fetch(query, *arguments)


async def ask(plane: Any, statement: str, *arguments: Any) -> None:
    async with plane.database.connection() as connection:
        await connection.execute(statement, *arguments)


async def hashed_again(plane: Any) -> dict[int, tuple[int, bytes]]:
    """Return the newest number and running hash of each lane, from the lines alone."""
    texts = [
        f"coalesce(to_json({name}) #>> '{{}}', '')"
        if name.endswith("_at")
        else "array_to_string(devices, ' ')"
        if name == "devices"
        else f"coalesce({name}::text, '')"
        for name in COLUMNS
    ]
    heads: dict[int, tuple[int, bytes]] = {}
    for batch in await rows(
        plane,
        "SELECT *, to_json(at) #>> '{}' AS at_, to_json(first_at) #>> '{}' AS first_, to_json(last_at) #>> '{}' AS "
        "last_ FROM ledger_batches ORDER BY lane, number",
    ):
        found = await rows(
            plane, f"SELECT concat_ws(E'\\t', {', '.join(texts)}) FROM energy_usages WHERE batch = $1", batch["id"]
        )
        lines = sorted(f"{row[0]}\n" for row in found)
        assert (len(lines), sha256("".join(lines).encode()).digest()) == (batch["lines"], batch["digest"])
        number, before = heads.get(batch["lane"], (0, NOTHING))
        assert batch["number"] == number + 1
        head = f"{batch['lane']} {batch['number']} {batch['at_']} {len(lines)} {batch['first_']} {batch['last_']}"
        text = f"wattshift ledger batch {batch['version']}\n{head}\n{before.hex()}\n{batch['digest'].hex()}\n"
        heads[batch["lane"]] = batch["number"], sha256(text.encode()).digest()
    return heads


async def heads_of(plane: Any) -> dict[int, tuple[int, bytes]]:
    return {row["lane"]: (row["number"], row["hash"]) for row in await rows(plane, "SELECT * FROM ledger_lanes")}


async def test_every_batch_is_hashed_with_the_one_before_it(plane) -> None:
    agent = await plane.agent()
    gang = await allocate(plane.database, await accept_job(plane.database), {"n0": [0]})
    now = utc_now().timestamp()
    for number in range(3):
        await agent.report(agent.interval(now + number, now + number + 1, usage(gang, 1 / 3), usage(None, 1e-9)))
    await ask(plane, INSERT, 1)

    heads = await hashed_again(plane)

    assert heads == await heads_of(plane)
    assert sum(number for number, _ in heads.values()) == 4
    assert not await rows(plane, "SELECT FROM energy_usages WHERE batch = 0")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE energy_usages SET carbon_gco2 = 0",
        "DELETE FROM energy_usages",
        "TRUNCATE energy_usages",
        "UPDATE ledger_batches SET lines = 0",
        "DELETE FROM ledger_batches",
        "UPDATE ledger_days SET signature = ''",
        "DELETE FROM ledger_days",
        "DELETE FROM ledger_heads",
        "DELETE FROM ledger_sums",
        "UPDATE energy_days SET energy_j = 0",
        "DELETE FROM energy_days",
        "TRUNCATE energy_days",
    ],
)
async def test_nothing_of_the_ledger_is_changed_or_removed(plane, statement: str) -> None:
    agent = await plane.agent()
    old = utc_now().timestamp() - 5 * DAY_S
    await agent.report(agent.interval(old, old + 1, usage(None, 5)))
    await fold_now(plane.database, 2 * DAY_S)
    await ask(plane, INSERT, 1)
    with pytest.raises(asyncpg.RestrictViolationError, match="the ledger is only added to"):
        await ask(plane, statement)
    assert [len(await rows(plane, f"SELECT FROM {table}")) for table in ("energy_usages", "energy_days")] == [3, 1]


async def test_writers_at_the_same_time_have_lanes_of_their_own(plane) -> None:
    """A chain that all share would have each transaction wait for the one before it to commit.

    Sums by hour are those of a node, whose lines one transaction adds at a time.
    """
    of_others = INSERT.replace("'n' || i", "'other' || i")
    await ask(plane, INSERT, 0)  # there is a lane that both could take
    async with plane.database.transaction() as first, plane.database.transaction() as second:
        await first.execute(INSERT, 1)
        async with asyncio.timeout(20):
            await second.execute(of_others, 2)
    await asyncio.gather(*(ask(plane, INSERT, number) for number in range(3, 23)))

    heads = await hashed_again(plane)
    assert heads == await heads_of(plane)
    assert len(heads) >= 2
    assert sum(number for number, _ in heads.values()) == 23


async def test_what_is_not_committed_has_no_hash(plane) -> None:
    await ask(plane, INSERT, 1)
    before = await heads_of(plane)
    async with plane.database.connection() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(INSERT, 2)
        await transaction.rollback()
    assert await heads_of(plane) == before == await hashed_again(plane)
    await ask(plane, INSERT, 3)
    assert await heads_of(plane) == await hashed_again(plane)


async def test_a_day_names_every_head_and_the_day_before_and_is_signed(plane) -> None:
    signer = Signer(plane.database, Sealer("k" * 32))
    await signer.use(close_days)
    for number in range(2):
        await ask(plane, INSERT, number)
        await end_day(plane.database, signer.sign)

    first, second = await rows(plane, "SELECT * FROM ledger_days ORDER BY number")
    for day in (first, second):
        assert day["hash"] == sha256(day["text"].encode()).digest()
        Ed25519PublicKey.from_public_bytes(day["public_key"]).verify(day["signature"], day["text"].encode())
    assert f"\nbefore {first['hash'].hex()}\n" in second["text"]
    ((lane, (number, head)),) = (await hashed_again(plane)).items()
    assert second["text"].endswith(f"\nlane {lane} {number} {head.hex()}")


async def test_the_key_is_made_once_and_another_only_where_it_does_not_open(plane) -> None:
    async def public(secret: str) -> bytes | None:
        signer = Signer(plane.database, Sealer(secret))
        await signer.use(close_days)
        return signer.sign("text")[0]

    await ask(plane, "DELETE FROM ledger_keys")
    made = await public("a" * 32)
    assert made == await public("a" * 32) == await public("b" * 32 + "," + "a" * 32)
    assert made != await public("c" * 32)
    assert await public("") is None
    stored = await rows(plane, "SELECT public_key, sealed FROM ledger_keys")
    assert len(stored) == 2
    assert all(len(row["sealed"]) > 64 for row in stored), "the private key is sealed"


async def test_a_sum_names_the_day_that_it_stands_for(plane) -> None:
    signer = Signer(plane.database, Sealer("k" * 32))
    await signer.use(close_days)
    agent = await plane.agent()
    old = utc_now().timestamp() - 5 * DAY_S
    await agent.report(agent.interval(old, old + 1, usage(None, 5)))
    await fold_now(plane.database, 2 * DAY_S, signer.sign)

    (day,) = await rows(plane, "SELECT * FROM ledger_days")
    (found,) = await rows(plane, "SELECT * FROM ledger_sums")
    assert f"\nreplaces 1 {day['hash'].hex()}\n" in found["text"]
    Ed25519PublicKey.from_public_bytes(found["public_key"]).verify(found["signature"], found["text"].encode())
    assert await rows(plane, "SELECT FROM energy_usages") == await rows(plane, "SELECT FROM ledger_batches") == []
    assert [row["sum_number"] for row in await rows(plane, "SELECT * FROM energy_days")] == [1]


async def test_a_key_that_was_not_stored_signs_nothing(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transaction = plane.database.transaction

    @asynccontextmanager
    async def cut_off() -> AsyncIterator[Any]:
        async with transaction() as connection:
            yield connection
            raise ConnectionError

    signer = Signer(plane.database, Sealer("of its own" * 4))
    monkeypatch.setattr(plane.database, "transaction", cut_off)
    with pytest.raises(ConnectionError):
        await signer.ready()
    monkeypatch.undo()
    public_key, _ = (await signer.ready())("text")
    assert await rows(plane, "SELECT 1 FROM ledger_keys WHERE public_key = $1", public_key)
