"""What must hold when a storm is over: the model outside, which knows only what was accepted and what jobs left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from tests.chaos.client import Accepted, Caller, User
from tests.chaos.visitors import APP, POOL

LEDGER_SHARE = 1e-3
GIVEN_BACK = {"no_line_after_its_gang", "no_line_before_its_gang"}
"""What telemetry mends by lines of its own once a node has said when a gang ended."""
GIVEN_BACK_WITHIN_S = 60
ENDS = ("job.succeeded", "job.failed", "job.cancelled")


async def breaches_of(
    user: User, ended: dict[str, Any], checkpoints: Path, notes: Path, slain: Mapping[str, Set[str]]
) -> list[str]:
    """Return what does not hold, a sentence each.

    Args:
        user: Whose jobs they are.
        ended: The jobs that have ended, by id.
        checkpoints: The folder of all jobs' checkpoint folders.
        notes: What jobs themselves have noticed.
        slain: Gangs of each job of which something was killed.
    """
    found = [f"a request was refused: {refusal}" for refusal in user.refused]
    found += [f"{job.name} has not moved on: it is not over" for job in user.jobs if job.job_id not in ended]
    for job in user.jobs:
        if job.job_id in ended:
            found += _of_job(job, ended[job.job_id], checkpoints / job.job_id, len(slain.get(job.job_id, ())))
            found += await _of_events(user, job)
    for kind in ("twin", "device-held-twice"):
        if (notes / kind).exists():
            found += [f"{kind}: {line}" for line in (notes / kind).read_text().splitlines()]
            (notes / kind).unlink()
    return found + await _of_names(user) + await _of_ledger(user)


def _of_job(job: Accepted, said: dict[str, Any], folder: Path, slain: int) -> list[str]:
    expected = {"failed"} if job.fails else {"succeeded"}
    if job.was_cancelled:
        expected |= {"cancelled"}
    if slain > job.max_restarts:
        expected |= {"failed"}
    if said["state"] not in expected:
        return [f"{job.name} {said['state']} ({said.get('detail')}), expected {' or '.join(sorted(expected))}"]
    if said["state"] != "succeeded":
        return []
    ticks = (folder / "ticks").stat().st_size if (folder / "ticks").exists() else 0
    if ticks != job.ticks or not (folder / "done").exists():
        return [f"{job.name} counts as done, with {ticks} of {job.ticks} ticks"]
    return []


async def _of_events(user: User, job: Accepted) -> list[str]:
    text = (await user.http.get(f"/v1/jobs/{job.job_id}/events", params={"follow": "false"})).text
    types = [json.loads(line[5:])["type"] for line in text.splitlines() if line.startswith("data:")]
    ends = [word for word in types if word in ENDS]
    if len(ends) != 1 or types[-1] != ends[0] or types.count("job.submitted") != 1:
        return [f"{job.name} has the events {types}"]
    return []


async def _of_names(user: User) -> list[str]:
    """Every submission became one job, however often it was sent."""
    pages = await user.pages("/v1/jobs", limit=500)
    names = sorted(job["name"] for page in pages for job in page["items"] if job["name"].startswith(f"{user.storm}-"))
    accepted = sorted(job.name for job in user.jobs)
    return [] if names == accepted else [f"there are the jobs {names}, accepted were {accepted}"]


async def _of_ledger(user: User) -> list[str]:
    found: list[str] = []
    for _ in range(GIVEN_BACK_WITHIN_S):
        said = await user.ask("GET", "/v1/invariants")
        broken = [each for each in said["invariants"] if not each["holds"]]
        found = [f"{each['name']}: {each['detail']}" for each in broken]
        if not {each["name"] for each in broken} & GIVEN_BACK:
            break
        await asyncio.sleep(1)
    pages = await user.pages("/v1/reports/footprint", group_by="job")
    of_jobs = sum(line["footprint"]["gpu_energy_j"] for page in pages for line in page["lines"])
    whole, metered = of_jobs + pages[-1]["idle"]["gpu_energy_j"], pages[-1]["metered_gpu_energy_j"]
    if abs(whole - metered) > LEDGER_SHARE * metered:
        found.append(f"the ledger has {whole:.1f} J where the devices counted {metered:.1f} J")
    return found


async def breaches_of_requests(caller: Caller, paid: Mapping[str, int]) -> list[str]:
    """Return which model has more requests in the ledger than were ever made.

    It may have fewer: what a router that is killed has not reported yet is no request's.
    """
    said = await caller.ask("GET", "/v1/reports/requests", params={"group_by": "model"})
    counted = {line["group"]: line["requests"] for line in said["lines"]}
    made = {name: paid.get(name, 0) for name in counted}
    return [
        f"the ledger has {counted[name]} requests to {name}, {made[name]} were made"
        for name in counted
        if name not in (POOL, APP) or counted[name] > made[name]
    ]
