"""What was answered 2xx survives any killed process; what is repeated with its key is not done twice."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Front
from tests.support.services import Running

SPEC: dict[str, Any] = {"name": "train", "command": ["python", "train.py"]}


class Submitter:
    """Submits one job after another, repeats each until it is accepted, and remembers the answers."""

    def __init__(self, front: Front, name: str, *, with_keys: bool) -> None:
        self._front = front
        self._name = name
        self._with_keys = with_keys
        self.accepted: dict[str, str] = {}
        self.refused = 0
        self.enough = asyncio.Event()

    async def run(self) -> None:
        """Submit until the test says that it is enough."""
        number = 0
        while not self.enough.is_set():
            number += 1
            name = f"{self._name}-{number}"
            headers = {"idempotency-key": name} if self._with_keys else {}
            while (answer := await self._ask(name, headers)) is None or answer.status_code != 201:
                assert answer is None or answer.status_code == 503, answer.text
                self.refused += answer is not None
                if not self._with_keys:
                    break
                await asyncio.wait({asyncio.create_task(self.enough.wait())}, timeout=0.02)
            else:
                self.accepted[name] = answer.json()["id"]

    async def _ask(self, name: str, headers: dict[str, str]) -> httpx.Response | None:
        try:
            return await self._front.client.post("/v1/jobs", json=SPEC | {"name": name}, headers=headers)
        except httpx.TransportError:
            return None


async def _under_load(front: Front, tag: str, disturb: Callable[[], Any]) -> list[Submitter]:
    submitters = [Submitter(front, f"{tag}-{i}", with_keys=i % 2 == 0) for i in range(16)]
    tasks = [asyncio.create_task(submitter.run()) for submitter in submitters]
    for _ in range(3):
        enough = sum(len(s.accepted) for s in submitters) + 40
        async with asyncio.timeout(60):
            while sum(len(s.accepted) for s in submitters) < enough:
                await asyncio.wait(tasks, timeout=0.01)
        await asyncio.to_thread(disturb)
    for submitter in submitters:
        submitter.enough.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    return submitters


async def _check(front: Front, tag: str, submitters: list[Submitter]) -> None:
    rows = await front.database.fetch("SELECT id, name FROM jobs WHERE name LIKE $1", f"{tag}-%")
    ids = {row["name"]: row["id"] for row in rows}
    assert len(ids) == len(rows), "a submission became two jobs"
    for submitter in submitters:
        for name, job_id in submitter.accepted.items():
            assert ids[name] == job_id
    events = await front.count("job_events", "job_id = ANY($1)", [row["id"] for row in rows])
    assert events == len(rows)


def _kill_and_start(service: Running) -> Callable[[], None]:
    def disturb() -> None:
        service.kill()
        service.start()

    return disturb


@pytest.mark.parametrize("victim", ["admission", "gateway"])
async def test_a_killed_process_loses_and_doubles_nothing(front: Front, victim: str) -> None:
    service: Running = getattr(front, victim)
    submitters = await _under_load(front, f"kill-{victim}", _kill_and_start(service))
    await _check(front, f"kill-{victim}", submitters)


async def test_killed_database_sessions_lose_and_double_nothing(front: Front) -> None:
    loop = asyncio.get_running_loop()

    def disturb() -> None:
        ending = front.database.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE application_name LIKE 'admission%' AND datname = current_database()"
        )
        asyncio.run_coroutine_threadsafe(_finished(ending), loop).result()

    submitters = await _under_load(front, "sessions", disturb)
    await _check(front, "sessions", submitters)
    refused = sum(submitter.refused for submitter in submitters)
    assert refused == 0, front.admission.log.read_text()[-3_000:]  # the commits were made again


async def _finished(work: Any) -> Any:
    return await work


async def test_a_gateway_without_admission_says_so_and_recovers(front: Front) -> None:
    caller = await front.key_for("without-admission")
    assert (await front.client.get("/v1/jobs", headers=caller)).status_code == 200
    front.admission.kill()
    try:
        answer = await front.client.get("/v1/jobs", headers=caller)
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        stranger = {"authorization": f"Bearer ws_{random.randbytes(30).hex()[:43]}"}
        assert (await front.client.get("/v1/jobs", headers=stranger)).status_code == 503
        lone = asyncio.create_task(front.client.post("/v1/jobs", json=SPEC, headers=caller))
        await asyncio.wait({lone}, timeout=0.1)
    finally:
        await asyncio.to_thread(front.admission.start)
    assert (await lone).status_code in (201, 503)
    assert (await front.client.post("/v1/jobs", json=SPEC, headers=caller)).status_code == 201
