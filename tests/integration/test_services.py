"""A service instance, live: training gives way to it, a power limit leaves it alone, and training goes on after it."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.contracts.jobs import SubmissionEntry, SubmissionRequest
from services.kit.tokens import outgoing
from services.standalone import stack
from services.standalone.data_folder import DataFolder
from services.standalone.identities import Identities
from tests.integration.conftest import Installation
from tests.integration.test_submission_to_footprint import a_spec, submit
from tests.support.servers import wait_until

SERVE = (
    f"echo $WATTSHIFT_PORT $CUDA_VISIBLE_DEVICES; exec {sys.executable} -m http.server --bind 127.0.0.1 $WATTSHIFT_PORT"
)


def start_service(installation: Installation, gpus: int, **terms: Any) -> str:
    """Submit a service instance as the planner of pools does; return its job's id."""
    spec = {"name": "serve", "command": ["sh", "-c", SERVE], "gpus": {"min": gpus}, "grace_s": 1, "service": terms}
    entry = SubmissionEntry(
        tenant_id="default", key_id="pools", idempotency_key=None, batch=False, body=json.dumps(spec), service=True
    )
    serving = Identities(DataFolder(installation.folder), {}).credential("serving")
    at = httpx.HTTPTransport(uds=str(stack.read_status(installation.folder).socket_of("admission")))
    headers = {"authorization": outgoing(serving, "admission").authorization(), "content-type": "application/json"}
    with httpx.Client(transport=at, base_url="http://admission", headers=headers) as client:
        answer = client.post("/internal/submissions", content=SubmissionRequest(entries=[entry]).model_dump_json())
    (made,) = answer.json()["answers"]
    assert made["status"] == 201, made
    return json.loads(made["body"])["id"]


def put_policy(installation: Installation, name: str, **parameters: Any) -> None:
    installation.gateway.call("PUT", "/v1/policies/active", body={"name": name, "parameters": parameters})


def answers(installation: Installation, service: str) -> bool:
    port, _ = installation.gateway.text(f"/v1/jobs/{service}/logs").text.split("\n")[0].split()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
        return answer.status == 200


def test_users_cannot_start_one(installation: Installation) -> None:
    with pytest.raises(Exception, match="only pools can start service instances"):
        submit(installation, {"name": "mine", "command": ["true"], "service": {}})


@pytest.fixture
def policy_kept(installation: Installation) -> Iterator[None]:
    """The policy that the session's other tests find is the one before."""
    before = installation.gateway.get("/v1/policies/active")
    yield
    put_policy(installation, before["name"], **before["parameters"])


@pytest.mark.usefixtures("policy_kept")
def test_training_gives_way_to_a_service_and_goes_on_after_it(installation: Installation) -> None:
    put_policy(installation, "fifo")
    steps = ("--steps", "1000000", "--step-seconds", "0.05")
    wide = submit(installation, a_spec("wide", *steps, gpus={"min": 8}, work={"total": 1_000_000}))
    installation.wait_for(wide, lambda job: job["state"] == "running" and job["progress"])

    service = start_service(installation, 3)
    placed = installation.wait_for(service, lambda job: job["state"] == "running")["placement"]
    assert [len(share["devices"]) for share in placed] == [3]
    gave_way = installation.job(wide)
    assert (gave_way["state"], gave_way["preemptions"]) == ("queued", 1)
    assert gave_way["reason"] == "not_enough_free_gpus"
    wait_until(lambda: answers(installation, service))

    narrow = submit(installation, a_spec("narrow", *steps, gpus={"min": 4}))
    installation.wait_for(narrow, lambda job: job["state"] == "running")
    put_policy(installation, "powerflow", power_limit_w=1.0, migration=False)
    installation.wait_for(narrow, lambda job: job["state"] == "queued" and job["reason"] == "power_limit")
    left_alone = installation.job(service)
    assert (left_alone["state"], left_alone["generation"], left_alone["placement"]) == ("running", 1, placed)
    assert (left_alone["power_limit_w"], left_alone["clock_mhz"]) == (None, None)
    assert answers(installation, service)

    installation.gateway.call("POST", f"/v1/jobs/{narrow}/cancel")
    put_policy(installation, "fifo")
    installation.gateway.call("POST", f"/v1/jobs/{service}/cancel")
    done = gave_way["progress"]["done"]
    resumed = installation.wait_for(wide, lambda job: job["state"] == "running" and job["progress"]["done"] > done)
    assert resumed["generation"] == 2
    assert installation.job(service)["state"] == "cancelled"
    installation.gateway.call("POST", f"/v1/jobs/{wide}/cancel")
    installation.wait_for_ends([wide, narrow, service], 60)
