"""The API keys of other people's model servers: from files, and from secrets of tenants."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.contracts.routing import RoutedServer, UpstreamKey
from tests.router.conftest import Stage, error_of
from tests.support.routers import MODEL, OPERATOR, ModelServer, a_routed_server, chat


async def test_an_endpoint_gets_its_own_key_and_its_own_name_of_the_model(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "lab-key").write_text("sk-upstream\n")
    lab = {"pool": None, "models": [MODEL], "upstream_model": "served-name", "upstream_key": "lab-key"}
    stage.plane.servers = [a_routed_server(stage.one, "endpoint:lab", **lab)]
    async with stage.router(keys_dir=tmp_path) as router:
        await router.adopted()
        answer = await router.ask(json=chat(temperature=0.5))
        assert answer.status_code == 200, answer.text
        assert stage.one.headers[0]["authorization"] == "Bearer sk-upstream"
        assert json.loads(stage.one.seen[0]) == chat(temperature=0.5, model="served-name")
        (tmp_path / "lab-key").unlink()
        router.router.upstream_keys.forget_files()
        assert error_of(await router.ask())[0] == 502


def a_lab(stage: Stage, set_at: str | None) -> RoutedServer:
    lab = {"pool": None, "models": [MODEL], "upstream_secret": "LAB_KEY", "upstream_secret_set_at": set_at}
    return a_routed_server(stage.one, "endpoint:lab", **lab)


def a_lab_key(value: str, set_at: str) -> UpstreamKey:
    return UpstreamKey.model_validate({"server": "endpoint:lab", "set_at": set_at, "value": value})


async def test_a_secret_that_is_set_again_is_the_key_of_the_next_request(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage.plane.servers = [a_lab(stage, "2026-11-22T10:00:00Z")]
    stage.plane.keys = [a_lab_key("sk-first", "2026-11-22T10:00:00Z")]
    async with stage.router(table_poll_s=1) as router:
        await router.adopted()
        for _ in range(2):
            assert (await router.ask()).status_code == 200
        stage.plane.servers = [a_lab(stage, "2026-11-22T11:00:00Z")]
        stage.plane.keys = [a_lab_key("sk-second", "2026-11-22T11:00:00Z")]
        await router.adopted()
        assert (await router.ask()).status_code == 200
        stage.plane.is_serving_up = False
        assert (await router.ask()).status_code == 200

    sent = [headers["authorization"] for headers in stage.one.headers]
    assert sent == ["Bearer sk-first"] * 2 + ["Bearer sk-second"] * 2
    assert stage.plane.keys_asked == 2
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "LAB_KEY" in kept
    assert "sk-" not in kept + caplog.text


def an_instance(stage: Stage, server: ModelServer, name: str = "instance_1") -> RoutedServer:
    return a_routed_server(server, name, upstream_secret_set_at="2026-11-25T10:00:00Z")


def an_instance_key(value: str, name: str = "instance_1") -> UpstreamKey:
    return UpstreamKey.model_validate({"server": name, "set_at": "2026-11-25T10:00:00Z", "value": value})


async def test_each_instance_is_sent_its_own_key_and_no_other(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage.plane.servers = [an_instance(stage, stage.one), an_instance(stage, stage.two, "instance_2")]
    stage.plane.keys = [an_instance_key("key-of-one"), an_instance_key("key-of-two", "instance_2")]
    async with stage.router() as router:
        await router.adopted()
        stage.one.gate = asyncio.Event()
        asking = [asyncio.create_task(router.ask()) for _ in range(4)]
        await stage.one.until(lambda: stage.one.held > 0)
        stage.plane.servers = stage.plane.servers[1:]
        await router.adopted()
        assert (await router.ask()).status_code == 200
        stage.one.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        shown = (await router.http.get("/status", headers=OPERATOR)).text
    sent = [{each["authorization"] for each in server.headers} for server in (stage.one, stage.two)]
    assert sent == [{"Bearer key-of-one"}, {"Bearer key-of-two"}]
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "key-of" not in kept + caplog.text + shown


async def test_an_instance_that_refuses_its_key_is_no_answer_to_the_client(stage: Stage) -> None:
    stage.plane.servers = [an_instance(stage, stage.one), a_routed_server(stage.two, "instance_2")]
    stage.plane.keys = [an_instance_key("key-of-one")]
    stage.one.status = 401
    async with stage.router() as router:
        await router.adopted()
        assert [(await router.ask()).status_code for _ in range(4)] == [200] * 4, "another one answers"
        stage.plane.servers = stage.plane.servers[:1]
        await router.adopted()
        assert (await router.ask()).status_code in (502, 503)


async def test_instances_answer_while_their_keys_cannot_be_fetched(stage: Stage) -> None:
    """A server that asks for none serves on; the table was kept, and serving is away."""
    stage.plane.servers = [an_instance(stage, stage.one)]
    stage.plane.keys = [an_instance_key("key-of-one")]
    async with stage.router() as router:
        await router.adopted()
        assert (await router.ask()).status_code == 200
    stage.plane.is_serving_up = False
    async with stage.router() as router:
        assert (await router.ask()).status_code == 200
        stage.plane.is_serving_up = True
        await router.router.upstream_keys.renew(())
        async with asyncio.timeout(20):
            while stage.one.headers[-1].get("authorization") != "Bearer key-of-one":
                assert (await router.ask()).status_code == 200
    assert [each.get("authorization") for each in stage.one.headers][:2] == ["Bearer key-of-one", None]


async def test_a_key_that_is_missing_or_refused_is_said_and_never_sent_elsewhere(stage: Stage) -> None:
    stage.plane.servers = [a_lab(stage, None)]
    async with stage.router() as router:
        await router.adopted()
        assert error_of(await router.ask()) == (502, "upstream_no_key")  # the secret was deleted
        stage.plane.servers = [a_lab(stage, "2026-11-22T10:00:00Z")]
        stage.plane.keys = [a_lab_key("two words", "2026-11-22T10:00:00Z")]
        await router.adopted()
        assert error_of(await router.ask()) == (502, "upstream_no_key")
        assert stage.one.seen == []
        stage.plane.servers = [a_lab(stage, "2026-11-22T11:00:00Z"), a_routed_server(stage.two, "two")]
        stage.plane.keys = [a_lab_key("sk-old", "2026-11-22T11:00:00Z")]
        stage.one.status = 401
        await router.adopted()
        answers = [await router.ask() for _ in range(6)]
    assert {answer.status_code for answer in answers} == {200}
    assert len(stage.two.seen) == 6
    assert all("authorization" not in headers for headers in stage.two.headers)
