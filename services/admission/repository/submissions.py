"""The transaction of the hot path, in raw asyncpg: with an ORM transaction per job it carried a quarter of the load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain
from typing import NamedTuple

import asyncpg

from services.admission.repository.accounts import Account, Accounts
from services.admission.submissions import REUSED, Draft, DraftJob, accepted, refused
from services.contracts.arrays import ArrayTasks
from services.contracts.codes import ProblemCode
from services.contracts.jobs import SubmissionAnswer, SubmittedJob
from services.db import database
from services.kit.ids import ID_ALPHABET
from services.kit.problems import ProblemError

# Every statement here finds its rows by key. Left to itself, the planner sees young tables without statistics, settles
# on reading them whole, and keeps that plan while they grow: commits took 5.7 ms at first and 11.7 ms after 36,000
# jobs, against 3.7 ms throughout with these.
PLANS = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
}

FIND = """
SELECT s.tenant_id, s.idempotency_key, s.body_sha256, s.batch, s.job_ids, s.created_at
FROM unnest($1::text[], $2::text[]) AS asked (tenant_id, idempotency_key)
JOIN submissions s USING (tenant_id, idempotency_key)
"""
MADE = """
SELECT id, name, CASE WHEN (spec->'hold')::bool THEN 'held' ELSE 'queued' END AS state, submitted_at, number,
       NULL::int AS count
FROM jobs WHERE id = ANY($1::text[])
UNION ALL
SELECT id, name, CASE WHEN (spec->'hold')::bool THEN 'held' ELSE 'queued' END, submitted_at, number, tasks
FROM job_arrays WHERE id = ANY($1::text[])
"""

# What is left of jobs and arrays that are forgotten: a submission is repeated with its key for as long as that is kept.
PAST = """
SELECT id, name, 'queued' AS state, NULL::int AS count FROM past_jobs WHERE id = ANY($1::text[])
UNION ALL
SELECT array_id, array_name, 'queued', count(*)::int FROM past_jobs WHERE array_id = ANY($1::text[]) GROUP BY 1, 2
"""

INSERT = """
WITH
made AS (
    INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, reason, submitted_at, queued_at, user_id,
                      number, cell)
    SELECT id, tenant_id, name, project, labels::jsonb, spec::jsonb,
           CASE WHEN held THEN 'held' ELSE 'queued' END, CASE WHEN held THEN 'held' END,
           submitted_at, CASE WHEN held THEN NULL ELSE submitted_at END, user_id, number, cell
    FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bool[], $8::timestamptz[],
                $17::text[], $19::bigint[], $21::text[])
         AS draft (id, tenant_id, name, project, labels, spec, held, submitted_at, user_id, number, cell)
),
announced AS (
    INSERT INTO job_events (job_id, tenant_id, at, type, data)
    SELECT id, tenant_id, submitted_at, 'job.submitted',
           CASE WHEN held THEN '{"state": "held"}'::jsonb ELSE '{"state": "queued"}'::jsonb END
               || CASE WHEN traceparent IS NULL THEN '{}' ELSE jsonb_build_object('traceparent', traceparent) END
    FROM unnest($1::text[], $2::text[], $7::bool[], $8::timestamptz[], $18::text[])
         AS draft (id, tenant_id, held, submitted_at, traceparent)
),
kept AS (
    INSERT INTO submissions (tenant_id, idempotency_key, body_sha256, job_ids, batch, created_at)
    SELECT tenant_id, idempotency_key, body_sha256, string_to_array(job_ids, ','), batch, created_at
    FROM unnest($9::text[], $10::text[], $11::bytea[], $12::text[], $13::bool[], $14::timestamptz[])
         AS keyed (tenant_id, idempotency_key, body_sha256, job_ids, batch, created_at)
)
UPDATE tenants SET accepted_jobs = accepted_jobs + taken, last_number = account.last_number
FROM unnest($15::text[], $16::bigint[], $20::bigint[]) AS account (tenant_id, taken, last_number)
WHERE tenants.id = account.tenant_id
"""

# The id of a task is that of its array with the last 15 bits replaced by its position, so that tasks sort by index and
# need not be sent one by one.
INSERT_ARRAY = """
WITH
made_array AS (
    INSERT INTO job_arrays (id, tenant_id, name, project, labels, spec, tasks, first_index, last_index, max_running,
                            submitted_at, user_id, number)
    VALUES ($1, $2, $3, $4, $5::text::jsonb, $6::text::jsonb, $7, $8, $9, $10, $11, $17, $19)
),
document AS MATERIALIZED (SELECT $5::text::jsonb AS labels, $15::text::jsonb AS spec),
tasks AS (
    SELECT 'job_' || substr($1, 7, 23) || substr($14, 1 + ((n - 1) >> 10), 1) || substr($14, 1 + ((n - 1) >> 5 & 31), 1)
               || substr($14, 1 + ((n - 1) & 31), 1) AS id, at
    FROM unnest($12::int[]) WITH ORDINALITY AS index (at, position) CROSS JOIN LATERAL (SELECT position::int) AS p (n)
),
made AS (
    INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, reason, submitted_at, queued_at,
                      array_id, array_index, gated, user_id, number)
    SELECT id, $2, $3 || '.' || at, $4, labels, spec, CASE WHEN $13 THEN 'held' ELSE 'queued' END,
           CASE WHEN $13 THEN 'held' END, $11, CASE WHEN $13 THEN NULL ELSE $11 END, $1, at, $16, $17, $19
    FROM tasks CROSS JOIN document
)
INSERT INTO job_events (job_id, tenant_id, at, type, data)
SELECT id, $2, $11, 'job.submitted', jsonb_build_object('state', CASE WHEN $13 THEN 'held' ELSE 'queued' END)
       || CASE WHEN $18::text IS NULL THEN '{}' ELSE jsonb_build_object('traceparent', $18::text) END
FROM tasks
"""

INSERT_NEEDS = """
INSERT INTO job_dependencies (dependent_id, needs_id, condition)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[]) ON CONFLICT DO NOTHING
"""
GATE = "UPDATE jobs SET gated = true WHERE id = ANY($1::text[])"


class SubmissionRepository:
    """Carries out commits on its own connection, one at a time."""

    def __init__(self, database_url: str) -> None:
        self._url = database_url
        self._connection: asyncpg.Connection | None = None
        self._accounts = Accounts()
        self._attempted: set[str] = set()

    async def commit(self, drafts: Sequence[Draft]) -> list[SubmissionAnswer]:
        """Accept, replay or refuse each draft, in one transaction; return the answers once it is on disk.

        May be called again with the drafts of a call that failed. If that call did commit after all, its jobs are
        found.
        """
        connection = await self._connected()
        try:
            async with connection.transaction():
                answers = await self._decide(connection, drafts)
        except BaseException:
            await self.close()
            raise
        self._attempted.difference_update(draft.jobs[0].id for draft in drafts)
        return answers

    def forget(self, drafts: Iterable[Draft]) -> None:
        """Note that these drafts will not be retried."""
        self._attempted.difference_update(draft.jobs[0].id for draft in drafts)

    async def close(self) -> None:
        """Drop the connection; the next commit makes a new one."""
        connection, self._connection = self._connection, None
        if connection:
            connection.terminate()

    async def _connected(self) -> asyncpg.Connection:
        connection = self._connection
        if connection is None or connection.is_closed():
            connection = self._connection = await database.connect(
                self._url, application_name="admission-commits", lock_timeout="5s", **PLANS
            )
        return connection

    async def _decide(self, connection: asyncpg.Connection, drafts: Sequence[Draft]) -> list[SubmissionAnswer]:
        wanted: Counter[str] = Counter()
        for draft in drafts:
            wanted[draft.entry.tenant_id] += draft.count
        accounts = await self._accounts.open(connection, wanted)
        there = await self._already_there(connection, drafts)
        stored = await self._stored(connection, drafts)
        resolver = _Resolver(accounts, stored, there)
        answers = [resolver.answer(draft) for draft in drafts]
        if resolver.new:
            self._attempted.update(draft.jobs[0].id for draft in resolver.new)
            await connection.execute(INSERT, *_columns(resolver.new, accounts.values()))
            await self._insert_arrays(connection, resolver.new)
            await self._insert_needs(connection, resolver.new)
        return answers

    @staticmethod
    async def _insert_arrays(connection: asyncpg.Connection, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            for array in draft.jobs:
                if array.tasks is not None:
                    await connection.execute(INSERT_ARRAY, *_array_arguments(draft, array, array.tasks))

    @staticmethod
    async def _insert_needs(connection: asyncpg.Connection, drafts: Sequence[Draft]) -> None:
        needs = [(job.id, on, why.value) for draft in drafts for job in draft.jobs for why, on in job.needs]
        if needs:
            await connection.execute(INSERT_NEEDS, *(list(column) for column in zip(*needs, strict=True)))
            await connection.execute(GATE, [job_id for job_id, _, _ in needs])

    async def _already_there(self, connection: asyncpg.Connection, drafts: Sequence[Draft]) -> dict[str, SubmittedJob]:
        """Return the jobs of drafts that an earlier attempt committed although it seemed to fail.

        The tenants are locked, so an earlier attempt has either committed or been rolled back by now.
        """
        tried = [job.id for draft in drafts if draft.jobs[0].id in self._attempted for job in draft.jobs]
        return await _made(connection, tried) if tried else {}

    async def _stored(
        self, connection: asyncpg.Connection, drafts: Sequence[Draft]
    ) -> dict[tuple[str, str], _StoredSubmission]:
        keys = {draft.key for draft in drafts if draft.key}
        if not keys:
            return {}
        rows = await connection.fetch(FIND, [tenant for tenant, _ in keys], [key for _, key in keys])
        if not rows:
            return {}
        ids = set(chain.from_iterable(row["job_ids"] for row in rows))
        made = await _made(connection, ids)
        gone = await connection.fetch(PAST, [*ids - made.keys()]) if ids - made.keys() else []
        past = {row["id"]: dict(row) for row in gone}
        stored: dict[tuple[str, str], _StoredSubmission] = {}
        for row in rows:
            at = row["created_at"]
            jobs = [made.get(i) or SubmittedJob(submitted_at=at, **past[i]) for i in row["job_ids"]]
            answer = accepted(jobs, batch=row["batch"], replayed=True)
            stored[row["tenant_id"], row["idempotency_key"]] = _StoredSubmission(row["body_sha256"], answer)
        return stored


class _StoredSubmission(NamedTuple):
    """The submission that an idempotency key belongs to."""

    body_sha256: bytes
    answer: SubmissionAnswer


class _Resolver:
    """Decides on each draft in turn, given the database and the drafts before it in the same commit."""

    def __init__(
        self,
        accounts: dict[str, Account],
        stored: dict[tuple[str, str], _StoredSubmission],
        there: dict[str, SubmittedJob],
    ) -> None:
        self._accounts, self._stored, self._there = accounts, stored, there
        self.new: list[Draft] = []

    def answer(self, draft: Draft) -> SubmissionAnswer:
        """Return the answer to a draft; an accepted one is added to ``new``."""
        if draft.jobs[0].id in self._there:
            made = [self._there[job.id] for job in draft.jobs]
            return accepted(made, batch=draft.entry.batch, replayed=False)
        if draft.key and (stored := self._stored.get(draft.key)):
            return stored.answer if draft.body_sha256 == stored.body_sha256 else refused(REUSED)
        account = self._accounts.get(draft.entry.tenant_id)
        if account is None:
            return refused(ProblemError(403, ProblemCode.FORBIDDEN, "The tenant does not exist."))
        if problem := draft.problem or account.take(draft.count):
            return refused(problem)
        draft.jobs = tuple(replace(job, number=account.number()) for job in draft.jobs)
        self.new.append(draft)
        answer = _acceptance(draft)
        if draft.key:
            again = answer.model_copy(update={"replayed": True})
            self._stored[draft.key] = _StoredSubmission(draft.body_sha256, again)
        return answer


def _acceptance(draft: Draft) -> SubmissionAnswer:
    made = [
        SubmittedJob(
            id=job.id,
            number=job.number,
            name=job.spec.name,
            state=job.state,
            submitted_at=draft.submitted_at,
            count=None if job.tasks is None else job.count,
        )
        for job in draft.jobs
    ]
    return accepted(made, batch=draft.entry.batch, replayed=False)


async def _made(connection: asyncpg.Connection, ids: Collection[str]) -> dict[str, SubmittedJob]:
    """Return stored jobs and arrays, by id, as they were when accepted."""
    return {row["id"]: SubmittedJob.as_stored(dict(row)) for row in await connection.fetch(MADE, list(ids))}


def _array_arguments(draft: Draft, array: DraftJob, tasks: ArrayTasks) -> tuple[object, ...]:
    spec = array.spec
    return (
        array.id,
        draft.entry.tenant_id,
        spec.name,
        spec.project,
        array.labels,
        array.document,
        array.count,
        tasks.indices[0],
        tasks.indices[-1],
        tasks.max_running,
        draft.submitted_at,
        list(tasks.indices),
        spec.hold,
        ID_ALPHABET,
        spec.model_copy(update={"array": None}).stored(),
        tasks.max_running is not None or bool(array.needs),
        draft.entry.user_id,
        draft.traceparent,
        array.number,
    )


def _columns(drafts: Sequence[Draft], accounts: Iterable[Account]) -> tuple[list[object], ...]:
    """Return the arguments of ``INSERT``: jobs column by column, then keyed submissions, then what tenants took, then
    the jobs' users, the traces of their submissions, their numbers, and the last numbers of the tenants.
    """
    jobs = [(draft, job) for draft in drafts for job in draft.jobs if job.tasks is None]
    keyed = [draft for draft in drafts if draft.key]
    taken = [account for account in accounts if account.taken]
    times: list[datetime] = [draft.submitted_at for draft, _ in jobs]
    return (
        [job.id for _, job in jobs],
        [draft.entry.tenant_id for draft, _ in jobs],
        [job.spec.name for _, job in jobs],
        [job.spec.project for _, job in jobs],
        [job.labels for _, job in jobs],
        [job.document for _, job in jobs],
        [job.spec.hold for _, job in jobs],
        list(times),
        [draft.entry.tenant_id for draft in keyed],
        [draft.entry.idempotency_key for draft in keyed],
        [draft.body_sha256 for draft in keyed],
        [",".join(job.id for job in draft.jobs) for draft in keyed],
        [draft.entry.batch for draft in keyed],
        [draft.submitted_at for draft in keyed],
        [account.tenant_id for account in taken],
        [account.taken for account in taken],
        [draft.entry.user_id for draft, _ in jobs],
        [draft.traceparent for draft, _ in jobs],
        [job.number for _, job in jobs],
        [account.last_number for account in taken],
        [job.cell for _, job in jobs],
    )
