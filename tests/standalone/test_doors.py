"""A port of the control plane is never free: not while its process is dead, being started again or being replaced."""

import asyncio
import errno
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from services.kit.sockets import LISTEN_AT, handed_over
from services.standalone.doors import Doors
from services.standalone.process import Process
from services.standalone.supervisor import Supervisor
from tests.support.servers import ROOT, ReadyFile, wait_until

# It answers with a word of its environment, its process id, and what a program of its own would inherit.
SERVER = """
import os, subprocess, sys
from services.kit.sockets import handed_over
(server, *_) = handed_over()
look = (
    "import os, socket, stat\\n"
    "print([n for n in range(3, 64) if os.path.exists(f'/dev/fd/{n}') and stat.S_ISSOCK(os.fstat(n).st_mode)],"
    " [name for name in os.environ if 'LISTEN' in name])"
)
given = subprocess.check_output([sys.executable, "-c", look], close_fds=False, text=True).strip()
open("ready", "w").close()
while True:
    to, _ = server.accept()
    with to:
        to.sendall(f"{os.environ.get('WORD')} {os.getpid()} {given}".encode())
"""


async def heard(port: int, host: str = "127.0.0.1") -> list[str]:
    async with asyncio.timeout(60):  # a socket that nobody answers at takes connections all the same
        reader, writer = await asyncio.open_connection(host, port)
        try:
            return (await reader.read()).decode().split(" ", 2)
        finally:
            writer.close()


def is_free(host: str, port: int, option: int | None = None) -> bool:
    """Return whether somebody else, who tries by every means that binding has, gets the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if option is not None:
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        return _binds(other, (host, port))


def _binds(other: socket.socket, address: tuple[str, int]) -> bool:
    try:
        other.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def is_anyhow_free(port: int) -> bool:
    hosts = ["127.0.0.1", "0.0.0.0", "::"] + (["::1"] if has_ipv6() else [])
    return any(is_free(host, port, option) for host in hosts for option in (None, socket.SO_REUSEPORT))


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def test_the_port_outlives_the_process_and_the_connection_waits_for_the_next(tmp_path: Path) -> None:
    doors, supervisor = Doors(), Supervisor(tmp_path)
    port, sockets = doors.open("127.0.0.1", 23_000)
    ready = tmp_path / "ready"
    process = Process(
        name="server",
        command=(sys.executable, "-c", SERVER),
        environment={"PATH": os.defpath, "PYTHONPATH": str(ROOT), "WORD": "first"},
        folder=tmp_path,
        probe=ReadyFile(ready),
        sockets=sockets,
    )
    try:
        await supervisor.start([process])
        word, pid, inherited = await heard(port)
        assert (word, inherited) == ("first", "[] []")
        assert not is_anyhow_free(port)
        psutil.Process(int(pid)).suspend()  # what is asked now is asked of nobody until the next one runs
        wait_until(lambda: psutil.Process(int(pid)).status() == psutil.STATUS_STOPPED)
        waiting = asyncio.create_task(heard(port))
        await asyncio.sleep(0)
        os.kill(int(pid), signal.SIGKILL)
        while supervisor.status()[0].pid == int(pid) or supervisor.status()[0].state != "running":
            assert not is_anyhow_free(port)
            await asyncio.sleep(0)
        assert (await waiting)[1] not in ("", pid)
        await supervisor.set_running("server", False)
        assert supervisor.status()[0].pid is None
        assert not is_anyhow_free(port)
        await supervisor.set_running("server", True, {"WORD": "second"})
        assert (await heard(port))[0] == "second"
    finally:
        await supervisor.stop()
        doors.close()
    assert is_free("127.0.0.1", port)


def test_both_loopback_addresses_are_held() -> None:
    """A browser that is told `localhost` asks ::1 first."""
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    doors = Doors()
    for host in ("127.0.0.1", "0.0.0.0"):
        port, sockets = doors.open(host, 23_100)
        assert [each.getsockname()[:2] for each in sockets] == [(host, port), ("::1", port)]
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
            taken = other.getsockname()[1]
            assert doors.open(host, taken)[0] != taken
    doors.close()


# As systemd does: the sockets are the files from 3 on, and the process that is executed keeps its id.
BY_SYSTEMD = """
import fcntl, os, sys
*numbers, program = sys.argv[1:]
copies = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 500) for number in numbers]  # whatever the numbers are, none is lost
for at, copy in enumerate(copies, 3):
    os.dup2(copy, at)
os.closerange(5, 600)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
os.execv(sys.executable, [sys.executable, "-c", program])
"""


async def test_systemd_hands_sockets_over_too(tmp_path: Path) -> None:
    doors = Doors()
    _, sockets = doors.open("127.0.0.1", 23_200)
    other, second = doors.open("127.0.0.1", 23_300)
    numbers = (sockets[0].fileno(), second[0].fileno())
    program = SERVER.replace("(server, *_)", "(_, server)")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BY_SYSTEMD, *map(str, numbers), program),
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT), "WORD": "activated"},
        cwd=tmp_path,
        pass_fds=numbers,
    )
    try:
        assert await heard(other) == ["activated", str(process.pid), "[] []"]
    finally:
        process.kill()
        await process.wait()
        doors.close()


def test_what_systemd_gave_another_process_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LISTEN_PID", str(os.getppid())), ("LISTEN_FDS", "1"), ("LISTEN_FDNAMES", "a")):
        monkeypatch.setenv(name, value)
    assert handed_over() == []
    assert not [name for name in os.environ if name.startswith("LISTEN_")], "a child of it is not told"


def test_a_service_takes_over_what_it_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.sock"
    for _ in range(2):  # the second time, its own file is in the way
        monkeypatch.setenv(LISTEN_AT, str(path))
        (found,) = handed_over()
        with found:
            assert found.getsockname() == str(path)
            assert path.stat().st_mode & 0o177 == 0
            assert not found.get_inheritable()
    assert handed_over() == [], "a child of it is not told"
