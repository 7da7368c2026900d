"""HTTP endpoints for arrays: lists, and commands on all of their tasks."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from services.admission.arrays import Arrays
from services.admission.steering import Command
from services.contracts.jobs import JobArray, JobArrayList
from services.contracts.queries import ArrayQuery
from services.contracts.slim import slim
from services.kit.identity import ProjectCaller
from services.kit.routes import from_state

TheArrays = Annotated[Arrays, from_state("arrays")]
router = APIRouter(tags=["jobs"])

WRONG_STATE: dict[int | str, dict[str, Any]] = {
    409: {"description": "The state of no task allows it: `invalid_transition`."}
}


@router.get("/v1/arrays", response_model=JobArrayList)
async def list_arrays(caller: ProjectCaller, query: Annotated[ArrayQuery, Query()], arrays: TheArrays) -> Response:
    """List arrays of jobs, newest first.

    `POST /v1/jobs` with `array` creates them. `GET /v1/jobs?array=ID` lists the tasks of one.
    """
    return Response(slim(await arrays.page(caller, query), query.fields), media_type="application/json")


@router.get("/v1/arrays/{array_id}")
async def get_array(caller: ProjectCaller, array_id: str, arrays: TheArrays) -> JobArray:
    """Get an array of jobs."""
    return await arrays.get(caller, array_id)


@router.post("/v1/arrays/{array_id}/cancel", responses=WRONG_STATE)
async def cancel_array(caller: ProjectCaller, array_id: str, arrays: TheArrays) -> JobArray:
    """Cancel all tasks of an array.

    All in one transaction. Tasks that have ended stay as they are; cancelling again changes nothing.
    """
    return await arrays.steer(caller, array_id, Command.CANCEL)


@router.post("/v1/arrays/{array_id}/hold", responses=WRONG_STATE)
async def hold_array(caller: ProjectCaller, array_id: str, arrays: TheArrays) -> JobArray:
    """Hold all tasks of an array.

    All in one transaction. Running tasks are stopped first, with their grace period.
    """
    return await arrays.steer(caller, array_id, Command.HOLD)


@router.post("/v1/arrays/{array_id}/release", responses=WRONG_STATE)
async def release_array(caller: ProjectCaller, array_id: str, arrays: TheArrays) -> JobArray:
    """Release the held tasks of an array.

    All in one transaction.
    """
    return await arrays.steer(caller, array_id, Command.RELEASE)
