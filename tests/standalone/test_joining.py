"""A second host joins by one command, over TLS with a certificate that is known by its fingerprint."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import ssl
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from gpu_agent.settings import AgentSettings
from services.cli.commands import CliError
from services.cli.main import app
from services.cli.site import join as module
from services.cli.site.local import _Up, up
from services.contracts.nodes import NodeCredential
from services.kit import files, heads
from services.kit.http import ServiceClient, new_session
from services.kit.problems import ProblemError
from services.kit.self_signed import fingerprint, new_certificate
from services.kit.settings import settings_faults
from services.kit.sockets import LISTEN, LISTEN_AT, handed_over
from services.kit.tls import Tls
from services.standalone import joining, remembered
from services.standalone.data_folder import DataFolder
from services.standalone.process import BadInputError
from services.standalone.stack import settle

OTHER_PIN = "0" * 64


def written(path: Path) -> Path:
    path.write_text(new_certificate("wattshift"))
    return path


class Telemetry:
    """What answers a host that joins, in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.certificate = written(folder / "telemetry.pem")
        self.pin = fingerprint(self.certificate.read_text())
        self.asked: list[tuple[str, str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        what = request.path.rpartition("/")[2]
        text = await request.text()
        self.asked.append((request.path, request.headers["authorization"], json.loads(text) if text else None))
        status, body = self.answers[what]
        kind = "application/json" if status < 400 else "application/problem+json"
        return web.Response(status=status, text=json.dumps(body), content_type=kind)


def refusal(status: int, detail: str) -> tuple[int, Any]:
    code = "unauthenticated" if status == 401 else "unavailable"
    return status, {"type": "urn:x", "title": "x", "status": status, "detail": detail, "code": code}


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    found, loop, is_up = Telemetry(tmp_path), asyncio.new_event_loop(), threading.Event()
    granted = NodeCredential(
        node_id="box", call_secrets=["00"], redis_user=None, redis_url=None, rotate_after_s=1e6
    ).model_dump()
    found.answers = {
        "enroll": (200, granted),
        "certificate": (200, {"pem": new_certificate("box")}),
        "leave": (204, None),
    }

    async def serve() -> None:
        plain = web.Application()
        plain.router.add_post("/v1/nodes/{node}/{what}", found.answer)
        runner = web.AppRunner(plain)
        await runner.setup()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(found.certificate, found.certificate)
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        found.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        is_up.set()
        await ended.wait()
        await runner.cleanup()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    is_up.wait()
    yield found
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


class StartedError(Exception):
    """The agent was started."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, str]]:
    """The environments in which agents are started, instead of being started."""
    found: list[dict[str, str]] = []

    def start(program: str, words: list[str], environment: dict[str, str]) -> None:
        assert words[-2:] == ["-m", "gpu_agent.app"]
        found.append(environment)
        raise StartedError

    monkeypatch.setattr(os, "execve", start)
    monkeypatch.setattr(os, "chdir", lambda _: None)
    for name in [name for name in os.environ if name.startswith(("GPU_AGENT_", "WATTSHIFT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPU_AGENT_DRIVER", "simulated")
    monkeypatch.setenv("WATTSHIFT_DATA_DIR", str(tmp_path / "data"))
    return found


def typed(*words: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, [*words], input=given)


def refused(result: Result, *parts: str) -> None:
    assert isinstance(result.exception, CliError), (result.output, result.exception)
    for part in parts:
        assert part in str(result.exception)
    assert result.exception.exit_code


SOURCES: dict[str, Callable[[str, Path, pytest.MonkeyPatch], tuple[list[str], str | None]]] = {
    "argument": lambda token, folder, patch: ([token], None),
    "standard input": lambda token, folder, patch: (["-"], f"{token}\n"),
    "file": lambda token, folder, patch: (
        ["--token-file", str(folder / "token")] if (folder / "token").write_text(f" {token}\n") else [],
        None,
    ),
    "environment": lambda token, folder, patch: (patch.setenv("WATTSHIFT_JOIN_TOKEN", token) or [], None),
}


@pytest.mark.parametrize("source", SOURCES)
def test_one_command_makes_a_host_a_node_and_starts_its_agent(
    telemetry: Telemetry, started: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("GPU_AGENT_SIMULATED_GPUS", "3")
    words, given = SOURCES[source](f"wse_x.{telemetry.pin}", tmp_path, monkeypatch)
    result = typed("join", telemetry.url, *words, "--name", "box", given=given)
    assert isinstance(result.exception, StartedError), (result.output, result.exception)

    (enrolled, certified) = telemetry.asked
    assert enrolled[:2] == ("/v1/nodes/box/enroll", "Bearer wse_x")
    assert enrolled[2]["role"] == "agent"
    assert certified[0] == "/v1/nodes/box/certificate"
    place = tmp_path / "data" / "joined"
    for path in place.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    (environment,) = started
    assert "WATTSHIFT_JOIN_TOKEN" not in environment, "nobody needs it any more"
    assert settings_faults(AgentSettings, environment) == []
    for name, value in {
        "GPU_AGENT_NODE_ID": "box",
        "GPU_AGENT_ADDRESS": "127.0.0.1",
        "GPU_AGENT_RELAYED": "true",
        "GPU_AGENT_TLS_PIN": telemetry.pin,
        "GPU_AGENT_SIMULATED_GPUS": "3",
        "WATTSHIFT_TELEMETRY_URL": telemetry.url,
    }.items():
        assert environment[name] == value

    monkeypatch.delenv("GPU_AGENT_SIMULATED_GPUS")
    monkeypatch.delenv("GPU_AGENT_DRIVER")
    again = typed("join")
    assert isinstance(again.exception, StartedError)
    assert {**started[1], **environment} == started[1] | environment
    assert started[1]["GPU_AGENT_SIMULATED_GPUS"] == "3", "what was set when it joined is remembered"
    refused(typed("join", telemetry.url, "t"), "this host is box of", "wattshift leave")
    assert len(telemetry.asked) == 2


def test_a_host_leaves_and_keeps_what_its_jobs_wrote(
    telemetry: Telemetry, started: list[dict[str, str]], tmp_path: Path
) -> None:
    token = f"wse_x.{telemetry.pin}"
    refused(typed("leave"), "has not joined")
    assert isinstance(typed("join", telemetry.url, token, "--name", "box").exception, StartedError)
    state = Path(started[0]["GPU_AGENT_STATE_DIR"])
    (state / "checkpoints").mkdir()
    telemetry.answers["leave"] = refusal(503, "The installation does not answer.")
    refused(typed("leave"), "does not answer", "wattshift nodes revoke box")
    assert isinstance(typed("join").exception, StartedError), "it has not left"

    telemetry.answers["leave"] = (204, None)
    left = typed("leave")
    assert (left.exit_code, telemetry.asked[-1][0]) == (0, "/v1/nodes/box/leave")
    assert (state / "checkpoints").exists()
    refused(typed("join"), "has not joined")
    assert isinstance(typed("join", telemetry.url, token, "--name", "box").exception, StartedError)
    assert Path(started[-1]["GPU_AGENT_STATE_DIR"]) == state, "the same node of the same installation"
    telemetry.answers["leave"] = refusal(401, "This node has no credential; enrol it.")
    assert typed("leave").exit_code == 0, "it was revoked there"
    assert isinstance(typed("join", telemetry.url, token, "--name", "box2").exception, StartedError)
    assert Path(started[-1]["GPU_AGENT_STATE_DIR"]) != state, "another node does not report what this one has left"


def test_a_token_that_lets_nobody_in_changes_nothing(
    telemetry: Telemetry, started: list[dict[str, str]], tmp_path: Path
) -> None:
    telemetry.answers["enroll"] = refusal(401, "This token was used before.")
    token = f"wse_x.{telemetry.pin}"
    refused(typed("join", telemetry.url, token), "This token was used before.")
    assert not (tmp_path / "data").exists()
    (tmp_path / "data").mkdir()
    refused(typed("join", telemetry.url, token), "This token was used before.")
    assert list((tmp_path / "data").iterdir()) == []
    assert started == []


def test_an_answer_that_was_lost_costs_no_token(
    telemetry: Telemetry, started: list[dict[str, str]], tmp_path: Path
) -> None:
    """What is asked again has the same keys, whatever answer was lost."""
    token, answers = f"wse_x.{telemetry.pin}", dict(telemetry.answers)
    for what in ("enroll", "certificate"):
        telemetry.answers[what] = refusal(503, "It does not answer.")
        refused(typed("join", telemetry.url, token, "--name", "box"), "The same command goes on")
        telemetry.answers = dict(answers)
    assert isinstance(typed("join", telemetry.url, token, "--name", "box").exception, StartedError)
    enrolled = [body for path, _, body in telemetry.asked if path.endswith("enroll")]
    assert len(enrolled) == 2
    assert enrolled[0] == enrolled[1]


def test_a_full_disk_is_one_clear_error_and_the_same_command_goes_on(
    telemetry: Telemetry, started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = f"wse_x.{telemetry.pin}"
    for name in ("certificate.pem", module.SETTINGS):
        with monkeypatch.context() as patched:
            patched.setattr(files, "replace", _full_for(name))
            refused(typed("join", telemetry.url, token, "--name", "box"), "No space left on device", "goes on")
    assert isinstance(typed("join", telemetry.url, token, "--name", "box").exception, StartedError)
    assert len([path for path, _, _ in telemetry.asked if path.endswith("enroll")]) == 1
    telemetry.answers["leave"] = (204, None)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda *_, **__: _full_for("x")(Path("x"), b""))
        refused(typed("leave"), "No space left on device", "goes on")
    assert typed("leave").exit_code == 0


def _full_for(name: str) -> Callable[..., None]:
    """Return what writes files on a disk that has no room for one of them."""
    write = files.replace

    def replace(path: Path, content: bytes, **options: Any) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content, **options)

    return replace


def test_nothing_is_sent_to_who_shows_another_certificate(
    telemetry: Telemetry, started: list[dict[str, str]], tmp_path: Path
) -> None:
    refused(typed("join", telemetry.url, f"wse_x.{OTHER_PIN}"), "another certificate")
    assert (telemetry.asked, (tmp_path / "data").exists()) == ([], False)


def test_bad_words_are_one_clear_error(
    telemetry: Telemetry, started: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = f"wse_x.{telemetry.pin}"
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    for words, said in {
        ("join",): "has not joined",
        ("join", "--name", "x"): "go with the URL",
        ("join", telemetry.url): "there is no token",
        ("join", telemetry.url, "wse_x"): "no token of `wattshift up --listen`",
        ("join", telemetry.url, "--token-file", str(tmp_path / "none")): "cannot be read",
        ("join", "http://127.0.0.1:1", good): "is not https://HOST:PORT",
        ("join", "https://127.0.0.1", good): "is not https://HOST:PORT",
        ("join", "https://127.0.0.1:x", good): "is not https://HOST:PORT",
        ("join", "https://[::1", good): "is not https://HOST:PORT",
        ("join", f"https://{'x' * 70}:1", good): "does not answer over TLS",
        ("join", f"https://127.0.0.1:{port}", good): "does not answer over TLS",
        ("join", telemetry.url, good, "--name", "a b"): "the name of a node",
    }.items():
        refused(typed(*words), said)
    monkeypatch.setenv("GPU_AGENT_PORT", "x")
    refused(typed("join", telemetry.url, good), "GPU_AGENT_PORT=x")
    monkeypatch.setenv("GPU_AGENT_DRIVER", "auto")
    monkeypatch.setattr(module.processes, "lack_of_gpus", lambda: "NVML shows none")
    refused(typed("join", telemetry.url, good), "has no GPUs")
    assert (telemetry.asked, (tmp_path / "data").exists(), started) == ([], False, [])


@pytest.mark.parametrize("lost", ["GPU_AGENT_TLS_PIN", "WATTSHIFT_TELEMETRY_URL"])
def test_settings_that_lack_something_start_nothing(
    telemetry: Telemetry, started: list[dict[str, str]], tmp_path: Path, lost: str
) -> None:
    assert isinstance(typed("join", telemetry.url, f"wse_x.{telemetry.pin}").exception, StartedError)
    path = tmp_path / "data" / "joined" / "agent.env"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith(lost)))
    refused(typed("join"), f"does not set {lost}")
    refused(typed("leave"), f"does not set {lost}")
    assert len(started) == 1


async def test_one_certificate_is_known_and_no_other(telemetry: Telemetry) -> None:
    async def reaches(pin: str) -> bool:
        async with new_session(tls=Tls(pin=pin)) as session:
            client = ServiceClient(session, telemetry.url, "the peer")
            try:
                await client.request("POST", "/v1/nodes/a/leave", headers={"authorization": "x"})
            except ProblemError:
                return False
            return True

    assert not await reaches(OTHER_PIN)
    assert telemetry.asked == [], "it was sent nothing"
    assert await reaches(telemetry.pin)
    assert len(telemetry.asked) == 1


def test_a_pin_needs_tls() -> None:
    environment = {"GPU_AGENT_TLS_PIN": OTHER_PIN, "WATTSHIFT_SERVICE_TOKEN": "x" * 16}
    assert settings_faults(AgentSettings, {**environment, "WATTSHIFT_TELEMETRY_URL": "https://a:1"}) == []
    (fault,) = settings_faults(AgentSettings, {**environment, "WATTSHIFT_TELEMETRY_URL": "http://a:1"})
    assert "https://" in fault


class _InThisLoop(heads.Server):
    def __init__(self, config: heads.ServerConfig) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


@asynccontextmanager
async def serving(certificate: Path, sockets: list[socket.socket]) -> AsyncIterator[None]:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    options = Tls(certificate, certificate).server()
    server = _InThisLoop(heads.ServerConfig(answer, lifespan="off", **options))
    running = asyncio.create_task(server.serve(sockets=sockets))
    await server.is_up.wait()
    try:
        yield
    finally:
        server.should_exit = True
        await running


async def test_a_process_answers_others_over_tls_and_its_own_host_at_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = written(tmp_path / "c.pem")
    door = socket.create_server(("127.0.0.1", 0))
    port = door.getsockname()[1]
    monkeypatch.setenv(LISTEN, str(door.detach()))
    monkeypatch.setenv(LISTEN_AT, str(tmp_path / "s.sock"))
    sockets = handed_over()
    assert len(sockets) == 2
    async with serving(certificate, sockets):
        pin = fingerprint(certificate.read_text())
        async with new_session(tls=Tls(pin=pin)) as session, session.get(f"https://127.0.0.1:{port}") as answer:
            assert await answer.text() == "https"
        connector = aiohttp.UnixConnector(str(tmp_path / "s.sock"))
        async with aiohttp.ClientSession(connector=connector) as session, session.get("http://here/") as answer:
            assert await answer.text() == "http"
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://127.0.0.1:{port}")


def test_a_door_has_one_certificate_for_good(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    folder.make()
    first = joining.settings(folder, "10.0.0.1", 8443)
    path = Path(first["WATTSHIFT_TLS_CERT"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_text()
    again = joining.settings(folder, "::1", 9)
    assert path.read_text() == before, "nodes know it"
    assert [each["TELEMETRY_JOIN_URL"] for each in (first, again)] == ["https://10.0.0.1:8443", "https://[::1]:9"]
    shown = joining.settings(folder, "0.0.0.0", 8443)["TELEMETRY_JOIN_URL"]
    assert "0.0.0.0" not in shown, "others cannot reach that"
    path.write_text("")
    with pytest.raises(BadInputError, match="cannot use"):
        joining.settings(folder, "10.0.0.1", 8443)


def test_what_listen_says_is_checked_and_remembered(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    folder.make()
    for text in ("8443", "a:b", "a:0", "a:65536", "a b:1", "-"):
        with pytest.raises(BadInputError, match="HOST:PORT"):
            settle(folder, "", None, {}, listen=text)
    assert joining.read_listen("[::1]:8443") == ("::1", 8443)
    for name in ("WATTSHIFT_TLS_CERT", "TELEMETRY_HOST", "TELEMETRY_PORT"):
        with pytest.raises(BadInputError, match=name):
            settle(folder, "", None, {name: "1"}, listen="0.0.0.0:8443")
    remembered.write(folder, remembered.Options(nodes="", listen="0.0.0.0:8443"))
    assert settle(folder, None, None, {}).options.listen == "0.0.0.0:8443"
    ended = settle(folder, None, None, {}, listen="")
    assert (ended.options.listen, ended.changes) == ("", ("--listen was 0.0.0.0:8443, is now empty",))


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--listen"], joining.DEFAULT),
        (["--listen", "--json"], joining.DEFAULT),
        (["--listen", "10.0.0.1:1"], "10.0.0.1:1"),
        (["--listen", ""], ""),
        ([], None),
    ],
)
def test_listen_needs_no_place(words: list[str], place: str | None) -> None:
    import typer

    alone = typer.Typer()
    alone.command(cls=_Up)(up)
    command = typer.main.get_command(alone)
    assert command.make_context("up", words).params["listen"] == place
