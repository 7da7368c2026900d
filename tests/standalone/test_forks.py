"""A process that is forked is what one started by its command would be, and a child of the supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.kit.sockets import LISTEN
from services.standalone import forks as module
from services.standalone.forks import Forks
from services.standalone.process import Process
from services.standalone.processes import AGENT, PYTHON, SERVICES, WORKERS
from services.standalone.supervisor import Supervisor

pytestmark = pytest.mark.skipif(not module.POSSIBLE, reason="this kernel makes no process a child of another")

PROGRAM = """
import os, sys, json, socket, time, ctypes
kept = {name: os.environ.get(name) for name in ("ONLY_MINE", "WATTSHIFT_LISTEN", "TZ")}
numbers = [int(each) for each in (kept["WATTSHIFT_LISTEN"] or "").split(",") if each]
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death))
print(json.dumps(kept | {
    "arguments": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "session": os.getsid(0), "parent": os.getppid(),
    "ports": [socket.socket(fileno=each).getsockname()[1] for each in numbers], "death": death.value,
    "zone": time.tzname[0], "stdin": os.read(0, 1).decode(), "files": len(os.listdir("/proc/self/fd")),
    "others": os.environ.get("OPENBLAS_NUM_THREADS"),
}), flush=True)
end = sys.argv[1]
if end == "wait":
    time.sleep(600)
sys.exit(int(end))
"""
LOGS: dict[Path, int] = {}


@asynccontextmanager
async def forking(folder: Path, *preloaded: str) -> AsyncIterator[Forks]:
    (folder / "program.py").write_text(PROGRAM)
    LOGS[folder] = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    forks = Forks({**os.environ, "PYTHONPATH": str(folder)}, preloaded)
    try:
        yield forks
    finally:
        await forks.close()
        os.close(LOGS.pop(folder))


def program(top: Path, *words: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    given = {"environment": {"PATH": os.defpath, "PYTHONPATH": str(top)}, "folder": top} | options
    process = Process(name="program", command=(*PYTHON, "-m", "program", *words), **given)
    os.truncate(top / "log", 0)
    return process.command, process.popen_options(LOGS[top])


async def said(folder: Path) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while not (text := (folder / "log").read_text()).endswith("\n"):  # noqa: ASYNC110, another process writes
            await asyncio.sleep(0.01)
    return json.loads(text)


async def test_it_is_what_its_command_would_have_started(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    environment = {"ONLY_MINE": "yes", "TZ": "Asia/Tokyo", "PYTHONPATH": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        options = {"environment": environment, "folder": own, "sockets": (one, two)}
        async with forking(tmp_path, "json", "time") as forks:
            command, given = program(tmp_path, "7", "two words", **options)
            running = await forks.spawn(command, given)
            assert await running.wait() == 7
            forked = await said(tmp_path)
            given = program(tmp_path, "7", "two words", **options)[1]
            started = await asyncio.create_subprocess_exec(*command, **given)
            assert await started.wait() == 7
            as_started = await said(tmp_path)

    assert (forked.pop("session"), as_started.pop("session")) == (running.pid, started.pid)
    assert forked.pop(LISTEN).count(",") == as_started.pop(LISTEN).count(",") == 1  # numbers of its own
    assert forked == as_started
    assert (forked["parent"], forked["zone"], len(forked["ports"])) == (os.getpid(), "JST", 2)


async def test_others_see_its_own_command(tmp_path: Path) -> None:
    async with forking(tmp_path, "json") as forks:
        running = await forks.spawn(*program(tmp_path, "wait"))
        await said(tmp_path)
        try:
            assert psutil.Process(running.pid).cmdline() == [*PYTHON, "-m", "program", "wait"]
            assert psutil.Process(running.pid).ppid() == os.getpid()
        finally:
            running.kill()
        assert await running.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            running.kill()


async def test_it_lives_on_without_what_forked_it_and_the_next_is_forked_by_another(tmp_path: Path) -> None:
    async with forking(tmp_path) as forks:
        first = await forks.spawn(*program(tmp_path, "wait"))
        await said(tmp_path)
        (server,) = [each for each in psutil.Process().children() if each.cmdline()[-1:] == [module.MODULE]]
        server.kill()
        psutil.wait_procs([server])
        second = await forks.spawn(*program(tmp_path, "3"))
        assert await second.wait() == 3
        assert psutil.Process(first.pid).status() != psutil.STATUS_ZOMBIE
        first.send_signal(signal.SIGTERM)
        assert await first.wait() == -signal.SIGTERM


async def test_what_cannot_be_forked_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ends_it.py").write_text("import os\nos._exit(1)")
    async with forking(tmp_path, "there_is_no_such_module", "ends_it") as forks:
        for _ in range(2):
            with pytest.raises(OSError, match="no process could be forked"):
                await forks.spawn(*program(tmp_path, "0"))


async def test_what_is_asked_for_and_not_waited_for_ends(tmp_path: Path) -> None:
    async with forking(tmp_path, "json") as forks:
        asked = asyncio.create_task(forks.spawn(*program(tmp_path, "wait")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with asyncio.timeout(60):
            while any("program" in each.cmdline() for each in psutil.Process().children()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await (await forks.spawn(*program(tmp_path, "0"))).wait() == 0


async def test_what_is_preloaded_is_shared_and_has_one_thread(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(
        "import sys, os\nassert 'numpy.linalg' in sys.modules\nsys.exit(len(os.listdir('/proc/self/task')))"
    )
    async with forking(tmp_path, "numpy.linalg") as forks:
        command, options = program(tmp_path)
        assert await (await forks.spawn((*command[:-1], "asks"), options)).wait() == 1


async def test_the_supervisor_has_modules_forked_and_starts_the_rest(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    own = {"PATH": os.defpath, "PYTHONPATH": str(tmp_path)}
    supervisor = Supervisor(tmp_path)
    supervisor.fork({**os.environ, **own, "OF_WHAT_FORKS": "1"}, ["json"])
    module_command = (*PYTHON, "-m", "program", "wait")
    processes = [
        Process(name=name, command=command, environment=own, folder=tmp_path)
        for name, command in (("module", module_command), ("other", ("/bin/sleep", "600")))
    ]
    try:
        await supervisor.start(processes)
        forked, other = (psutil.Process(each.pid) for each in supervisor.status())
        assert "OF_WHAT_FORKS" in forked.environ()  # the kernel shows what the interpreter was started in
        assert "OF_WHAT_FORKS" not in other.environ()
        forked.kill()
        async with asyncio.timeout(60):
            while not supervisor.status()[0].restarts or supervisor.status()[0].state != "running":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        again = psutil.Process(supervisor.status()[0].pid)
        assert again.cmdline() == [*module_command]
    finally:
        await supervisor.stop()
    assert not again.is_running()
    assert not [each for each in psutil.Process().children() if each.cmdline()[-1:] == [module.MODULE]]


def test_what_is_imported_is_what_runs() -> None:
    names = module.imported_by([*SERVICES, AGENT], WORKERS)
    assert {each.module for each in (*SERVICES, AGENT)} < set(names)
    assert all(find_spec(name) for name in names)
    assert {AGENT.module, "migrations.run"} < set(module.imported_by([AGENT], [])) < set(names)


def test_what_services_import_when_they_run_is_imported_before_they_are_forked() -> None:
    served = "import uvicorn, sys; config = uvicorn.Config(None); config.load(); config.get_loop_factory(); "
    later = "print(*(name for name in sys.modules if name.startswith(('uvicorn.l', 'uvloop'))))"
    needed = subprocess.run([*PYTHON, "-c", served + later], capture_output=True, text=True, check=True).stdout.split()
    names = module.imported_by([AGENT], [])
    imports = f"import importlib, sys; [importlib.import_module(name) for name in {names!r}]; "
    shared = subprocess.run([*PYTHON, "-c", imports + later], capture_output=True, text=True, check=True).stdout.split()
    assert not set(needed) - set(shared) - {"uvicorn.loops.auto"}
