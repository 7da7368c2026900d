"""Profiles, accuracies and traces of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lab.inference.profiles import EXAMPLE, for_the_example, read_application
from services.core.domain.errors import DomainError

HEADER = "gpu,family,variant,sm_percent,concurrent_instances,mean_ms,p95_ms,gpu_power_w"
ROWS = (
    "NVIDIA H200,bert,v2-base,14,1,20,21,140",
    "NVIDIA H200,bert,v2-base,28,1,15,16,150",
    "NVIDIA H200,bert,v2-base,43,1,12,13,155",
    "NVIDIA H200,bert,v2-base,57,1,11,12,160",
    "NVIDIA H200,bert,v2-base,100,1,10,10.5,183.8",
)
SHARED = (
    *("NVIDIA H200,bert,v2-base,14,14+14+14+14+14+14+14,30,31,223.8",) * 7,
    "NVIDIA H200,bert,v2-base,57,57+28+14,16.5,17,183.8",
    "NVIDIA H200,bert,v2-base,28,57+28+14,22.5,23,183.8",
    "NVIDIA H200,bert,v2-base,14,57+28+14,25,26,183.8",
)


def test_slices_slow_down_and_share_power_as_measured_together(written: Callable[..., Path]) -> None:
    found = read_application(
        "bert",
        written("alone.csv", HEADER, *ROWS),
        written("shared.csv", HEADER, *SHARED),
        written("accuracy.json", json.dumps({"base": 83.2})),
    )

    assert found.variants == ("v2-base",)
    assert found.service_s[0] * 1_000 == pytest.approx([30, 22.5, 18, 16.5, 10])  # 3g: 1.5 times slower, as 2g and 4g
    assert found.busy_w[0] == pytest.approx([20, 200 / 7, 300 / 7, 400 / 7, 100])
    assert found.idle_w == 83.8
    assert found.jitter_s[0, -1] == pytest.approx(0.0005 / 1.6449)


def test_the_bundled_profile_is_efficientnet() -> None:
    found = read_application("efficientnet")

    assert found.variants == ("b1", "b3", "b5", "b7")
    assert found.accuracy.tolist() == [78.382, 81.528, 83.776, 84.582]
    assert (np.diff(found.service_s, axis=1) < 0).all()


def test_a_variant_that_needs_more_memory_than_a_slice_has_does_not_run_there(written: Callable[..., Path]) -> None:
    rows = [f"{row},30" for row in ROWS]

    found = read_application(
        "bert", written("a.csv", f"{HEADER},memory_gib", *rows), accuracy=written("b.json", '{"v2-base": 83.2}')
    )

    assert found.fits.tolist() == [[False, True, True, True, True]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("NVIDIA H200,bert,v2-base,14,1,nan,21,140", "line 2: mean_ms must be a number above 0"),
        ("NVIDIA H200,bert,v2-base,14,1,20,,140", "line 2: p95_ms must be a number above 0, not empty"),
        ("NVIDIA H200,bert,v2-base,14,1,20,21,-3", "line 2: gpu_power_w must be"),
        ("NVIDIA H200,bert,v2-base,20,1,20,21,140", "line 2: sm_percent 20 is no slice"),
        ("NVIDIA H200,bert,v2-base,14,14+x,20,21,140", "concurrent_instances '14.x' is no sum"),
        ("NVIDIA H200,bert,v2-base,14,1,20", "line 2: 6 cells"),
        ("Abacus,bert,v2-base,14,1,20,21,140", "gpu 'Abacus' is not in the catalogue"),
        ("NVIDIA H200,yolo,x,14,1,20,21,140", "no family 'bert', only yolo"),
    ],
)
def test_a_bad_profile_is_named(written: Callable[..., Path], row: str, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        read_application("bert", written("a.csv", HEADER, row), accuracy=written("b.json", '{"base": 80}'))


def test_what_no_slice_can_hold_is_named(written: Callable[..., Path]) -> None:
    rows = [f"{row},300" for row in ROWS]

    with pytest.raises(DomainError, match="variant v2-base fits no slice"):
        read_application(
            "bert", written("a.csv", f"{HEADER},memory_gib", *rows), accuracy=written("b.json", '{"base": 80}')
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object"),
        ('{"large": 3}', "no accuracy of variant v2-base"),
        ('{"base": "high"}', "accuracy of base must be a percentage"),
        ('{"base": NaN}', "accuracy of base must be a percentage"),
        ('{"base": 120}', "accuracy of base must be a percentage"),
    ],
)
def test_bad_accuracies_are_named(written: Callable[..., Path], text: str, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        read_application("bert", written("a.csv", HEADER, *ROWS), accuracy=written("b.json", text))


def test_the_example_has_the_family_as_measured() -> None:
    assert json.loads(EXAMPLE.read_bytes()) == for_the_example("efficientnet")
