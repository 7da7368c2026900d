"""The pods of inference pools as endpoints: a stand-in API server and a stand-in control plane, a real registrar."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client

from services.contracts.engines import node_name
from services.contracts.routing import EndpointSpec
from services.engines.kueue.cluster import Cluster
from services.engines.kueue.servers import Registrar, ServersSettings
from services.kit.bridges.silent import EngineSilentError
from services.kit.problems import ProblemError

KEY = "ws_" + "o" * 43


class World:
    """An API server with pools and pods, a control plane with endpoints, and a model server at every pod's address."""

    def __init__(self) -> None:
        self.group = "inference.networking.k8s.io/v1"
        self.pools: list[dict[str, Any]] = []
        self.pods: dict[str, list[dict[str, Any]]] = {}
        self.endpoints: dict[str, dict[str, Any]] = {
            "mine": {"url": "http://10.0.0.9:1", "models": ["m"], "location": "x"}
        }
        self.writes: list[str] = []
        self.models: object = {"data": [{"id": "llama"}, {"id": "llama-lora"}]}
        self.refused: set[str] = set()
        self.is_down = False
        self.port = 0

    def pod(self, name: str, *, ready: bool = True, ip: str = "127.0.0.1", ending: bool = False) -> dict[str, Any]:
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        metadata = {"name": name, **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if ending else {})}
        return {"metadata": metadata, "status": {"podIP": ip, "phase": "Running", "conditions": conditions}}

    def pool(self, name: str, **annotations: str) -> None:
        said = {f"wattshift.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
        spec = {"selector": {"matchLabels": {"app": name}}, "targetPorts": [{"number": self.port}]}
        self.pools.append({"metadata": {"name": name, "annotations": said}, "spec": spec})

    async def answer(self, request: web.Request) -> web.Response:
        if self.is_down:
            raise web.HTTPServiceUnavailable
        path = request.path
        if path == f"/apis/{self.group}/namespaces/models/inferencepools":
            return web.json_response({"items": self.pools})
        if path == "/api/v1/namespaces/models/pods":
            items = self.pods.get(request.query["labelSelector"], [])
            return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})
        if path == "/v1/models":
            return web.json_response(self.models)
        if not path.startswith("/v1/endpoints"):
            raise web.HTTPNotFound(text="{}", content_type="application/json")
        assert request.headers["authorization"] == f"Bearer {KEY}"
        name = path.removeprefix("/v1/endpoints").removeprefix("/")
        if request.method == "GET":
            at = {"tenant_id": "acme", "created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z"}
            items = [{"name": each, "spec": spec, **at} for each, spec in sorted(self.endpoints.items())]
            # pages of one: whoever reads only the first does not know its own again
            begin = next(
                (i for i, each in enumerate(items) if each["name"] > request.query.get("cursor", "")), len(items)
            )
            more = begin + 1 < len(items)
            return web.json_response(
                {"items": items[begin : begin + 1], "next_cursor": items[begin]["name"] if more else None}
            )
        self.writes.append(f"{request.method} {name}")
        if name in self.refused:
            problem = {"type": "", "title": "", "status": 422, "detail": "Not in a network.", "code": "invalid_request"}
            return web.json_response(problem, status=422)
        if request.method == "PUT":
            self.endpoints[name] = EndpointSpec.model_validate_json(await request.read()).model_dump(mode="json")
        elif self.endpoints.pop(name, None) is None:
            problem = {"type": "", "title": "", "status": 404, "detail": "None.", "code": "not_found"}
            return web.json_response(problem, status=404)
        return web.json_response({})

    @property
    def ours(self) -> dict[str, dict[str, Any]]:
        return {name: each for name, each in self.endpoints.items() if name != "mine"}


@contextlib.asynccontextmanager
async def running(tmp_path: Path, world: World) -> AsyncIterator[Registrar]:
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", world.answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        world.port = server.port or 0
        url = f"http://127.0.0.1:{world.port}"
        settings = ServersSettings.model_validate(
            {
                "control_plane_url": url,
                "key_file": key,
                "namespace": "models",
                "node_id": "eu",
                "own_zone": "DE",
                "state_dir": tmp_path,
            }
        )
        configuration: Any = client.Configuration()
        configuration.host = url
        async with client.ApiClient(configuration) as api:
            yield Registrar(settings, Cluster(settings, api), session)


async def test_pods_are_registered_drained_and_removed(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path, world) as registrar:
        world.pool("chat", power_w="450", capacity="32")
        world.pods["app=chat"] = [world.pod("chat-a"), world.pod("chat-b", ready=False)]
        await registrar.look()
        (found,) = world.ours.values()
        assert found["url"] == f"http://127.0.0.1:{world.port}"
        assert (found["models"], found["location"], found["zone"]) == (["llama", "llama-lora"], "eu", "DE")
        assert (found["power_w"], found["capacity"], found["draining"]) == (450, 32, False)
        world.pods["app=chat"] = [world.pod("chat-a", ending=True), world.pod("chat-b")]
        await registrar.look()
        assert {name: each["draining"] for name, each in world.ours.items()} == {"eu.chat-a": True, "eu.chat-b": False}
        world.writes.clear()
        await registrar.look()
        assert world.writes == [], "what has not changed is not written again"
        world.pods["app=chat"] = []
        del world.endpoints["eu.chat-b"]  # an operator was faster
        await registrar.look()
        assert set(world.endpoints) == {"mine"}, "of what others have registered, nothing is touched"


async def test_one_that_starts_again_knows_its_own(tmp_path: Path) -> None:
    world = World()
    world.endpoints["eu.left-behind"] = {"url": "http://10.0.0.7:1", "models": ["m"], "location": "eu"}
    world.endpoints["europe.x"] = {"url": "http://10.0.0.8:1", "models": ["m"], "location": "europe"}
    async with running(tmp_path, world) as registrar:
        await registrar.look()
    assert set(world.endpoints) == {"mine", "europe.x"}


async def test_what_one_server_lacks_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    async with running(tmp_path, world) as registrar:
        world.pool("broken", capacity="many")
        world.pool("refused")
        world.pool("chat", models="gpt, gpt-mini")
        for name in ("broken", "refused", "chat"):
            world.pods[f"app={name}"] = [world.pod(f"{name}-a")]
        world.pods["app=refused"].append(world.pod("silent-a", ip="127.255.255.254"))
        world.refused = {"eu.refused-a"}
        for _ in range(3):
            await registrar.look()
        assert {name: each["models"] for name, each in world.ours.items()} == {"eu.chat-a": ["gpt", "gpt-mini"]}
        said = [each.getMessage() for each in caplog.records if "not_registered" in each.getMessage()]
        assert len(said) == 3, "each is said once"
        world.refused = set()
        await registrar.look()
        assert "eu.refused-a" in world.ours


async def test_a_pool_that_cannot_be_read_keeps_nobody_back_and_removes_nothing(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path, world) as registrar:
        world.pool("chat")
        world.pods["app=chat"] = [world.pod("chat-a")]
        await registrar.look()
        world.pools[0]["spec"].pop("targetPorts")
        world.pool("new")
        world.pods["app=new"] = [world.pod("new-a")]
        await registrar.look()
        assert set(world.ours) == {"eu.chat-a", "eu.new-a"}
        world.pools = world.pools[1:]
        await registrar.look()
        assert set(world.ours) == {"eu.new-a"}


async def test_a_pool_without_labels_has_no_pods(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path, world) as registrar:
        world.pool("all")
        world.pools[0]["spec"]["selector"] = {"matchLabels": {}}
        world.pods[""] = [world.pod("somebody-elses")]
        await registrar.look()
        assert world.ours == {}


@pytest.mark.parametrize("models", [{}, [], {"data": {}}, {"data": [{"id": 1}, 2]}, "x", None])
async def test_an_answer_without_models_registers_nothing(tmp_path: Path, models: object) -> None:
    world = World()
    world.models = models
    async with running(tmp_path, world) as registrar:
        world.pool("chat")
        world.pods["app=chat"] = [world.pod("chat-a")]
        await registrar.look()
        assert world.ours == {}


async def test_without_an_api_server_nothing_changes(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path, world) as registrar:
        world.pool("chat")
        world.pods["app=chat"] = [world.pod("chat-a")]
        await registrar.look()
        world.is_down = True
        with pytest.raises((EngineSilentError, ProblemError)):
            await registrar.look()
        assert set(world.ours) == {"eu.chat-a"}


async def test_pools_of_the_earlier_api_are_read_too(tmp_path: Path) -> None:
    world = World()
    world.group = "inference.networking.x-k8s.io/v1alpha2"
    async with running(tmp_path, world) as registrar:
        spec = {"selector": {"app": "chat"}, "targetPortNumber": world.port}
        world.pools = [{"metadata": {"name": "chat"}, "spec": spec}]
        world.pods["app=chat"] = [world.pod("chat-a")]
        await registrar.look()
        assert set(world.ours) == {"eu.chat-a"}


def test_long_names_stay_apart() -> None:
    names = {node_name("eu", "p" * 70 + end) for end in "ab"}
    assert len(names) == 2
    assert all(len(each) == 63 for each in names)
