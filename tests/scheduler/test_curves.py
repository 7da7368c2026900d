"""The operator's file of measured curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.scheduler.learning.learned import known_of, read_curves
from services.scheduler.repository.kept_jobs import JobRows

ENTRY = {"kind": "k", "gpu_model": "A100", "setting": "power_limit"}
COLUMNS = {"values": [200, 400], "speed": [0.9, 1.0], "power_w": [150, 380]}


def test_a_file_is_read_by_kind_and_gpu_model(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    file.write_text(json.dumps([ENTRY | COLUMNS, ENTRY | COLUMNS | {"kind": "j", "gpu_model": "K80"}]))

    rows, curves, gangs = known_of(JobRows([]), ("V100", "A100"), read_curves(file), {}, {})

    assert rows == {"j": 0, "k": 1}
    assert not curves[0], "no such GPU model here"
    assert gangs == ({}, {})
    assert curves[1][1, ControlKind.POWER_LIMIT].at(300.0) == pytest.approx((0.95, 265.0))


@pytest.mark.parametrize(
    "content",
    ["", "{}", json.dumps([ENTRY]), json.dumps([ENTRY | COLUMNS | {"speed": [1.0]}]), json.dumps([{**ENTRY, "x": 1}])],
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "curves.json"
    file.write_text(content)

    with pytest.raises(DomainError):
        read_curves(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DomainError, match="cannot be read"):
        read_curves(tmp_path / "none.json")
