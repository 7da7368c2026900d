"""A real Slurm with 5,000 jobs that wait: looked at, held, and mirrored. Needs root, and Slurm installed.

    ./test --bench slurm_bridge

The bridge runs in this process, with Slurm's own commands and a control plane that decides as it is told to; after that
telemetry and the scheduler take the same 5,000 jobs in, on a real PostgreSQL. Two nodes are full, so that all wait.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from services.contracts.engines import EngineAction, EngineDecision, EngineJob, EngineReply, EngineReport
from services.engines.slurm.bridge import Bridge
from services.engines.slurm.commands import Commands
from services.engines.slurm.settings import SlurmSettings
from tests.benchmarks.results import write_result
from tests.engines import bridge as seam
from tests.scheduler.world import a_world
from tests.support import slurm
from tests.support.servers import fresh_database, postgres_server, scratch_folder, valkey_server
from tests.support.slurm import SlurmLab

JOBS, ROUNDS = 5_000, 5


class Decider:
    """A control plane that remembers what it is told."""

    def __init__(self) -> None:
        self.jobs: dict[str, EngineJob] = {}
        self.told = 0

    async def call(self, what: str, body: BaseModel, answer: type[EngineReply], timeout_s: float) -> EngineReply:
        """Take a report; answer that nothing is amiss."""
        if isinstance(body, EngineReport):
            self.jobs |= {job.external_id: job for job in body.jobs}
            self.told += len(body.jobs)
        return EngineReply()


def submit(lab: SlurmLab, number: int) -> None:
    """Submit jobs that wait, as an ordinary user, four at a time."""
    one = "sbatch -Q --gres=gpu:1 --time=60 --mem=10 -c1 --output=/dev/null --chdir=/tmp --wrap 'sleep 1'"
    loop = f"for i in $(seq {number // 4}); do {one} || exit 1; done"
    for node in ("gpu1", "gpu2"):
        lab.sbatch("sleep 3600", "--comment=wattshift:off", f"--nodelist={node}", "--begin=now", gpus=8)
    subprocess.run(["bash", "-c", " & ".join([f"({loop})"] * 4) + " & wait"], env=lab.environment, check=True)


async def look(bridge: Bridge) -> float:
    """Return how long one look takes."""
    began_s = time.perf_counter()
    await bridge.look()
    return time.perf_counter() - began_s


async def measure_bridge(lab: SlurmLab) -> dict[str, Any]:
    """Return seconds of looks: with nothing to do, and with some jobs and all jobs held for another reason."""
    settings = SlurmSettings(mode="control", energy=False, hold_s=86_400)  # pyright: ignore[reportCallIssue, reportArgumentType]
    decider, commands = Decider(), Commands(timeout_s=120)
    bridge = Bridge(settings, commands, decider)  # pyright: ignore[reportArgumentType]
    first_s = [await look(bridge) for _ in range(3)]  # tags all, and sees what it has done
    names = [name for name, job in decider.jobs.items() if job.steered and not job.state.is_over]
    figures: dict[str, Any] = {"jobs": len(names), "first_look_s": first_s[0]}
    figures["slurm_answers_s"] = await _timed(commands.jobs, ROUNDS)
    figures["nothing_changed_s"] = statistics.median([await look(bridge) for _ in range(ROUNDS)])
    chance, revision = random.Random(1), 0
    for label, count in (("noted_50_s", 50), ("noted_all_s", len(names))):
        times_s: list[float] = []
        for _ in range(ROUNDS):
            revision += 1
            some = chance.sample(names, count)
            bridge.take([_held(name, revision, at) for at, name in enumerate(some)])
            times_s.append(await look(bridge))
            await look(bridge)
        figures[label] = statistics.median(times_s)
    return figures


def _held(name: str, revision: int, at: int) -> EngineDecision:
    return EngineDecision(external_id=name, revision=revision, action=EngineAction.HOLD, note=f"waits:{at}")


async def _timed(what: Any, times: int) -> float:
    seconds: list[float] = []
    for _ in range(times):
        began_s = time.perf_counter()
        await what()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


async def measure_seam(postgres_url: str, redis_url: str) -> dict[str, float]:
    """Return seconds that telemetry and the scheduler need for a first report of all jobs, and for one of 50."""
    async with a_world(fresh_database(postgres_url), redis_url) as world:
        bridge = seam.Bridge(world)
        await bridge.enrol(nodes=2, gpus=8)
        jobs = [seam.a_job(f"{number}@1") for number in range(JOBS)]
        began_s = time.perf_counter()
        await _say(bridge, jobs)
        all_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        await _say(bridge, [job.model_copy(update={"revision": 1}) for job in jobs[:50]])
        return {"mirrored_and_planned_all_s": all_s, "mirrored_and_planned_50_s": time.perf_counter() - began_s}


async def _say(bridge: seam.Bridge, jobs: Sequence[EngineJob]) -> None:
    for at in range(0, len(jobs), 1_000):
        await bridge.say(*jobs[at : at + 1_000])


def main() -> int:
    """Measure, print and write the result."""
    if problem := slurm.missing() or slurm.install():
        print(f"no Slurm to measure: {problem}", file=sys.stderr)
        return 1
    with scratch_folder() as folder:
        lab = SlurmLab(folder / "lab", nodes=2)
        try:
            lab.start()
            submit(lab, JOBS)
            os.environ["SLURM_CONF"] = str(lab.conf)
            figures = asyncio.run(measure_bridge(lab))
        finally:
            lab.stop()
    with postgres_server() as postgres_url, valkey_server() as redis_url:
        figures |= asyncio.run(measure_seam(postgres_url, redis_url))
    figures = {name: value if isinstance(value, int) else round(value, 3) for name, value in figures.items()}
    for name, value in figures.items():
        print(f"{name:<28} {value}")
    write_result("slurm_bridge", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
