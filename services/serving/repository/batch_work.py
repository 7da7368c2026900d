"""Queries of the process that works on the batches of all tenants; one does at a time."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sqlalchemy import Row, text

from services.contracts.batches import LineError
from services.contracts.identity import Identity
from services.kit.readable import readable
from services.serving.repository.specs import Rows

_OPEN = text("""
SELECT b.*, extract(epoch FROM b.expires_at - now())::float8 AS left_s, l.model, coalesce(l.waiting, 0) AS waiting,
       coalesce(l.sent, 0) AS sent
  FROM batches b LEFT JOIN LATERAL (
       SELECT model, count(*) FILTER (WHERE state = 'waiting') AS waiting,
              count(*) FILTER (WHERE state = 'sent') AS sent
         FROM batch_lines WHERE batch_id = b.id AND result IS NULL GROUP BY model) l ON true
 WHERE b.ended_at IS NULL ORDER BY b.expires_at, b.id
""")
_TAKE_BACK = text("""
WITH back AS (
    UPDATE batch_lines SET state = 'waiting'
     WHERE state = 'sent' AND result IS NULL AND NOT (batch_id || ' ' || number = ANY(CAST(:kept AS text[])))
    RETURNING batch_id)
UPDATE batches b SET repeated = repeated + n.lines
  FROM (SELECT batch_id, count(*) AS lines FROM back GROUP BY batch_id) n WHERE b.id = n.batch_id
""")
_ADD_LINES = text("""
INSERT INTO batch_lines (batch_id, number, custom_id, model, body)
SELECT CAST(:batch AS text), n, c, m, b FROM unnest(CAST(:numbers AS integer[]), CAST(:custom_ids AS text[]),
                                      CAST(:models AS text[]), CAST(:bodies AS text[])) AS l(n, c, m, b)
""")
_BEGIN = text("""
UPDATE batches SET status = 'in_progress', total = :total, arrival_gco2_per_kwh = CAST(:arrival AS float8),
       moments = moments || jsonb_build_object('in_progress_at', floor(extract(epoch FROM now())))
 WHERE id = :id AND status = 'validating'
""")
_FAIL = text("""
UPDATE batches SET status = 'failed', errors = CAST(:errors AS jsonb), ended_at = now(),
       moments = moments || jsonb_build_object('failed_at', floor(extract(epoch FROM now())))
 WHERE id = :id AND status = 'validating'
""")
_CLAIM = text("""
UPDATE batch_lines SET state = 'sent', attempt = attempt + 1
 WHERE (batch_id, number) IN (
       SELECT batch_id, number FROM batch_lines
        WHERE batch_id = :batch AND model = :model AND state = 'waiting' AND result IS NULL
        ORDER BY failures, number LIMIT :lines FOR UPDATE SKIP LOCKED)
RETURNING batch_id, number, attempt, custom_id, model, body, failures
""")
_RECORD = text("""
WITH written AS (
    UPDATE batch_lines SET state = :state, result = CAST(:result AS text), failures = failures + :failures
     WHERE batch_id = :batch AND number = :number AND attempt = :attempt AND state = 'sent' RETURNING state)
UPDATE batches b SET completed = completed + CASE WHEN w.state = 'succeeded' THEN 1 ELSE 0 END,
       failed = failed + CASE WHEN w.state = 'failed' THEN 1 ELSE 0 END,
       energy_j = energy_j + :energy_j, carbon_gco2 = carbon_gco2 + :carbon_gco2, repeated = repeated + :repeated
  FROM written w WHERE b.id = :batch
""")
_EXPECT = text("""
UPDATE batches SET moments = moments - 'next_at' || CASE WHEN CAST(:at AS float8) IS NULL THEN '{}'::jsonb
                                                        ELSE jsonb_build_object('next_at', floor(:at)) END
 WHERE id = :id AND ended_at IS NULL
""")
_LOCK = text("SELECT tenant_id, output_keep_s FROM batches WHERE id = :id AND ended_at IS NULL FOR UPDATE")
_END_LINES = text("""
UPDATE batch_lines SET state = 'failed', result = json_build_object(
       'id', CAST(:batch AS text) || '_' || number, 'custom_id', custom_id, 'response', NULL,
       'error', json_build_object('code', CAST(:code AS text), 'message', CAST(:message AS text)))::text
 WHERE batch_id = CAST(:batch AS text) AND result IS NULL
""")
_RESULTS = text("""
SELECT number, result FROM batch_lines WHERE batch_id = :batch AND state = :state AND number > :after
 ORDER BY number LIMIT :limit
""")
_END = text("""
UPDATE batches SET status = CAST(:status AS text), output_file_id = :output, error_file_id = :error, ended_at = now(),
       failed = failed + :failed,
       moments = moments || jsonb_build_object('finalizing_at', floor(extract(epoch FROM now())),
                                               CAST(:status AS text) || '_at', floor(extract(epoch FROM now())))
 WHERE id = :id
""")
_DROP_LINES = text("DELETE FROM batch_lines WHERE batch_id = :batch")
_FORGET_BATCHES = text("DELETE FROM batches WHERE ended_at < now() - make_interval(secs => CAST(:keep_s AS float8))")
_FORGET_FILES = text("""
DELETE FROM batch_files WHERE expires_at < now() OR (NOT is_complete AND created_at < now() - interval '1 day')
""")


@dataclass(frozen=True)
class OpenBatch:
    """A batch that has not ended; ``waiting`` and ``sent``: its lines without a result, by model."""

    id: str
    caller: Identity
    endpoint: str
    input_file_id: str
    status: str
    left_s: float  #: Seconds until it expires
    waiting: dict[str, int]
    sent: dict[str, int]


@dataclass(frozen=True)
class Line:
    """A line of a batch's file."""

    number: int
    custom_id: str
    model: str
    body: str


@dataclass(frozen=True)
class ClaimedLine:
    """A line that is to be sent; ``attempt`` counts how often it was, ``failures`` how often servers failed at it."""

    batch_id: str
    number: int
    attempt: int
    custom_id: str
    model: str  #: That answers it; its body may have an alias
    body: str
    failures: int

    @property
    def id(self) -> str:
        """The line's name among those of all batches."""
        return f"{self.batch_id} {self.number}"


@dataclass(frozen=True)
class Outcome:
    """What became of a line that was sent: it has a result, or it waits again."""

    line: ClaimedLine
    state: str  #: ``succeeded``, ``failed`` or ``waiting``
    result: str | None = None
    has_failed: bool = False  #: Whether a server failed at it
    is_unknown: bool = False  #: Whether a server may have answered it, and the answer was lost
    energy_j: float = 0.0
    carbon_gco2: float = 0.0


class BatchWorkRows(Rows):
    """Queries on open batches."""

    async def open(self) -> list[OpenBatch]:
        """Return the batches that have not ended and can be read, the next to expire first."""
        found: dict[str, OpenBatch] = {}

        def read(row: Row[Any]) -> None:
            if row.id not in found:
                caller = Identity.as_stored(row.caller)
                of = (row.id, caller, row.endpoint, row.input_file_id, row.status, row.left_s)
                found[row.id] = OpenBatch(*of, {}, {})
            if row.model is not None:
                found[row.id].waiting[row.model], found[row.id].sent[row.model] = row.waiting, row.sent

        readable(await self._connection.execute(_OPEN), read, "batch", attrgetter("id"))
        return list(found.values())

    async def take_back(self, kept: Collection[str]) -> None:
        """Have lines wait again that were sent and whose outcome nobody awaits, which are all but ``kept``."""
        await self._connection.execute(_TAKE_BACK, {"kept": list(kept)})

    async def add_lines(self, batch_id: str, lines: Sequence[Line]) -> None:
        values = {"batch": batch_id, "numbers": [each.number for each in lines]}
        values |= {"custom_ids": [each.custom_id for each in lines], "models": [each.model for each in lines]}
        await self._connection.execute(_ADD_LINES, {**values, "bodies": [each.body for each in lines]})

    async def begin(self, batch_id: str, total: int, arrival_gco2_per_kwh: float | None) -> bool:
        """Have a batch's lines sent; return False if it was cancelled."""
        values = {"id": batch_id, "total": total, "arrival": arrival_gco2_per_kwh}
        return bool((await self._connection.execute(_BEGIN, values)).rowcount)

    async def fail(self, batch_id: str, errors: Sequence[LineError]) -> None:
        """End a batch whose file is no good."""
        written = json.dumps([each.model_dump() for each in errors])
        await self._connection.execute(_FAIL, {"id": batch_id, "errors": written})

    async def expect(self, batch_id: str, at_s: float | None) -> None:
        """Write until when nothing more of a batch is planned to be sent, UTC seconds; None if some is sent now."""
        await self._connection.execute(_EXPECT, {"id": batch_id, "at": at_s})

    async def claim(self, batch_id: str, model: str, lines: int) -> list[ClaimedLine]:
        """Return lines to send now, as many as there are up to ``lines``."""
        found = await self._connection.execute(_CLAIM, {"batch": batch_id, "model": model, "lines": lines})
        return [ClaimedLine(*row) for row in found]

    async def record(self, outcomes: Sequence[Outcome]) -> None:
        """Write what became of lines, each if nobody has written it and it was not sent again meanwhile."""
        for each in outcomes:
            values: dict[str, Any] = {"batch": each.line.batch_id, "number": each.line.number}
            values |= {"attempt": each.line.attempt, "state": each.state, "result": each.result}
            values |= {"repeated": int(each.is_unknown)}
            values |= {"failures": int(each.has_failed), "energy_j": each.energy_j, "carbon_gco2": each.carbon_gco2}
            await self._connection.execute(_RECORD, values)

    async def lock(self, batch_id: str) -> tuple[str, float] | None:
        """Keep others from ending a batch; return its tenant, and how long its files are kept. None if it has ended."""
        row = (await self._connection.execute(_LOCK, {"id": batch_id})).one_or_none()
        return None if row is None else (row.tenant_id, row.output_keep_s)

    async def end_lines(self, batch_id: str, code: str, message: str) -> int:
        """Give an error to all lines without a result; return how many those were."""
        values = {"batch": batch_id, "code": code, "message": message}
        return (await self._connection.execute(_END_LINES, values)).rowcount

    async def results(self, batch_id: str, state: str, after: int, limit: int) -> list[tuple[int, str]]:
        """Return the numbers and results of lines in a state, in the file's order."""
        values = {"batch": batch_id, "state": state, "after": after, "limit": limit}
        return [(row.number, row.result) for row in await self._connection.execute(_RESULTS, values)]

    async def end(self, batch_id: str, status: str, output: str | None, error: str | None, failed: int) -> None:
        """End a batch, whose results are in its files."""
        values = {"id": batch_id, "status": status, "output": output, "error": error, "failed": failed}
        await self._connection.execute(_END, values)
        await self._connection.execute(_DROP_LINES, {"batch": batch_id})

    async def forget(self, keep_s: float) -> None:
        """Delete files past their time, uploads that broke off a day ago, and batches that ended ``keep_s`` ago."""
        await self._connection.execute(_FORGET_FILES)
        await self._connection.execute(_FORGET_BATCHES, {"keep_s": keep_s})
