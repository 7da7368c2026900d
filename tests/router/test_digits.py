"""A real application: digits read by models of two sizes behind the router, which says which of them answered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from sklearn.datasets import load_digits

from tests.router.conftest import Stage
from tests.support.app_instances import InstanceServer, a_routed_app, a_routed_instance
from tests.support.ports import Ports
from tests.support.servers import ROOT, wait_until

ASKED = 50


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def instances() -> Iterator[dict[str, InstanceServer]]:
    ports = Ports()
    found: dict[str, InstanceServer] = {}
    with ExitStack() as stack:
        stack.callback(ports.release)
        for variant in ("small", "large"):
            port = ports.take(29_150)
            own = {"WATTSHIFT_PORT": str(port), "WATTSHIFT_VARIANT": variant, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(ROOT / "examples" / "apps" / "digits_server.py")]
            process = stack.enter_context(subprocess.Popen(command, env=os.environ | own))
            stack.callback(process.terminate)
            wait_until(lambda port=port: is_ready(port), 120)
            found[variant] = InstanceServer(variant, f"http://127.0.0.1:{port}")
        yield found


@pytest.mark.slow
async def test_both_sizes_read_digits_and_the_header_names_the_one_that_did(
    stage: Stage, instances: dict[str, InstanceServer]
) -> None:
    digits = load_digits()
    stage.plane.apps = [a_routed_app("digits")]
    stage.plane.app_servers = [
        a_routed_instance(server, app="digits", variant=variant) for variant, server in instances.items()
    ]
    right = {"small": 0, "large": 0}
    asked = {"small": 0, "large": 0}
    async with stage.router() as router:
        await router.adopted()
        for image, digit in list(zip(digits.data, digits.target, strict=True))[-2 * ASKED :]:
            tensor = {"name": "images", "datatype": "FP32", "shape": [1, 64], "data": image.tolist()}
            answer = await router.ask("/v2/models/digits/infer", json={"inputs": [tensor]})
            variant = answer.headers["x-wattshift-variant"]
            assert answer.json()["parameters"]["variant"] == variant
            asked[variant] += 1
            right[variant] += answer.json()["outputs"][0]["data"] == [digit]
        assert (await router.ask("/v2/models/digits/infer", json={"inputs": []})).status_code == 400
    assert asked == {"small": ASKED, "large": ASKED}  # the one that has been free the longest serves
    assert right["small"] > 0.6 * ASKED
    assert right["large"] > 0.8 * ASKED
