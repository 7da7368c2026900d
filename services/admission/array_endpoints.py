"""HTTP of arrays: lists, and commands on all of their tasks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from services.admission.arrays import Arrays
from services.admission.steering import Command
from services.contracts.jobs import JobArray, JobArrayList
from services.contracts.queries import ArrayQuery
from services.kit.identity import ProjectCaller


def array_routes(arrays: Arrays) -> APIRouter:
    """Return the routes that are about arrays."""
    router = APIRouter()

    @router.get("/v1/arrays")
    async def list_arrays(caller: ProjectCaller, query: Annotated[ArrayQuery, Query()]) -> JobArrayList:
        return await arrays.page(caller, query)

    @router.get("/v1/arrays/{array_id}")
    async def get_array(caller: ProjectCaller, array_id: str) -> JobArray:
        return await arrays.get(caller, array_id)

    @router.post("/v1/arrays/{array_id}/cancel")
    async def cancel(caller: ProjectCaller, array_id: str) -> JobArray:
        return await arrays.steer(caller, array_id, Command.CANCEL)

    @router.post("/v1/arrays/{array_id}/hold")
    async def hold(caller: ProjectCaller, array_id: str) -> JobArray:
        return await arrays.steer(caller, array_id, Command.HOLD)

    @router.post("/v1/arrays/{array_id}/release")
    async def release(caller: ProjectCaller, array_id: str) -> JobArray:
        return await arrays.steer(caller, array_id, Command.RELEASE)

    return router
