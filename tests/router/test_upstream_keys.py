"""The API keys of other people's model servers: from files, and from secrets of tenants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.contracts.routing import RoutedServer, UpstreamKey
from tests.router.conftest import Stage, error_of
from tests.support.routers import MODEL, a_routed_server, chat


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
