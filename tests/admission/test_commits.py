"""Commits that fail, and commits that only seem to."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from services.admission.repository.submissions import SubmissionRepository
from services.admission.service import Committer
from services.admission.submissions import Draft, read_submission
from services.contracts.jobs import SubmissionAnswer
from services.contracts.streams import HINTS_STREAM
from services.kit.redis import connect
from tests.admission.conftest import admission_on
from tests.admission.installation import Admission, an_entry


def _drafts(count: int, key: str | None = None) -> list[Draft]:
    read = [read_submission(an_entry(key=key and f"{key}-{i}")) for i in range(count)]
    return [draft for draft in read if isinstance(draft, Draft)]


@asynccontextmanager
async def committing(repository: SubmissionRepository, patience_s: float = 5) -> AsyncIterator[Committer]:
    committer = Committer(repository, lambda: None, max_jobs=100, patience_s=patience_s)
    task = asyncio.create_task(committer.run())
    try:
        yield committer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _LosesAnswers(SubmissionRepository):
    """Commits, and then loses the connection before the answer arrives."""

    left = 1

    async def commit(self, drafts: Sequence[Draft]) -> list[SubmissionAnswer]:
        tried = set(self._attempted)
        answers = await super().commit(drafts)
        if self.left:
            self.left -= 1
            self._attempted |= tried | {draft.jobs[0].id for draft in drafts}
            await self.close()
            raise ConnectionResetError
        return answers


async def test_a_commit_whose_answer_was_lost_is_found_again(admission: Admission, database_url: str) -> None:
    before = await admission.count("jobs")
    async with committing(_LosesAnswers(database_url)) as committer:
        answers = await committer.submit(_drafts(5) + _drafts(5, "lost"))
    assert [answer.status for answer in answers] == [201] * 10
    assert await admission.count("jobs") == before + 10
    made = {job["id"]: job["number"] for job in (json.loads(answer.body) for answer in answers)}
    stored = await admission.database.fetch("SELECT id, number FROM jobs WHERE id = ANY($1)", list(made))
    assert {row["id"]: row["number"] for row in stored} == made


async def test_a_backend_that_is_killed_delays_and_loses_nothing(admission: Admission, database_url: str) -> None:
    before = await admission.count("jobs")
    killed = asyncio.Event()

    async def kill_backends() -> None:
        for _ in range(5):
            await admission.database.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'admission-commits'"
                " AND datname = current_database()"
            )
            await asyncio.sleep(0.05)
        killed.set()

    accepted = 0
    async with committing(SubmissionRepository(database_url), patience_s=20) as committer:
        killer = asyncio.create_task(kill_backends())
        while not killed.is_set():
            answers = await committer.submit(_drafts(3))
            assert [answer.status for answer in answers] == [201] * 3
            accepted += 3
        await killer
    assert await admission.count("jobs") == before + accepted


class _Away(SubmissionRepository):
    async def commit(self, drafts: Sequence[Draft]) -> list[SubmissionAnswer]:
        raise ConnectionRefusedError


async def test_without_a_database_everybody_is_told_to_come_back(admission: Admission, database_url: str) -> None:
    before = await admission.count("jobs")
    async with committing(_Away(database_url), patience_s=0.01) as committer:
        answers = await committer.submit(_drafts(3))
    assert [answer.status for answer in answers] == [503] * 3
    assert await admission.count("jobs") == before


class _Chokes(SubmissionRepository):
    """Cannot hold one of the jobs, whatever the reason."""

    async def commit(self, drafts: Sequence[Draft]) -> list[SubmissionAnswer]:
        if any(job.spec.name == "bad" for draft in drafts for job in draft.jobs):
            raise asyncpg.UntranslatableCharacterError("no such character")
        return await super().commit(drafts)


async def test_what_the_database_cannot_hold_spoils_nothing_else(admission: Admission, database_url: str) -> None:
    bad = read_submission(an_entry({"name": "bad"}))
    assert isinstance(bad, Draft)
    async with committing(_Chokes(database_url)) as committer:
        answers = await committer.submit([*_drafts(2), bad, *_drafts(2)])
    assert [answer.status for answer in answers] == [201, 201, 422, 201, 201]


async def test_commits_stay_below_their_size(database_url: str) -> None:
    sizes: list[int] = []

    class Counts(SubmissionRepository):
        async def commit(self, drafts: Sequence[Draft]) -> list[SubmissionAnswer]:
            sizes.append(len(drafts))
            return await super().commit(drafts)

    async with committing(Counts(database_url)) as committer:
        await asyncio.gather(*(committer.submit(_drafts(30)) for _ in range(10)))
    assert sum(sizes) == 300
    assert max(sizes) <= 100


async def test_without_redis_submissions_go_on(database_url: str, tmp_path: Path) -> None:
    async with admission_on(database_url, "redis://127.0.0.1:1/0", tmp_path) as admission:
        async with asyncio.timeout(5):
            job_id = await admission.submit()
            assert (await admission.ask("POST", f"/v1/jobs/{job_id}/cancel")).json()["state"] == "cancelled"


async def test_a_commit_gives_one_hint(database_url: str, redis_url: str, tmp_path: Path) -> None:
    redis = connect(redis_url)
    async with admission_on(database_url, redis_url, tmp_path) as admission:
        await redis.delete(HINTS_STREAM)
        await admission.submit_all(*(an_entry() for _ in range(20)))
        async with asyncio.timeout(10):
            hints = await redis.xread({HINTS_STREAM: "0"}, block=9_000)
        assert [fields for _, fields in hints[0][1]] == [{"kind": "job"}]
        refused = an_entry("{")
        await admission.submit_all(refused)
        assert await redis.xlen(HINTS_STREAM) == 1
    await redis.aclose()
