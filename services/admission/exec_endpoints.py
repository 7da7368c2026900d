"""HTTP of exec sessions."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from services.admission.endpoints import UNBUFFERED
from services.admission.exec_sessions import Exec
from services.contracts.exec_sessions import ExecInput, ExecInputAnswer, ExecRequest
from services.kit.identity import ProjectCaller


def exec_routes(sessions: Exec) -> APIRouter:
    """Return the routes that are about commands in running jobs."""
    router = APIRouter()

    @router.post("/v1/jobs/{job_id}/exec")
    async def run_in_job(caller: ProjectCaller, job_id: str, request: ExecRequest) -> Response:
        events = await sessions.run(caller, job_id, request)
        return StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)

    @router.put("/v1/jobs/{job_id}/exec/{session_id}")
    async def send_to_exec(caller: ProjectCaller, job_id: str, session_id: str, given: ExecInput) -> ExecInputAnswer:
        return await sessions.send(caller, job_id, session_id, given)

    return router
