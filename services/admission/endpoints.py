"""HTTP endpoints for jobs and arrays: submissions, lists, commands, events, output, and what runs beside a job."""

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import ValidationError

from services.admission.exec_sessions import Exec
from services.admission.jobs import ARRAY_ID, JOB_ID, Arrays, Jobs
from services.admission.logs import Logs
from services.admission.repository.events import Scope
from services.admission.service import Submissions
from services.admission.steering import Command
from services.admission.streaming import EventStreams, read_last_event_id
from services.contracts.exec_sessions import ExecEvent, ExecInput, ExecInputAnswer, ExecRequest, FilesRequest
from services.contracts.jobs import (
    Job,
    JobArray,
    JobArrayList,
    JobCounts,
    JobEvent,
    JobList,
    SubmissionAnswers,
    SubmissionRequest,
)
from services.contracts.queries import ArrayQuery, EventQuery, EventsQuery, JobQuery, LogQuery
from services.contracts.slim import slim
from services.kit.identity import ProjectCaller
from services.kit.problems import validation_problem
from services.kit.routes import EventStream, from_state, named_by

LastEventId = Annotated[str | None, Header(alias="Last-Event-ID")]
UNBUFFERED = {"cache-control": "no-store", "x-accel-buffering": "no"}


TheSubmissions = Annotated[Submissions, from_state("submissions")]
TheJobs = Annotated[Jobs, from_state("jobs")]
TheStreams = Annotated[EventStreams, from_state("streams")]
TheLogs = Annotated[Logs, from_state("logs")]
TheArrays = Annotated[Arrays, from_state("arrays")]
TheSessions = Annotated[Exec, from_state("exec_sessions")]
JobId = Annotated[str, named_by(JOB_ID, "job")]
ArrayId = Annotated[str, named_by(ARRAY_ID, "array")]
router = APIRouter()

WRONG_STATE: dict[int | str, dict[str, Any]] = {
    409: {"description": "The job's state does not allow it: `invalid_transition`."}
}
WRONG_STATES: dict[int | str, dict[str, Any]] = {
    409: {"description": "The state of no task allows it: `invalid_transition`."}
}


@router.post("/internal/submissions", response_model=SubmissionAnswers)
async def submit(request: Request, submissions: TheSubmissions) -> Response:
    try:
        asked = SubmissionRequest.model_validate_json(await request.body())
    except ValidationError as error:
        raise validation_problem(error.errors()) from error
    answers = SubmissionAnswers(answers=await submissions.submit(asked.entries))
    return Response(answers.model_dump_json(), media_type="application/json")


@router.get("/v1/jobs", tags=["jobs"], response_model=JobList)
async def list_jobs(caller: ProjectCaller, query: Annotated[JobQuery, Query()], jobs: TheJobs) -> Response:
    """List jobs, newest first."""
    return Response(slim(await jobs.page(caller, query), query.fields), media_type="application/json")


@router.get("/v1/jobs:counts", tags=["jobs"])
async def count_jobs(caller: ProjectCaller, jobs: TheJobs) -> JobCounts:
    """Count the jobs that have not ended.

    By state, and, for those that wait, by reason.
    """
    return await jobs.counts(caller)


@router.get(
    "/v1/jobs/{job_id}",
    tags=["jobs"],
    response_model=Job,
    responses={304: {"description": "Unchanged since the `ETag` in `If-None-Match`."}},
)
async def get_job(
    caller: ProjectCaller, job_id: JobId, jobs: TheJobs, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """Get a job."""
    body = (await jobs.get(caller, job_id)).model_dump_json()
    etag = f'"{hashlib.sha256(body.encode()).hexdigest()[:24]}"'
    headers = {"etag": etag, "cache-control": "private, no-cache"}
    if _matches(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


@router.post("/v1/jobs/{job_id}/cancel", tags=["jobs"], responses=WRONG_STATE)
async def cancel_job(caller: ProjectCaller, job_id: JobId, jobs: TheJobs) -> Job:
    """Cancel a job.

    Cancelling a job that is already cancelled changes nothing.
    """
    return await jobs.steer(caller, job_id, Command.CANCEL)


@router.post("/v1/jobs/{job_id}/withdraw", tags=["jobs"], responses=WRONG_STATE)
async def withdraw_job(caller: ProjectCaller, job_id: JobId, jobs: TheJobs) -> Job:
    """Cancel a job unless it has ever been given GPUs.

    An answer without an error is certain: the job has not run, and will not.
    """
    return await jobs.steer(caller, job_id, Command.WITHDRAW)


@router.post("/v1/jobs/{job_id}/give-back", tags=["jobs"], responses=WRONG_STATE)
async def give_back_job(caller: ProjectCaller, job_id: JobId, jobs: TheJobs) -> Job:
    """Cancel a job, for it to run elsewhere.

    One that runs is stopped, with its grace period. Once it is cancelled, it will not run again.
    """
    return await jobs.steer(caller, job_id, Command.GIVE_BACK)


@router.post("/v1/jobs/{job_id}/hold", tags=["jobs"], responses=WRONG_STATE)
async def hold_job(caller: ProjectCaller, job_id: JobId, jobs: TheJobs) -> Job:
    """Hold a job.

    A held job does not start until it is released. A running job is stopped first, with its grace period.
    """
    return await jobs.steer(caller, job_id, Command.HOLD)


@router.post("/v1/jobs/{job_id}/release", tags=["jobs"], responses=WRONG_STATE)
async def release_job(caller: ProjectCaller, job_id: JobId, jobs: TheJobs) -> Job:
    """Release a held job."""
    return await jobs.steer(caller, job_id, Command.RELEASE)


@router.post("/v1/jobs/{job_id}/forget-checkpoint", tags=["jobs"], responses=WRONG_STATE)
async def forget_checkpoint(caller: ProjectCaller, job_id: JobId, jobs: TheJobs) -> Job:
    """Let a job start over elsewhere.

    A job whose checkpoint only certain nodes have (`checkpoint_nodes`) waits for them. This lets it start on any node,
    from the beginning; the checkpoint stays where it is. A job that may already start anywhere is left as it is.
    """
    return await jobs.steer(caller, job_id, Command.FORGET_CHECKPOINT)


@router.get(
    "/v1/jobs/{job_id}/events",
    tags=["events"],
    responses={
        200: {"model": JobEvent},
        204: {"description": "The job has ended and the client has seen all its events; it need not reconnect."},
    },
    response_class=EventStream,
)
async def follow_job_events(
    caller: ProjectCaller,
    job_id: JobId,
    query: Annotated[EventQuery, Query()],
    streams: TheStreams,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow a job's events until it ends."""
    after = read_last_event_id(last_event_id)
    stream = await streams.of_job(caller, job_id, after, follow=query.follow)
    if stream is None:  # by the SSE specification, what tells a client not to connect again
        return Response(status_code=204)
    return StreamingResponse(stream, media_type="text/event-stream", headers=UNBUFFERED)


@router.get("/v1/events", tags=["events"], responses={200: {"model": JobEvent}}, response_class=EventStream)
async def follow_events(
    caller: ProjectCaller,
    query: Annotated[EventsQuery, Query()],
    streams: TheStreams,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow the events of all jobs, from now on.

    Users follow their tenant's jobs, operators those of all tenants.
    """
    after = read_last_event_id(last_event_id)
    scope = Scope(tenant_id=caller.only_tenant, project=caller.project)
    stream = await streams.of_all(scope, after, follow=query.follow, changes=query.changes)
    return StreamingResponse(stream, media_type="text/event-stream", headers=UNBUFFERED)


@router.get("/v1/jobs/{job_id}/logs", tags=["jobs"], response_class=PlainTextResponse)
async def read_job_logs(
    caller: ProjectCaller, job_id: JobId, query: Annotated[LogQuery, Query()], logs: TheLogs
) -> Response:
    """Read a job's output."""
    if query.follow:
        headers, pieces = await logs.follow(caller, job_id, query)
        return StreamingResponse(pieces, media_type="text/plain", headers={**headers, **UNBUFFERED})
    piece = await logs.piece(caller, job_id, query)
    return Response(piece.content, media_type="text/plain", headers=piece.headers)


def _matches(if_none_match: str | None, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return "*" in tags or etag in tags


@router.get("/v1/arrays", tags=["jobs"], response_model=JobArrayList)
async def list_arrays(caller: ProjectCaller, query: Annotated[ArrayQuery, Query()], arrays: TheArrays) -> Response:
    """List arrays of jobs, newest first.

    `POST /v1/jobs` with `array` creates them. `GET /v1/jobs?array=ID` lists the tasks of one.
    """
    return Response(slim(await arrays.page(caller, query), query.fields), media_type="application/json")


@router.get("/v1/arrays/{array_id}", tags=["jobs"])
async def get_array(caller: ProjectCaller, array_id: ArrayId, arrays: TheArrays) -> JobArray:
    """Get an array of jobs."""
    return await arrays.get(caller, array_id)


@router.post("/v1/arrays/{array_id}/cancel", tags=["jobs"], responses=WRONG_STATES)
async def cancel_array(caller: ProjectCaller, array_id: ArrayId, arrays: TheArrays) -> JobArray:
    """Cancel all tasks of an array.

    All in one transaction. Tasks that have ended stay as they are; cancelling again changes nothing.
    """
    return await arrays.steer(caller, array_id, Command.CANCEL)


@router.post("/v1/arrays/{array_id}/hold", tags=["jobs"], responses=WRONG_STATES)
async def hold_array(caller: ProjectCaller, array_id: ArrayId, arrays: TheArrays) -> JobArray:
    """Hold all tasks of an array.

    All in one transaction. Running tasks are stopped first, with their grace period.
    """
    return await arrays.steer(caller, array_id, Command.HOLD)


@router.post("/v1/arrays/{array_id}/release", tags=["jobs"], responses=WRONG_STATES)
async def release_array(caller: ProjectCaller, array_id: ArrayId, arrays: TheArrays) -> JobArray:
    """Release the held tasks of an array.

    All in one transaction.
    """
    return await arrays.steer(caller, array_id, Command.RELEASE)


@router.post(
    "/v1/jobs/{job_id}/exec",
    tags=["jobs"],
    responses={200: {"model": ExecEvent}, 409: {"description": "The job does not run: `conflict`."}},
    response_class=EventStream,
)
async def run_in_job(caller: ProjectCaller, job_id: JobId, request: ExecRequest, sessions: TheSessions) -> Response:
    """Run a command in a running job.

    It gets the environment, folder and account of one of the job's processes, on the node of that process. The response
    lasts as long as the command, and closing the response ends the command. A client must send input, even if empty, at
    least every 30 seconds.
    """
    events = await sessions.run(caller, job_id, request)
    return StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)


@router.post(
    "/v1/jobs/{job_id}/files",
    tags=["jobs"],
    responses={200: {"model": ExecEvent}, 409: {"description": "It runs, or its files are gone: `conflict`."}},
    response_class=EventStream,
)
async def read_files_of_job(
    caller: ProjectCaller, job_id: JobId, request: FilesRequest, sessions: TheSessions
) -> Response:
    """Read a file or folder of a job that has ended.

    The events are those of a command whose standard output is a tar archive. It is read as the job's account, on the
    first node of the job's newest gang, for as long as that node keeps the files.
    """
    events = await sessions.read_files(caller, job_id, request)
    return StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)


@router.put(
    "/v1/jobs/{job_id}/exec/{session_id}",
    tags=["jobs"],
    responses={409: {"description": "Bytes before `offset` are missing: `conflict`."}},
)
async def send_to_command(
    caller: ProjectCaller, job_id: JobId, session_id: str, given: ExecInput, sessions: TheSessions
) -> ExecInputAnswer:
    """Send input to a command in a running job.

    Only the API key that started the command may send. Input that is sent twice counts once.
    """
    return await sessions.send(caller, job_id, session_id, given)
