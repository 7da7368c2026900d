"""The use case: gather what is known about one job. It only reads, and takes part in no round."""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from pydantic import ValidationError

from services.contracts.engines import OURS
from services.contracts.explanations import (
    EndedExplanation,
    Explanation,
    JobAhead,
    LeverEffect,
    OneChange,
    Outcome,
    PolicyComparison,
    QueuePlace,
    RunningExplanation,
)
from services.contracts.identity import Identity
from services.contracts.jobs import JobFootprint
from services.contracts.live import Earlier, LiveState
from services.core.cycle.snapshot import Trigger
from services.core.domain.counted import counted
from services.core.domain.ids import JobId
from services.core.domain.jobs import JobState
from services.core.domain.reasons import Reason
from services.db.database import Database
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError, not_found
from services.kit.text import duration
from services.scheduler.explaining import levers
from services.scheduler.explaining.live_state import in_its_place, live_state, mean_length
from services.scheduler.explaining.story import sentence, story_of
from services.scheduler.explaining.waiting import (
    Place,
    WhyItWaits,
    change_of,
    guarantee_words,
    how_it_runs,
    next_step,
    on_slice_step,
    shown,
    why_it_waits,
)
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.planning.closed import SHORT, closed_to
from services.scheduler.planning.dry_run import DRAFT, Live, LiveView
from services.scheduler.planning.job_table import progress_of
from services.scheduler.planning.lengths import remaining
from services.scheduler.repository import explanations
from services.scheduler.repository.explanations import Facts, GangRow

log = Log(__name__)

SHOWN_AHEAD = 5
COMPARISON_TIMEOUT_S = 1.0
EARLIER_JOBS = 5_000  #: With more jobs, no change is looked for that would start one earlier
EARLIER_TIMEOUT_S = 8.0


class Explanations:
    """Explains jobs."""

    def __init__(self, database: Database, view: LiveView, carbon: CarbonWatch, simulator: ServiceClient) -> None:
        self._database = database
        self._view = view
        self._carbon = carbon
        self._simulator = simulator

    async def explain(self, caller: Identity, job_id: str, *, one_change: bool = False) -> Explanation:
        """Explain a job that the caller may see; ``one_change``: and look for what would start it now.

        Raises:
            ProblemError: 404 if there is no such job.
        """
        facts = await self._facts(caller, job_id)
        state = JobState(facts.row.state)
        if state.is_final:
            return await self._ended(facts, state)
        if facts.row.cell is not None:
            return self._in_cell(facts, state)
        if state.holds_gpus and facts.gang is not None:
            return await self._running(facts, facts.gang, state)
        return await self._waiting(facts, state, caller, one_change=one_change)

    async def live_state(self) -> LiveState:
        """Return the live queue and cluster for the what-if service."""
        return (await self._state(await self._view.read()))[0]

    async def _state(self, live: Live) -> tuple[LiveState, dict[str, float]]:
        """Return the live state, and the time limits of the jobs that have one, seconds."""
        async with self._database.connection() as connection:
            limits_s = await explanations.time_limits_s(connection)
            queued = await connection.fetchval(explanations.QUEUED)
        return await asyncio.to_thread(live_state, self._view, live, limits_s, queued), limits_s

    async def _earlier(self, facts: Facts, live: Live, why: WhyItWaits) -> OneChange | None:
        """Return the change that starts a job earlier than planned, if the what-if service finds one in time."""
        tried, planned = why.tried, why.explanation.expected_start_at
        if tried is None or tried.now is not None or len(live.rows.jobs) > EARLIER_JOBS:
            return None
        state, limits_s = await self._state(live)
        mean_gpu_s, limit_s = mean_length(live.rows.jobs), limits_s.get(facts.row.id)
        asked = await asyncio.to_thread(
            in_its_place, state, tried.snapshot, tried.row, tried.changes, tried.predicted, limit_s, mean_gpu_s
        )
        asked = asked.model_copy(update={"planned_s": None if planned is None else planned.timestamp()})
        try:
            found = await self._simulator.call(
                "POST", "/internal/earlier", Earlier, body=asked, attempts=1, timeout_s=EARLIER_TIMEOUT_S
            )
        except (ProblemError, ValidationError) as error:
            log.warning("earlier.unknown", job=facts.row.id, error=str(error))
            return None
        change = None if found.change is None else tried.changes[found.change]
        return None if change is None else shown(change, facts.spec, tried.snapshot.levels, found)

    async def _facts(self, caller: Identity, job_id: str) -> Facts:
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            facts = await explanations.facts(connection, job_id)
        if facts is None or not caller.sees(facts.row.tenant_id, facts.row.project):
            raise not_found("job")
        return facts

    async def _waiting(self, facts: Facts, state: JobState, caller: Identity, *, one_change: bool) -> Explanation:
        since = facts.row.queued_at or facts.row.submitted_at
        live, comparison = await asyncio.gather(self._view.read(), self._comparison(facts, since))
        seen = any(row.id == facts.row.id for row in live.rows.jobs)
        why = await asyncio.to_thread(self._why, facts, live, seen_by_policy=seen, one_change=one_change and seen)
        if found := await self._earlier(facts, live, why):
            why = replace(why, explanation=why.explanation.model_copy(update={"one_change": found}))
        waiting, reason, detail = why.explanation, why.reason or facts.row.reason, why.detail
        if detail is None:
            detail = facts.row.detail or sentence(facts.row.reason) or None
        if why.reason in SHORT and (closed := closed_to(live.rows, [facts.row.id]).get(facts.row.id)):
            reason, detail = Reason.NODE_CLOSED.value, closed
        if state is JobState.HELD and facts.row.reason in (None, "held"):
            detail = "It is on hold: it waits until it is released."
        expected_at = waiting.expected_start_at
        if seen and expected_at is None and comparison is not None:
            own = next((each for each in comparison.items if each.in_force), None)
            if own is not None and own.starts_at is not None and own.starts_at.timestamp() > live.rows.state.now_s:
                waiting = waiting.model_copy(
                    update={"expected_start_at": own.starts_at, "expected_start_from": "simulation"}
                )
        if waiting.forecast is not None:
            made_at = self._carbon.forecast_made_at(waiting.forecast.zone)
            waiting = waiting.model_copy(update={"forecast": waiting.forecast.model_copy(update={"made_at": made_at})})
        place = None if why.place is None else await self._named(why.place, caller, live)
        waiting = waiting.model_copy(update={"place": place})
        stays = facts.spec.stays_because if facts.spec.cells else None
        here = f"It may not go to a cell, as {stays}." if stays else ""
        summary = " ".join(filter(None, (_place_words(place), detail, why.change_words, here))) or "It waits."
        return self._explanation(
            facts,
            state,
            reason=reason,
            detail=detail,
            summary=summary,
            waiting=waiting,
            under_policies=comparison if seen else None,
            levers=why.levers,
            assumptions=[*why.assumptions, *([levers.SENTENCE] if why.levers else [])],
        )

    def _in_cell(self, facts: Facts, state: JobState) -> Explanation:
        """Explain a job that a cell has, or for which a place is being chosen, by what admission noted of it."""
        row = facts.row
        detail = row.detail or sentence(row.reason or Reason.CHOOSING_CELL)
        placed = next((each.data.get("detail") for each in reversed(facts.events) if each.type == "job.in_cell"), None)
        chosen = f"It was placed in cell {row.cell}: {placed}" if row.cell and placed and placed != detail else ""
        summary = " ".join(filter(None, (detail, chosen)))
        return self._explanation(facts, state, summary=summary, reason=row.reason, detail=detail)

    def _why(self, facts: Facts, live: Live, *, seen_by_policy: bool, one_change: bool) -> WhyItWaits:
        row, spec = facts.row, facts.spec
        job_id = JobId(row.id) if seen_by_policy else DRAFT
        if not seen_by_policy:
            live = self._view.with_draft(live, spec, row.tenant_id)
        dry = self._view.round(live, Trigger.PASSIVE)
        why = why_it_waits(
            dry,
            job_id,
            spec,
            self._view.prediction(row.tenant_id, row.spec),
            row.queued_at or row.submitted_at,
            row.submitted_at.timestamp(),
            seen_by_policy=seen_by_policy,
        )
        if one_change and not why.explanation.starts_now:
            tried = change_of(self._view, live, dry, job_id, spec, why.reason)
            found = None if tried is None or tried.now is None else shown(tried.now, spec, dry.snapshot.levels)
            why = replace(why, explanation=why.explanation.model_copy(update={"one_change": found}), tried=tried)
        return why

    async def _named(self, place: Place, caller: Identity, live: Live) -> QueuePlace:
        if place.ahead is None:
            return QueuePlace(waiting_jobs=place.waiting_jobs)
        rows = {row.id: row for row in live.rows.jobs}
        visible = [each for each in place.ahead if caller.is_operator or rows[each].tenant_id == caller.tenant_id]
        async with self._database.connection() as connection:
            if caller.project is not None:
                own = await explanations.of_project(connection, visible, caller.project)
                visible = [each for each in visible if each in own]
            named = await explanations.names(connection, visible[:SHOWN_AHEAD])
        first = [
            JobAhead(job_id=each, name=named[each], gpus=rows[each].min_gpus)
            for each in visible[:SHOWN_AHEAD]
            if each in named
        ]
        return QueuePlace(
            position=len(place.ahead) + 1,
            waiting_jobs=place.waiting_jobs,
            ahead=len(place.ahead),
            ahead_gpus=place.ahead_gpus,
            hidden_ahead=len(place.ahead) - len(visible),
            first=first,
        )

    async def _running(self, facts: Facts, gang: GangRow, state: JobState) -> Explanation:
        live, comparison = await asyncio.gather(self._view.read(), self._comparison(facts, gang.started_at))
        run, effects, assumptions = await asyncio.to_thread(self._run, facts, gang, state, live)
        if facts.row.engine == OURS:
            run = run.model_copy(update={"stop_at": facts.spec.stop_at(gang.running_at, gang.stop_requested_at)})
        does = {JobState.STARTING: "It starts", JobState.RUNNING: "It runs"}.get(state, "It is being stopped")
        where = ", ".join(dict.fromkeys(share["node_id"] for share in gang.shares))
        detail = facts.row.detail or sentence(facts.row.reason)
        then = detail if state is JobState.PREEMPTING else run.next.detail if run.next else ""
        if run.next and run.next.action == "stop":
            then = f"The next round would stop it. {then}"
        size = facts.spec.gpus.slice
        on = counted(gang.gpus, "GPU") if size is None else f"a {size} slice"
        return self._explanation(
            facts,
            state,
            reason=facts.row.reason,
            detail=detail,
            summary=f"{does} on {on} of {where}. {then}".strip(),
            running=run,
            under_policies=comparison,
            levers=effects,
            assumptions=[*assumptions, *([levers.SENTENCE] if effects else [])],
        )

    def _run(
        self, facts: Facts, gang: GangRow, state: JobState, live: Live
    ) -> tuple[RunningExplanation, list[LeverEffect], list[str]]:
        row, spec = facts.row, facts.spec
        job_id, now_s = JobId(row.id), live.rows.state.now_s
        last_s = live.rows.state.last_active_s
        due_s = now_s if last_s is None else last_s + self._view.settings.round_interval_s
        dry, done = None, None
        if spec.gpus.slice is None:
            dry = self._view.round(live, Trigger.ACTIVE)
            jobs = dry.snapshot.jobs
            if (at := jobs.index.get(job_id)) is not None:
                done = float(jobs.progress[at]), float(jobs.attained_gpu_s[at])
        elif spec.service is None and (held := next((each for each in live.rows.jobs if each.id == row.id), None)):
            done = progress_of(held, now_s)
        if done is None:  # it ended meanwhile, or is a service instance, which no policy sees and which has no end
            return how_it_runs(gang, spec, facts.events, None, now_s, facts.policy), [], []
        left = remaining(*done, gang.gpus, spec, self._view.prediction(row.tenant_id, row.spec))
        run = how_it_runs(gang, spec, facts.events, left, now_s, facts.policy)
        words = [left.words if left.estimate.seconds is not None else "Length: unknown; --time would limit it."]
        stays = state is not JobState.PREEMPTING
        if dry is None:
            return run.model_copy(update={"next": on_slice_step(max(due_s, now_s))}) if stays else run, [], words
        if stays:
            following = next_step(dry, job_id, due_s, run.expected_end_at, preemptible=spec.preemptible)
            run = run.model_copy(update={"next": following})
        run = run.model_copy(update={"why": [*run.why, *guarantee_words(dry, job_id)]})
        effects = levers.of_round(dry, job_id) if stays else []
        return run, effects, [*words, "Next round: by the cluster as it is now; jobs that arrive or end change it."]

    async def _ended(self, facts: Facts, state: JobState) -> Explanation:
        row = facts.row
        ended_at = row.ended_at or row.submitted_at
        total_s = (ended_at - row.submitted_at).total_seconds()
        waited_s = max(total_s - facts.held_s, 0.0)
        ended = EndedExplanation.of(row, waited_s=waited_s, held_gpus_s=facts.held_s, starts=row.generation)
        detail = row.detail or sentence(row.reason) or None
        ended_how = "was cancelled" if state is JobState.CANCELLED else state.value
        took = f"after {duration(total_s)}, of which it waited {duration(ended.waited_s)}"
        baseline = await self._baseline(facts, ended_at)
        unshifted = await self._baseline(facts, row.submitted_at + timedelta(seconds=max(facts.held_s, 1.0)))
        effects = levers.of_ended(facts.ledger, facts.spec, unshifted) if facts.ledger else []
        mean = "Mean intensity: from submission to end, by zone, weighted by time; energy and PUE are the same."
        said = [*([] if baseline is None else [mean]), *([levers.IN_LEDGER] if effects else [])]
        return self._explanation(
            facts,
            state,
            reason=row.reason,
            detail=detail,
            summary=f"It {ended_how} {took}. {detail or ''}".strip(),
            ended=ended,
            baseline_gco2=baseline,
            levers=effects,
            assumptions=said,
        )

    async def _baseline(self, facts: Facts, until: datetime) -> float | None:
        """Return what the job would have emitted at its zones' mean intensity since submission, gCO2; None: unknown."""
        start_s, end_s = facts.row.submitted_at.timestamp(), until.timestamp()
        if not facts.by_zone or not all(part.one_signal for part in facts.by_zone):
            return None
        means = [await self._carbon.past_mean(part.zone, part.signal, start_s, end_s) for part in facts.by_zone]
        known = [part.kwh * mean for part, mean in zip(facts.by_zone, means, strict=True) if mean is not None]
        return sum(known) if len(known) == len(means) else None

    async def _comparison(self, facts: Facts, since: datetime) -> PolicyComparison | None:
        """Return what the what-if service has of a job that has waited, or run, ``since`` then; it may be down.

        None for a model server's instance, which no policy decides about.
        """
        if facts.spec.service is not None:
            return None
        job_id = facts.row.id
        path, asked = f"/internal/comparisons/{job_id}", {"since": since.isoformat()}
        try:
            return await self._simulator.call(
                "GET", path, PolicyComparison, params=asked, attempts=1, timeout_s=COMPARISON_TIMEOUT_S
            )
        except (ProblemError, ValidationError) as error:
            log.warning("comparison.unknown", job=job_id, error=str(error))
            detail = "The what-if service does not answer right now; ask again."
            return PolicyComparison(status=Outcome.PENDING, detail=detail)

    def _explanation(
        self, facts: Facts, state: JobState, *, summary: str, reason: str | None, detail: str | None, **parts: object
    ) -> Explanation:
        row = facts.row
        lines, left_out = story_of(facts.events, row.submitted_at)
        return Explanation.of(
            row,
            job_id=row.id,
            state=state,
            reason=reason,
            detail=detail,
            summary=summary,
            as_of=datetime.fromtimestamp(time.time(), UTC),
            policy=facts.policy,
            footprint=JobFootprint.of(row),
            story=lines,
            story_left_out=left_out,
            **parts,
        )


def _place_words(place: QueuePlace | None) -> str:
    if place is None:
        return ""
    if place.position is None:
        others = place.waiting_jobs - 1
        return f"{counted(others, 'other job waits', 'other jobs wait')}, too." if others else ""
    if place.waiting_jobs == 1:
        return "It is the only job that waits."
    return f"It is number {place.position} of the {place.waiting_jobs} jobs that wait."
