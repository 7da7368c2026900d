"""A job's trace, from its user's request to its start on a node, as a collector receives it from real processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from tests.support.api_examples import EXAMPLES
from tests.support.collector import Collector, Received, collector
from tests.support.control_plane import eventually
from tests.support.servers import fresh_database, scratch_folder

NEEDED = {"gateway", "router", "serving", "simulator", "admission", "scheduler", "telemetry", "carbon", "optimizer"}
CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLERS_SPAN = "00f067aa0ba902b7"


@dataclass
class Traced:
    """An installation whose traces are on, and who collects them."""

    stack: Stack
    http: httpx.AsyncClient
    collector: Collector

    async def submit(self, spec: Any, **headers: str) -> httpx.Response:
        return await self.http.post("/v1/jobs", json=spec, headers=headers)

    async def events(self, job_id: str) -> list[Any]:
        """Return the events of a job that has ended."""
        found: list[Any] = []
        async with self.http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    found.append(json.loads(line.removeprefix("data:")))
                    if found[-1]["type"] == "job.succeeded":
                        return found
        return found

    async def ended(self, job_id: str) -> bool:
        return (await self.http.get(f"/v1/jobs/{job_id}")).json()["state"] == "succeeded"

    def logged(self, process: str) -> list[Any]:
        """Return the lines of a process's log."""
        lines = (self.stack.folder.log / f"{process}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture(scope="module")
async def traced(postgres_url: str, redis_url: str) -> AsyncIterator[Traced]:
    with collector() as found, scratch_folder() as data:
        env = {
            "DATABASE_URL": fresh_database(postgres_url),
            "REDIS_URL": redis_url,
            "WATTSHIFT_TRACES": "otlp",
            "WATTSHIFT_LOG_FORMAT": "json",
            "OTEL_EXPORTER_OTLP_ENDPOINT": found.url,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "TELEMETRY_HEARTBEAT_INTERVAL_S": "0.5",
        }
        services = [each for each in SERVICES if each.name in NEEDED]
        async with Stack(data, nodes="1x2@DE", env=env, services=services, workers=("worker",)) as stack:
            key = (stack.folder.path / "admin.key").read_text().strip()
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(timeout=30, base_url=stack.gateway_url, headers=headers) as http:
                yield Traced(stack, http, found)


def is_under(span: Received, ancestor: Received, spans: list[Received]) -> bool:
    """Whether a span is a child of another, of a child of it, and so on."""
    by_id = {each.span_id: each for each in spans}
    while span.parent_id in by_id:
        span = by_id[span.parent_id]
        if span == ancestor:
            return True
    return False


async def test_a_job_has_one_trace_from_the_gateway_to_its_start(traced: Traced) -> None:
    answer = await traced.submit({"name": "traced", "command": ["true"], "gpus": {"min": 1, "max": 1}})
    assert answer.status_code == 201, answer.text
    job_id = answer.json()["id"]
    await eventually(lambda: traced.ended(job_id))
    events = await traced.events(job_id)
    (trace_id,) = {event["data"].get("trace_id") for event in events}

    async def has_all() -> bool:
        found = {span.name for span in traced.collector.of(trace_id)}
        return found >= {"POST /v1/jobs", "POST /internal/submissions", "job.submit", "job.start", "gang.start"}

    await eventually(has_all)
    spans = traced.collector.of(trace_id)
    of = {(span.process, span.name): span for span in spans}
    request, submit = of["gateway", "POST /v1/jobs"], of["admission", "job.submit"]
    start, gang = of["scheduler", "job.start"], of["gpu_agent", "gang.start"]
    assert request.parent_id == ""
    assert (submit.parent_id, start.parent_id, gang.parent_id) == (request.span_id, submit.span_id, start.span_id)
    assert start.attributes["wattshift.job_id"] == job_id
    carried = next(span for span in spans if span.name == "POST /internal/submissions")
    assert is_under(carried, request, spans)
    assert any(span.attributes.get("db.system.name") == "postgresql" for span in spans if span.process == "admission")
    assert {event["type"] for event in events} >= {"job.submitted", "job.starting", "job.succeeded"}
    assert traced.collector.paths == {"/v1/traces"}


async def test_the_log_of_each_process_names_the_trace(traced: Traced) -> None:
    sent = f"00-{CALLER}-{CALLERS_SPAN}-01"
    spec = {"name": "logged", "command": ["true"], "gpus": {"min": 1, "max": 1}}
    answer = await traced.submit(spec, traceparent=sent)
    await eventually(lambda: traced.ended(answer.json()["id"]))

    for process, event in (("scheduler", "job.start"), ("agent-node-1", "gang.started")):
        (line,) = [each for each in traced.logged(process) if each.get("trace_id") == CALLER and each["event"] == event]
        assert answer.json()["id"] in line["allocation_id"]
    request = next(span for span in traced.collector.of(CALLER) if span.name == "POST /v1/jobs")
    assert request.parent_id == CALLERS_SPAN


async def test_the_log_of_each_process_has_the_id_that_a_client_gave(traced: Traced) -> None:
    spec = {"name": "named", "command": ["true"], "gpus": {"min": 1, "max": 1}}
    answer = await traced.submit(spec, **{"x-request-id": "mine-1"})
    job_id = answer.json()["id"]
    await eventually(lambda: traced.ended(job_id))
    logs = await traced.http.get(f"/v1/jobs/{job_id}/logs", headers={"x-request-id": "mine-2"})
    assert logs.status_code == 200

    def events(process: str, request_id: str) -> set[str]:
        return {each["event"] for each in traced.logged(process) if each.get("request_id") == request_id}

    assert events("gateway", "mine-1") == {"request.answered"}
    assert events("admission", "mine-1") == {"request.answered", "submission.answered"}
    assert "job.start" in events("scheduler", "mine-1")
    assert events("agent-node-1", "mine-1") >= {"gang.accepted", "gang.started"}
    for process in ("gateway", "admission", "agent-node-1"):
        assert events(process, "mine-2") == {"request.answered"}
    (line,) = [each for each in traced.logged("gateway") if each.get("request_id") == "mine-2"]
    assert (line["path"], line["role"], line["status"]) == (f"/v1/jobs/{job_id}/logs", "admin", 200)


async def test_a_task_of_a_worker_is_part_of_the_request_that_gave_it(traced: Traced) -> None:
    trace_id = "8" * 32
    sent = {"traceparent": f"00-{trace_id}-{CALLERS_SPAN}-01"}
    answer = await traced.http.post("/v1/optimize/partition", json=EXAMPLES["PartitionRequest"], headers=sent)
    assert answer.is_success, answer.text

    async def is_run() -> bool:
        found = {span.name for span in traced.collector.of(trace_id)}
        return found >= {"apply_async/optimizer.solve", "run/optimizer.solve"}

    await eventually(is_run)
    spans = traced.collector.of(trace_id)
    (given,) = [span for span in spans if span.name == "apply_async/optimizer.solve"]
    (run,) = [span for span in spans if span.name == "run/optimizer.solve"]
    assert (given.process, run.process, run.parent_id) == ("optimizer", "optimizer-worker", given.span_id)


@pytest.mark.parametrize("path", ["/v1/jobs/job_00000000000000000000000000", "/v1/nowhere"])
async def test_a_problem_names_the_trace_of_its_request(traced: Traced, path: str) -> None:
    answer = await traced.http.get(path, headers={"traceparent": f"00-{'5' * 32}-{CALLERS_SPAN}-01"})

    assert answer.status_code == 404
    assert answer.json()["trace_id"] == "5" * 32
    assert answer.json()["request_id"]


async def test_a_refused_submission_names_the_trace_of_its_request(traced: Traced) -> None:
    answer = await traced.submit({"name": "bad"}, traceparent=f"00-{'6' * 32}-{CALLERS_SPAN}-01")

    assert (answer.status_code, answer.json()["trace_id"]) == (422, "6" * 32)


async def test_a_question_to_the_router_is_in_its_callers_trace(traced: Traced) -> None:
    trace_id = "8" * 32
    headers = {"traceparent": f"00-{trace_id}-{CALLERS_SPAN}-01"}
    asked = {"model": "nobody-has-it", "messages": [{"role": "user", "content": "hello"}]}
    answer = await traced.http.post(f"{traced.stack.urls['router']}/v1/chat/completions", json=asked, headers=headers)
    assert answer.status_code == 404
    (line,) = [each for each in traced.logged("router") if each.get("trace_id") == trace_id]
    assert (line["route"], line["status"], line["request_id"]) == (
        "/v1/chat/completions",
        404,
        answer.headers["x-request-id"],
    )

    async def found() -> list[Received]:
        return [each for each in traced.collector.of(trace_id) if each.process == "router"]

    (request,) = [each for each in await eventually(found) if each.parent_id == CALLERS_SPAN]
    assert request.name == "POST /v1/chat/completions"


async def test_a_malformed_traceparent_begins_a_new_trace(traced: Traced) -> None:
    answer = await traced.http.get("/v1/nowhere", headers={"traceparent": f"00-{'7' * 32}-{'0' * 16}-01"})

    assert len(answer.json()["trace_id"]) == 32
    assert answer.json()["trace_id"] != "7" * 32


async def test_what_loops_ask_for_and_what_queries_say_is_in_no_trace(traced: Traced) -> None:
    asked = await traced.http.get("/v1/nowhere?code=hunter2")

    async def is_there() -> bool:
        return bool(traced.collector.of(asked.json()["trace_id"]))

    await eventually(is_there)
    spans = list(traced.collector.spans)
    assert not [span for span in spans if "hunter2" in str(span.attributes)]
    roots = {span.name for span in spans if not span.parent_id}
    assert roots
    assert not [name for name in roots if name.split()[0] in ("SELECT", "XREADGROUP", "XREAD", "BEGIN", "UPDATE")]
