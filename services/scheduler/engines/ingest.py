"""Fold what bridges report into jobs, allocations and claims, and send decisions again that are not followed.

Every step is one short transaction that locks what it changes, so that any of them may be repeated or interrupted
anywhere.
"""

import re
from collections import Counter
from collections.abc import Sequence

from services.contracts.engines import ENGINE_LABEL, QUEUEING, EngineAction, EngineJob, node_name
from services.contracts.jobs import GpuRequest, JobSpec
from services.contracts.streams import command_stream
from services.core.domain.counted import counted
from services.core.domain.ids import JobId, allocation_id
from services.core.domain.jobs import JobState
from services.db import nodes
from services.db.database import Connection, Database
from services.kit.ids import new_id
from services.kit.logging import Log
from services.scheduler.engines import folding
from services.scheduler.engines.decisions import CANCELLED, ON_HOLD, decide, send, stop_run
from services.scheduler.failures import contained, note_failure, passes_over
from services.scheduler.ingest.gangs import EndReason, GangState
from services.scheduler.repository import engines, gangs, jobs
from services.scheduler.repository.documents import Json, StoredShare
from services.scheduler.repository.engines import Claim, Device, HeldRow, NewJob, UnfoldedRow, WishRow
from services.scheduler.settings import SchedulerSettings

log = Log(__name__)

BATCH = 500
MOST_BATCHES = 100
"""In one look, so that rounds are held even while reports come as fast as they are folded."""
LONGEST_S = 365 * 86_400.0  #: The longest time limit of a job; engines have longer ones
_WAITING = (JobState.QUEUED, JobState.HELD)
_HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING)
_STREAM = command_stream("\0").split("\0")


class EngineIngest:
    """Looks after the jobs of engines."""

    def __init__(self, database: Database, settings: SchedulerSettings) -> None:
        self._database = database
        self._settings = settings

    async def look(self) -> int:
        """Fold all pending reports and carry out users' wishes; return how many jobs that affected."""
        folded = 0
        for _ in range(MOST_BATCHES):
            if not (count := await self._fold()):
                break
            folded += count
        async with self._database.transaction() as connection:
            await nodes.lose_of_engines(connection, self._settings.lease_margin_s)
            wished = 0
            for wish in await engines.wishes(connection, self._settings.engine_start_timeout_s):
                with contained("engine.wish_failed", engine=wish.engine, job=wish.job_id):
                    async with connection.transaction():
                        wished += await self._do(connection, wish)
            if wished:
                await _claim(connection)
            stream = (_STREAM[0], _STREAM[1])
            await send(connection, await engines.unfollowed(connection, self._settings.republish_after_s, stream))
        return folded + wished

    async def _fold(self, most: int = BATCH) -> int:
        """Fold a batch of reports; return how many. Of one that fails, each is folded by itself, or left out."""
        rows: Sequence[UnfoldedRow] = ()
        try:
            async with self._database.transaction() as connection:
                rows = await engines.lock_unfolded(connection, most)
                if rows:
                    await self._fold_rows(connection, rows)
        except Exception as error:
            if passes_over(error) or not rows:
                raise
            if len(rows) > 1:
                return sum([await self._fold(1) for _ in rows])
            note_failure(error, "engine.unfoldable", engine=rows[0].engine, job=rows[0].external_id)
            async with self._database.transaction() as connection:
                await _claim(connection)  # fails by itself, too, if it is no fault of the report: that is kept then
                await engines.mark_folded(connection, [(row.engine, row.external_id) for row in rows])
        return len(rows)

    async def _fold_rows(self, connection: Connection, rows: Sequence[UnfoldedRow]) -> None:
        new: list[NewJob] = []
        blocked: dict[str, bool] = {}
        deviations = Counter[tuple[str, str]]()
        for row in rows:
            fold = _Fold(connection, row)
            if isinstance(fold.fate, folding.Admit):
                new.append(fold.admitted(again=fold.fate.again))
            await fold.apply()
            if row.job_id is not None:
                blocked[row.job_id] = bool(fold.report.blocked)
            if fold.deviation is not None:
                deviations[row.engine, f"deviation_{fold.deviation}"] += 1
        await engines.gate(connection, blocked)
        await engines.admit(connection, self._settings.engine_tenant, new)
        # A job that is new and runs already is folded once more, now that it is known.
        fresh = {(job.engine, job.external_id.partition("#")[0]) for job in new}
        folded = [(row.engine, row.external_id) for row in rows]
        await engines.mark_folded(connection, [each for each in folded if each not in fresh])
        await engines.count(connection, deviations)
        await _claim(connection)
        log.info("engine.folded", reports=len(rows), new=len(new), deviations=sum(deviations.values()))

    async def _do(self, connection: Connection, wish: WishRow) -> int:
        """Do what is wanted of one job; return whether there was anything new to do."""
        runs = wish.gang_id is not None and wish.gang_state in (GangState.STARTING, GangState.RUNNING)
        if runs and (wish.cancel_requested or wish.hold_requested):
            (gang,) = await gangs.stoppable(connection, [wish.job_id])
            reason = EndReason.CANCELLED if wish.cancel_requested else EndReason.HELD
            detail = "It is being cancelled." if wish.cancel_requested else "It is being put on hold."
            return int(await stop_run(connection, gang, reason, detail=detail))
        if wish.state == JobState.CANCELLED:
            return await decide(connection, {wish.job_id: CANCELLED})
        if wish.state == JobState.HELD:
            return await decide(connection, {wish.job_id: ON_HOLD})
        if wish.late and wish.gang_id is not None:
            await _withdraw(connection, wish, wish.gang_id)
            return 1
        return 0


class _Fold:
    """One report on its way into the database."""

    def __init__(self, connection: Connection, row: UnfoldedRow) -> None:
        self._connection = connection
        self._row = row
        self.report = EngineJob.as_stored(row.report)
        reported = {node_name(row.engine, share.node): sorted(share.devices) for share in self.report.shares}
        planned = {share["node_id"]: sorted(share["devices"]) for share in row.shares or ()}
        self.devices: folding.Devices = reported or planned  # one that does not say where it runs is where it was
        decision: Json = row.decision or {}
        known = folding.Known(
            job=None if row.job_state is None else JobState(row.job_state),
            gang=None if row.gang_state is None else GangState(row.gang_state),
            planned=planned or None,
            stop_reason=EndReason(row.stop_reason) if row.stop_reason else None,
            action=EngineAction(decision["action"]) if decision else None,
            revision=row.revision,
            gpus=decision.get("gpus"),
            cancel_requested=row.cancel_requested,
            hold_requested=row.hold_requested,
            controls=row.controls,
        )
        self.fate = folding.fate_of(known, self.report, self.devices)
        self.deviation: folding.Deviation | None = None

    def admitted(self, *, again: bool) -> NewJob:
        """Return the report's job, to be stored as waiting; if it runs, the report is then folded once more."""
        row, report = self._row, self.report
        job_id = new_id("job")
        external_id = f"{row.external_id}#{job_id}" if again else row.external_id
        if again:
            self.deviation = folding.Deviation.AGAIN
        return NewJob(job_id, spec_of(row.engine, report), "queued", report.submitted_at, None, row.engine, external_id)

    async def apply(self) -> None:
        """Write what the report changes about a known job."""
        row, fate = self._row, self.fate
        if row.job_id is None or fate is None or isinstance(fate, folding.Admit):
            return
        self.deviation = folding.Deviation.REFUSED if isinstance(fate, folding.RunsOn) else fate.deviation
        if self.deviation is not None:
            said = {"deviation": self.deviation.value, "planned": row.shares, "actual": self._shares()}
            await jobs.note(self._connection, row.job_id, "job.deviation", said)
        match fate:
            case folding.Runs():
                await self._runs(row.job_id)
            case folding.RunsOn():
                assert row.gang_id is not None
                await engines.placed(self._connection, row.gang_id, self._shares(), GangState.RUNNING.value)
                await self._connection.execute(
                    engines.RUN_ON, row.job_id, f"It could not be stopped: {self.report.refused}"
                )
            case folding.Waits():
                await self._ends(row.job_id, fate.job, fate.reason, fate.detail, None, preempted=fate.preempted)
            case folding.Ends():
                await self._ends(row.job_id, fate.job, fate.reason, fate.detail, fate.exit_code)
            case folding.Stays():
                pass

    def _shares(self) -> list[StoredShare]:
        return [{"node_id": node, "devices": list(numbers)} for node, numbers in sorted(self.devices.items())]

    async def _runs(self, job_id: str) -> None:
        row, gpus = self._row, sum(map(len, self.devices.values()))
        detail = f"It runs on {counted(gpus, 'GPU')}."
        event: Json = {"engine": row.engine, "gpus": gpus, "shares": self._shares()}
        if row.gang_id is None:
            gang = allocation_id(JobId(job_id), row.generation + 1)
            if await engines.take_up(self._connection, job_id, row.generation + 1, detail, event):
                generation, begun_at = row.generation + 1, self.report.started_at
                await engines.add_run(self._connection, gang, job_id, generation, self._shares(), begun_at)
            return
        await engines.placed(self._connection, row.gang_id, self._shares(), GangState.RUNNING.value)
        if row.job_state == JobState.RUNNING:
            await jobs.note(self._connection, job_id, "job.resized", event)
        if row.job_state == JobState.STARTING:
            starting, running = [JobState.STARTING], JobState.RUNNING
            await jobs.move(self._connection, job_id, starting, running, reason="running", detail=detail, data=event)

    async def _ends(
        self, job_id: str, state: JobState, reason: str, detail: str, exit_code: int | None, *, preempted: bool = False
    ) -> None:
        """End a job's run, if it has one, and have the job wait again or be over."""
        gang, sources, attained_gpu_s = self._row.gang_id, _WAITING, 0.0
        if gang is not None:
            attained_gpu_s, sources = await gangs.end(self._connection, gang, reason), _HOLDING
        if state is JobState.HELD:
            await self._connection.execute(jobs.MARK_PREEMPTING, job_id)
            sources = (JobState.PREEMPTING,)
        await jobs.move(
            self._connection,
            job_id,
            sources,
            state,
            reason=reason,
            detail=detail,
            exit_code=exit_code,
            preemptions=int(preempted),
            attained_gpu_s=attained_gpu_s,
            data=None if gang is None else {"allocation_id": gang},
        )


async def _withdraw(connection: Connection, wish: WishRow, gang: str) -> None:
    """Free what was planned for a job that its engine has not started in time.

    An engine with a queue of its own may still start it when it sees fit; with any other one it is on hold again.
    """
    job_id = wish.job_id
    detail = "It was released, and its engine did not start it in time; it is planned again."
    await gangs.end(connection, gang, "not_started")
    sources, reason = [JobState.STARTING], "not_started"
    await jobs.move(connection, job_id, sources, JobState.QUEUED, reason=reason, detail=detail)
    await jobs.note(connection, job_id, "job.deviation", {"deviation": folding.Deviation.NOT_STARTED.value})
    await engines.count(connection, {(wish.engine, f"deviation_{folding.Deviation.NOT_STARTED}"): 1})
    if wish.kind not in QUEUEING:
        await decide(connection, {job_id: {"action": EngineAction.HOLD.value, "note": "waits:not_started"}})


async def _claim(connection: Connection) -> None:
    """Bring the claims in line with what engines' jobs hold and are planned to hold."""
    wanted = claims_of(await engines.holders(connection), await engines.devices(connection))
    present = await engines.claims(connection)
    await engines.replace_claims(connection, present - wanted, wanted - present)


def spec_of(engine: str, report: EngineJob) -> Json:
    """Return what an engine's job asks for, in the form in which our own jobs are stored."""
    low, high, step = report.gpus, report.max_gpus or report.gpus, report.step_gpus
    asked = low + (min(max(report.asked_gpus or low, low), high) - low) // step * step
    spec = JobSpec(
        name=_name(report.name) or "job",
        project=_name(report.account) or "default",
        command=[engine, report.number],
        gpus=GpuRequest(min=low, max=high, step=step, asked=asked, model=report.gpu_model or None),
        preemptible=report.stoppable and report.steered,
        time_limit_s=report.time_limit_s and min(report.time_limit_s, LONGEST_S),
        deadline=report.deadline,
        labels={"user": report.user[:255], "queue": report.queue[:255], ENGINE_LABEL: engine},
    )
    return spec.model_dump(mode="json", exclude_none=True)


def _name(text: str) -> str:
    """Return a text as a valid name, as similar as possible."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:63]


def claims_of(holders: Sequence[HeldRow], devices: Sequence[Device]) -> set[Claim]:
    """Return who holds which device of engines' nodes; no device is held twice.

    If an engine gives the same device to two runs, the one that began last has it: the other one is over, and its end
    has not been reported yet. A planned run keeps its devices if they are free, or else gets others of the same node,
    or of any node, so that room is kept for it wherever the engine puts it.
    """
    owner: dict[tuple[str, int], str] = {}
    known = {(node, device) for _, node, device in devices}
    real = [holder for holder in holders if holder.state != "starting"]
    for holder in sorted(real, key=lambda each: (each.started_s, each.id)):
        for share in holder.shares:
            for device in share["devices"]:
                if (share["node_id"], device) in known:
                    owner[share["node_id"], device] = holder.id
    for holder in (each for each in holders if each.state == "starting"):
        for share in holder.shares:
            node = share["node_id"]
            own = [(node, device) for device in share["devices"]]
            beside = [(at, device) for _, at, device in devices if at == node]
            elsewhere = [(at, device) for engine, at, device in devices if engine == holder.engine]
            wanted = len(share["devices"])
            for place in (*own, *beside, *elsewhere):
                if wanted and place in known and place not in owner:
                    owner[place] = holder.id
                    wanted -= 1
    return {(holder, node, device) for (node, device), holder in owner.items()}
