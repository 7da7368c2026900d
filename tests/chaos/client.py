"""A careful user: repeats what got no answer, never gives up a job, and remembers what was accepted."""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

POLICIES = ("las", "green", "fifo", "joint")
GANGS: tuple[dict[str, int], ...] = ({"min": 1}, {"min": 1, "max": 2}, {"min": 2}, {"min": 4}, {"min": 1, "max": 4})
FAILS = 7
"""The exit code of jobs that are made to fail."""
PAUSE_S = 0.3
FIRST = 12
"""So many jobs are submitted at once, to have some at work when the faults begin; then one every second."""
BETWEEN_S = 1.0
LASTING = 4
"""So many of the first jobs outlive the longest absence of a node, on one GPU each. They go before all others, so that
what a lost node ran begins again elsewhere at once."""
LASTING_TICKS, LASTING_TICK_S = (120, 160), 0.3
RUNNING = 3
RESTARTS, FEW_RESTARTS = 2, 1
"""Of jobs that succeed, and of those that are made to fail."""


@dataclass
class Caller:
    """Asks the public API until it answers; ``refused`` has what should have been accepted."""

    http: httpx.AsyncClient
    refused: list[str] = field(default_factory=list[str], kw_only=True)

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Ask until there is an answer; it is noted if the answer is a refusal."""
        while True:
            try:
                answer = await self.http.request(method, path, **options)
            except httpx.HTTPError:
                await asyncio.sleep(PAUSE_S)
                continue
            if answer.status_code < 400:
                return answer.json() if answer.content else None
            if answer.status_code < 500 and answer.status_code not in (408, 409, 425, 429):
                self.refused.append(f"{method} {path}: {answer.status_code} {answer.text[:200]}")
                return None
            if answer.status_code == 409:
                return None  # it had ended already
            await asyncio.sleep(PAUSE_S)

    async def pages(self, path: str, **params: Any) -> list[Any]:
        """Return all pages of a list."""
        found = [await self.ask("GET", path, params=params)]
        while cursor := found[-1].get("next_cursor"):
            found.append(await self.ask("GET", path, params=params | {"cursor": cursor}))
        return found


@dataclass
class Accepted:
    """A job that was accepted.

    Attributes:
        ticks: The work that it has to do.
        fails: It ends with ``FAILS`` each time.
        max_restarts: So many of its gangs may be killed, and it has to succeed all the same.
        was_cancelled: A cancellation was accepted too.
    """

    job_id: str
    name: str
    ticks: int
    fails: bool
    max_restarts: int = 0
    was_cancelled: bool = False


@dataclass
class User(Caller):
    """Submits until told to stop; see ``jobs`` for what was accepted."""

    dice: random.Random
    program: Path
    notes: Path
    storm: str
    jobs: list[Accepted] = field(default_factory=list[Accepted])

    async def use(self, until: asyncio.Event) -> None:
        """Submit, cancel and switch policies until it is over; the last requests are answered after that."""
        await asyncio.gather(self._submit(until), self._interfere(until))

    async def is_at_work(self) -> bool:
        """Whether the first jobs are submitted, and some of them run."""
        if len(self.jobs) < FIRST:
            return False
        said = [await self.ask("GET", f"/v1/jobs/{job.job_id}") for job in self.jobs]
        return sum(job["state"] == "running" for job in said) >= RUNNING

    async def ended(self) -> dict[str, Any]:
        """Return the jobs that have ended, by id."""
        found: dict[str, Any] = {}
        for job in self.jobs:
            answer = await self.ask("GET", f"/v1/jobs/{job.job_id}")
            if answer["state"] in ("succeeded", "failed", "cancelled"):
                found[job.job_id] = answer
        return found

    async def _submit(self, until: asyncio.Event) -> None:
        while not until.is_set():
            if len(self.jobs) >= FIRST:
                await asyncio.sleep(self.dice.uniform(0, 2 * BETWEEN_S))
            number = len(self.jobs)
            name, fails = f"{self.storm}-{number}", self.dice.random() < 0.1
            ticks, tick_s = self.dice.randint(5, 100), self.dice.choice((0.05, 0.1, 0.3))
            lasts = number < LASTING
            if lasts:
                fails, ticks, tick_s = False, self.dice.randint(*LASTING_TICKS), LASTING_TICK_S
            command = [sys.executable, "-I", "-S", str(self.program), str(ticks), str(tick_s)]
            body = {
                "name": name,
                "command": [*command, str(FAILS if fails else 0), str(self.notes)],
                "gpus": {"min": 1} if lasts else self.dice.choice(GANGS),
                "priority": 100 if lasts else 0,
                "processes": "per_node",
                "work": {"total": ticks},
                "grace_s": 2,
                "max_restarts": FEW_RESTARTS if fails else RESTARTS,
            }
            made = await self.ask("POST", "/v1/jobs", json=body, headers={"idempotency-key": name})
            if made:
                self.jobs.append(Accepted(made["id"], name, ticks, fails, body["max_restarts"]))

    async def _interfere(self, until: asyncio.Event) -> None:
        while not until.is_set():
            await asyncio.sleep(self.dice.uniform(1, 4))
            if self.dice.random() < 0.3:
                await self.ask("PUT", "/v1/policies/active", json={"name": self.dice.choice(POLICIES)})
            elif self.jobs:
                job = self.dice.choice(self.jobs)
                if await self.ask("POST", f"/v1/jobs/{job.job_id}/cancel"):
                    job.was_cancelled = True
