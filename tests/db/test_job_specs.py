"""Fields of stored specifications read by SQL are what `JobSpec` reads, whichever release stored them."""

from __future__ import annotations

from typing import Any

import pytest

from services.contracts.jobs import JobSpec
from services.db import job_specs
from services.db.database import connect
from services.db.job_specs import spec_field
from tests.support.servers import fresh_database

LEAST = {"name": "a", "command": ["true"]}
"""What every release stored: nothing else is required."""

FULL = LEAST | {
    "gpus": {"min": 2, "max": 8, "step": 3, "asked": 5, "model": "A100", "memory_gib": 40.5, "zone": "SE"}
    | {"within": "rack", "near": "node"},
    "work": {"total": 1e6, "unit": "samples"},
    "preemptible": False,
    "priority": -3,
    "deadline": "2030-01-02T03:04:05+00:00",
    "grace_s": 7.5,
    "max_restarts": 4,
    "restart_after_node_loss": False,
    "global_batch": 256,
    "family": "vision",
    "batch": {"min": 64, "max": 1024},
    "checkpoint_dir": "/data/bert",
}

READ = {
    "MIN_GPUS": lambda spec: spec.gpus.min,
    "MAX_GPUS": lambda spec: spec.gpus.largest,
    "STEP_GPUS": lambda spec: spec.gpus.step,
    "ASKED_GPUS": lambda spec: spec.gpus.asked or spec.gpus.min,
    "GPU_MODEL": lambda spec: spec.gpus.model,
    "SLICE": lambda spec: spec.gpus.slice,
    "GPU_MEMORY_GIB": lambda spec: spec.gpus.memory_gib,
    "GPU_ZONE": lambda spec: spec.gpus.zone,
    "GPU_WITHIN": lambda spec: spec.gpus.within,
    "GPU_NEAR": lambda spec: spec.gpus.near,
    "WORK_TOTAL": lambda spec: spec.work and spec.work.total,
    "PREEMPTIBLE": lambda spec: spec.preemptible,
    "MAY_MOVE": lambda spec: spec.may_move,
    "MAY_SHARE_GPU": lambda spec: spec.may_share_gpu,
    "FLEX": lambda spec: spec.flex,
    "PRIORITY": lambda spec: spec.priority,
    "DEADLINE": lambda spec: spec.deadline,
    "GRACE_S": lambda spec: spec.grace_s,
    "MAX_RESTARTS": lambda spec: spec.max_restarts,
    "RESTART_AFTER_NODE_LOSS": lambda spec: spec.restart_after_node_loss,
    "GLOBAL_BATCH": lambda spec: spec.global_batch,
    "FAMILY": lambda spec: spec.family,
    "BATCH_MIN": lambda spec: spec.batch and spec.batch.min,
    "BATCH_MAX": lambda spec: spec.batch and spec.batch.max,
    "CHECKPOINT_DIR": lambda spec: spec.checkpoint_dir,
}
"""By name of the expression: the same field in Python."""


def test_every_expression_is_compared_below() -> None:
    assert set(READ) == {name for name in vars(job_specs) if name.isupper()}


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(LEAST, id="without any field that has a default"),
        pytest.param(LEAST | {"gpus": {"min": 4}}, id="of fixed size"),
        pytest.param(LEAST | {"gpus": {"max": 4}}, id="with a largest size alone"),
        pytest.param(LEAST | {"gpus": {"min": 2, "max": None}, "work": None, "family": None}, id="with nulls"),
        pytest.param(LEAST | {"gpus": {"slice": "2g"}}, id="on a slice"),
        pytest.param(FULL, id="with every field"),
    ],
)
async def test_sql_reads_a_stored_specification_as_its_model_does(postgres_url: str, stored: dict[str, Any]) -> None:
    spec = JobSpec.model_validate(stored)
    columns = ", ".join(f"{getattr(job_specs, name)} AS {name.lower()}" for name in READ)
    connection = await connect(fresh_database(postgres_url), application_name="test")
    try:
        row = await connection.fetchrow(f"SELECT {columns} FROM (SELECT $1::jsonb AS spec) j", stored)
    finally:
        await connection.close()

    assert row is not None
    assert {name: row[name.lower()] for name in READ} == {name: read(spec) for name, read in READ.items()}


def test_an_expression_of_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError):
        spec_field("prioritty", "int")
    with pytest.raises(AttributeError):
        spec_field("gpus.least", "int")
    with pytest.raises(TypeError):
        spec_field("gpus", "text")
