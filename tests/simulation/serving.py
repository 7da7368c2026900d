"""Instances of model servers from wanted to ended: what the controller asks over HTTP, and the steps that it takes.

The rows are in memory; which of them belong to a plan is SQL and not part of this. The controller is killed and begins
again, and for a while there are two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import orjson

from services.contracts.codes import ProblemCode
from services.contracts.jobs import SubmissionAnswer, SubmissionAnswers, SubmissionRequest, SubmittedJob
from services.contracts.serving import InstanceState, PoolSpec, ServerProbes
from services.core.domain.jobs import JobState
from services.kit.ids import utc_now
from services.kit.problems import ProblemError, unavailable
from services.serving.controller.advance import advance, drain, one_by_one
from services.serving.controller.controller import Controller
from services.serving.controller.server_jobs import ServerJobs
from services.serving.instances import Instance, InstanceJob, InstanceReason, InstanceTerms, pool_blueprint
from tests.simulation.loop import Process, Simulation
from tests.support.pools import a_pool

POOL = "chat"
LOOK_S = 1.0


@dataclass
class _Job:
    """A job at admission."""

    id: str
    instance: str
    runs_at_s: float
    ends_at_s: float
    state: JobState = JobState.QUEUED
    running_at: datetime | None = None
    cancel_requested: bool = False


class _Admission:
    """Admission and the scheduler: jobs by the keys of their submissions, which run after a while."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.jobs: dict[str, _Job] = {}
        self._keyed: dict[str, str] = {}
        self.refused: set[str] = set()

    async def call(self, method: str, path: str, answer: Any, *, body: SubmissionRequest) -> SubmissionAnswers:
        """Answer submissions, as ``ServiceClient.call``."""
        return await self._simulation.boundary(
            lambda: SubmissionAnswers(answers=[self._submit(each) for each in body.entries]),
            unavailable("Admission"),
            may_repeat=True,
        )

    def _submit(self, entry: Any) -> SubmissionAnswer:
        draw = self._simulation.choices.below
        instance = str(orjson.loads(entry.body)["environment"]["WATTSHIFT_INSTANCE"])
        known = self._keyed.get(entry.idempotency_key)
        if known is None and not self._simulation.is_calm:
            outcome = draw(3, often=0.2)
            if outcome == 1 or instance in self.refused:
                self.refused.add(instance)
                return _refusal(422, ProblemCode.INVALID_REQUEST)
            if outcome == 2:
                return _refusal((429, 503)[draw(2)], ProblemCode.QUOTA_EXCEEDED)
        if known is None:
            now_s = self._simulation.loop.time()
            job_id = f"job_{len(self.jobs)}"
            runs_at_s = now_s + draw(6)
            ends_at_s = runs_at_s + (1e9 if draw(4, often=0.5) != 1 else float(draw(10)))
            self.jobs[job_id] = _Job(job_id, instance, runs_at_s, ends_at_s)
            known = self._keyed[entry.idempotency_key] = job_id
        told = SubmittedJob(id=known, name=entry.idempotency_key, state=JobState.QUEUED, submitted_at=utc_now())
        return SubmissionAnswer(status=201, body=told.model_dump_json())

    async def request(self, method: str, path: str, *, identity: Any) -> None:
        """Cancel a job, as ``ServiceClient.request``."""

        def cancel() -> None:
            self.jobs[path.split("/")[3]].cancel_requested = True

        await self._simulation.boundary(cancel, unavailable("Admission"), may_repeat=True)

    def go_on(self) -> None:
        """Have jobs run and end."""
        for job in self.jobs.values():
            now_s = self._simulation.loop.time()
            if job.state.is_final:
                continue
            if job.cancel_requested or now_s >= job.ends_at_s:
                job.state = JobState.CANCELLED if job.cancel_requested else JobState.FAILED
            elif now_s >= job.runs_at_s and job.state is JobState.QUEUED:
                job.state, job.running_at = JobState.RUNNING, utc_now()


def _refusal(status: int, code: ProblemCode) -> SubmissionAnswer:
    problem = ProblemError(status, code, "It is refused.").document("request")
    return SubmissionAnswer(status=status, body=problem.model_dump_json())


class _Prober:
    """Servers, which answer when their jobs run, mostly."""

    def __init__(self, simulation: Simulation, admission: _Admission) -> None:
        self._simulation, self._admission = simulation, admission

    async def answers(self, url: str) -> bool:
        """Whether a server answers."""
        job = self._admission.jobs[url.split("/")[2]]
        fails = self._simulation.choices.below(2, often=0.0 if self._simulation.is_calm else 0.1)
        return await self._simulation.boundary(lambda: job.state is JobState.RUNNING and not fails)

    async def held(self, url: str, names: Any) -> float | None:
        """Return how many requests it holds."""
        return 0.0 if await self.answers(url) else None


class _Service:
    """A process of serving, with its controller."""

    def __init__(self, simulation: Simulation, rows: dict[str, Instance], admission: _Admission) -> None:
        self.process: Process = simulation.process()
        self._rows, self._admission = rows, admission
        settings = SimpleNamespace(instance_look_s=LOOK_S, instance_probe_s=2.0)
        jobs = ServerJobs(cast(Any, admission))
        self._controller = Controller(
            cast(Any, None), jobs, cast(Any, _Prober(simulation, admission)), cast(Any, settings)
        )
        self.process.start(self._run())  # until it is killed

    async def _run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        """As ``Controller.look``, with the rows where its queries would be."""
        owners: Mapping[str, Any] = {POOL: SimpleNamespace(blueprint=_blueprint())}
        before = [self._read(each) for each in self._rows.values() if each.state is not InstanceState.ENDED]
        await asyncio.sleep(0)
        seen = await self._controller._ask(owners, before, utc_now())
        await asyncio.sleep(0)
        now = utc_now()
        live = [self._read(each) for each in self._rows.values() if each.state is not InstanceState.ENDED]
        for each, change in one_by_one([(each, advance(each, seen.get(each.id), _probes(), now)) for each in live]):
            self._rows[each.id] = replace(self._rows[each.id], **change)

    def _read(self, row: Instance) -> Instance:
        """Return a row with its job, which is found by the key of its submission, too."""
        job = self._admission.jobs.get(row.job_id or "")
        if job is None:
            return row
        url = f"http://{job.id}" if job.state is JobState.RUNNING else None
        seen = InstanceJob(job.state, cancel_requested=job.cancel_requested, url=url, running_at=job.running_at)
        return replace(row, job=seen)


@cache
def _blueprint() -> Any:
    return pool_blueprint(_spec())


@cache
def _spec() -> PoolSpec:
    return PoolSpec.model_validate(a_pool())


def _probes() -> ServerProbes:
    return _spec().probes


def _wanted(name: str) -> Instance:
    spec = _spec()
    terms = InstanceTerms(mode=spec.modes[0], place=spec.places[0], probes=spec.probes)
    return Instance(name, POOL, "acme", spec.places[0].name, spec.modes[0].name, InstanceState.WANTED, terms, utc_now())


async def play(simulation: Simulation) -> None:
    """Instances are wanted, run, drain and end, while the service dies and returns; no job is doubled or left."""
    draw = simulation.choices.below
    rows: dict[str, Instance] = {}
    admission = _Admission(simulation)
    simulation.holds("an instance has one job", lambda: _doubled(admission))
    services = [_Service(simulation, rows, admission)]
    for number in range(1 + draw(4)):
        rows[f"i{number}"] = _wanted(f"i{number}")
        if draw(3) == 1:
            services.append(_Service(simulation, rows, admission))
        if draw(3) == 1:
            services.pop(0).process.kill()
        if not services:
            services.append(_Service(simulation, rows, admission))
        for _ in range(draw(10)):
            await asyncio.sleep(1.0)
            admission.go_on()
    for each in services[1:]:
        each.process.kill()
    simulation.calm_down()
    for _ in range(120):
        await asyncio.sleep(1.0)
        admission.go_on()
        for name, row in rows.items():
            if row.state is InstanceState.READY:
                rows[name] = replace(row, **drain(utc_now(), InstanceReason.NOT_NEEDED))
    left = {name: row.state.value for name, row in rows.items() if row.state is not InstanceState.ENDED}
    simulation.check("every instance ends", not left, str(left))
    refused = {name for name, row in rows.items() if row.reason == InstanceReason.REFUSED.value}
    simulation.check("only what is refused for good ends so", refused <= admission.refused, str(refused))
    tried = {job.instance for job in admission.jobs.values()}
    simulation.check("what is refused for good is left", not admission.refused & tried - refused, str(refused))
    running = [job.id for job in admission.jobs.values() if not job.state.is_final]
    simulation.check("no job is left behind", not running, str(running))


def _doubled(admission: _Admission) -> str | None:
    seen: dict[str, str] = {}
    for job in admission.jobs.values():
        if (other := seen.setdefault(job.instance, job.id)) != job.id:
            return f"{job.instance}: {other}, {job.id}"
    return None
