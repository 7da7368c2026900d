"""Which jobs are taken for one job submitted again."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.profiles.recurrence import GROUP_VERSION, job_group

SPEC: dict[str, Any] = {
    "name": "resnet-run-17",
    "command": ["python", "train.py", "--lr", "0.1"],
    "image": "trainer:3",
    "environment": {"RUN_ID": "a"},
    "working_dir": "/home/ada",
    "checkpoint_dir": "/scratch/17",
    "gpus": {"min": 4, "max": 8, "model": "A100"},
    "work": {"total": 90, "unit": "epochs"},
    "priority": 3,
    "project": "vision",
    "labels": {"dataset": "imagenet", "ticket": "17"},
}


@pytest.mark.parametrize(
    "change",
    [
        {"name": "resnet-run-18"},
        {"name": "resnet-run-3fa9c1"},
        {"environment": {"RUN_ID": "b"}},
        {"checkpoint_dir": "/scratch/18"},
        {"gpus": {"min": 1, "model": "A100"}},
        {"priority": 0},
        {"labels": {"dataset": "imagenet", "ticket": "18"}},
        {"project": "speech"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_run_of_the_same_job(change: dict[str, Any]) -> None:
    assert job_group("acme", SPEC | change)[0] == job_group("acme", SPEC)[0]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "bert-run-17"},
        {"command": ["python", "train.py", "--lr", "0.2"]},
        {"image": "trainer:4"},
        {"working_dir": "/home/bob"},
        {"gpus": {"min": 4, "model": "H100"}},
        {"work": {"total": 180, "unit": "epochs"}},
        {"labels": {"dataset": "coco", "ticket": "17"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_job(change: dict[str, Any]) -> None:
    assert job_group("acme", SPEC | change)[0] != job_group("acme", SPEC)[0]


def test_tenants_and_projects() -> None:
    assert job_group("acme", SPEC)[0] != job_group("other", SPEC)[0], "nobody learns of another tenant's jobs"
    assert job_group("acme", SPEC)[1] != job_group("acme", SPEC | {"project": "speech"})[1]
    assert all(0 <= each < 2**63 for each in job_group("acme", {}))


def test_groups_of_this_version_never_change() -> None:
    assert (GROUP_VERSION, *job_group("acme", SPEC)) == (1, 7_929_653_028_416_374_368, 8_993_651_216_927_087_541)
