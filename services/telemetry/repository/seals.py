"""What makes changes to the ledger evident: its lanes of batches, and the signed statements of days and of sums."""

from collections.abc import Callable
from datetime import date, datetime
from typing import NamedTuple

from services.db import locks
from services.db.database import Connection, Database, Record
from services.db.rows import fetch_row, fetch_rows

NOTHING = bytes(32)  #: Stands for the hash before the first

Sign = Callable[[str], tuple[bytes | None, bytes | None]]
"""Returns the public key and the signature of a text; None both: the installation has no key."""

_LAST_DAY = """
SELECT number, day, hash, substring(text FROM 'since ([^\n]+)') AS since FROM ledger_days ORDER BY number DESC LIMIT 1
"""
_SINCE = "SELECT to_json(min(at)) #>> '{}' FROM ledger_batches"
_LAST_SUM = "SELECT number, hash FROM ledger_sums ORDER BY number DESC LIMIT 1"

_HEADS = """
SELECT l.lane, coalesce(h.number, 0) AS after_number, l.number, encode(l.hash, 'hex') AS hash
FROM ledger_lanes l LEFT JOIN ledger_heads h ON h.lane = l.lane AND h.day_number = $1 ORDER BY l.lane
"""

_SPAN = """
SELECT coalesce(sum(b.lines), 0)::bigint AS lines, min(b.first_at) AS first_at, max(b.last_at) AS last_at
FROM ledger_batches b JOIN ledger_heads h USING (lane)
WHERE h.day_number = $1 AND b.number > h.after_number AND b.number <= h.number
"""

_ADD_HEADS = """
INSERT INTO ledger_heads (day_number, lane, after_number, number)
SELECT $1, * FROM unnest($2::int[], $3::bigint[], $4::bigint[])
"""

_ADD_DAY = "INSERT INTO ledger_days (number, day, text, hash, public_key, signature, first_at, last_at) "
_ADD_DAY += "VALUES ($1, $2, $3, sha256(convert_to($3, 'UTF8')), $4, $5, $6, $7)"

_ADD_SUM = "INSERT INTO ledger_sums (number, day_number, text, hash, public_key, signature) "
_ADD_SUM += "VALUES ($1, $2, $3, sha256(convert_to($3, 'UTF8')), $4, $5)"

LINE_TEXT = """concat_ws(E'\\t', node_id, boot_id, sequence, owner, coalesce(job_id, ''), to_json(start_at) #>> '{}',
    to_json(end_at) #>> '{}', gpus, gpu_energy_j, cpu_energy_j, static_energy_j, source, cpu_source, zone, signal,
    intensity_gco2_per_kwh, intensity_estimated::text, pue, carbon_gco2, coalesce(basis, ''),
    coalesce(reported_energy_j::text, ''), array_to_string(devices, ' '), coalesce(provider, ''),
    coalesce(to_json(fetched_at) #>> '{}', ''), coalesce(intensity_kind, ''), coalesce(release, ''))"""
"""A line of ``energy_usages`` as ``ledger_close`` hashes it, version 1."""

SUM_TEXT = """concat_ws(E'\\t', node_id, owner, coalesce(job_id, ''), to_json(start_at) #>> '{}',
    to_json(end_at) #>> '{}', zone, signal, pue, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s,
    estimated::text)"""
"""A line of ``energy_days`` as it is hashed."""

_OF_SUM = f"""
SELECT count(*) AS lines, min(start_at) AS first_at, max(start_at) AS last_at,
    encode(sha256(convert_to(coalesce(string_agg(line, '' ORDER BY line COLLATE "C"), ''), 'UTF8')), 'hex') AS digest
FROM (SELECT start_at, {SUM_TEXT} || E'\\n' AS line FROM energy_days WHERE sum_number = $1) AS lines
"""

_FOLDABLE = """
SELECT d.number, d.hash FROM ledger_days d
WHERE coalesce(least(d.last_at, (d.day + 1)::timestamp AT TIME ZONE 'UTC'), '-infinity') < $1
    AND NOT EXISTS (SELECT FROM ledger_sums s WHERE s.day_number = d.number)
ORDER BY d.number LIMIT 1
"""


class Known(NamedTuple):
    """A statement."""

    number: int
    hash: bytes


class KnownDay(NamedTuple):
    """The newest statement of a day, and when batches began."""

    number: int
    day: date
    hash: bytes
    since: str


class Head(NamedTuple):
    """The newest batch of a lane, and its last one of the day before."""

    lane: int
    after_number: int
    number: int
    hash: str


def _lines(span: Record) -> str:
    first, last = ("-" if at is None else at.isoformat() for at in (span["first_at"], span["last_at"]))
    return f"lines {span['lines']} {first} {last}"


async def close_day(database: Database, sign: Sign, day: date) -> bool:
    """State which batches the ledger has at the end of a day, and sign it; return whether a statement was added.

    The batches of a day are those committed since the previous statement. Only committed heads are read, so what
    commits meanwhile belongs to the next day.
    """
    async with database.transaction() as connection:
        await connection.execute("SELECT pg_advisory_xact_lock($1)", locks.LEDGER_UPKEEP)
        before = await fetch_row(connection, KnownDay, _LAST_DAY) or KnownDay(
            0, date.min, NOTHING, await connection.fetchval(_SINCE)
        )
        if before.day >= day:
            return False
        number = before.number + 1
        heads = await fetch_rows(connection, Head, _HEADS, before.number)
        if not heads:
            return False
        columns = zip(*(head[:3] for head in heads), strict=True)
        await connection.execute(_ADD_HEADS, number, *map(list, columns))
        (span,), last_sum = await connection.fetch(_SPAN, number), await _last_sum(connection)
        text = "\n".join(
            [
                "wattshift ledger day 1",
                f"number {number}",
                f"day {day}",
                f"before {before.hash.hex()}",
                f"since {before.since}",
                f"sums {last_sum.number} {last_sum.hash.hex()}",
                _lines(span),
                *(f"lane {head.lane} {head.number} {head.hash}" for head in heads),
            ]
        )
        await connection.execute(_ADD_DAY, number, day, text, *sign(text), span["first_at"], span["last_at"])
    return True


async def foldable_day(connection: Connection, before: datetime) -> Known | None:
    """Return the statement of the first day whose lines all begin before a time and were not replaced by a sum."""
    return await fetch_row(connection, Known, _FOLDABLE, before)


async def next_sum(connection: Connection) -> int:
    return (await _last_sum(connection)).number + 1


async def _last_sum(connection: Connection) -> Known:
    return await fetch_row(connection, Known, _LAST_SUM) or Known(0, NOTHING)


async def state_sum(connection: Connection, number: int, replaced: Known | None, sign: Sign) -> None:
    """Sign the lines of a sum; ``replaced`` is the day whose lines it stands for, None if it corrects such sums."""
    before, (span,) = await _last_sum(connection), await connection.fetch(_OF_SUM, number)
    text = "\n".join(
        [
            "wattshift ledger sum 1",
            f"number {number}",
            f"before {before.hash.hex()}",
            f"replaces {replaced.number} {replaced.hash.hex()}" if replaced else "adds",
            _lines(span),
            f"digest {span['digest']}",
        ]
    )
    await connection.execute(_ADD_SUM, number, replaced.number if replaced else None, text, *sign(text))


async def newest_keys(connection: Connection) -> list[Record]:
    """Return the signing keys, newest first: ``public_key``, and the key itself as ``sealed``."""
    return await connection.fetch("SELECT public_key, sealed FROM ledger_keys ORDER BY made_at DESC")


async def add_key(connection: Connection, public_key: bytes, sealed: bytes) -> None:
    await connection.execute("INSERT INTO ledger_keys (public_key, sealed) VALUES ($1, $2)", public_key, sealed)
