"""What a job spec takes and what it refuses."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from services.contracts.jobs import JobSpec


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "a", "command": ["true"], **fields})


def test_a_name_and_a_command_are_enough() -> None:
    made = spec()
    assert (made.gpus.min, made.gpus.largest, made.grace_s, made.preemptible) == (1, 1, 120, True)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"gpus": {"min": 0}}, ("gpus", "min")),
        ({"gpus": {"min": 4, "max": 2}}, ("gpus",)),
        ({"gpus": {"min": 1, "max": 4, "step": 2}}, ("gpus",)),
        ({"gpus": {"min": True}}, ("gpus", "min")),
        ({"command": []}, ()),
        ({"command": [""]}, ()),
        ({"command": ["a\x00b"]}, ("command", 0)),
        ({"name": "../etc"}, ("name",)),
        ({"name": ""}, ("name",)),
        ({"environment": {"A=B": "x"}}, ("environment", "A=B", "[key]")),
        ({"working_dir": "relative"}, ("working_dir",)),
        ({"grace_s": float("nan")}, ("grace_s",)),
        ({"priority": 101}, ("priority",)),
        ({"deadline": "2026-01-01T00:00:00"}, ("deadline",)),
        ({"deadline": "9999-12-31T23:59:59-14:00"}, ("deadline",)),
        ({"progress": {"source": "log", "pattern": "("}}, ("progress",)),
        ({"progress": {"source": "log", "pattern": "step"}}, ("progress",)),
        ({"progress": {"source": "file", "pattern": "x"}}, ("progress",)),
        ({"processes": "per_rank"}, ("processes",)),
        ({"processes": "per_gpu", "service": {}}, ()),
        ({"time_limit_s": 0}, ("time_limit_s",)),
        ({"time_limit_s": 366 * 86_400}, ("time_limit_s",)),
        ({"batch": {"min": 64}}, ("batch", "max")),
        ({"batch": {"min": 64, "max": 32}}, ("batch",)),
        ({"batch": {"min": 0, "max": 32}}, ("batch", "min")),
        ({"batch": {"min": 64, "max": 128}, "global_batch": 256}, ()),
        ({"batch": {"min": 1, "max": 2}, "gpus": {"min": 1, "max": 4}}, ()),
        ({"batch": {"min": 64, "max": 128}, "work": {"total": 10}}, ()),
        ({"batch": {"min": 64, "max": 128}, "service": {}}, ()),
        ({"unknown": 1}, ("unknown",)),
    ],
)
def test_what_cannot_be_is_refused_where_it_stands(fields: dict[str, Any], place: tuple[str | int, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(**fields)
    assert [error["loc"] for error in caught.value.errors()] == [place]


def test_a_stored_spec_has_every_default_and_reads_back_the_same() -> None:
    spec = JobSpec.model_validate({"name": "train", "command": ["true"]})
    stored = json.loads(spec.stored())

    assert JobSpec.model_validate(stored) == spec
    assert set(stored) == {name for name in JobSpec.model_fields if getattr(spec, name) is not None}
    assert (stored["grace_s"], stored["preemptible"], stored["priority"], stored["gpus"]) == (
        *(120, True, 0),
        {"min": 1, "step": 1},
    )


def test_a_spec_stored_by_an_earlier_release_takes_the_defaults_of_later_fields() -> None:
    stored = {"name": "train", "command": ["true"], "gpus": {"min": 2}}

    spec = JobSpec.model_validate(stored)

    assert (spec.gpus.step, spec.gpus.largest, spec.max_restarts, spec.service) == (1, 2, 0, None)


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({"command": ["python3", "train.py"], "gpus": {"min": 2}}, "per_gpu"),
        ({"command": ["python3", "train.py"], "gpus": {"min": 1, "max": 4}}, "per_gpu"),
        ({"command": ["torchrun", "train.py"], "gpus": {"min": 2}}, "per_node"),
        ({"command": [], "image": "example.org/train:1", "gpus": {"min": 2}}, "per_node"),
        ({"service": {}, "gpus": {"min": 2}}, "per_node"),
        ({"command": ["python3", "train.py"], "gpus": {"min": 2}, "processes": "per_node"}, "per_node"),
        ({"command": ["python3", "train.py"]}, None),
    ],
)
def test_an_accepted_gang_is_stored_with_how_its_processes_start(fields: dict[str, Any], stored: str | None) -> None:
    assert json.loads(spec(**fields).stored()).get("processes") == stored


def test_a_job_on_a_slice_has_one() -> None:
    assert spec(gpus={"slice": "2g"}).gpus.largest == 1
    for gpus in ({"slice": "2g", "max": 2}, {"slice": "2g", "min": 2}, {"slice": "5g"}, {"slice": 2}):
        with pytest.raises(ValidationError):
            spec(gpus=gpus)


def test_an_instance_of_a_fleet_names_the_slice_it_runs_on() -> None:
    assert spec(gpus={"slice": "7g"}, service={"fleet": "vision"}).service is not None
    with pytest.raises(ValidationError, match=r"gpus\.slice is missing"):
        spec(service={"fleet": "vision"})


def test_a_permitted_batch_begins_at_the_users_own() -> None:
    permitted = {"batch": {"min": 64, "max": 128}, "work": {"total": 1e6, "unit": "samples"}}
    assert [spec().base_batch, spec(**permitted).base_batch, spec(**permitted, global_batch=96).base_batch] == [
        None,
        64,
        96,
    ]
