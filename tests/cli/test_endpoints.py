"""``wattshift endpoints``: against gateway, admission and serving as processes, on real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import EXIT_NOT_FOUND, EXIT_REFUSED, CliError
from services.cli.main import app
from tests.support.services import services


@pytest.fixture(scope="module")
def address(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    settings = {"WATTSHIFT_ENDPOINT_NETWORKS": "10.8.0.0/16"}
    with (
        services(tmp_path_factory.mktemp("endpoints"), database_url, redis_url, **settings) as found,
        found.started("services.admission.app"),
        found.started("services.serving.app"),
        found.started("gateway.app", ready_path="/healthz"),
    ):
        yield found.urls["GATEWAY"], found.admin_key()


@pytest.fixture
def wattshift(address: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("WATTSHIFT_URL", address[0])
    monkeypatch.setenv("WATTSHIFT_API_KEY", address[1])

    def run(*words: str) -> Any:
        assert (app(["endpoints", *words], standalone_mode=False) or 0) == 0
        shown = capsys.readouterr().out
        return json.loads(shown) if "--json" in words else shown

    return run


def test_an_endpoint_is_registered_listed_and_deleted(wattshift: Any, tmp_path: Path) -> None:
    spec = tmp_path / "lab.json"
    spec.write_text(json.dumps({"url": "http://10.8.0.7:8000", "models": ["llama"], "location": "lab"}))
    assert wattshift("list") == "no endpoints\n"
    assert wattshift("set", "lab", str(spec)) == "lab serves llama at http://10.8.0.7:8000\n"
    assert [each["name"] for each in wattshift("list", "--json")] == ["lab"]
    assert "http://10.8.0.7:8000" in wattshift("list")
    assert wattshift("delete", "lab") == "lab is given no more requests\n"
    with pytest.raises(CliError) as missing:
        wattshift("delete", "lab")
    assert missing.value.exit_code == EXIT_NOT_FOUND


def test_an_address_outside_the_networks_is_refused_and_named(wattshift: Any, tmp_path: Path) -> None:
    spec = tmp_path / "metadata.json"
    spec.write_text(json.dumps({"url": "http://169.254.169.254", "models": ["llama"], "location": "lab"}))
    with pytest.raises(CliError, match=r"169\.254\.169\.254 lies in none of the networks") as refused:
        wattshift("set", "metadata", str(spec))
    assert refused.value.exit_code == EXIT_REFUSED
