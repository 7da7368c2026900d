"""A stranger on the port of a gateway or service, after its owner is gone, is sent no key and no token."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.cli.client import Gateway
from services.cli.commands import CliError
from services.kit.http import ServiceClient, new_session
from services.kit.problems import ProblemError
from wattshift import AsyncClient, Client, StrangerError, peers

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to listen as another user takes root")

KEY, ANSWER = "ws_secret", '{"items":[]}'
STRANGER, DAEMON = 2_000_001, 999
LISTENS = r"""
import os, socket, sys
how, host, user, port = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.setuid(user)
server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
if host == "::":
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((host, port))
server.listen()
print(server.getsockname()[1], flush=True)
if how == "waits":
    sys.stdin.read()
    server.settimeout(0)
while True:
    try:
        to, _ = server.accept()
    except BlockingIOError:
        break
    to.settimeout(10)
    try:
        if heard := to.recv(65536):
            print("HEARD", heard, flush=True)
        to.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"items":[]}')
    except OSError:
        pass
    to.close()
"""


class Listener:
    """A process of another user that listens."""

    def __init__(self, process: subprocess.Popen[str], how: str) -> None:
        self._process, self._how = process, how
        assert process.stdout
        self.port = int(process.stdout.readline())

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}"

    def heard(self) -> str:
        """Return all that it was sent; what reached it is printed before it is answered."""
        if self._how != "waits":
            self._process.terminate()
        return self._process.communicate()[0]


@contextmanager
def listening(how: str = "accepts", host: str = "127.0.0.1", user: int = STRANGER, port: int = 0) -> Iterator[Listener]:
    """Have another user listen, and accept, or not yet ("waits")."""
    command = ["/usr/bin/python3", "-c", LISTENS, how, host, str(user), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Listener(process, how)
        finally:
            process.kill()


def asked(url: str, trusted: tuple[int, ...] = ()) -> str:
    with Client(url, KEY, retries=0, timeout_s=2, trusted=trusted) as client:
        return client.request("GET", "/v1/jobs").text


@pytest.mark.parametrize(
    ("how", "host", "to"),
    [
        ("accepts", "127.0.0.1", "127.0.0.1"),
        ("waits", "127.0.0.1", "127.0.0.1"),
        ("accepts", "0.0.0.0", "127.0.0.1"),
        ("accepts", "::", "127.0.0.1"),
        ("waits", "::", "127.0.0.1"),
        ("accepts", "::", "[::1]"),
        ("waits", "::", "[::1]"),
    ],
)
def test_a_client_sends_a_stranger_no_key(how: str, host: str, to: str) -> None:
    with listening(how, host) as stranger:
        with pytest.raises(StrangerError, match=f"the user id {STRANGER} listens on port {stranger.port} "):
            asked(stranger.url(to))
        assert stranger.heard() == ""


async def test_nor_does_one_that_waits_for_nothing() -> None:
    with listening() as stranger:
        async with AsyncClient(stranger.url(), KEY, retries=0) as client:
            with pytest.raises(StrangerError):
                await client.job("job_1")
            with pytest.raises(StrangerError):
                async with client.stream("/v1/events"):
                    pass
        assert stranger.heard() == ""


def test_nor_does_the_command_line_which_says_who_it_is() -> None:
    with listening() as stranger:
        with pytest.raises(CliError, match="nothing was sent there") as refused:
            Gateway(stranger.url(), KEY).get("/v1/jobs")
        assert "\n" not in str(refused.value)
        assert stranger.heard() == ""


async def test_nor_does_a_service_or_an_agent(caplog: pytest.LogCaptureFixture) -> None:
    async with new_session() as session:
        with listening() as stranger:
            with pytest.raises(ProblemError, match="telemetry"):
                await ServiceClient(session, stranger.url(), "telemetry").request(
                    "GET", "/", headers={"authorization": f"Bearer {KEY}"}
                )
            assert "peer.not_believed" in caplog.text
            assert stranger.heard() == ""
        with listening(user=DAEMON) as known:
            assert await ServiceClient(session, known.url(), "telemetry").request("GET", "/") == ANSWER.encode()


@pytest.mark.parametrize(
    ("listener", "connection", "is_stranger"),
    [
        (peers.Holder(STRANGER, 7), peers.Holder(0, 0), True),
        (peers.Holder(0, 7), peers.Holder(0, 0), False),
        (peers.Holder(0, 7), peers.Holder(STRANGER, 8), True),
        (peers.Holder(STRANGER, 7), peers.Holder(0, 8), False),
        (None, peers.Holder(STRANGER, 8), True),
        (None, peers.Holder(0, 0), False),
        (peers.Holder(STRANGER, 7), None, False),
    ],
)
def test_a_connection_is_whose_it_was_accepted_by_and_before_that_whoever_listens(
    listener: peers.Holder | None, connection: peers.Holder | None, is_stranger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 6.17, a connection that waits to be accepted has the user id 0, as it has no inode."""
    here, there = ("127.0.0.1", 1), ("127.0.0.1", 2)
    found = {(there, None): listener, (there, here): connection}
    monkeypatch.setattr(peers, "_holder", lambda at, other: found[at, other])
    with pytest.raises(StrangerError) if is_stranger else contextlib.nullcontext():
        peers.check_peer(here, there)


def test_root_the_system_and_who_is_named_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (0, DAEMON):
        with listening(user=user) as known:
            assert asked(known.url()) == ANSWER
    with listening() as owner:
        assert asked(owner.url(), trusted=(STRANGER,)) == ANSWER
        monkeypatch.setenv(peers.ACCOUNT, str(STRANGER))
        assert asked(owner.url()) == ANSWER
        monkeypatch.setenv(peers.ACCOUNT, "nobody")
        with pytest.raises(StrangerError):
            asked(owner.url())
        monkeypatch.setenv(peers.ACCOUNT, "no-such-account")
        with pytest.raises(StrangerError, match="no-such-account: this machine has no such account"):
            asked(owner.url())


def test_the_owner_of_an_installation_is_believed_by_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTSHIFT_DATA_DIR", str(tmp_path))
    os.chown(tmp_path, STRANGER, -1)
    with listening() as owner:
        (tmp_path / "run.json").write_text(json.dumps({"urls": {"gateway": owner.url()}}))
        assert Gateway(owner.url(), KEY).get("/v1/jobs") == {"items": []}
        (tmp_path / "run.json").write_text(json.dumps({"urls": {"gateway": "http://127.0.0.1:1"}}))
        with pytest.raises(CliError, match="nothing was sent there"):
            Gateway(owner.url(), KEY).get("/v1/jobs")


def test_where_the_kernel_does_not_say_the_network_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> socket.socket:
        raise OSError(errno.EPROTONOSUPPORT, "no such protocol")

    peers.check_peer(("127.0.0.1", 1), ("127.0.0.1", 2))  # no such connection on this machine
    monkeypatch.setattr(peers.socket, "socket", none)
    peers.check_peer(("127.0.0.1", 1), ("127.0.0.1", 2))
