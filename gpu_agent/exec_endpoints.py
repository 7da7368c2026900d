"""Exec sessions over HTTP; only admission calls these endpoints."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from gpu_agent.endpoints import TheAgent
from services.contracts.exec_sessions import ExecInput, ExecInputAnswer, ExecRequest, FilesRequest
from services.kit.identity import read_identity


def read_owner(request: Request) -> str:
    """Return the API key on whose behalf admission calls."""
    return read_identity(request).key_id


Owner = Annotated[str, Depends(read_owner)]
router = APIRouter()


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
