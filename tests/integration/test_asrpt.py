"""A-SRPT, live: a gang of two nodes is placed as decided and its ranks see it; jobs that recur are predicted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.conftest import Installation
from tests.integration.test_submission_to_footprint import submit, wattshift
from tests.support.servers import wait_until

TELL = (
    "echo NODE_RANK=$NODE_RANK WORLD_SIZE=$WORLD_SIZE MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$MASTER_PORT "
    "OFFSET=$WATTSHIFT_RANK_OFFSET LOCAL=$WATTSHIFT_LOCAL_WORLD_SIZE DEVICES=$CUDA_VISIBLE_DEVICES; sleep 2"
)


@pytest.fixture(scope="module")
def asrpt(rare_rounds: Installation) -> Installation:
    """An installation under A-SRPT that learns from every two jobs that end."""
    rare_rounds.gateway.call("PUT", "/v1/policies/active", body={"name": "a-srpt", "parameters": {}})
    return rare_rounds


def job(name: str, command: str, gpus: int, **spec: Any) -> dict[str, Any]:
    return {
        "name": name,
        "command": ["sh", "-c", command],
        "gpus": {"min": gpus},
        "processes": "per_node",
        "grace_s": 1,
        **spec,
    }


def told(installation: Installation, job_id: str, node: str) -> dict[str, str]:
    """Return what the ranks on a node saw in their environment."""
    text = installation.gateway.text(f"/v1/jobs/{job_id}/logs", node=node).text
    return dict(word.split("=") for word in text.split())


@pytest.mark.parametrize(
    ("parameter_bytes", "sizes"),
    # A gang that exchanges much gets the fullest servers, any other what the emptiest ones have left.
    [(4e9, [4, 2]), (1.0, [2, 4])],
    ids=["heavy", "light"],
)
def test_a_gang_of_two_nodes_is_placed_as_decided(
    asrpt: Installation, parameter_bytes: float, sizes: list[int]
) -> None:
    blocker = submit(asrpt, job("blocker", "sleep 600", 2))
    taken = asrpt.wait_for(blocker, lambda found: found["state"] == "running")["placement"]
    stage = {"replicas": 6, "parameter_bytes": parameter_bytes, "forward_s": 0.05, "backward_s": 0.1}
    gang = submit(asrpt, job("gang", TELL, 6, layout={"stages": [stage]}))
    shares = asrpt.wait_for(gang, lambda found: found["state"] in ("running", "succeeded"))["placement"]
    (ended,) = asrpt.wait_for_ends([gang], 60)
    asrpt.gateway.call("POST", f"/v1/jobs/{blocker}/cancel")
    asrpt.wait_for_ends([blocker], 60)

    assert ended["state"] == "succeeded"
    assert [len(share["devices"]) for share in shares] == sizes
    assert {(share["node_id"], device) for share in shares for device in share["devices"]}.isdisjoint(
        (share["node_id"], device) for share in taken for device in share["devices"]
    )
    seen = [told(asrpt, gang, share["node_id"]) for share in shares]
    assert [(each["NODE_RANK"], each["WORLD_SIZE"]) for each in seen] == [("0", "6"), ("1", "6")]
    assert [each["OFFSET"] for each in seen] == ["0", str(sizes[0])]
    assert [each["LOCAL"] for each in seen] == [str(size) for size in sizes]
    assert [each["DEVICES"] for each in seen] == [",".join(map(str, share["devices"])) for share in shares]
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in seen}) == 1
    assert all(each["MASTER_ADDR"] and int(each["MASTER_PORT"]) for each in seen)


def test_the_third_job_of_a_group_is_predicted(asrpt: Installation) -> None:
    first = [submit(asrpt, job(f"again-{n}", "sleep 4", 2)) for n in range(2)]
    asrpt.wait_for_ends(first, 60)
    told = [asrpt.gateway.get(f"/v1/predictions/{job_id}") for job_id in first]

    def knows_both() -> bool:
        models = asrpt.gateway.get("/v1/predictions/models")["items"]
        ended = max(asrpt.job(job_id)["ended_at"] for job_id in first)
        return any(model["active"] and model["through_at"] >= ended for model in models)

    # Two more that succeed make a training due, should another test's jobs have been the last ones counted.
    others = [submit(asrpt, job(f"other-{n}", "sleep 0.1", 1)) for n in range(2)]
    asrpt.wait_for_ends(others, 60)
    wait_until(knows_both, 60)
    third = submit(asrpt, job("again-2", "sleep 4", 2))
    asrpt.wait_for_ends([third], 60)
    found = asrpt.gateway.get(f"/v1/predictions/{third}")

    assert [(each["group_seen"], each["gpu_s"]) for each in told] == [(False, 0.0)] * 2
    assert all(each["actual_gpu_s"] > 7 for each in told), "two GPUs for four seconds"
    assert (found["group_id"], found["group_seen"], found["examples"]) == (told[0]["group_id"], True, 2)
    assert found["gpu_s"] > 7
    came_to = sorted(each["actual_gpu_s"] for each in told)
    assert [found["low_gpu_s"], found["high_gpu_s"]] == pytest.approx(came_to, rel=1e-3)
    assert found["error_gpu_s"] == pytest.approx(found["gpu_s"] - found["actual_gpu_s"])
    shown = wattshift(asrpt, "job", third, "--json")
    assert json.loads(shown.stdout)["prediction"] == found
    assert "from 2 jobs" in " ".join(wattshift(asrpt, "job", third).stdout.split())
