"""HTTP of jobs: submissions from the gateway, lists, commands, events and output."""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from services.admission.jobs import Jobs, visible_tenant
from services.admission.logs import Logs
from services.admission.repository.events import Scope
from services.admission.service import Submissions
from services.admission.steering import Command
from services.admission.streaming import EventStreams, read_last_event_id
from services.contracts.jobs import Job, JobCounts, JobList, SubmissionAnswers, SubmissionRequest
from services.contracts.queries import EventQuery, EventsQuery, JobQuery, LogQuery
from services.kit.identity import ProjectCaller
from services.kit.problems import validation_problem

LastEventId = Annotated[str | None, Header(alias="Last-Event-ID")]
UNBUFFERED = {"cache-control": "no-store", "x-accel-buffering": "no"}


def job_routes(submissions: Submissions, jobs: Jobs, streams: EventStreams, logs: Logs) -> APIRouter:
    """Return the routes that are about jobs."""
    router = APIRouter()

    @router.post("/internal/submissions", response_model=SubmissionAnswers)
    async def submit(request: Request) -> Response:
        try:
            asked = SubmissionRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise validation_problem(error.errors()) from error
        answers = SubmissionAnswers(answers=await submissions.submit(asked.entries))
        return Response(answers.model_dump_json(), media_type="application/json")

    @router.get("/v1/jobs", response_model=JobList)
    async def list_jobs(caller: ProjectCaller, query: Annotated[JobQuery, Query()]) -> Response:
        return Response((await jobs.page(caller, query)).model_dump_json(), media_type="application/json")

    @router.get("/v1/jobs:counts")
    async def count_jobs(caller: ProjectCaller) -> JobCounts:
        return await jobs.counts(caller)

    @router.get("/v1/jobs/{job_id}", response_model=Job)
    async def get_job(
        caller: ProjectCaller, job_id: str, if_none_match: Annotated[str | None, Header()] = None
    ) -> Response:
        body = (await jobs.get(caller, job_id)).model_dump_json()
        etag = f'"{hashlib.sha256(body.encode()).hexdigest()[:24]}"'
        headers = {"etag": etag, "cache-control": "private, no-cache"}
        if _matches(if_none_match, etag):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    @router.post("/v1/jobs/{job_id}/cancel")
    async def cancel(caller: ProjectCaller, job_id: str) -> Job:
        return await jobs.steer(caller, job_id, Command.CANCEL)

    @router.post("/v1/jobs/{job_id}/hold")
    async def hold(caller: ProjectCaller, job_id: str) -> Job:
        return await jobs.steer(caller, job_id, Command.HOLD)

    @router.post("/v1/jobs/{job_id}/release")
    async def release(caller: ProjectCaller, job_id: str) -> Job:
        return await jobs.steer(caller, job_id, Command.RELEASE)

    @router.post("/v1/jobs/{job_id}/forget-checkpoint")
    async def forget_checkpoint(caller: ProjectCaller, job_id: str) -> Job:
        return await jobs.steer(caller, job_id, Command.FORGET_CHECKPOINT)

    @router.get("/v1/jobs/{job_id}/events")
    async def job_events(
        caller: ProjectCaller, job_id: str, query: Annotated[EventQuery, Query()], last_event_id: LastEventId = None
    ) -> Response:
        after = read_last_event_id(last_event_id)
        stream = await streams.of_job(caller, job_id, after, follow=query.follow)
        if stream is None:  # by the SSE specification, what tells a client not to connect again
            return Response(status_code=204)
        return StreamingResponse(stream, media_type="text/event-stream", headers=UNBUFFERED)

    @router.get("/v1/events")
    async def all_events(
        caller: ProjectCaller, query: Annotated[EventsQuery, Query()], last_event_id: LastEventId = None
    ) -> Response:
        after = read_last_event_id(last_event_id)
        scope = Scope(tenant_id=visible_tenant(caller), project=caller.project)
        stream = await streams.of_all(scope, after, follow=query.follow, changes=query.changes)
        return StreamingResponse(stream, media_type="text/event-stream", headers=UNBUFFERED)

    @router.get("/v1/jobs/{job_id}/logs")
    async def job_logs(caller: ProjectCaller, job_id: str, query: Annotated[LogQuery, Query()]) -> Response:
        if query.follow:
            headers, pieces = await logs.follow(caller, job_id, query)
            return StreamingResponse(pieces, media_type="text/plain", headers={**headers, **UNBUFFERED})
        piece = await logs.piece(caller, job_id, query)
        return Response(piece.content, media_type="text/plain", headers=piece.headers)

    return router


def _matches(if_none_match: str | None, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return "*" in tags or etag in tags
