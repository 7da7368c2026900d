"""What people are told of a name that is not there."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import services.contracts
from services.admission.submissions import read_submission
from services.contracts.invalid import explained, first_error, no_such_zone
from services.contracts.jobs import JobSpec, SubmissionEntry
from services.contracts.queries import PageQuery
from services.kit.problems import ProblemError, validation_problem

WRONG = [None, True, -(10**9), 10**12, 0.5, "no such value", "", [], {}]
SECRET = "hunter2"


@pytest.mark.parametrize(
    ("zone", "known", "told"),
    [
        ("US-CAL-CISCO", ("DE", "US-CAL-CISO"), "did you mean US-CAL-CISO? The zones are DE, US-CAL-CISO."),
        ("de", ("DE", "US-CAL-CISO"), "There is no zone de; did you mean DE? "),
        ("ATLANTIS", ("DE", "GB"), "There is no zone ATLANTIS. The zones are DE, GB."),
        ("DE", (), "There is no zone DE. The zones are none."),
        ("Q", [f"Z{n:03}" for n in range(400)], "Z019 and 380 more."),
        ("x" * 5_000, ("DE",), f"There is no zone {'x' * 60}.... The zones are DE."),
    ],
)
def test_a_zone_that_is_not_there_is_told_with_the_nearest_names(zone: str, known: list[str], told: str) -> None:
    found = no_such_zone(zone, known)

    assert told in found
    assert len(found) < 400


def models() -> Iterator[type[BaseModel]]:
    """Every model that a document can arrive in."""
    for module in pkgutil.walk_packages(services.contracts.__path__, "services.contracts."):
        for _, found in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(found, BaseModel) and found.__module__ == module.name:
                yield found


def test_only_null_is_called_null() -> None:
    """Whatever is wrong in whatever field, also where the error does not say what was given."""
    wrong, called_null = 0, 0
    for model in models():
        for name, value in ((name, value) for name in model.model_fields for value in WRONG):
            document = {name: value}
            try:
                model.model_validate_json(json.dumps(document))
            except ValidationError as error:
                for has_input in (True, False):
                    for each in error.errors(include_input=has_input, include_url=False):
                        said = explained(each)
                        wrong += 1
                        called_null += "not null" in said
                        is_null = has_input and value is None
                        assert "not null" not in said or is_null, (model.__name__, document, said)
    assert wrong > 10_000
    assert called_null > 100


def problem_of(job: Mapping[str, Any]) -> ProblemError:
    """Return the problem that admission has with a job."""
    entry = SubmissionEntry(tenant_id="t", key_id="k", idempotency_key=None, batch=False, body=json.dumps(job))
    found = read_submission(entry)
    assert isinstance(found, ProblemError)
    return found


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpus": {"min": 0}}, "/gpus/min: must be at least 1, not 0"),
        ({"priority": 1_000}, "/priority: must be at most 100, not 1000"),
        ({"priority": None}, "/priority: must be a whole number, not null"),
        ({"gpus": 1}, "/gpus: must be an object with named fields, not 1"),
        ({"processes": "all"}, "/processes: must be 'per_gpu' or 'per_node', not 'all'"),
    ],
)
def test_a_submission_that_is_refused_says_what_was_sent(fields: dict[str, Any], said: str) -> None:
    assert problem_of({"name": "a", "command": ["true"], **fields}).detail == said


@pytest.mark.parametrize("sent", [0, "0"])
def test_a_number_beyond_its_range_is_shown_as_one_in_a_query_too(sent: object) -> None:
    with pytest.raises(ValidationError) as refused:
        PageQuery.model_validate({"limit": sent})
    assert first_error(refused.value) == "limit: must be at least 1, not 0"


@pytest.mark.parametrize(
    "fields",
    [
        {"environment": {"TOKEN": 4_711}},
        {"environment": {"TOKEN": {"value": SECRET}}},
        {"environment": SECRET},
        {"command": ["login", 4_711]},
        {"command": SECRET},
        {"secrets": [{"name": f"{SECRET} 4711", "env": "TOKEN"}]},
        {"source": {"git": {"url": f"https://ada:{SECRET}@example.org/x y.git", "revision": "4711"}}},
    ],
)
def test_what_may_be_a_secret_is_not_repeated(fields: dict[str, Any]) -> None:
    document = problem_of({"name": "a", "command": ["true"], **fields}).document().model_dump_json()

    assert SECRET not in document
    assert "4711" not in document or "source" in fields


def test_what_may_be_a_secret_is_not_repeated_of_other_documents() -> None:
    error = {"type": "string_type", "loc": ("body", "value"), "msg": "", "input": 4_711}

    assert validation_problem([error]).detail == "/value: must be text"


def test_text_that_no_file_can_hold_is_refused_in_words_that_can_be_printed() -> None:
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate({"name": "a\udcff", "command": ["true"]})
    found = explained(refused.value.errors()[0])

    assert found == r"must be text that UTF-8 can hold, not 'a\udcff'"
    assert found.encode()
