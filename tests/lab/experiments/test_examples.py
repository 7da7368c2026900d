"""Every experiment that pages name can be read: labels, policies and parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.experiments.plan import load_experiment
from services.core.policies.registry import build_policy

EXAMPLES = sorted((Path(__file__).parents[3] / "lab" / "examples").glob("*.toml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_an_experiment_of_its_name(file: Path) -> None:
    experiment = load_experiment(file)

    assert experiment.name == file.stem
    for cell in experiment.cells():
        build_policy(cell.choice.policy, cell.choice.params)
