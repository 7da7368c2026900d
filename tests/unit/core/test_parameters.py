"""What an operator may set, and how a mistake is answered."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from services.core.domain.errors import PolicyConfigError
from services.core.policies.baselines.las import LasConfig
from services.core.policies.green.config import GreenConfig
from services.core.policies.parameters import describe_parameters
from services.core.policies.registry import POLICIES, build_policy


def test_defaults_build_every_policy() -> None:
    assert [build_policy(name, {}).name for name in POLICIES] == list(POLICIES) == sorted(POLICIES)


def test_parameters_reach_the_policy() -> None:
    parameters = {"mu": 3, "fixed_gpus": 2, "starvation_s": None, "carbon_factor": "gpu_seconds"}

    assert build_policy("green", parameters).config == GreenConfig(
        mu=3.0, fixed_gpus=2, starvation_s=None, carbon_factor="gpu_seconds"
    )
    assert build_policy("las", {"queue_thresholds_gpu_s": [10, 20.5]}).config == LasConfig((10, 20.5))


@pytest.mark.parametrize(
    ("name", "parameters", "pointer", "complaint"),
    [
        ("ljf", {}, "", "unknown policy 'ljf'; known: a-srpt, fifo, green, joint, las, powerflow; any"),
        ("gandiva", {}, "", "'gandiva' is in the package wattshift-lab, .* pip install ./lab"),
        ("fair+las+zeus", {}, "", "'fair.las.zeus' is in the package wattshift-lab"),
        ("green", {"nu": 1}, "/nu", "unknown parameter 'nu'"),
        ("green", {"a/b~c": 1}, "/a~1b~0c", "unknown parameter"),
        ("green", {"mu": True}, "/mu", "expected a number, got True"),
        ("green", {"mu": "2"}, "/mu", "expected a number, got '2'"),
        ("green", {"mu": float("nan")}, "/mu", "finite"),
        ("green", {"mu": float("inf")}, "/mu", "finite"),
        ("green", {"mu": 10**400}, "/mu", "finite"),
        ("green", {"mu": 0.99}, "/mu", "at least 1, got 0.99"),
        ("green", {"mu": None}, "/mu", "null is not a value"),
        ("green", {"theta": 1.5}, "/theta", "at most 1, got 1.5"),
        ("green", {"job_cap_gpus": 2.0}, "/job_cap_gpus", "expected an integer, got 2.0"),
        ("green", {"fixed_gpus": 0}, "/fixed_gpus", "at least 1"),
        ("green", {"carbon_factor": "watts"}, "/carbon_factor", "one of footprint, gpu_seconds, got 'watts'"),
        ("green", {"carbon_factor": ["footprint"]}, "/carbon_factor", "one of footprint"),
        ("green", {"gamma_full": 0.5}, "/gamma_full", "at least gamma_empty"),
        ("las", {"queue_thresholds_gpu_s": 5}, "/queue_thresholds_gpu_s", "list of numbers"),
        ("las", {"queue_thresholds_gpu_s": [5, True]}, "/queue_thresholds_gpu_s/1", "expected a number"),
        ("las", {"queue_thresholds_gpu_s": [5, 5]}, "/queue_thresholds_gpu_s/1", "ascend"),
        ("fifo", {"gang": "most"}, "/gang", "one of min, max"),
        ("fifo", {"backfill": 1}, "/backfill", "true or false"),
    ],
)
def test_a_mistake_is_named_with_a_pointer(
    name: str, parameters: dict[str, object], pointer: str, complaint: str
) -> None:
    with pytest.raises(PolicyConfigError, match=complaint) as caught:
        build_policy(name, parameters)
    assert caught.value.pointer == pointer


def test_descriptions_are_json_and_build_the_defaults() -> None:
    for name, entry in POLICIES.items():
        read = json.loads(json.dumps([asdict(each) for each in describe_parameters(entry.config)]))
        defaults = {parameter["name"]: parameter["default"] for parameter in read}
        assert build_policy(name, defaults).config == build_policy(name, {}).config
        assert all(parameter["meaning"].endswith(".") for parameter in read)


def test_a_description_says_what_a_form_needs() -> None:
    by_name = {parameter.name: parameter for parameter in describe_parameters(POLICIES["green"].config)}

    assert "NSDI'25" in POLICIES["green"].paper
    assert (by_name["mu"].type, by_name["mu"].default, by_name["mu"].minimum) == ("number", 2.0, 1.0)
    assert (by_name["starvation_s"].nullable, by_name["starvation_s"].unit) == (True, "s")
    assert by_name["carbon_factor"].choices == ("footprint", "gpu_seconds")
    assert (by_name["fixed_gpus"].type, by_name["fixed_gpus"].default) == ("integer", None)
