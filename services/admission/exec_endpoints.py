"""HTTP endpoints for exec sessions."""

from typing import Annotated

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from services.admission.endpoints import UNBUFFERED
from services.admission.exec_sessions import Exec
from services.contracts.exec_sessions import ExecEvent, ExecInput, ExecInputAnswer, ExecRequest, FilesRequest
from services.kit.identity import ProjectCaller
from services.kit.routes import EventStream, from_state

TheSessions = Annotated[Exec, from_state("exec_sessions")]
router = APIRouter(tags=["jobs"])


@router.post(
    "/v1/jobs/{job_id}/exec",
    responses={200: {"model": ExecEvent}, 409: {"description": "The job does not run: `conflict`."}},
    response_class=EventStream,
)
async def run_in_job(caller: ProjectCaller, job_id: str, request: ExecRequest, sessions: TheSessions) -> Response:
    """Run a command in a running job.

    It gets the environment, folder and account of one of the job's processes, on the node of that process. The response
    lasts as long as the command, and closing the response ends the command. A client must send input, even if empty, at
    least every 30 seconds.
    """
    events = await sessions.run(caller, job_id, request)
    return StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)


@router.post(
    "/v1/jobs/{job_id}/files",
    responses={200: {"model": ExecEvent}, 409: {"description": "It runs, or its files are gone: `conflict`."}},
    response_class=EventStream,
)
async def read_files_of_job(
    caller: ProjectCaller, job_id: str, request: FilesRequest, sessions: TheSessions
) -> Response:
    """Read a file or folder of a job that has ended.

    The events are those of a command whose standard output is a tar archive. It is read as the job's account, on the
    first node of the job's newest gang, for as long as that node keeps the files.
    """
    events = await sessions.read_files(caller, job_id, request)
    return StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)


@router.put(
    "/v1/jobs/{job_id}/exec/{session_id}",
    responses={409: {"description": "Bytes before `offset` are missing: `conflict`."}},
)
async def send_to_command(
    caller: ProjectCaller, job_id: str, session_id: str, given: ExecInput, sessions: TheSessions
) -> ExecInputAnswer:
    """Send input to a command in a running job.

    Only the API key that started the command may send. Input that is sent twice counts once.
    """
    return await sessions.send(caller, job_id, session_id, given)
