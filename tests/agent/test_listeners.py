"""Who listens on the port of a server: its own processes, somebody else's, or nobody; and the key that it is given."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_agent import listeners
from gpu_agent.cgroups import Cgroups, Limits
from gpu_agent.listeners import Known, Port, who_listens
from services.contracts.nodes import PORT_TAKEN, Listener
from tests.agent.conftest import Node, eventually
from tests.support.ports import Ports

LISTENS = """
import os, socket, sys, time
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if len(sys.argv) > 2:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind(("127.0.0.1", int(os.environ.get("WATTSHIFT_PORT") or sys.argv[1])))
server.listen()
print("listens", flush=True)
while not os.path.exists(os.environ.get("CLOSES", "")):
    time.sleep(0.05)
server.close()
time.sleep(600)
"""
IN_A_GRANDCHILD = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", {LISTENS!r}])
    os._exit(0)
time.sleep(600)
"""
SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody has; the name that keeps other tests from it stays taken."""
    ports = Ports()
    yield ports.take(33_000 + os.getpid() % 5_000)
    ports.release()


@contextmanager
def listening(port: int, *shared: str) -> Iterator[int]:
    """Have another process listen on a port; yield its id."""
    command = [sys.executable, "-c", LISTENS, str(port), *shared]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        try:
            assert process.stdout.readline() == b"listens\n"
            yield process.pid
        finally:
            process.kill()


@contextmanager
def sleeping() -> Iterator[int]:
    """Have another process do nothing; yield its id."""
    with subprocess.Popen(SLEEPS) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def seen(port: int, *roots: int) -> Listener:
    return who_listens({"a": Port(port, frozenset(roots))})["a"]


def test_a_listener_is_known_by_its_socket(port: int) -> None:
    assert seen(port, os.getpid()) is Listener.NONE
    with listening(port) as pid, subprocess.Popen(SLEEPS) as other:
        assert [seen(port, root) for root in (pid, os.getpid(), other.pid)] == ["own", "own", "foreign"]
        other.kill()
    with socket.socket() as mine, subprocess.Popen(SLEEPS) as other:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        assert [seen(mine.getsockname()[1], root) for root in (os.getpid(), other.pid)] == ["own", "foreign"]
        other.kill()


def test_one_of_two_listeners_on_a_port_is_enough_to_be_foreign(port: int) -> None:
    """Processes of one user may share a port; the kernel then gives either of them a connection."""
    with listening(port, "shared") as one, listening(port, "shared") as two:
        assert (seen(port, one), seen(port, two), seen(port, one, two)) == ("foreign", "foreign", "own")


def test_a_process_that_is_not_of_the_ranks_group_is_foreign(tmp_path: Path, port: int) -> None:
    group = tmp_path / "cgroup.procs"
    with listening(port) as pid, sleeping() as other:
        for members, who in (([other], "foreign"), ([other, pid], "own"), ([], "foreign")):
            group.write_text("".join(f"{member}\n" for member in members))
            assert who_listens({"a": Port(port, frozenset(), group)}) == {"a": who}
        known: Known = {}
        group.write_text(f"{pid}\n")
        assert who_listens({"a": Port(port, frozenset(), group)}, known=known) == {"a": "own"}
        group.write_text(f"{other}\n")
        assert who_listens({"a": Port(port, frozenset(), group)}, known=known) == {"a": "foreign"}
        group.unlink()
        assert who_listens({"a": Port(port, frozenset(), group)}) == {"a": "unchecked"}, "its rank is over"


def test_as_long_as_nothing_changes_no_look_walks_through_the_processes(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: Known = {}
    walks: list[str] = []
    for name in ("_children", "_sockets"):
        walk = getattr(listeners, name)
        monkeypatch.setattr(listeners, name, lambda path, walk=walk, name=name: walks.append(name) or walk(path))
    assert who_listens({}, known=known) == {}
    assert seen(port, os.getpid()) == "none"
    assert walks == []
    with listening(port) as pid, sleeping() as other:
        ports = {"a": Port(port, frozenset({pid}))}
        assert who_listens(ports, known=known) == {"a": "own"}
        assert walks == ["_children", "_sockets"]
        inode = next(iter(known["a"]))
        for file in (f"/proc/{other}/fd/0", f"/proc/{other}/fd/999"):  # it holds that socket no more
            assert who_listens({"a": Port(port, frozenset({other}))}, known={"a": {inode: Path(file)}}) == {
                "a": "foreign"
            }
        walks[2:] = []
        for _ in range(3):
            assert who_listens(ports, known=known) == {"a": "own"}
        assert walks == ["_children", "_sockets"]
    assert who_listens(ports, known=known) == {"a": "none"}
    assert known == {}
    with listening(port) as pid:
        assert who_listens(ports, known=known) == {"a": "foreign"}
        assert known == {}


def test_the_kernel_lists_what_its_tables_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as two,
        socket.create_connection(one.getsockname()),
    ):
        expected = {each.getsockname()[1]: {os.fstat(each.fileno()).st_ino} for each in (one, two)}
        for _ in range(2):
            found = listeners._listening(listeners.PROC)
            assert found is not None
            assert {port: found[port] for port in expected} == expected
            monkeypatch.setattr(listeners, "listening", lambda: (_ for _ in ()).throw(OSError))


def test_what_cannot_be_seen_is_not_held_against_anybody(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert who_listens({"a": Port(port, frozenset({1}))}, tmp_path) == {"a": "unchecked"}
    with listening(port) as pid:
        assert seen(port) == "unchecked", "a container whose processes its engine does not name"

        def hidden(folder: Path) -> dict[int, Path]:
            raise PermissionError

        monkeypatch.setattr(listeners, "_sockets", hidden)
        assert seen(port, pid) == "unchecked", "of another user, to an agent that is not root"


def test_a_rank_is_looked_for_in_its_own_group(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory pids")
    (tmp_path / "cgroup.subtree_control").touch()
    groups = Cgroups(tmp_path / "state", Limits(2**30, 2**31, 100), tmp_path)
    groups.prepare()
    made = groups.make("alloc_1", [], 1)[0]
    assert groups.processes_of("alloc_1") is None, "as where jobs have none"
    made.write_text("1\n")
    assert groups.processes_of("alloc_1") == made
    assert groups.processes_of("alloc_2") is None


def listener_of(node: Node, gang: str) -> str | None:
    """Return what the newest heartbeat says of a gang's port."""
    found = [rank for rank in node.plane.heartbeats[-1].ranks if rank.allocation_id == gang]
    return found[0].listener if found else None


async def a_server(node: Node, port: int, *command: str, **environment: str) -> str:
    return await node.run(
        *(command or (sys.executable, "-c", LISTENS)),
        service={"zone": "DE", "node_labels": {}},
        master_port=port,
        environment=environment,
    )


@pytest.mark.parametrize("program", [LISTENS, IN_A_GRANDCHILD], ids=["itself", "a daemon of its own"])
async def test_a_port_that_a_server_lets_go_and_another_takes_is_reported(
    node: Node, port: int, tmp_path: Path, program: str
) -> None:
    closes = tmp_path / "closes"
    await node.start()
    gang = await a_server(node, port, sys.executable, "-c", program, CLOSES=str(closes))
    await eventually(lambda: listener_of(node, gang) == "own")
    closes.touch()
    await eventually(lambda: listener_of(node, gang) == "none")
    with listening(port):
        await eventually(lambda: listener_of(node, gang) == "foreign")
    await eventually(lambda: listener_of(node, gang) == "none")
    reported = [rank.listener for beat in node.plane.heartbeats for rank in beat.ranks]
    assert reported[0] == "none", "and not that nothing is known, before it was looked"


async def test_who_was_there_first_is_foreign(node: Node, port: int) -> None:
    await node.start()
    with listening(port):
        gang = await a_server(node, port, *SLEEPS)
        await eventually(lambda: listener_of(node, gang) == "foreign")
        other = await node.run(*SLEEPS, devices=[1], master_port=port)
        await eventually(lambda: node.plane.state(other) == "running")
        assert listener_of(node, other) is None, "it is no server"


async def test_a_server_that_fails_because_its_port_is_taken_says_so_however_soon_it_ends(
    node: Node, port: int
) -> None:
    """It may have ended before the first look at its port; one that fails for another reason lacked no port."""
    await node.start()

    async def detail_of(gang: str) -> str:
        await eventually(lambda: node.plane.state(gang) == "exited")
        return next(rank.detail for rank in node.plane.heartbeats[-1].ranks if rank.allocation_id == gang) or ""

    with listening(port):
        assert await detail_of(await a_server(node, port)) == f"{PORT_TAKEN}, {port}."
        assert PORT_TAKEN not in await detail_of(await a_server(node, port, "true"))
        assert PORT_TAKEN not in await detail_of(await node.run("false", devices=[1], master_port=port)), "no server"
    assert PORT_TAKEN not in await detail_of(await a_server(node, port, "false"))


async def test_an_instance_has_its_key_as_the_variables_of_servers_and_nobody_else_can_read_it(
    node: Node, port: int, tmp_path: Path
) -> None:
    out, key, keys = tmp_path / "out", "k" * 43, "$VLLM_API_KEY $LLAMA_API_KEY $WATTSHIFT_API_KEY"
    node.plane.instance_key = key
    node.plane.secrets = {"A": "of a user"}
    await node.start()
    gang = await node.run(
        *("sh", "-c", f'echo "{keys} $A" > "$OUT.new"; mv "$OUT.new" "$OUT"; sleep 600'),
        service={"zone": "DE", "node_labels": {}},
        master_port=port,
        secrets=[{"name": "A", "env": "A"}, {"name": "A", "env": "VLLM_API_KEY"}],
        environment={"OUT": str(out)},
    )
    await eventually(out.exists)
    assert out.read_text().split(maxsplit=3) == [key, key, key, "of a user\n"]

    def holding() -> list[str]:
        files = [path for path in node.folder.rglob("*") if path.is_file() and path != out]
        return [str(path) for path in files if key.encode() in path.read_bytes()]

    assert await asyncio.to_thread(holding) == []
    assert gang in node.plane.inputs_asked
    plain = await node.run(
        "sh", "-c", 'env > "$OUT.new"; mv "$OUT.new" "$OUT"', environment={"OUT": str(out) + "2"}, devices=[1]
    )
    await eventually(Path(f"{out}2").exists)
    assert "API_KEY" not in Path(f"{out}2").read_text()
    assert plain not in node.plane.inputs_asked
