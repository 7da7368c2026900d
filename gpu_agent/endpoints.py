"""The agent over HTTP: logs, progress reports, exec sessions, and its state."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from gpu_agent.agent import Agent
from gpu_agent.logs import LogPiece, offset_since, read_both, read_piece
from gpu_agent.progress import parse_report
from gpu_agent.reporting import ReportingAgent
from services.contracts.codes import ProblemCode
from services.contracts.exec_sessions import ExecInput, ExecInputAnswer, ExecRequest, FilesRequest
from services.contracts.jobs import LogStream
from services.contracts.nodes import (
    LOG_EOF_HEADER,
    LOG_NEXT_OFFSET_HEADER,
    LOG_OFFSET_HEADER,
    LOG_SINCE_HEADER,
    LOG_SIZE_HEADER,
)
from services.kit.identity import read_identity
from services.kit.problems import ProblemError, not_found, problem_response

PROGRESS_PREFIX = "/v1/progress/"
_MOST_LOG_BYTES = 1 << 20
_LINE_BYTES = 1 << 13  #: How far back the start of a line is looked for, of which the end was written after a time


class ProgressDoor:
    """Serves only progress reports at the port that jobs reach.

    The agent's other port takes progress too: jobs that an earlier release started were given that one.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked_at = (scope.get("server") or ("", None))[1]  # of the connection itself, whatever its headers say
        if asked_at != self._port or scope["path"].startswith(PROGRESS_PREFIX):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await problem_response(not_found("operation at this port"))(scope, receive, send)
        else:
            await WebSocketClose()(scope, receive, send)


router = APIRouter()  #: Of an agent that runs jobs
state_router = APIRouter()  #: Of every agent


def get_agent(request: Request) -> Agent:
    agent: Agent = request.app.state.agent
    return agent


TheAgent = Annotated[Agent, Depends(get_agent)]


@router.get("/v1/allocations/{allocation_id}/logs")
async def read_logs(
    agent: TheAgent,
    allocation_id: str,
    stream: LogStream = LogStream.STDOUT,
    offset: Annotated[int, Query(description="Negative: from the end.")] = 0,
    limit: Annotated[int, Query(ge=1, le=_MOST_LOG_BYTES)] = 64 * 1024,
    since_s: Annotated[float | None, Query(description="UTC seconds.", allow_inf_nan=False)] = None,
) -> Response:
    """Return a piece of a rank's output; headers give its offset and whether more may follow."""
    folder = agent.rank_folder(allocation_id)
    if folder is None:
        raise not_found("allocation on this node")
    is_over = folder.exit() is not None

    def read(offset: int, limit: int) -> LogPiece:
        if stream is LogStream.BOTH:
            return read_both(folder.path, offset, limit, is_over=is_over)
        return read_piece(folder.path / stream, offset, limit)

    start = None if since_s is None else offset_since(folder.path, stream, since_s)
    if start is not None:
        offset = max(offset, _line_start(read, start))
    piece = read(offset, limit)
    return Response(
        piece.data,
        media_type="application/octet-stream",
        headers={
            **({} if start is None else {LOG_SINCE_HEADER: str(start)}),
            LOG_OFFSET_HEADER: str(piece.offset),
            LOG_NEXT_OFFSET_HEADER: str(piece.next_offset),
            LOG_SIZE_HEADER: str(piece.size),
            LOG_EOF_HEADER: "true" if is_over and piece.next_offset >= piece.size else "false",
        },
    )


def _line_start(read: Callable[[int, int], LogPiece], offset: int) -> int:
    """Return where the line begins that goes on at an offset; the offset itself if that is too far before it."""
    if not offset:
        return 0
    begin = max(offset - _LINE_BYTES, 0)
    before = read(begin, offset - begin)
    found = before.data.rfind(b"\n") + 1
    return before.offset + found if before.next_offset == offset and (found or not before.offset) else offset


@router.post(PROGRESS_PREFIX + "{token}", status_code=204)
async def post_progress(agent: TheAgent, token: str, request: Request) -> Response:
    """Store a job's progress report; the token in the path is the job's own."""
    report = parse_report(await request.body())
    if report is None or report.done is None:
        detail = 'The body must be like {"done": 120}, a number of at least 0.'
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, detail)
    if not agent.gangs.post_progress(token, report):
        raise not_found("running job that posts its progress")
    return Response(status_code=204)


# --- exec sessions, for admission alone


async def read_owner(request: Request) -> str:
    return read_identity(request).key_id


Owner = Annotated[str, Depends(read_owner)]


@router.post("/v1/allocations/{allocation_id}/exec/{session_id}")
async def run_command(
    agent: TheAgent, allocation_id: str, session_id: str, request: ExecRequest, owner: Owner
) -> StreamingResponse:
    """Run a command beside a rank; the response streams its events and ends with the command."""
    session = await agent.exec_sessions.open(allocation_id, session_id, request, owner)
    return StreamingResponse(session.messages(), media_type="text/event-stream")


@router.post("/v1/allocations/{allocation_id}/files")
async def read_files(agent: TheAgent, allocation_id: str, request: FilesRequest) -> StreamingResponse:
    """Read files of a rank that has ended; the response streams a tar archive as events."""
    events = await agent.kept_files.open(agent.rank_folder(allocation_id), request.path)
    return StreamingResponse(events, media_type="text/event-stream")


@router.put("/v1/exec/{session_id}")
async def send_input(agent: TheAgent, session_id: str, given: ExecInput, owner: Owner) -> ExecInputAnswer:
    """Send a command its input, a new terminal size or a signal."""
    return await agent.exec_sessions.get(session_id, owner).feed(given)


@state_router.get("/v1/state")
async def read_state(request: Request) -> dict[str, Any]:
    """Return the agent's state, for troubleshooting."""
    agent: ReportingAgent = request.app.state.agent
    return agent.describe()
