"""Which jobs may permit that another one shares their GPU."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.contracts.commands import StartGang, command_document
from services.contracts.jobs import JobSpec
from services.scheduler.commands import start_commands

SHARES = {"name": "a", "command": ["true"], "may_share_gpu": True, "gpus": {"min": 1, "memory_gib": 8}}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"gpus": {"min": 1}}, "gpus.memory_gib"),
        ({"gpus": {"min": 2, "memory_gib": 8}}, "one whole GPU"),
        ({"gpus": {"min": 1, "memory_gib": 8, "slice": "1g"}}, "one whole GPU"),
        ({"preemptible": False}, "preemptible"),
    ],
)
def test_only_jobs_that_fit_beside_others_may_share_a_gpu(changed: dict[str, Any], says: str) -> None:
    assert JobSpec.model_validate(SHARES).may_share_gpu
    with pytest.raises(ValidationError, match=says):
        JobSpec.model_validate(SHARES | changed)


@pytest.mark.parametrize("packed", [False, True])
def test_agents_of_an_earlier_release_can_read_every_start_but_that_of_a_guest(packed: bool) -> None:
    (command,) = start_commands(
        allocation_id="j.1",
        job_id="j",
        generation=1,
        tenant_id="t",
        spec=SHARES,
        shares=[{"node_id": "n0", "devices": [0]}],
        master_addr="n0",
        master_port=1,
        packed=packed,
    )

    assert ("shares" in command.payload) is packed
    assert "may_share_gpu" not in command.payload["spec"]
    assert command_document(StartGang.model_validate(command.payload)) == command.payload
