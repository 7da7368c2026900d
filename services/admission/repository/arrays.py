"""Arrays of jobs: read with the states of their tasks, which are changed together."""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

from sqlalchemy import Row, TextClause, and_, func, text, update
from sqlalchemy.dialects.postgresql import JSONB

from services.admission.repository import Repository
from services.admission.repository.jobs import labels_of, steered
from services.admission.steering import Decision, Steered
from services.contracts.arrays import TaskCounts
from services.contracts.identity import Identity
from services.contracts.invalid import JOB_NUMBER
from services.contracts.jobs import JobArray, JobFootprint, JobSpec
from services.contracts.queries import ArrayQuery
from services.core.domain.jobs import JobState
from services.db.tables import jobs
from services.kit.readable import Unread, each_readable

_COUNTS = ", ".join(f"count(*) FILTER (WHERE j.state = '{state}') AS {state}" for state in JobState)

_ARRAYS = f"""
SELECT a.*, t.*, r.waiting, (SELECT name FROM users WHERE id = a.user_id) AS user_name
FROM (SELECT * FROM job_arrays a WHERE {{conditions}} ORDER BY a.id DESC LIMIT :limit) a
CROSS JOIN LATERAL (
    SELECT {_COUNTS}, min(j.started_at) AS started_at,
           coalesce(min(j.id) FILTER (WHERE j.state = 'queued'), min(j.id) FILTER (WHERE j.state = 'held'))
               AS next_task,
           CASE WHEN bool_and(j.ended_at IS NOT NULL) THEN max(j.ended_at) END AS ended_at,
           coalesce(sum(l.gpus), 0) AS gpus, coalesce(sum(f.energy_j), 0) AS energy_j,
           coalesce(sum(f.gpu_energy_j), 0) AS gpu_energy_j, coalesce(sum(f.carbon_gco2), 0) AS carbon_gco2,
           coalesce(sum(f.gpu_s), 0) AS gpu_s, coalesce(sum(f.estimated_energy_j), 0) AS estimated_energy_j
    FROM jobs j LEFT JOIN live_gangs l ON l.job_id = j.id
    LEFT JOIN footprints f ON f.job_id = j.id WHERE j.array_id = a.id
) t
CROSS JOIN LATERAL (
    SELECT jsonb_object_agg(reason, tasks) AS waiting FROM (
        SELECT reason, count(*) AS tasks FROM jobs j
        WHERE j.array_id = a.id AND j.state IN ('queued', 'held') AND reason IS NOT NULL GROUP BY reason) w
) r
ORDER BY a.id DESC
"""

_CONDITIONS = {
    "id": "a.id = :id",
    "tenant": "a.tenant_id = :tenant",
    "user": "coalesce((SELECT u.name FROM users u WHERE u.id = a.user_id), a.labels ->> 'user') = :user",
    "project": "a.project = :project",
    "name": "a.name = :name",
    "number": "a.number = :number",
    "id_prefix": "starts_with(a.id, :id_prefix)",
    "cursor": "a.id < :cursor",
    "submitted_after": "a.submitted_at > :submitted_after",
    "submitted_before": "a.submitted_at < :submitted_before",
    "label": "a.labels @> CAST(:label AS jsonb)",
    "state": "EXISTS (SELECT FROM jobs j WHERE j.array_id = a.id AND j.state = ANY(:state))",
}
"""What each field of a query asks of an array, if it is given."""

_ALIKE = text("""
WITH tasks AS (
    SELECT state, cancel_requested, hold_requested, reason FROM jobs WHERE array_id = :array_id ORDER BY id FOR UPDATE
)
SELECT DISTINCT * FROM tasks ORDER BY 1, 2, 3, 4
""")

_EVENTS = text("""
INSERT INTO job_events (job_id, tenant_id, type, data)
SELECT id, tenant_id, :event, CAST(:data AS jsonb) FROM jobs WHERE id = ANY(:ids) ORDER BY id
""")

_OWNED = "tenant_id = :tenant_id AND (CAST(:project AS text) IS NULL OR project = :project)"

_WITH_IDS = text(f"""
SELECT id FROM jobs WHERE id = ANY(:words) AND {_OWNED}
UNION ALL SELECT id FROM job_arrays WHERE id = ANY(:words) AND {_OWNED}
""")

# One statement for all words of a submission, as others wait for it.
_NAMED = text(f"""
SELECT w.word, found.* FROM unnest(CAST(:words AS text[])) AS w (word) CROSS JOIN LATERAL (
    (SELECT id, state <> ALL(:ended) AS is_live FROM jobs
      WHERE {_OWNED} AND name = w.word ORDER BY 2 DESC, 1 DESC LIMIT 4)
    UNION ALL
    (SELECT id, EXISTS (SELECT FROM jobs t WHERE t.array_id = a.id AND t.state <> ALL(:ended)) AS is_live
       FROM job_arrays a WHERE {_OWNED} AND name = w.word ORDER BY 2 DESC, 1 DESC LIMIT 4)) found
""")

_NUMBERED = text(f"""
SELECT w.word, found.id
FROM unnest(CAST(:words AS text[]), CAST(:numbers AS bigint[]), CAST(:indices AS int[])) AS w (word, number, index)
CROSS JOIN LATERAL (
    SELECT id FROM jobs WHERE {_OWNED} AND number = w.number AND array_id IS NULL AND w.index IS NULL
    UNION ALL SELECT id FROM job_arrays WHERE {_OWNED} AND number = w.number AND w.index IS NULL
    UNION ALL SELECT id FROM jobs WHERE array_index = w.index AND array_id IN (
        SELECT id FROM job_arrays WHERE {_OWNED} AND number = w.number)) found
""")

# Ids consist of digits and small letters, so that an index finds all that begin so between two of them.
_BEGINNING = text(f"""
SELECT w.word, found.id
FROM unnest(CAST(:words AS text[]), CAST(:jobs AS text[]), CAST(:arrays AS text[])) AS w (word, job, array_)
CROSS JOIN LATERAL (
    (SELECT id FROM jobs WHERE {_OWNED} AND starts_with(id, w.job) AND id BETWEEN w.job AND w.job || repeat('z', 26)
      ORDER BY id LIMIT 4)
    UNION ALL
    (SELECT id FROM job_arrays WHERE {_OWNED} AND starts_with(id, w.array_)
        AND id BETWEEN w.array_ AND w.array_ || repeat('z', 26) ORDER BY id LIMIT 4)) found
""")

_ID_PART = re.compile(r"(?:(job|array)_)?([0-9a-z]{1,26})")
_LIVE_FIRST = ("running", "starting", "preempting", "queued", "held")


class ArrayRepository(Repository):
    """Arrays, and their tasks together."""

    async def page(self, wanted: ArrayQuery) -> list[JobArray | Unread]:
        """Return a page of arrays and one more, newest first; ``cursor`` is the id of the last of the page before.

        None stands for one that cannot be read.
        """
        given = {name: value for name in _CONDITIONS if (value := getattr(wanted, name, None))}
        if wanted.label:
            labels: dict[str, str | list[str]] = {}
            for key, value in labels_of(wanted.label):  # no array has two values of one key, and none has a list
                labels[key] = value if labels.get(key, value) == value else [value]
            given["label"] = json.dumps(labels)
        rows = await self._found(given, wanted.limit + 1)
        return each_readable(rows, _array, "array", attrgetter("id"))

    async def find(self, array_id: str, caller: Identity) -> JobArray | None:
        """Return an array if it exists and the caller may see it."""
        given = {"id": array_id, "tenant": caller.only_tenant, "project": caller.project}
        rows = await self._found({name: value for name, value in given.items() if value}, 1)
        return next(map(_array, rows), None)

    async def _found(self, given: dict[str, Any], limit: int) -> Sequence[Row[Any]]:
        query = _ARRAYS.format(conditions=" AND ".join(map(_CONDITIONS.__getitem__, given)) or "true")
        typed = text(query).columns(spec=JSONB, waiting=JSONB)
        return (await self._connection.execute(typed, {**given, "limit": limit})).all()

    async def lock_tasks(self, array_id: str) -> list[Steered]:
        """Lock all tasks until the transaction ends; return the states they are in, each once."""
        return await self._all(_ALIKE.bindparams(array_id=array_id), steered)

    async def change_tasks(self, array_id: str, alike: Steered, decision: Decision, key_id: str) -> int:
        """Change locked tasks and add an event to each; return how many there are."""
        which = and_(
            jobs.c.array_id == array_id,
            jobs.c.state == alike.state.value,
            jobs.c.cancel_requested == alike.cancel_requested,
            jobs.c.hold_requested == alike.hold_requested,
            jobs.c.reason.is_not_distinct_from(alike.reason),
        )
        values = {**decision.values, **dict.fromkeys(decision.now, func.now())}
        changed = await self._connection.execute(update(jobs).where(which).values(**values).returning(jobs.c.id))
        ids = list(changed.scalars())
        state = decision.values.get("state")
        data = {"by": key_id} | ({} if state is None else {"state": state})
        await self._connection.execute(_EVENTS, {"ids": ids, "event": decision.event, "data": json.dumps(data)})
        return len(ids)

    async def with_ids(self, tenant_id: str, project: str | None, words: Collection[str]) -> list[str]:
        """Return the words that are ids of the tenant's jobs and arrays, in one project or, if None, in any."""
        given = {"words": list(words), "tenant_id": tenant_id, "project": project}
        rows = await self._connection.execute(_WITH_IDS, given)
        return list(rows.scalars())

    async def named(self, tenant_id: str, project: str | None, words: Collection[str]) -> dict[str, list[str]]:
        """Return the ids of at most eight jobs and arrays by each word: by that name, else number, else start of an id.

        Of several with that name, the only one that has not ended.
        """
        owner = {"tenant_id": tenant_id, "project": project}
        ended = [state.value for state in JobState if state.is_final]
        found, live = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
        for row in await self._connection.execute(_NAMED, {**owner, "words": list(words), "ended": ended}):
            found[row.word].append(row.id)
            if row.is_live:
                live[row.word].append(row.id)
        found |= {word: ids for word, ids in live.items() if len(ids) == 1}

        async def look_up(query: TextClause, names: Sequence[str], asked: Sequence[tuple[Any, ...]]) -> None:
            if asked:
                columns = dict(zip(("words", *names), map(list, zip(*asked, strict=True)), strict=True))
                for row in await self._connection.execute(query, {**owner, **columns}):
                    found[row.word].append(row.id)

        numbers = ((word, re.fullmatch(f"#?{JOB_NUMBER}", word)) for word in words if word not in found)
        numbered = [(word, int(number[1]), number[2] and int(number[2])) for word, number in numbers if number]
        await look_up(_NUMBERED, ("numbers", "indices"), numbered)
        parts = ((word, _ID_PART.fullmatch(word)) for word in words if word not in found)
        kinds = [
            (word, *(f"{kind}_{part[2]}" if part[1] in (None, kind) else "-" for kind in ("job", "array")))
            for word, part in parts
            if part
        ]
        await look_up(_BEGINNING, ("jobs", "arrays"), kinds)
        return found


def _array(row: Row[Any]) -> JobArray:
    tasks = TaskCounts.of(row)
    return JobArray.of(
        row,
        user=row.user_name,
        state=state_of(tasks),
        spec=JobSpec.as_stored(row.spec),
        count=row.tasks,
        first=row.first_index,
        last=row.last_index,
        tasks=tasks,
        waiting=row.waiting or {},
        footprint=JobFootprint.of(row),
    )


def state_of(tasks: TaskCounts) -> JobState:
    """Return the state of an array whose tasks are in these states."""
    for state in _LIVE_FIRST:
        if getattr(tasks, state):
            return JobState(state)
    if tasks.failed:
        return JobState.FAILED
    return JobState.CANCELLED if tasks.cancelled else JobState.SUCCEEDED
