"""The public API against its own description, over the whole system: whatever is asked, no server error, and only
answers that were promised.

Bounded and repeatable: boundary cases from the description, and a few generated ones from a fixed seed. To make the
cases takes ten seconds, so this file is collected by `test_api.py` alone, not by every worker of a run.
"""

import copy
import re
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks

from gateway.routes import EVENTS, JSON, read_routes
from tests.fuzz.asking import DESCRIBED, FOLLOWED
from tests.fuzz.world import World

CONFIG = SchemathesisConfig.from_dict(
    {
        "seed": 20_261_120,
        "generation": {"database": "none", "max-examples": 4, "with-security-parameters": False},
        "phases": {"coverage": {"enabled": True, "unexpected-methods": []}, "stateful": {"enabled": False}},
        "checks": {"negative_data_rejection": {"expected-statuses": [400, 404, 409, 413, 414, 415, 422]}},
    }
)


def described() -> dict[str, Any]:
    """Return the description, with events as Schemathesis reads them: one by one, where generators want a string."""
    document = copy.deepcopy(DESCRIBED)
    for route in read_routes():
        if route.media == EVENTS:
            content = document["paths"][route.path][route.method.lower()]["responses"]["200"]["content"][EVENTS]
            data = {"type": "string", "contentMediaType": JSON, "contentSchema": content["schema"]["x-event-data"]}
            names = {"id": {"type": "string"}, "event": {"type": "string"}, "data": data}
            content["schema"] = {"type": "object", "properties": names}
    return document


schema = schemathesis.openapi.from_dict(described(), config=CONFIG)


@schema.parametrize()
@settings(max_examples=4, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_every_answer_was_promised(case: Case, world: World) -> None:
    _make_answerable(case, world)
    headers = {**world.admin, **dict(case.headers or {})}
    answer = case.call(base_url=world.stack.gateway_url, headers=headers, session=world.session)
    is_elsewhere = answer.status_code == 503 and (case.method, case.path) == ("POST", "/v1/cells")  # as `asking` has it
    case.validate_response(
        answer,
        checks=[
            *([] if is_elsewhere else [not_a_server_error]),
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
            checks.response_headers_conformance,
            checks.negative_data_rejection,
        ],
    )

    _says_what_was_sent(answer)


def _says_what_was_sent(answer: Any) -> None:
    """A number beyond its range is repeated, so that one sees which of several was meant, and is never called null."""
    for error in answer.json().get("errors", []) if answer.status_code == 422 else []:
        if re.match(r"must be (at least|at most|greater than|less than) ", error["detail"]):
            assert re.search(r", not -?[0-9]", error["detail"]), error


def _make_answerable(case: Case, world: World) -> None:
    """Let streams end with what there is, and let some of the questions be about a job that is there."""
    if case.path in FOLLOWED and isinstance(case.query, dict):
        query: dict[str, Any] = case.query
        query["follow"] = "false"
    parameters = case.path_parameters or {}
    if len(str(parameters.get("job_id", "x"))) % 2 == 0:
        parameters["job_id"] = world.held_job
