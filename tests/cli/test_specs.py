"""Job files: what the command line reads before it asks the gateway."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import EXIT_USAGE, CliError
from services.cli.jobs.specs import read_specs

JOB = {"name": "a", "command": ["{python}", "{examples}/train.py", "--x={python}"]}


@pytest.mark.parametrize("document", [JOB, [JOB], {"jobs": [JOB]}])
def test_one_job_a_list_or_a_batch(tmp_path: Path, document: Any) -> None:
    (tmp_path / "jobs.json").write_text(json.dumps(document))

    (spec,) = read_specs(tmp_path / "jobs.json")

    assert spec.command[0] == sys.executable
    assert Path(spec.command[1]).name == "train.py"
    assert spec.command[2] == f"--x={sys.executable}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot read"),
        ("[]", "jobs"),
        ('[{"name": "a"}]', "command or a container image"),
        ('[{"name": "a", "command": ["x"], "gpus": {"min": 0}}]', r"jobs\[0\].gpus.min: must be at least 1"),
        ("7", "jobs"),
    ],
)
def test_a_bad_file_is_named_with_the_field(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "jobs.json").write_text(text)
    with pytest.raises(CliError, match=words) as caught:
        read_specs(tmp_path / "jobs.json")
    assert caught.value.exit_code == EXIT_USAGE


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot be read"):
        read_specs(tmp_path / "none.json")
