"""Use cases: submit a what-if run, view it, cancel it."""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from services.contracts import simulations
from services.contracts.background import WorkProblem, WorkRecord, WorkState
from services.contracts.codes import ProblemCode
from services.contracts.explanations import Outcome, PolicyComparison, PolicyOutcome
from services.contracts.identity import Identity, Role
from services.contracts.invalid import NAME_PATTERN
from services.contracts.live import Earlier, EarlierRequest
from services.contracts.simulations import LIVE, MAX_POLICIES, TrainingRequest
from services.core.policies.registry import POLICIES
from services.kit.background.work_queue import WorkQueue, sha256
from services.kit.logging import Log
from services.kit.problems import ProblemError, invalid
from services.kit.release import RELEASE
from services.kit.tasks import end_tasks
from services.simulator.bundles import BUNDLED_ZONES
from services.simulator.catalogue import catalogue, unknown
from services.simulator.live import earlier
from services.simulator.readers.carbon import signal_named
from services.simulator.readers.text import utc_s
from services.simulator.repository import SimulationRepository
from services.simulator.settings import SimulatorSettings
from services.simulator.sources import Sources
from services.simulator.training import Content, OptionError, of_option, opened, unpack

DAY_S = 86_400.0
TAIL_DAYS = 7.0  #: The grid is read for this long after the requested days too, because jobs still run then
FORMATS = {simulations.HISTORY: "wattshift", simulations.LIVE: simulations.LIVE}


class SimulatorService:
    """What callers can do with what-if runs."""

    def __init__(
        self, work_queue: WorkQueue, repository: SimulationRepository, sources: Sources, settings: SimulatorSettings
    ) -> None:
        self._work_queue, self._repository = work_queue, repository
        self._sources, self._settings = sources, settings
        self._reading = asyncio.Semaphore(1)  # each holds a trace in memory

    async def submit(
        self, request: simulations.TrainingRequest, caller: Identity, idempotency_key: str | None
    ) -> tuple[simulations.SimulationSummary, bool]:
        """Accept a run, and return whether it is new; a reused idempotency key, or a run equal to one that is kept,
        returns the existing simulation. Even a new one may already have ended.

        All inputs are read and checked first, so that errors are reported now and not by a worker.

        Raises:
            ProblemError: 422 for an option that makes no sense, a run beyond the limits, or a key used for another
                body; 429 with too many runs pending; 503 if something it refers to cannot be read right now.
        """

        async def resolve() -> WorkProblem:
            try:
                return await self._resolve(request, caller)
            except OptionError as error:
                raise invalid(f"/{error.option}", str(error)) from error

        body_sha256 = sha256("training", request.model_dump(mode="json"))
        work, is_new = await self._work_queue.submit(caller, idempotency_key, body_sha256, resolve)
        return _summary(work), is_new

    async def find(self, simulation_id: str, caller: Identity) -> simulations.Simulation:
        """Return a complete run; ``ProblemError``: 404 if there is none that the caller may see."""
        work = await self._work_queue.find(simulation_id, caller)
        request = simulations.TrainingProblem.as_stored(work.problem)
        return simulations.Simulation(**dict(_summary(work)), request=request, result=work.result)

    async def page(self, query: simulations.SimulationQuery, caller: Identity) -> simulations.SimulationList:
        """Return one page of runs, newest first; ``ProblemError``: 422 for an invalid cursor."""
        items, next_cursor = await self._work_queue.page(
            caller, cursor=query.cursor, limit=query.limit, states=query.status, tenant=query.tenant, shown=_summary
        )
        return simulations.SimulationList(items=items, next_cursor=next_cursor)

    async def cancel(self, simulation_id: str, caller: Identity) -> simulations.SimulationSummary:
        """Cancel a run, once; ``ProblemError``: 404 if the caller sees none, 409 if it has ended otherwise."""
        return _summary(await self._work_queue.cancel(simulation_id, caller))

    async def _resolve(self, request: simulations.TrainingRequest, caller: Identity) -> WorkProblem:
        if request.days is not None and request.jobs != simulations.HISTORY:
            self._check_days(request.days)
        contents = await self._contents(request, caller)
        terms = request.model_dump(mode="json", exclude=set(simulations.FILE_OPTIONS))
        if isinstance(request.jobs, str) and request.jobs in FORMATS:
            terms["format"] = FORMATS[request.jobs]
        files = {
            name: contents[name].stored if name in contents else getattr(request, name)
            for name in simulations.FILE_OPTIONS
        }
        problem = simulations.TrainingProblem.model_validate({**terms, **files})
        async with self._reading:
            total = await asyncio.to_thread(self._count, problem, contents)
        await self._repository.keep(contents.values())
        document = problem.model_dump(mode="json")
        # Another release may simulate differently, so the same request to it is another problem.
        same = sha256(f"training {RELEASE}", document)
        hashes = sorted(content.sha256 for content in contents.values())
        return WorkProblem(document, same, {"inputs": hashes, "total": total})

    async def _contents(self, request: simulations.TrainingRequest, caller: Identity) -> dict[str, Content]:
        """Return the files of a request by option, including those made from this installation's own history."""
        found: dict[str, Content] = {}
        for option in simulations.FILE_OPTIONS:
            value = getattr(request, option)
            if isinstance(value, simulations.InlineFile):
                with of_option(option):
                    found[option] = await asyncio.to_thread(unpack, value, self._settings.max_file_bytes)
        if request.jobs == simulations.LIVE:
            if not caller.is_operator:
                raise ProblemError(403, ProblemCode.FORBIDDEN, "Only an operator may simulate the present queue.")
            return {"jobs": await self._sources.live(caller)}
        if request.jobs == simulations.HISTORY:
            found |= await self._past(request, caller, wants_grid="carbon" not in found)
        elif isinstance(request.jobs, str) and request.jobs not in catalogue().jobs:
            names = ", ".join((*catalogue().jobs, simulations.HISTORY, simulations.LIVE))
            raise OptionError("jobs", unknown("job trace", request.jobs, f"{names}, or a file's content"))
        if "carbon" not in found and request.carbon not in BUNDLED_ZONES:
            zones = ", ".join(BUNDLED_ZONES)
            raise OptionError("carbon", f"there is no grid {request.carbon!r}; bundled: {zones}, or a file's content")
        return found

    async def _past(
        self, request: simulations.TrainingRequest, caller: Identity, *, wants_grid: bool
    ) -> dict[str, Content]:
        assert request.start is not None
        assert request.days is not None
        with of_option("start"):
            start_s = utc_s(request.start, "start")
            end_s = min(start_s + request.days * DAY_S, time.time())
            if start_s >= end_s:
                raise ValueError("start is in the future: nothing has run yet")
            if start_s < DAY_S:
                raise ValueError("start lies before 1970-01-02")
        self._check_days((end_s - start_s) / DAY_S)
        found = {"jobs": await self._sources.past_jobs(caller, start_s, end_s, self._settings.max_jobs)}
        if not found["jobs"].data:
            raise OptionError("jobs", f"no job was submitted here from {_minute(start_s)} to {_minute(end_s)} UTC")
        if wants_grid:
            zone = str(request.carbon)
            if not re.fullmatch(NAME_PATTERN, zone):
                raise OptionError("carbon", f"{zone!r} is not the name of a zone")
            with of_option("signal"):
                signal = signal_named(request.signal)
            until_s = min(end_s + TAIL_DAYS * DAY_S, time.time())
            found["carbon"] = await self._sources.intensities(zone, signal, start_s - DAY_S, until_s)
        return found

    def _count(self, problem: simulations.TrainingProblem, contents: Mapping[str, Content]) -> int:
        """Read everything as a worker will, check it against the limits, and return jobs times policies."""
        with opened(problem, contents) as run:
            jobs, submitted_s = len(run.workload), run.workload.submitted_s
            limits = self._settings
            if jobs > limits.max_jobs:
                raise OptionError("jobs", f"{jobs} jobs are more than a run may have ({limits.max_jobs}); set days")
            if run.live is None:
                self._check_days(float(submitted_s[-1] - submitted_s[0]) / DAY_S)
            if run.cluster.gpus > limits.max_gpus:
                most = limits.max_gpus
                raise OptionError("cluster", f"{run.cluster.gpus} GPUs are more than a run may have ({most})")
            return jobs * len(problem.policies)

    def _check_days(self, days: float) -> None:
        if days > self._settings.max_days:
            most = f"{self._settings.max_days:g}"
            raise OptionError("days", f"{days:g} days are more than a run may have ({most})")


def _minute(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d %H:%M")


def _summary(work: WorkRecord) -> simulations.SimulationSummary:
    columns = work.columns
    return simulations.SimulationSummary.of(
        work,
        status=work.state,
        policies=columns["policies"],
        progress=simulations.SimulationProgress(done=columns["done"], total=columns["total"]),
        run_s=columns["run_s"],
    )


log = Log(__name__)

OWNER = Identity(tenant_id="_queue", role=Role.OPERATOR, key_id="simulator")
"""Names of tenants begin with a letter or a digit."""

ASSUMPTIONS = [
    "No further job is submitted, and jobs run for as long as predicted.",
    "Where nothing is measured, twice the GPUs take half the time.",
    "Policies begin without what they remember, and with default parameters; the one in force has its own.",
    "PUE is not included.",
]
REST = 5.0
"""A comparison that took long is not renewed before this many times as long, so that it never takes a core for good."""


@dataclass(frozen=True)
class Known:
    """A comparison that has succeeded."""

    work_id: str
    result: Mapping[str, Any]
    row: Mapping[str, int]

    @property
    def as_of(self) -> datetime:
        return datetime.fromtimestamp(self.result["as_of_s"], UTC)

    def outcomes(self, job_id: str) -> list[PolicyOutcome]:
        """Return the outcomes of one of its jobs, the policy in force first."""
        row, result = self.row[job_id], self.result
        found = [_outcome(each, row, result) for each in result["policies"]]
        return sorted(found, key=lambda each: (not each.in_force, each.policy))


class Comparisons:
    """Answers what each policy would do with the current queue: one simulation of a snapshot, shared by all who ask.

    At most one runs at a time in an installation, whoever asks and however often; a new one begins only when somebody
    asks and the last is too old or does not include the job. The rows belong to a reserved name that no tenant can
    have; workers claim, renew and retry them like any other run, so a kill only delays the answer.
    """

    def __init__(
        self, repository: SimulationRepository, service: SimulatorService, max_age_s: float, min_age_s: float
    ) -> None:
        """Take the stored runs, and a service whose queue takes one run of a tenant at a time.

        Args:
            max_age_s: A comparison older than this is renewed when somebody asks.
            min_age_s: A comparison younger than this is not renewed, even if it lacks the job or failed.
        """
        self._repository, self._service = repository, service
        self._max_age, self._min_age = timedelta(seconds=max_age_s), timedelta(seconds=min_age_s)
        self._known: Known | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._looking = asyncio.Semaphore(1)
        self._problem: str | None = None
        self._tried_at = datetime.min.replace(tzinfo=UTC)

    async def earlier(self, asked: EarlierRequest) -> Earlier:
        """Return which of some jobs would start earlier than one that waits; one look at a time."""
        async with self._looking:
            return await asyncio.to_thread(earlier, asked)

    async def close(self) -> None:
        if self._beginning is not None:
            await end_tasks([self._beginning])

    async def of(self, job_id: str, since: datetime) -> PolicyComparison:
        """Return what is known about a job; if nothing is, start a comparison and answer ``pending``.

        Args:
            since: Since when the job has waited, or held its GPUs; what was simulated before knows it otherwise.
        """
        newest = await self._repository.page(OWNER.tenant_id, (), None, 3)
        last = newest[0] if newest else None
        under_way = last is not None and last.state in (WorkState.QUEUED, WorkState.RUNNING)
        done = next((each for each in newest if each.state is WorkState.SUCCEEDED), None)
        known = None if done is None else await self._read(done)
        knows = known is not None and job_id in known.row and known.as_of >= since
        if not under_way and self._is_due(last, knows=knows):
            self._begin()
            under_way = True
        if known is not None and knows:
            notes, items = [*known.result["notes"], *ASSUMPTIONS], known.outcomes(job_id)
            return PolicyComparison(status=Outcome.READY, as_of=known.as_of, items=items, assumptions=notes)
        if last is not None and last.state in (WorkState.FAILED, WorkState.CANCELLED) and not under_way:
            why = "It was cancelled." if last.failure is None else last.failure.detail
            return PolicyComparison(status=Outcome.FAILED, detail=why)
        if self._problem is not None and (self._beginning is None or self._beginning.done()):
            return PolicyComparison(status=Outcome.FAILED, detail=self._problem)
        return PolicyComparison(status=Outcome.PENDING, detail="The present queue is being simulated.")

    def _is_due(self, last: WorkRecord | None, *, knows: bool) -> bool:
        now = datetime.now(UTC)
        if self._problem is not None and now - self._tried_at < self._min_age:
            return False
        if last is None:
            return True
        least = max(self._min_age, timedelta(seconds=REST * (last.columns["run_s"] or 0.0)))
        return now - last.submitted_at > (max(self._max_age, least) if knows else least)

    async def _read(self, done: WorkRecord) -> Known | None:
        if self._known is None or self._known.work_id != done.id:
            work = await self._repository.find(done.id, OWNER.tenant_id)
            if work is None or not isinstance(work.result, dict):
                return None
            rows = {job_id: row for row, job_id in enumerate(work.result["job_ids"])}
            self._known = Known(done.id, work.result, rows)
        return self._known

    def _begin(self) -> None:
        if self._beginning is None or self._beginning.done():
            self._beginning = asyncio.create_task(self._submit())

    async def _submit(self) -> None:
        """Submit a comparison; if another process got there first, its run serves."""
        self._tried_at = datetime.now(UTC)
        try:
            request = TrainingRequest(policy=[*POLICIES][:MAX_POLICIES], jobs=LIVE, carbon=LIVE)
            await self._service.submit(request, OWNER, None)
            await self._repository.forget_older(OWNER.tenant_id, keep=3)
            self._problem = None
        except ProblemError as error:
            if error.status != 429:
                self._problem = error.detail
                log.warning("comparison.not_begun", error=error.detail)
        except Exception as error:  # it is tried again when somebody asks again
            self._problem = "The present queue cannot be read right now."
            log.warning("comparison.not_begun", error=str(error) or type(error).__name__)


def _outcome(entry: Mapping[str, Any], row: int, result: Mapping[str, Any]) -> PolicyOutcome:
    policy, in_force = entry["policy"], entry["policy"] == result["policy_in_force"]
    if "failure" in entry:
        return PolicyOutcome(policy=policy, in_force=in_force, failure=entry["failure"])
    columns = entry["jobs"]
    starts_s, ends_s = columns["starts_at_s"][row], columns["ends_at_s"][row]
    return PolicyOutcome(
        policy=policy,
        in_force=in_force,
        starts_at=None if starts_s is None else datetime.fromtimestamp(starts_s, UTC),
        ends_at=None if ends_s is None else datetime.fromtimestamp(ends_s, UTC),
        waits_s=None if starts_s is None else max(starts_s - result["as_of_s"], 0.0),
        carbon_gco2=columns["carbon_gco2"][row],
    )
