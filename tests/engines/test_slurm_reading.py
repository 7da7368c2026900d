"""Slurm's JSON of several versions: what 22.05 answers, and the later form of the same."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.engines.slurm.reading import number_of, read_jobs, read_nodes
from services.engines.slurm.settings import SlurmSettings
from services.engines.slurm.steering import Memory, report_of
from services.kit.bridges.silent import EngineSilentError

OLD_JOB: dict[str, Any] = {
    **{"job_id": 7, "job_state": "RUNNING", "name": "train", "user_name": "ann", "account": "lab"},
    **{"admin_comment": "wattshift:7@100", "comment": "wattshift:gpus=2-8", "partition": "gpu", "qos": "normal"},
    **{"priority": 4_294_901_758, "node_count": 1, "nodes": "gpu1", "gres_detail": ["gpu:h200:2(IDX:0-1)"]},
    **{
        "tres_per_node": "gres:gpu:h200:2",
        "time_limit": 60,
        "submit_time": 100,
        "start_time": 200,
        "eligible_time": 100,
    },
    **{"end_time": 3_800, "exit_code": 0, "restart_cnt": 1, "requeue": True, "batch_flag": True, "array_job_id": 0},
    **{"het_job_id": 0, "dependency": "", "resv_name": "", "deadline": 0, "state_reason": "None"},
}


def number(value: int) -> dict[str, Any]:
    """Return a number as parsers from v0.0.39 on write it."""
    return {"set": True, "infinite": False, "number": value}


NEW_JOB = OLD_JOB | {
    "job_state": ["RUNNING"],
    "tres_per_node": "gres/gpu:h200:2",
    "exit_code": {"status": ["SUCCESS"], "return_code": number(0)},
    **{
        name: number(OLD_JOB[name])
        for name in ("priority", "node_count", "time_limit", "submit_time", "start_time", "eligible_time", "end_time")
    },
    **{name: number(0) for name in ("array_job_id", "het_job_id", "deadline")},
}


def test_both_forms_of_a_job_are_the_same_job() -> None:
    (old,) = read_jobs({"jobs": [OLD_JOB]})
    (new,) = read_jobs({"jobs": [NEW_JOB]})
    assert old == new
    assert (old.number, old.state, old.tag, old.gpus, old.gpu_type, old.per_node) == (
        "7",
        "running",
        "7@100",
        2,
        "h200",
        2,
    )
    assert (dict(old.shares), old.time_limit_s, old.restarts, old.special) == ({"gpu1": (0, 1)}, 3_600, 1, "")
    assert old.options == {"gpus": "2-8"}


def test_comments_in_one_place_are_found() -> None:
    comments = {"administrator": "wattshift:7@100", "job": "wattshift:off", "system": ""}
    (job,) = read_jobs({"jobs": [NEW_JOB | {"comment": comments}]})
    assert (job.tag, job.options) == ("7@100", {"off": ""})


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        ("PENDING", ["PENDING"], "pending"),
        ("REQUEUED,PENDING", ["PENDING", "REQUEUED"], "pending"),
        ("COMPLETING", ["RUNNING", "COMPLETING"], "running"),
        ("TIMEOUT", ["TIMEOUT"], "timeout"),
    ],
)
def test_states_are_read_alike(old: str, new: list[str], state: str) -> None:
    assert [read_jobs({"jobs": [OLD_JOB | {"job_state": each}]})[0].state for each in (old, new)] == [state, state]


def test_numbers_may_be_missing_or_infinite() -> None:
    assert [number_of(each) for each in (None, "", 5, number(5), {"set": False, "number": 5})] == [
        None,
        None,
        5,
        5,
        None,
    ]
    assert number_of({"set": True, "infinite": True, "number": 0}) == math.inf
    (job,) = read_jobs({"jobs": [NEW_JOB | {"time_limit": {"set": True, "infinite": True, "number": 0}}]})
    assert job.time_limit_s is None


def test_what_says_that_it_is_incomplete_is_not_read() -> None:
    for answer in (
        {"jobs": [OLD_JOB], "errors": [{"error": "timed out"}]},
        {"jobs": "none"},
        [],
        {"jobs": [{"job_id": 1}]},
    ):
        with pytest.raises(EngineSilentError):
            read_jobs(answer)
    with pytest.raises(EngineSilentError):
        read_nodes({"nodes": [{}]})


@pytest.mark.parametrize(
    "fields",
    [
        *({"job_state": states} for states in ([], ["OF_A_LATER_RELEASE"])),
        *({"priority": {"set": True, "infinite": False, "number": of}} for of in ("NaN", None)),
        {"job_id": "seven"},
    ],
    ids=str,
)
def test_a_row_that_cannot_be_read_costs_that_row_alone(fields: dict[str, Any]) -> None:
    row = NEW_JOB | {"job_id": 8} | fields
    found = read_jobs({"jobs": [OLD_JOB, row, OLD_JOB | {"job_id": 9}]})
    assert ([job.number for job in found], list(found.unread)) == (["7", "9"], [str(row["job_id"])])
    nodes = read_nodes({"nodes": [{"name": "n1", "state": "idle", "gres": "gpu:2"}, {"name": "n2", "gres": "gpu:2"}]})
    assert ([node.name for node in nodes], list(nodes.unread)) == (["n1"], ["n2"])


@pytest.mark.parametrize(("comment", "sizes"), [("wattshift:gpus=2-8", (2, 8, 4)), ("", (4, 4, 4))])
def test_the_size_a_job_was_submitted_with_is_what_its_user_asked_for(
    comment: str, sizes: tuple[int, int, int]
) -> None:
    waits = {"job_state": "PENDING", "gres_detail": [], "nodes": "", "tres_per_node": "gres:gpu:h200:4"}
    (job,) = read_jobs({"jobs": [OLD_JOB | waits | {"comment": comment}]})
    settings = SlurmSettings.model_construct(partitions="", gpu_models={}, steer="all")
    report = report_of(job, "7@100", None, Memory(), settings, 0.0)
    assert (report.gpus, report.max_gpus, report.asked_gpus) == sizes
