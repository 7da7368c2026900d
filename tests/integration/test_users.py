"""Users and keys of one project on a whole installation: whom jobs run as, and that nothing of other projects shows."""

from __future__ import annotations

import os
import re
from typing import Any

import httpx
import pytest

from gateway.routes import EVENTS, Route, read_routes
from services.contracts.identity import Role
from tests.integration.conftest import Installation
from tests.support.servers import wait_until

FOREIGN = "fish"
"""A word in everything that belongs to the other project."""
RUN = {"name": "own", "command": ["true"]}
BODIES = {
    "submit_job": RUN,
    "estimate_job": RUN,
    "run_in_job": {"command": ["true"]},
    "read_files_of_job": {"path": "any"},
}
QUERIES = {"follow_job_events": {"follow": "false"}, "follow_events": {"follow": "false"}}
GRID = re.compile(r"/v1/carbon/|/emissions/|/locations|/v1/policies")
"""What is the same for every caller."""


def key_for(installation: Installation, **spec: Any) -> httpx.Client:
    """Return a client with a new key of the tenant `default`."""
    made = installation.gateway.call("POST", "/v1/keys", body={"tenant_id": "default", **spec})
    headers = {"authorization": f"Bearer {made['secret']}"}
    return httpx.Client(base_url=installation.gateway.url, headers=headers, timeout=30)


def submit(installation: Installation, project: str, **spec: Any) -> str:
    body = {"name": f"{project}-job", "command": ["echo", project], "project": project, **spec}
    return str(installation.gateway.call("POST", "/v1/jobs", body=body)["id"])


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another account takes root")
def test_a_job_runs_as_the_account_of_the_user_whose_key_submits_it(installation: Installation) -> None:
    users = "/v1/tenants/default/users"
    installation.gateway.call("POST", users, body={"name": "ada", "account": "daemon"})
    with key_for(installation, user="ada") as ada:
        assert ada.get("/v1/whoami").json()["account"] == "daemon"
        made = ada.post("/v1/jobs", json={"name": "who", "command": ["id", "-un"]})
        job = installation.wait_for_ends([made.json()["id"]], 60)[0]
        assert (job["state"], job["user"]) == ("succeeded", "ada"), job["detail"]
        assert ada.get(f"/v1/jobs/{job['id']}/logs").text == "daemon\n"
        mine = ada.get("/v1/jobs", params={"user": "ada"}).json()["items"]
        assert [each["id"] for each in mine] == [job["id"]]

        def is_in_the_report() -> bool:  # the agent reports energy after the job has ended
            lines = ada.get("/v1/reports/footprint", params={"group_by": "user"}).json()["lines"]
            return "ada" in [line["group"] for line in lines]

        wait_until(is_in_the_report)
        installation.gateway.call("PATCH", f"{users}/ada", body={"account": "no-such-account"})
        again = ada.post("/v1/jobs", json={"name": "who", "command": ["id", "-un"]}).json()["id"]
        failed = installation.wait_for_ends([again], 60)[0]
        assert (failed["state"], failed["reason"]) == ("failed", "start_failed")
        assert "no-such-account, which does not exist on this node" in failed["detail"]


def test_a_key_of_a_project_reaches_nothing_of_another(installation: Installation) -> None:
    birds = submit(installation, "birds")
    fish = submit(installation, FOREIGN, labels={"kind": FOREIGN})
    arrays = [submit(installation, project, array="0-1") for project in ("birds", FOREIGN)]
    for project in ("birds", FOREIGN):
        budget = {"tenant_id": "default", "project": project, "quantity": "kwh", "amount": 1e6}
        installation.gateway.call("PUT", "/v1/budgets", body=budget)
    installation.wait_for_ends([birds, fish], 60)
    with key_for(installation, project="birds") as key:
        answers = {route.operation: asked(key, route, birds, arrays[0]) for route in read_routes()}
        foreign = {
            route.operation: asked(key, route, fish, arrays[1]) for route in read_routes() if "{job_id}" in route.path
        }
        foreign |= {
            route.operation: asked(key, route, fish, arrays[1]) for route in read_routes() if "{array_id}" in route.path
        }
        elsewhere = key.post("/v1/jobs", json={"name": "x", "command": ["true"], "project": FOREIGN})
        listed = key.get("/v1/jobs", params={"project": FOREIGN})
        after = key.post("/v1/jobs", json={"name": "x", "command": ["true"], "after": {"ok": fish}})
        assert {job["project"] for job in key.get("/v1/jobs").json()["items"]} == {"birds"}
        assert [each["project"] for each in key.get("/v1/budgets").json()["items"]] == ["birds"]

    for route in read_routes():
        answer, other = answers[route.operation], foreign.get(route.operation)
        if not route.for_projects:
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), route
        else:
            made_up = GRID.match(route.path) or "{session_id}" in route.path or "{sha256}" in route.path
            assert answer.status_code not in (401, 403, 404) or made_up, (route, answer.text)
        if other is not None:
            assert other.status_code == (404 if route.for_projects else 403), (route, other.text)
        for each in (answer, other):
            assert each is None or not re.search(rf"{FOREIGN}|{fish}|{arrays[1]}", each.text), (route, each.text)
    assert (elsewhere.status_code, elsewhere.json()["errors"][0]["pointer"]) == (403, "/project")
    assert listed.status_code == 403
    assert after.status_code == 422


def asked(client: httpx.Client, route: Route, job_id: str, array_id: str) -> httpx.Response:
    """Ask one operation about a job and an array; names of other things are made up."""
    path = route.path.replace("{job_id}", job_id).replace("{array_id}", array_id)
    path = re.sub(r"\{[^}]*\}", "unknown", path)
    body = BODIES.get(route.operation, {}) if route.has_body else None
    query = QUERIES.get(route.operation) or ({"follow": "false"} if route.media == EVENTS else None)
    return client.request(route.method, path, json=body, params=query)


def test_roles_and_projects_of_the_table_agree() -> None:
    assert [route.operation for route in read_routes() if route.for_projects and route.role is not Role.USER] == []
