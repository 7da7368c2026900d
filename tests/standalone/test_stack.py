"""One installation with real servers and a stand-in for the services: folders, ports, secrets, being killed."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from services.kit.credentials import Credential
from services.standalone import processes
from services.standalone import stack as module
from services.standalone.data_folder import DataFolder
from services.standalone.doors import Door, Doors
from services.standalone.forks import POSSIBLE
from services.standalone.process import BadInputError, StackError
from services.standalone.processes import SERVICES, Node, Service, agent_process, parse_nodes, zones_of
from services.standalone.stack import Stack, down, erase, read_status
from tests.support.servers import ROOT, scratch_folder, wait_until

FAKE = Service("gateway", "tests.standalone.fake_service", "GATEWAY_", 8000)


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as folder:
        yield folder


@pytest.fixture(autouse=True)
def shared_servers(monkeypatch: pytest.MonkeyPatch, postgres_url: str, redis_url: str) -> None:
    """Most tests here are not about the servers, and start in half the time with those that run already."""
    for name in ("GATEWAY_PORT", "WATTSHIFT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DATABASE_URL", postgres_url)
    monkeypatch.setenv("REDIS_URL", redis_url)


@pytest.fixture
def own_servers(shared_servers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL")
    monkeypatch.delenv("REDIS_URL")


def a_stack(folder: Path, **options: object) -> Stack:
    return Stack(folder, **({"nodes": "", "services": (FAKE,), "workers": ()} | options))


def get(url: str) -> dict[str, str]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.usefixtures("own_servers")
async def test_processes_are_told_where_the_others_are(folder: Path) -> None:
    async with a_stack(folder, env={"CARBON_REPLAY_SPEED": "600"}) as stack:
        told = await asyncio.to_thread(get, stack.gateway_url)
        assert told["CARBON_REPLAY_SPEED"] == "600"
        assert told["WATTSHIFT_GATEWAY_URL"] == stack.gateway_url
        assert told["WATTSHIFT_DATA_DIR"] == str(folder)
        assert Credential.parsed(told["WATTSHIFT_SERVICE_CREDENTIAL"]).name == "gateway"
        assert not {"WATTSHIFT_SERVICE_TOKEN", "WATTSHIFT_NODE_JOIN_TOKEN", "DATABASE_URL"} & set(told)
        assert urlsplit(told["REDIS_URL"]).username == "gateway", "a user of its own"
        status = read_status(folder)
        assert (status.state, status.gateway_url, status.pid) == ("running", stack.gateway_url, os.getpid())
        assert [process.name for process in status.processes] == ["postgres", "valkey", "gateway"]
        assert all(process.pid and process.state == "running" for process in status.processes)
        assert [process.port is None for process in status.processes] == [True, True, False]
        assert (Path(status.sockets).stat().st_mode & 0o727, Path(status.sockets).stat().st_uid) == (
            0o700,
            os.geteuid(),
        )
        assert status.trusts_jobs == (os.geteuid() != 0)
        assert all(Path(process.socket).is_socket() for process in status.processes[:2])
    assert read_status(folder).state == "stopped"
    assert not Path(status.sockets).exists()


@pytest.mark.usefixtures("own_servers")
async def test_secrets_are_private_and_stay_the_same(folder: Path) -> None:
    async with a_stack(folder) as stack:
        credential = stack.identities.credential("gateway")
    private = [folder / "run.json", *(folder / "secrets").iterdir(), *(folder / "log").iterdir()]
    assert len(private) >= 8
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)
    async with a_stack(folder) as stack:
        assert stack.identities.credential("gateway") == credential
        assert module.credential_of("gateway", folder) == credential.text()
    with pytest.raises(BadInputError, match="is not a data folder"):
        module.credential_of("gateway", folder / "nothing")


async def test_the_same_folder_twice_is_refused_and_another_folder_is_not(folder: Path) -> None:
    async with a_stack(folder / "one") as one:
        with pytest.raises(StackError, match=f"already running at {one.gateway_url}"):
            await a_stack(folder / "one").start()
        with pytest.raises(StackError, match=f"already running at {one.gateway_url}"):
            module.up(folder / "one")
        with pytest.raises(BadInputError, match="SCHEDULER_ROUND_INTERVAL_S=abc: must be a valid number"):
            module.up(folder / "one", env={"SCHEDULER_ROUND_INTERVAL_S": "abc"})
        async with a_stack(folder / "two") as two:
            assert two.gateway_url != one.gateway_url
            port = urlsplit(two.gateway_url).port
            assert re.fullmatch(rf"port \d+ is taken.*: gateway has {port}", read_status(folder / "two").detail)
        assert read_status(folder / "one").state == "running"


async def test_a_port_that_was_asked_for_and_is_taken(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StackError, match=rf"port {port} is taken by .* \(process {os.getpid()}\)"):
            await a_stack(folder, port=port).start()
    assert read_status(folder).state == "failed"
    async with a_stack(folder, port=port) as stack:
        assert stack.gateway_url == f"http://127.0.0.1:{port}"


def test_a_preferred_port_that_is_taken_is_passed_over() -> None:
    first, second = Doors(), Doors()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert first.open("127.0.0.1", taken.getsockname()[1])[0] != taken.getsockname()[1]
    port, _ = first.open("127.0.0.1", 19_000)
    assert second.open("127.0.0.1", port)[0] != port
    first.close()
    assert second.open("127.0.0.1", port, exactly=True)[0] == port
    with pytest.raises(StackError, match=r"cannot listen on 192\.0\.2\.1: Cannot assign requested address"):
        second.open("192.0.2.1", port)
    second.close()


async def test_given_servers_are_used(folder: Path, postgres_url: str) -> None:
    async with a_stack(folder) as stack:
        assert [process.name for process in stack.status().processes] == ["gateway"]
        assert stack.environment["DATABASE_URL"] == postgres_url


async def test_a_service_that_cannot_start_stops_everything(folder: Path) -> None:
    broken = Service("gateway", "no.such.module", "GATEWAY_", 8000)
    stack = a_stack(folder, services=(broken,))
    with pytest.raises(StackError, match="No module named"):
        await stack.start()
    assert [process.state for process in stack.status().processes] == ["stopped"]
    failed = read_status(folder)
    assert failed.state == "failed"
    assert failed.detail.startswith("it did not start: gateway ended before it was ready: status 1")
    async with a_stack(folder):
        pass


def start_elsewhere(folder: Path) -> "subprocess.Popen[bytes]":
    """Run the stack of this module in a process of its own, as `python -m services.standalone` does the real one."""
    program = (
        "import asyncio, sys; from services.standalone.stack import serve\n"
        "from tests.standalone.test_stack import a_stack\n"
        "asyncio.run(serve(a_stack(sys.argv[1])))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, folder], cwd=ROOT)
    wait_until(lambda: read_status(folder).state == "running" or process.poll() is not None)
    return process


def test_down_stops_what_runs_elsewhere(folder: Path) -> None:
    process = start_elsewhere(folder)
    children = psutil.Process(process.pid).children()
    assert len(children) == 1 + POSSIBLE  # the service, and what forked it
    assert down(folder) is True
    assert process.wait() == 0
    assert not any(child.is_running() for child in children)
    assert read_status(folder).state == "stopped"
    assert down(folder) is False


@pytest.mark.usefixtures("own_servers")
def test_sigterm_while_it_starts(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "services.standalone", "--nodes", "2x4", "--data-dir", folder], cwd=ROOT
    )
    wait_until(lambda: bool(DataFolder(folder).status().processes))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert read_status(folder).state == "stopped"


@pytest.mark.usefixtures("own_servers")
def test_kill_9_of_everything_and_up_again(folder: Path) -> None:
    process = start_elsewhere(folder)
    old = read_status(folder)
    process.kill()
    process.wait()
    assert read_status(folder).state == "stopped"
    again = start_elsewhere(folder)
    try:
        new = read_status(folder)
        assert {p.name: p.restarts for p in new.processes} == {p.name: 0 for p in old.processes}
        assert not {p.pid for p in new.processes} & {p.pid for p in old.processes}
        assert new.sockets != old.sockets
        assert not Path(old.sockets).exists()
    finally:
        down(folder)
        assert again.wait() == 0


async def test_processes_that_outlived_their_supervisor_are_ended(folder: Path) -> None:
    """As on systems where a child is not tied to its parent: the next start ends what is written in run.json."""
    leftover = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
    stranger = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
    try:
        data = DataFolder(folder)
        data.make()
        started_at_s = psutil.Process(leftover.pid).create_time()
        dead = {"name": "old", "state": "running", "port": 1, "restarts": 0}
        processes = [
            {**dead, "pid": leftover.pid, "started_at_s": started_at_s},
            {**dead, "pid": stranger.pid, "started_at_s": started_at_s - 1_000},  # the id was given again since
        ]
        (folder / "run.json").write_text(json.dumps({"state": "running", "processes": processes}))
        async with a_stack(folder):
            assert leftover.poll() is not None
            assert stranger.poll() is None
    finally:
        leftover.kill()
        stranger.kill()
        leftover.wait()
        stranger.wait()


def test_without_gpus_nothing_is_simulated_unless_somebody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "lack_of_gpus", lambda: "NVML does not answer (Driver/library version mismatch)")
    with pytest.raises(BadInputError, match=r"no GPUs: NVML does not answer .*mismatch.*--nodes 2x4"):
        parse_nodes(None)
    monkeypatch.setattr(processes, "lack_of_gpus", lambda: "")
    assert parse_nodes(None) == (Node("node-1"),)


def test_nodes_are_read() -> None:
    assert parse_nodes("2x4:H100-SXM5-80GB, 1x8,1x2@US-CAL-CISO,1x1:L4@DE") == (
        Node("node-1", 4, "H100-SXM5-80GB"),
        Node("node-2", 4, "H100-SXM5-80GB"),
        Node("node-3", 8),
        Node("node-4", 2, zone="US-CAL-CISO"),
        Node("node-5", 1, "L4", "DE"),
    )
    assert parse_nodes("") == ()
    assert [node.gpus for node in parse_nodes(None, simulate=True)] == [4, 4]
    assert parse_nodes("1x2:A100")[0].model == "A100-SXM4-40GB"
    with pytest.raises(StackError, match=r"unknown GPU model 'B9000'; known: .*A100-SXM4-80GB"):
        parse_nodes("2x4:B9000")
    for wrong in ("4", "0x4", "1x0", "2x4:", "x", "2x4,", "65x1", "2x4:A B", "2x4@", "2x4@-", "2x4@DE:L4"):
        with pytest.raises(StackError):
            parse_nodes(wrong)


def test_an_agent_is_told_its_zone(tmp_path: Path) -> None:
    environment = {"GPU_AGENT_ZONE": "GB"}
    for node, zone in ((Node("a", 1, zone="DE"), "DE"), (Node("b", 1), "GB")):
        assert agent_process(node, Door(("127.0.0.1", 1)), environment, tmp_path).environment["GPU_AGENT_ZONE"] == zone


def test_the_zones_of_nodes_are_those_to_know() -> None:
    nodes = (Node("a", 1, zone="DE"), Node("b", 1), Node("c", 1, zone="DE"))
    assert zones_of(nodes, {}) == ("US-CAL-CISO", "DE")
    assert zones_of(nodes, {"WATTSHIFT_ZONE": "GB", "GPU_AGENT_ZONE": "SE"}) == ("GB", "DE", "SE")


def test_what_is_erased_takes_its_database_along(folder: Path, tmp_path: Path) -> None:
    data, elsewhere = DataFolder(folder / "data"), tmp_path / "elsewhere"
    data.open()
    (elsewhere / "data").mkdir(parents=True)
    (data.path / "postgres").symlink_to(elsewhere)
    with pytest.raises(StackError, match="already running"):
        erase(data.path)
    data.close()
    erase(data.path)
    assert not data.path.exists()
    assert not elsewhere.exists()


def test_only_a_data_folder_is_erased(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(StackError, match="not a data folder"):
            erase(path)
    assert (tmp_path / "thesis.tex").exists()


def test_no_two_processes_share_a_port_or_a_prefix() -> None:
    assert len({service.port for service in SERVICES}) == len({service.prefix for service in SERVICES}) == len(SERVICES)


def test_agents_keep_jobs_from_all_ports_but_those_of_users(folder: Path) -> None:
    stack = a_stack(folder, env={"GATEWAY_PORT": "18123", "GPU_AGENT_JOBS_MAY_REACH": "3128"})
    try:
        doors = stack._agent_doors(2)
        held = {each.getsockname()[1] for door, _ in doors for each in door.sockets}
        progress = {int(own["GPU_AGENT_PROGRESS_PORT"]) for _, own in doors}
        assert len(progress) == 2
        assert held == progress | {door.address[1] for door, _ in doors if isinstance(door.address, tuple)}
        assert stack.environment["GPU_AGENT_JOBS_MAY_REACH"] == "3128,18123"
        assert stack.environment["GPU_AGENT_JOBS_MAY_NOT_BIND"] == ",".join(map(str, sorted(held)))
    finally:
        stack._doors.close()
