"""An agent trades its token for a credential, keeps that to itself, and replaces it."""

from __future__ import annotations

import json
import stat

from tests.agent.conftest import Node, eventually
from tests.agent.stand_in import JOIN_TOKEN, headers_to


async def test_a_token_is_traded_once_and_the_credential_is_kept(node: Node) -> None:
    node.plane.answers_lost = 3
    await node.start(WATTSHIFT_NODE_JOIN_TOKEN="", GPU_AGENT_ENROLL_TOKEN=JOIN_TOKEN)
    file = node.state_dir / "credential.json"
    asked = node.plane.enrolled[node.id]
    kept = json.loads(file.read_text())

    assert len(asked) == 4
    assert len(set(asked)) == 1, "what was made is sent again until there is an answer"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert kept["asked"] is None
    assert JOIN_TOKEN not in file.read_text()

    node.kill()
    await node.start(WATTSHIFT_NODE_JOIN_TOKEN="", GPU_AGENT_ENROLL_TOKEN="")
    assert len(node.plane.enrolled[node.id]) == 4, "the credential was there"
    assert json.loads(file.read_text()) == kept


async def test_where_valkey_has_moved_to_is_known_after_a_start(node: Node) -> None:
    file = node.state_dir / "credential.json"
    node.plane.redis_url = "redis://before:6379/0"
    await node.start()
    before = json.loads(file.read_text())
    node.kill()
    node.plane.redis_url = "redis://now:6379/0"
    await node.start()

    await eventually(lambda: json.loads(file.read_text())["held"]["redis_url"] == "redis://now:6379/0")

    now = json.loads(file.read_text())["held"]
    assert before["held"] | {"redis_url": "redis://now:6379/0"} == now, "and nothing else is new"


async def test_secrets_are_replaced_by_themselves(node: Node) -> None:
    node.plane.rotate_after_s = 0.5
    await node.start()
    first = node.plane.enrolled[node.id][0]
    await eventually(lambda: len(set(node.plane.enrolled[node.id])) >= 3)
    heard = len(node.plane.heartbeats)
    await eventually(lambda: len(node.plane.heartbeats) > heard)

    assert node.plane.enrolled[node.id][-1] != first
    assert (await node.get("/v1/state"))[0] == 200


async def test_an_agent_whose_credential_is_refused_tries_the_token_that_it_has_now(node: Node) -> None:
    await node.start()
    node.plane.enrolled.clear()
    node.plane.forget_tokens()
    heard = len(node.plane.heartbeats)
    (node.state_dir / "enroll-token").write_text(JOIN_TOKEN + "\n")
    await eventually(lambda: len(node.plane.heartbeats) > heard)

    assert node.plane.enrolled[node.id]


async def test_an_agent_asks_for_a_new_secret_of_services_when_it_is_called_with_one(node: Node) -> None:
    await node.start()
    old, new = (
        headers_to(node.id, nodes_secret=it)["authorization"].split()[1] for it in (b"secret-of-the-nodes", b"n")
    )
    assert (await node.get("/v1/state", token=old))[0] == 200
    node.plane.nodes_secret = b"n"

    assert (await node.get("/v1/state", token=new))[0] == 200
    assert (await node.get("/v1/state", token=old))[0] == 401, "what was dropped is accepted no more"
    node.plane.nodes_secret = b"another"
    stranger = headers_to(node.id, nodes_secret=b"stranger")["authorization"].split()[1]
    assert (await node.get("/v1/state", token=stranger))[0] == 401
    assert (await node.get("/v1/state", token=new))[0] == 200, "asked once in a while alone"
