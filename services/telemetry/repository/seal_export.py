"""What follows the lines of an export and shows that none was changed, as docs/ledger.md describes."""

import json
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Literal

from services.db.database import Connection
from services.telemetry.repository.lines import LEDGER
from services.telemetry.repository.reports import PERIOD, Subject
from services.telemetry.repository.seals import LINE_TEXT, SUM_TEXT, Sign

Output = Callable[[bytes], Awaitable[None]]

_AT_ONCE = 5_000

_TIME = "to_json({at}) #>> '{{}}'"

_SPAN = "(first_at IS NULL OR $2::timestamptz IS NULL OR first_at < $2) AND (last_at IS NOT NULL "
_SPAN += "AND ($1::timestamptz IS NULL OR last_at >= $1))"
"""Whether something that has a first and a last line has any in the period."""

_PERIOD = "SELECT 'period ' || coalesce(to_json($1::timestamptz) #>> '{}', '-') || ' ' "
_PERIOD += "|| coalesce(to_json($2::timestamptz) #>> '{}', '-')"

_FIGURES = ", ".join(
    f"coalesce(sum({name}), 0) AS {name}"
    for name in (
        *("energy_j", "gpu_energy_j", "estimated_energy_j", "facility_energy_j", "carbon_gco2", "estimated_gco2"),
        "gpu_s",
    )
)

_TOTALS = f"""
WITH {LEDGER}, base AS MATERIALIZED (
    SELECT job_id, node_id, zone, date_trunc('day', l.start_at, 'UTC') AT TIME ZONE 'UTC' AS at, {_FIGURES}
    FROM ledger l WHERE {PERIOD} GROUP BY 1, 2, 3, 4
), named AS (
    SELECT l.*, j.tenant_id AS tenant, j.project, j.user_name AS "user", model.name AS model FROM base l {{owner}}
), keyed AS (
    SELECT n.*, g.kind, g.name FROM named n CROSS JOIN LATERAL (VALUES
        ('all', ''), (CASE WHEN job_id IS NULL THEN 'idle' END, ''),
        (CASE WHEN tenant IS NOT NULL THEN 'job' END, job_id),
        (CASE WHEN tenant IS NOT NULL THEN 'tenant' END, tenant),
        (CASE WHEN tenant IS NOT NULL THEN 'project' END, project),
        (CASE WHEN tenant IS NOT NULL THEN 'user' END, coalesce("user", '')),
        (CASE WHEN tenant IS NOT NULL THEN 'model' END, coalesce(model, '')),
        (CASE WHEN tenant IS NOT NULL THEN 'zone' END, zone),
        (CASE WHEN tenant IS NOT NULL THEN 'node' END, node_id),
        (CASE WHEN tenant IS NOT NULL THEN 'day' END, to_char(at, 'YYYY-MM-DD')),
        (CASE WHEN tenant IS NOT NULL THEN 'week' END, to_char(at, 'IYYY-"W"IW')),
        (CASE WHEN tenant IS NOT NULL THEN 'month' END, to_char(at, 'YYYY-MM'))) AS g (kind, name)
    WHERE g.kind IS NOT NULL
)
SELECT concat_ws(' ', 'total', kind, energy_j, gpu_energy_j, estimated_energy_j, facility_energy_j, carbon_gco2,
    estimated_gco2, gpu_s, to_json(name)) FROM (SELECT kind, name, {_FIGURES} FROM keyed GROUP BY 1, 2 ORDER BY 1, 2) s
"""

_STATEMENT = "concat_ws(' ', '{kind}', coalesce(encode(public_key, 'hex'), '-'), "
_STATEMENT += "coalesce(encode(signature, 'hex'), '-'), to_json(text))"

_DAYS = f"SELECT {_STATEMENT.format(kind='day')} FROM ledger_days ORDER BY number"
_SUMS = f"SELECT {_STATEMENT.format(kind='sum')} FROM ledger_sums ORDER BY number"

_TAIL = """
tail AS (
    SELECT b.* FROM ledger_batches b
    LEFT JOIN ledger_heads h ON h.lane = b.lane AND h.day_number = (SELECT max(number) FROM ledger_days)
    WHERE b.number > coalesce(h.number, 0)
)
"""

_WANTED = f"""
{_TAIL}, wanted AS (
    SELECT b.* FROM ledger_days d JOIN ledger_heads h ON h.day_number = d.number
    JOIN ledger_batches b ON b.lane = h.lane AND b.number > h.after_number AND b.number <= h.number
    WHERE {_SPAN.replace("first_at", "d.first_at").replace("last_at", "d.last_at")}
    UNION ALL
    SELECT * FROM tail WHERE EXISTS (SELECT FROM tail WHERE {_SPAN})
)
"""
"""Batches of days that have lines in the period, and of the time since the last day if any of them has."""

_BATCHES = f"""
WITH {_WANTED}
SELECT concat_ws(' ', 'batch', id, lane, number, version, {_TIME.format(at="at")}, lines, {_TIME.format(at="first_at")},
    {_TIME.format(at="last_at")}, encode(digest, 'hex')) FROM wanted ORDER BY id
"""

_OUTSIDE = "(start_at < $1 OR start_at >= $2)"

_LINES_OUTSIDE = f"""
WITH {_WANTED}, cut AS MATERIALIZED (SELECT id FROM wanted WHERE {_SPAN} AND (first_at < $1 OR last_at >= $2))
SELECT concat_ws(' ', 'line', batch, to_json({LINE_TEXT})) FROM energy_usages
WHERE batch BETWEEN (SELECT min(id) FROM cut) AND (SELECT max(id) FROM cut) AND batch IN (SELECT id FROM cut)
    AND {_OUTSIDE}
"""

_SUMS_OUTSIDE = f"""
WITH spans AS (
    SELECT sum_number, min(start_at) AS first_at, max(start_at) AS last_at FROM energy_days WHERE sum_number > 0
    GROUP BY 1
)
SELECT concat_ws(' ', 'sumline', sum_number, to_json({SUM_TEXT})) FROM energy_days
WHERE sum_number IN (SELECT sum_number FROM spans WHERE {_SPAN}) AND {_OUTSIDE}
"""


class Written:
    """What was written of an export, counted and hashed."""

    def __init__(self, output: Output, form: Literal["csv", "jsonl"]) -> None:
        self._output, self._form = output, form
        self._hash = sha256()
        self.size = 0

    async def take(self, piece: bytes) -> None:
        self._hash.update(piece)
        self.size += len(piece)
        await self._output(piece)

    async def seal(self, lines: list[str]) -> None:
        """Write lines of seals: comments in CSV, objects with one field in JSON lines."""
        form = "# {}\n".format if self._form == "csv" else (lambda line: json.dumps({"seal": line}) + "\n")
        await self.take("".join(map(form, lines)).encode())

    @property
    def sha256(self) -> str:
        """The SHA-256 of all that was written."""
        return self._hash.hexdigest()


async def write_seals(connection: Connection, about: Subject, written: Written, owner: str, sign: Sign) -> None:
    """Write the seals of an export of all lines of a period, and the signature of the whole.

    Args:
        connection: In the transaction that read the lines.
        owner: Joins the names of a line's job and board.
    """
    lines_end, period = written.size, about[:2]
    for query, arguments in (
        (_PERIOD, period),
        (_TOTALS.format(owner=owner), period),
        (_DAYS, ()),
        (_BATCHES, period),
        (_LINES_OUTSIDE, period),
        (_SUMS, ()),
        (_SUMS_OUTSIDE, period),
    ):
        cursor = await connection.cursor(query, *arguments)
        while rows := await cursor.fetch(_AT_ONCE):
            await written.seal([row[0] for row in rows])
    text = f"wattshift ledger export 1\nlines_end {lines_end}\nsha256 {written.sha256}"
    key, signature = sign(text)
    await written.seal([f"end {key.hex() if key else '-'} {signature.hex() if signature else '-'} {json.dumps(text)}"])
