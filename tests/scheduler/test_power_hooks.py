"""Hooks that power nodes: real commands, and a real controller on a local UDP port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.core.domain.errors import DomainError
from services.kit.settings import SECRET_VARIABLES
from services.scheduler.power.hooks import (
    CommandHook,
    Controller,
    HookError,
    IpmiHook,
    Target,
    build_hook,
    read_controllers,
)
from services.scheduler.settings import SchedulerSettings
from tests.support.servers import wait_until

NODE = Target("n1", "10.0.0.1")
PASSWORD = "a-secret-of-the-rack"


def sh(line: str, *more: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", line, *more)


async def test_a_command_gets_the_node_as_a_word_and_none_of_our_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "a-secret-of-ours")
    monkeypatch.setenv("RACK", "r7")
    out = tmp_path / "out"
    hook = CommandHook(sh('env > "$0"; echo "$1" >> "$0"', str(out), "{node};{address} $(id)"), sh("true"), 5)
    await hook.set_power(NODE, on=True)
    said = out.read_text()
    assert said.endswith("n1;10.0.0.1 $(id)\n")
    assert "RACK=r7\n" in said
    assert "a-secret-of-ours" not in said


async def test_a_command_that_fails_is_quoted_and_one_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    hook = CommandHook(
        sh("echo one; echo no such node >&2; exit 4"), sh('sleep 60 & echo $! > "$0"; wait', str(child)), 1
    )
    with pytest.raises(HookError, match=r"^no such node$"):
        await hook.set_power(NODE, on=True)
    with pytest.raises(HookError, match="took longer than 1 s"):
        await hook.set_power(NODE, on=False)
    wait_until(lambda: not lives(int(child.read_text())))


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def test_an_address_is_never_read_as_an_option() -> None:
    hook = CommandHook(sh("true"), sh("true"), 5)
    with pytest.raises(HookError, match="option"):
        await hook.set_power(Target("n1", "-rf"), on=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_power": "command"}, "needs SCHEDULER_NODE_POWER_ON_COMMAND"),
        ({"node_power": "command", "node_power_on_command": ["a", "{host}"]}, "no placeholder {host}"),
        ({"node_power": "command", "node_power_on_command": ["a", "{"]}, "SCHEDULER_NODE_POWER_ON_COMMAND"),
        ({"node_power": "ipmi"}, "needs SCHEDULER_NODE_POWER_FILE"),
        ({"node_power": "ipmi", "node_power_file": "/nowhere/bmc.toml"}, "No such file"),
    ],
)
def test_a_hook_that_cannot_work_is_refused_at_the_start(options: dict[str, Any], message: str) -> None:
    settings = SchedulerSettings(WATTSHIFT_SERVICE_TOKEN="a-token-of-sixteen-and-more", **options)
    with pytest.raises(DomainError, match=message):
        build_hook(settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[nodes.n1]\naddress = '1.2.3.4'\nuser = 'u'\n", "name either password_env or password_file"),
        ("[nodes.n1]\naddress = '1.2.3.4'\nuser = 'u'\npassword = 'p'\n", "password: is not a known field"),
        ("[nodes.n1]\nuser = 'u'\npassword_env = 'P'\n", "address: is required"),
        ("[node.n1]\n", "node: is not a known field"),
        ("[nodes.n1]\naddress = '1.2.3.4'\nuser = 'u'\npassword_env = 'P'\nport = 70000\n", "at most 65535, not 70000"),
        ("nodes = 3\n", "nodes: must be an object with named fields, not 3"),
        ("[", "bmc.toml"),
    ],
)
def test_a_list_of_controllers_that_does_not_hold_together_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bmc.toml"
    path.write_text(text)
    with pytest.raises(DomainError, match=message):
        read_controllers(path)


def test_a_password_that_is_not_there_and_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(address="1.2.3.4", user="u", password_env="NO_SUCH_SECRET")
    with pytest.raises(DomainError, match="the controller of n1: the environment has no NO_SUCH_SECRET"):
        IpmiHook({"n1": controller}, 5)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DomainError, match=r"pip install 'wattshift-control-plane\[ipmi\]'"):
        IpmiHook({}, 5)


def test_a_scheduler_that_cannot_power_nodes_says_so_in_one_line() -> None:
    environment = os.environ | {
        "WATTSHIFT_SERVICE_TOKEN": "a-token-of-sixteen-and-more",
        "SCHEDULER_NODE_POWER": "ipmi",
        "DATABASE_URL": "postgresql://127.0.0.1:1/none",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "services.scheduler.app"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    needs = "SCHEDULER_NODE_POWER=ipmi needs SCHEDULER_NODE_POWER_FILE, a list of controllers"
    assert ended.stderr.strip() == f"scheduler: {needs}"


CONTROLLER = """
import json, sys
from pathlib import Path
from pyghmi.ipmi import bmc
from pyghmi.ipmi.private.serversession import ServerSession

usual = ServerSession.create_open_session_response

def of_suite_3(self, request):
    # The library's controller speaks cipher suite 3 alone but accepts 17: refuse that, as one of its kind does.
    if request[12] != 1:
        return bytearray([request[0], 0x11, 0, 0]) + bytearray(request[4:8])
    return usual(self, request)

ServerSession.create_open_session_response = of_suite_3
port, log, stubborn = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "stubborn"

class Chassis(bmc.Bmc):
    state = "on"
    def do(self, what, state):
        self.state = state
        with log.open("a") as file:
            file.write(what + "\\n")
    def get_power_state(self): return self.state
    def power_on(self): self.do("on", "on")
    def power_off(self): self.do("off", "off")
    def power_shutdown(self): self.do("shutdown", "on" if stubborn else "off")
    def is_active(self): return False

chassis = Chassis({"admin": sys.argv[4]}, port=port)
log.write_text("")
chassis.listen()
"""


@pytest.fixture(params=["soft", "stubborn"])
def controller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, int, Path]]:
    """A controller whose host shuts down when asked to, and one whose host does not listen."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.bind(("::", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "chassis"
    words = [sys.executable, "-c", CONTROLLER, str(port), str(log), request.param, PASSWORD]
    process = subprocess.Popen(words)
    try:
        wait_until(log.exists)
        yield request.param, port, log
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


async def test_a_chassis_is_switched_softly_then_hard_and_read_back(
    controller: tuple[str, int, Path], tmp_path: Path
) -> None:
    kind, port, log = controller
    secret = tmp_path / "secret"
    secret.write_text(PASSWORD + "\n")
    entry = Controller(address="127.0.0.1", port=port, user="admin", password_file=secret, soft_s=1)
    hook = IpmiHook({"n1": entry}, 20)
    assert (hook.covers("n1"), hook.covers("n2")) == (True, False)
    for on in (False, False, True, True):
        await hook.set_power(NODE, on=on)
    down = ["shutdown"] if kind == "soft" else ["shutdown", "off"]
    assert log.read_text().split() == [*down, "on"]


async def test_a_controller_that_refuses_or_does_not_answer_is_named_and_no_secret_is(
    controller: tuple[str, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port, log = controller
    monkeypatch.setenv("RACK_SECRET", "another-secret")
    entry = {"address": "127.0.0.1", "user": "admin", "password_env": "RACK_SECRET"}
    wrong = IpmiHook({"n1": Controller(**entry, port=port)}, 20)
    with pytest.raises(HookError) as refused:
        await wrong.set_power(NODE, on=True)
    assert str(refused.value) == f"the controller at 127.0.0.1:{port}: Incorrect password provided"
    assert log.read_text() == ""
    absent = IpmiHook({"n1": Controller(**entry, port=1)}, 20)
    with pytest.raises(HookError, match=r"127\.0\.0\.1:1: ") as missed:
        await absent.set_power(NODE, on=True)
    assert "another-secret" not in json.dumps([str(refused.value), str(missed.value)])
