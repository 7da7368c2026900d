"""The public API against its own description, over the whole system: whatever is asked, no server error, and only
answers that were promised.

Bounded and repeatable: boundary cases from the description, and a few generated ones from a fixed seed. To make the
cases takes ten seconds, so this file is collected by `test_api.py` alone, not by every worker of a run.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks

from gateway.openapi import describe
from gateway.routes import EVENTS, JSON, ROUTES
from services.standalone.stack import Stack
from tests.support.forked import forked_by_the_supervisor
from tests.support.servers import scratch_folder

CONFIG = SchemathesisConfig.from_dict(
    {
        "seed": 20_261_120,
        "generation": {"database": "none", "max-examples": 4, "with-security-parameters": False},
        "phases": {"coverage": {"enabled": True, "unexpected-methods": []}, "stateful": {"enabled": False}},
        "checks": {"negative_data_rejection": {"expected-statuses": [400, 404, 409, 413, 414, 415, 422]}},
    }
)
FOLLOWED = {route.path for route in ROUTES if route.media == EVENTS} | {"/v1/jobs/{job_id}/logs"}


def described() -> dict[str, Any]:
    """Return the description, with events as Schemathesis reads them: one by one, where generators want a string."""
    document = describe("fuzz")
    for route in ROUTES:
        if route.media == EVENTS:
            content = document["paths"][route.path][route.method.lower()]["responses"]["200"]["content"][EVENTS]
            data = {"type": "string", "contentMediaType": JSON, "contentSchema": content["schema"]["x-event-data"]}
            names = {"id": {"type": "string"}, "event": {"type": "string"}, "data": data}
            content["schema"] = {"type": "object", "properties": names}
    return document


schema = schemathesis.openapi.from_dict(described(), config=CONFIG)


@dataclass
class Api:
    """A whole installation: its address, the headers of its admin, and a job that is there."""

    url: str
    headers: dict[str, str]
    job_id: str
    session: requests.Session


@pytest.fixture(scope="module")
async def api() -> AsyncIterator[Api]:
    """An installation without nodes: a job that was made up must not run on the machine that tests."""
    with scratch_folder() as folder, forked_by_the_supervisor():
        async with Stack(folder / "data", nodes="", workers=()) as stack:
            key = (Path(stack.environment["WATTSHIFT_DATA_DIR"]) / "admin.key").read_text().strip()
            headers = {"authorization": f"Bearer {key}"}
            spec = {"name": "there", "command": ["true"], "hold": True}
            with requests.Session() as session:
                made = session.post(f"{stack.gateway_url}/v1/jobs", json=spec, headers=headers, timeout=10)
                yield Api(stack.gateway_url, headers, made.json()["id"], session)


@schema.parametrize()
@settings(max_examples=4, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_every_answer_was_promised(case: Case, api: Api) -> None:
    _make_answerable(case, api)
    answer = case.call(base_url=api.url, headers={**api.headers, **dict(case.headers or {})}, session=api.session)
    case.validate_response(
        answer,
        checks=[
            not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
            checks.response_headers_conformance,
            checks.negative_data_rejection,
        ],
    )


def _make_answerable(case: Case, api: Api) -> None:
    """Let streams end with what there is, and let some of the questions be about a job that is there."""
    if case.path in FOLLOWED and isinstance(case.query, dict):
        query: dict[str, Any] = case.query
        query["follow"] = "false"
    parameters = case.path_parameters or {}
    if len(str(parameters.get("job_id", "x"))) % 2 == 0:
        parameters["job_id"] = api.job_id
