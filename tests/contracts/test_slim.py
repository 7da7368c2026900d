"""Slim lists: the rows of an answer with the fields that were asked for, and no other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from services.contracts.jobs import JobArray
from services.contracts.queries import ArrayQuery, JobQuery, NodeQuery
from services.contracts.reports import FootprintLine, FootprintQuery
from services.kit.problems import validation_problem
from tests.architecture.test_imports import ROOT
from tools.openapi import SLIM
from tools.operations import operations


@pytest.mark.parametrize("given", [["id,name , state"], ["id", "name", "state"], ["id,name", "state"], "id,name,state"])
def test_fields_are_separated_by_commas_or_repeated(given: Any) -> None:
    assert JobQuery.model_validate({"fields": given}).fields == ["id", "name", "state"]


@pytest.mark.parametrize("query", [JobQuery, ArrayQuery, NodeQuery, FootprintQuery])
@pytest.mark.parametrize("given", ["nope", "id,nope", "", ["spec.name"]])
def test_a_field_that_is_not_there_is_one_error_that_names_those_that_are(query: type[BaseModel], given: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        query.model_validate({"fields": given})
    problem = validation_problem(caught.value.errors())

    assert (problem.status, len(problem.errors)) == (422, 1)
    assert problem.detail.startswith("/fields: must be some of ")
    first = FootprintLine if query is FootprintQuery else JobArray
    assert ("then_group, name" if first is FootprintLine else "id, ") in problem.detail
    assert len(problem.detail) < 900


def test_the_description_says_it_of_every_list_that_takes_fields() -> None:
    described = json.loads((ROOT / "deploy" / "openapi.json").read_text())
    slim_ones = [each for each in operations() if each.query is not None and "fields" in each.query.model_fields]
    assert {each.route.path for each in slim_ones} == {"/v1/jobs", "/v1/arrays", "/v1/nodes", "/v1/reports/footprint"}
    for each in slim_ones:
        said = described["paths"][each.route.path]["get"]
        assert SLIM in said["responses"]["200"]["content"]["application/json"]["schema"]["anyOf"]
        (parameter,) = [one for one in said["parameters"] if one["name"] == "fields"]
        assert len(parameter["schema"]["items"]["enum"]) >= 6
