"""What an application may ask for."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.contracts.apps import AppSpec
from services.contracts.invalid import first_error


def a_variant(name: str, accuracy_pct: float, **profiles_ms: float) -> dict[str, Any]:
    return {
        "name": name,
        "accuracy_pct": accuracy_pct,
        "command": ["serve", name],
        "profiles": [
            {"slice": each.lstrip("s"), "service_ms": service_ms, "busy_w": 100}
            for each, service_ms in profiles_ms.items()
        ],
    }


def a_spec(**changes: Any) -> dict[str, Any]:
    variants = [a_variant("b1", 79, s1g=20, s7g=8), a_variant("b7", 84, s3g=60, s7g=25)]
    return {"fleet": "edge", "variants": variants, "sla_p95_ms": 100, "requests_per_s": 5, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"variants": [a_variant("b7", 84)]}, "profiles"),
        ({"variants": [a_variant("b7", 84, s3g=60)]}, "the most accurate variant, b7, needs a profile on 7g"),
        ({"variants": [a_variant("b7", 84, s7g=25)] * 2}, "variant b7 is there twice"),
        ({"variants": [{**a_variant("b7", 84, s7g=25), "command": []}]}, "needs a command or a container image"),
        ({"variants": [a_variant("b7", float("nan"), s7g=25)]}, "accuracy_pct"),
        ({"sla_p95_ms": 7}, "the fastest variant above the accuracy floor takes 8 ms without any wait"),
        ({"sla_p95_ms": 20, "max_accuracy_loss_pct": 1}, "the accuracy floor takes 25 ms without any wait"),
        ({"requests_per_s": 0}, "requests_per_s"),
        ({"max_accuracy_loss_pct": -2}, "an accuracy floor of 85.68 %, and the best accuracy is 84 %, of variant b7"),
        ({"max_accuracy_loss_pct": 101}, "max_accuracy_loss_pct"),
    ],
)
def test_bad_input_is_one_clear_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AppSpec.model_validate(a_spec(**changes))
    assert said in first_error(refused.value, whole="the application")


def test_an_application_needs_no_more_than_its_variants_and_its_load() -> None:
    spec = AppSpec.model_validate(a_spec())
    assert spec.most_accurate.name == "b7"
    assert AppSpec.model_validate_json(spec.model_dump_json()) == spec
