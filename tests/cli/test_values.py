"""Values of ``--param``."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.errors import CliError
from services.cli.values import parameter_value


def test_a_value_is_json_or_text() -> None:
    assert parameter_value("0.7") == 0.7
    assert parameter_value("[[0, 900.0]]") == [[0, 900.0]]
    assert parameter_value("min") == "min"


def test_a_file_holds_a_limit_by_the_hour_or_by_time(tmp_path: Path) -> None:
    file = tmp_path / "cap.csv"
    file.write_text("hour,watts\n0,9000\n17.5,6000\n")
    assert parameter_value(f"@{file}") == [[0.0, 9_000.0], [17.5, 6_000.0]]

    file.write_text("2026-01-01T00:00:00+00:00,9000\n2026-01-01T01:00:00,8e3\n")
    assert parameter_value(f"@{file}") == [[1_767_225_600.0, 9_000.0], [1_767_229_200.0, 8_000.0]]


def test_a_file_that_is_none_or_holds_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cap.csv"
    file.write_text("0,9000\nnoon,6000\n")
    with pytest.raises(CliError, match="row 2"):
        parameter_value(f"@{file}")
    with pytest.raises(CliError, match="cannot be read"):
        parameter_value(f"@{tmp_path / 'nowhere'}")
