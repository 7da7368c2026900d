"""NVIDIA's client for the Open Inference Protocol against the router, in front of the stand-in for an image model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.conftest import Stage
from tests.support.app_instances import APP, InstanceServer, a_routed_app, a_routed_instance
from tests.support.ports import Ports
from tests.support.routers import a_key
from tests.support.servers import ROOT, http_ready, wait_until

SCRIPT = """
import json, sys
import numpy, tritonclient.http as http

address, key, app = sys.argv[1:]
headers = {"Authorization": f"Bearer {key}"}
client = http.InferenceServerClient(address)
found = {"live": client.is_server_live(), "ready": client.is_server_ready()}
found["model_ready"] = client.is_model_ready(app, headers=headers)
found["unknown_ready"] = client.is_model_ready("unknown", headers=headers)
found["server"] = client.get_server_metadata()["name"]
found["inputs"] = client.get_model_metadata(app, headers=headers)["inputs"]
images = http.InferInput("image", [3, 4], "FP32")
images.set_data_from_numpy(numpy.zeros((3, 4), dtype=numpy.float32), binary_data=True)
result = client.infer(app, [images], headers=headers, model_version="1", request_id="r7")
found["labels"] = len(result.as_numpy("label"))
found["parameters"] = result.get_response()["parameters"]
try:
    client.infer(app, [images])
except http.InferenceServerException as error:
    found["error"] = [error.status(), error.message()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def triton_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tritonclient")
    venv.create(folder, with_pip=True)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "tritonclient[http]"]
    done = subprocess.run(install, check=False, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"tritonclient cannot be installed: {done.stderr[-300:]}")
    return folder / "bin" / "python"


@pytest.fixture
def instance() -> Iterator[InstanceServer]:
    ports = Ports()
    port = ports.take(29_100)
    command = [sys.executable, str(ROOT / "examples" / "apps" / "variant_server.py"), "--load-s", "0"]
    names = {"WATTSHIFT_PORT": str(port), "WATTSHIFT_VARIANT": "b3", "WATTSHIFT_SLICE": "2g", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=os.environ | names) as process:
        try:
            wait_until(lambda: http_ready(("127.0.0.1", port)))
            yield InstanceServer("one", f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            ports.release()


@pytest.mark.slow
async def test_tritons_client_infers_through_the_router(
    stage: Stage, triton_python: Path, instance: InstanceServer
) -> None:
    stage.plane.apps = [a_routed_app()]
    stage.plane.app_servers = [a_routed_instance(instance, variant="b3", slice="2g")]
    async with stage.router() as router:
        await router.adopted()
        asked = [str(triton_python), "-c", SCRIPT, router.url.removeprefix("http://"), a_key(), APP]
        client = await asyncio.create_subprocess_exec(*asked, stdout=subprocess.PIPE)
        output, _ = await client.communicate()
    found = json.loads(output)
    assert (found["live"], found["ready"], found["model_ready"], found["unknown_ready"]) == (True, True, True, False)
    assert (found["server"], found["inputs"][0]["name"], found["labels"]) == ("wattshift", "image", 3)
    assert found["parameters"] == {"variant": "b3", "slice": "2g"}
    assert found["error"][0] == "401"
    assert "API key" in found["error"][1]
