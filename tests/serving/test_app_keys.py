"""Instances of applications have keys as those of pools do, and none waits for a path that its server need not have."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.contracts.serving import InstanceState
from services.db.sealing import Sealer, new_instance_key, open_instance_key
from services.serving.controller.controller import Controller
from services.serving.controller.probes import KEYED_PATH, KeyCheck
from services.serving.instances import Instance

SEALER = Sealer("k" * 32)
TERMS: Any = SimpleNamespace(mode=SimpleNamespace(gpus=1, workload=None))


def a_controller(prober: Any = None) -> Any:
    return Controller(*cast("tuple[Any, Any, Any, Any]", (None, None, prober, None)), sealer=SEALER)


async def test_an_instance_of_an_application_gets_a_key_too() -> None:
    made: list[Any] = []

    async def add(found: list[Any]) -> None:
        made.extend(found)

    blueprint = SimpleNamespace(terms=lambda _: TERMS)
    for key, is_app in (("app:photos", True), ("chat", False)):
        owner = SimpleNamespace(key=key, tenant_id="t", blueprint=blueprint, is_app=is_app)
        plan, changes = SimpleNamespace(partition=None), SimpleNamespace(make=[(("here", "b1/1g"), None)])
        await a_controller()._make(SimpleNamespace(add=add), owner, plan, changes)
    keys = {open_instance_key(SEALER, each.sealed_key, "t", each.id) for each in made}
    assert len(keys) == 2


@pytest.mark.parametrize("found", KeyCheck)
@pytest.mark.parametrize("pool", ["app:photos", "chat"])
async def test_the_server_of_an_application_may_refuse_what_it_does_not_serve(pool: str, found: KeyCheck) -> None:
    asked: list[tuple[str, str]] = []

    async def key_check(url: str, key: str) -> KeyCheck:
        asked.append((url, key))
        return found

    sealed = new_instance_key(SEALER, "t", "instance_1")
    assert sealed is not None
    instance = Instance(
        *("instance_1", pool, "t", "here", "b1/1g", InstanceState.STARTING, TERMS, datetime.now(UTC)),
        sealed_key=sealed,
    )
    said = await a_controller(SimpleNamespace(key_check=key_check))._check_key(instance, "http://there")
    assert asked == [("http://there" + KEYED_PATH, open_instance_key(SEALER, sealed, "t", "instance_1"))]
    is_lenient = pool.startswith("app:") and found is KeyCheck.REFUSED
    assert said is (KeyCheck.UNCHECKED if is_lenient else found)
