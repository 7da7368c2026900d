"""The stand-in for an image model: measured timing and power, one request at a time, two protocols."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from lab.inference.profiles import read_application
from services.contracts.apps import AppSpec
from services.core.domain.gpus import SLICE_SEVENTHS, gpu_model
from tests.support.app_instances import until
from tests.support.servers import ROOT

APPS = ROOT / "examples" / "apps"
SLOWER = 10
"""How many times slower than measured the examples run."""


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("variant_server", APPS / "variant_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["variant_server"] = module
    spec.loader.exec_module(module)
    return module


SERVER = loaded()
INFER = {"id": "7", "inputs": [{"name": "image", "datatype": "FP32", "shape": [2, 1], "data": [0.5, 1.5]}]}


@asynccontextmanager
async def running(
    service_s: float = 0.001, gpu_load: float = 0.5, load_s: float = 0.0, **wrong: Any
) -> AsyncGenerator[tuple[TestClient[Any, Any], Any]]:
    instance = SERVER.Instance(SERVER.Timing(service_s, 0.0, gpu_load), load_s, 1.0)
    instance.misbehaviour = SERVER.Misbehaviour(**wrong)
    api = SERVER.Api(instance, "b7", "2g")
    async with TestClient(TestServer(api.app(), handler_cancellation=True)) as client:
        yield client, instance


async def test_an_inference_labels_each_image_and_says_who_did() -> None:
    async with running() as (client, instance):
        answer = await (await client.post("/v2/models/photos/infer", json=INFER)).json()
        assert (answer["model_name"], answer["id"]) == ("photos", "7")
        (labels,) = answer["outputs"]
        assert labels["shape"] == [2]
        assert set(labels["data"]) <= set(SERVER.LABELS)
        assert answer["parameters"] == {"variant": "b7", "slice": "2g"}
        assert instance.served == 1


async def test_binary_tensors_follow_a_head_of_a_stated_length() -> None:
    async with running() as (client, _):
        head = json.dumps({"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 1]}]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        answer = await client.post("/v2/models/photos/infer", data=head + b"\x00\xff\x80\x3f", headers=headers)
        assert (await answer.json())["outputs"][0]["shape"] == [1]


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"inputs": [{"shape": ["x"]}]}', '{"inputs": [{"shape": [0]}]}'])
async def test_what_is_no_inference_is_refused_and_costs_no_time(body: str) -> None:
    async with running() as (client, instance):
        assert (await client.post("/v2/models/photos/infer", data=body)).status == 400
        assert instance.served == 0


async def test_it_serves_one_request_at_a_time_in_order() -> None:
    async with running(service_s=60.0) as (client, instance):
        first = asyncio.create_task(client.post("/any", data=b"1"))
        await until(lambda: instance.load() > 0.0)
        second = asyncio.create_task(client.post("/any", data=b"2"))
        instance.timing = SERVER.Timing(0.0, 0.0, 0.5)
        await (await client.get("/stand-in")).json()
        assert not second.done()
        first.cancel()  # a client that leaves ends its request
        found = await (await second).json()
        assert (found["variant"], found["method"], instance.served) == ("b7", "POST", 1)


async def test_it_is_ready_once_it_has_loaded() -> None:
    async with running(load_s=1e6) as (client, _):
        assert (await client.get("/v2/health/live")).status == 200
        assert (await client.get("/v2/health/ready")).status == 503
        assert (await client.get("/v2/models/photos/ready")).status == 503
    async with running() as (client, _):
        assert (await client.get("/v2/health/ready")).status == 200


async def test_it_misbehaves_as_asked() -> None:
    async with running() as (client, _):
        assert (await client.post("/stand-in", json={"fail_status": 500})).status == 200
        assert (await client.post("/any")).status == 500
        assert (await client.post("/stand-in", json={"fail_status": None, "drop": True})).status == 200
        with pytest.raises(aiohttp.ClientError):
            await client.post("/any")
        assert (await client.post("/stand-in", json={"nonsense": 1})).status == 400
        assert (await client.post("/stand-in", data="x")).status == 400


async def test_its_load_reaches_the_progress_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVER, "REPORT_S", 0.01)
    path = tmp_path / "progress"
    path.write_text('{"gpu_load": 0}')
    inode = path.stat().st_ino
    async with running(service_s=60.0, gpu_load=0.5) as (client, instance):
        busy, reports = asyncio.create_task(client.post("/any")), asyncio.create_task(instance.report(path))
        await until(lambda: json.loads(path.read_text())["gpu_load"] > 0.4)
        reports.cancel()
        busy.cancel()
    assert path.stat().st_ino == inode  # a job may write this file, but not into its folder
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("variant", "slice_name"), [("b1", "1g"), ("b7", "2g"), ("b5", "7g")])
def test_timing_and_power_are_the_measured_ones(variant: str, slice_name: str) -> None:
    found = SERVER.timing_of(variant, slice_name, "H200")
    application, board = read_application("efficientnet"), gpu_model("H200")
    at = application.variants.index(variant), SLICE_SEVENTHS.index(int(slice_name[0]))
    assert found.service_s == application.service_s[at]
    drawn_w = found.gpu_load * int(slice_name[0]) / 7 * (board.peak_w - board.idle_w)  # as simulated devices add it up
    assert drawn_w == pytest.approx(application.busy_w[at])


def test_a_variant_that_there_is_not_is_one_line() -> None:
    with pytest.raises(SystemExit, match="EfficientNet has the variants b1, b3, b5, b7"):
        SERVER.timing_of("b9", "1g", "H200")


@pytest.mark.parametrize("name", ["photos", "streets"])
def test_the_examples_have_the_measured_profiles(name: str) -> None:
    spec = AppSpec.model_validate_json((APPS / f"{name}.json").read_bytes())
    application = read_application("efficientnet")
    assert tuple(each.name for each in spec.variants) == application.variants
    for row, variant in enumerate(spec.variants):
        assert variant.accuracy_pct == application.accuracy[row]
        assert variant.command[-2:] == ["--slower", str(SLOWER)]
        for profile in variant.profiles:
            at = row, SLICE_SEVENTHS.index(int(profile.slice[0]))
            assert profile.service_ms == pytest.approx(1e3 * SLOWER * application.service_s[at], abs=0.01)
            assert profile.busy_w == pytest.approx(application.busy_w[at], abs=0.1)
