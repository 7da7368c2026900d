"""What a node knows of services, asked for anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.contracts.nodes import NodeCredential, NodeRole
from services.kit import enrolment as module
from services.kit.bridges.process import BridgeSettings
from services.kit.credentials import caller_key
from services.kit.enrolment import Enrolment
from services.kit.problems import ProblemError
from services.kit.tokens import Outgoing

OLD, NEW = b"old".ljust(32), b"new".ljust(32)


class Telemetry:
    """Answers nodes, with the secrets of services that there are now."""

    def __init__(self) -> None:
        self.call_secrets = [OLD]
        self.asked: list[str] = []

    async def call(self, method: str, path: str, answer: type[NodeCredential], **_: Any) -> NodeCredential:
        self.asked.append(path.rpartition("/")[2])
        secrets = [secret.hex() for secret in self.call_secrets]
        return answer(node_id="n1", call_secrets=secrets, redis_user=None, redis_url=None, rotate_after_s=10**6)


async def test_a_node_forgets_a_secret_that_was_dropped_within_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry = Telemetry()
    settings = BridgeSettings(node_id="n1", enroll_token="token", state_dir=tmp_path)
    node = Enrolment(settings, telemetry, NodeRole.ENGINE)  # pyright: ignore[reportArgumentType]
    await node.secret()
    telemetry.call_secrets = [NEW]

    def knows(secret: bytes) -> bool:
        sent = Outgoing("admission", "node/n1", caller_key(secret, "admission")).authorization()
        try:
            return bool(node.caller(sent, "GET", "/v1/state"))
        except ProblemError:
            return False

    await node.renew()
    assert (knows(OLD), knows(NEW), telemetry.asked) == (True, False, ["enroll"])
    now_s = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s + module.REFRESH_EVERY_S + 1)
    await node.renew()
    await node.renew()
    assert (knows(OLD), knows(NEW), telemetry.asked) == (False, True, ["enroll", "rotate"])
