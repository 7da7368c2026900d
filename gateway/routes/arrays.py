"""Arrays of jobs: listed, read, steered as one."""

from __future__ import annotations

from gateway.routes.route import Route, Status, Upstream
from services.contracts import jobs, queries
from services.contracts.identity import Role

_WRONG_STATE = Status(409, "The state of no task allows it: `invalid_transition`.")


def _steers(command: str, summary: str, description: str) -> Route:
    return Route(
        "POST",
        f"/v1/arrays/{{array_id}}/{command}",
        Role.USER,
        Upstream.ADMISSION,
        "jobs",
        summary,
        description,
        operation=f"{command}_array",
        for_projects=True,
        answer=jobs.JobArray,
        statuses=(_WRONG_STATE,),
    )


ARRAYS = (
    Route(
        "GET",
        "/v1/arrays",
        Role.USER,
        Upstream.ADMISSION,
        "jobs",
        "List arrays of jobs, newest first",
        "`POST /v1/jobs` with `array` makes them. `GET /v1/jobs?array=ID` lists the tasks of one.",
        operation="list_arrays",
        for_projects=True,
        query=queries.ArrayQuery,
        answer=jobs.JobArrayList,
    ),
    Route(
        "GET",
        "/v1/arrays/{array_id}",
        Role.USER,
        Upstream.ADMISSION,
        "jobs",
        "Get an array of jobs",
        operation="get_array",
        for_projects=True,
        answer=jobs.JobArray,
    ),
    _steers(
        "cancel",
        "Cancel all tasks of an array",
        "In one transaction. Tasks that have ended stay as they are; cancelling again changes nothing.",
    ),
    _steers(
        "hold",
        "Hold all tasks of an array",
        "In one transaction. Tasks that run are stopped first, with their grace period.",
    ),
    _steers("release", "Release the held tasks of an array", "In one transaction."),
)
