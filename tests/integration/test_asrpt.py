"""A-SRPT, live: a gang of two nodes is placed as decided and its ranks see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.conftest import Installation
from tests.integration.test_submission_to_footprint import submit
from tests.support.servers import scratch_folder

TELL = (
    "echo NODE_RANK=$NODE_RANK WORLD_SIZE=$WORLD_SIZE MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$MASTER_PORT "
    "OFFSET=$WATTSHIFT_RANK_OFFSET LOCAL=$WATTSHIFT_LOCAL_WORLD_SIZE DEVICES=$CUDA_VISIBLE_DEVICES; sleep 2"
)


@pytest.fixture(scope="module")
def asrpt() -> Iterator[Installation]:
    """An installation under A-SRPT."""
    with scratch_folder() as folder:
        made = Installation(folder / "data")
        made.up()
        made.gateway.call("PUT", "/v1/policies/active", body={"name": "a-srpt", "parameters": {}})
        yield made
        made.down()


def job(name: str, command: str, gpus: int, **spec: Any) -> dict[str, Any]:
    return {"name": name, "command": ["sh", "-c", command], "gpus": {"min": gpus}, "grace_s": 1, **spec}


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
