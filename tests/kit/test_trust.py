"""Where the network has to be trusted, every process says so when it starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

from services.kit import app as kit_app
from services.kit.settings import SharedSettings
from services.kit.sockets import LISTEN, LISTEN_AT
from services.kit.tls import trusts_network
from services.router import app as router_app
from services.router.settings import RouterSettings
from tests.support.tokens import TOKEN

VERIFIED = "postgresql://u:p@db:5432/w?sslmode=verify-full&sslrootcert=/etc/ca.crt"


@pytest.mark.parametrize(
    ("url", "trusts"),
    [
        (VERIFIED, False),
        ("postgresql://u:p@db1:5432,db2:5432/w", True),
        ("postgresql://u:p@127.0.0.1/w?sslmode=require", True),
        ("postgresql://u:p@db/w?sslmode=verify-ca", True),
        ("postgresql://db/w?user=u&password=p", True),
        ("postgresql://u@db/w", False),
        ("postgresql://u:p@/w?host=/run/wattshift-1/postgres&port=5432", False),
        ("postgresql://u:p@/w?host=db", True),
        ("redis://127.0.0.1:6379/0", False),
        ("redis://:p@127.0.0.1:6379/0", True),
        ("redis+sentinel://u:p@s1:1,s2:2/0?master=m", True),
        ("redis+sentinel://s1:1/0?master=m&sentinel_password=p", True),
        ("rediss+sentinel://u:p@s1:1,s2:2/0?master=m", False),
        ("rediss://:p@valkey:6379/0", False),
        ("rediss://:p@valkey:6379/0?ssl_cert_reqs=none", True),
        ("unix://:p@/run/wattshift-1/valkey.sock?db=0", False),
        ("", False),
    ],
)
def test_a_password_for_whoever_listens_is_known(url: str, trusts: bool) -> None:
    assert trusts_network(url) is trusts


def run(kind: str, settings: SharedSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    """Start a process up to where it would answer; return what it logged."""
    caplog.clear()
    caplog.set_level("INFO")
    for module in (kit_app, router_app):
        monkeypatch.setattr(module, "configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(uvicorn.Server, "run", lambda _, sockets: [each.close() for each in sockets])
    if kind == "router":
        assert isinstance(settings, RouterSettings)
        router_app.run_worker(settings, kit_app.handed_over())
    else:
        with pytest.raises(SystemExit):
            kit_app.serve(FastAPI(), "telemetry", settings, "0.0.0.0", 8060)
    return " ".join(
        f"{each.levelname} {each.getMessage()} {vars(each)}"
        for each in caplog.records
        if each.getMessage() == "network.trusted"
    )


@pytest.mark.parametrize("kind", ["router", "other"])
def test_a_process_says_so_when_it_starts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_ends = {"database_url": "postgresql://u:secret@db/w", "redis_url": "redis://:secret@127.0.0.1"}
    settings = RouterSettings(service_token=TOKEN, data_dir=tmp_path, **open_ends)
    with socket.create_server(("0.0.0.0", 0)) as server:
        monkeypatch.setenv(LISTEN, str(server.detach()))
        said = run(kind, settings, monkeypatch, caplog)
    assert said.count("WARNING network.trusted") == 3
    assert "0.0.0.0:" in said
    assert "secret" not in said
    monkeypatch.setenv(LISTEN_AT, str(tmp_path / "s.sock"))
    closed = RouterSettings(service_token=TOKEN, data_dir=tmp_path, database_url=VERIFIED)
    assert run(kind, closed, monkeypatch, caplog) == ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(LISTEN, str(server.detach()))
        assert run(kind, closed, monkeypatch, caplog).startswith("INFO network.trusted")
