"""The supervisor keeps tiny real processes running, stops them in order and leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from services.standalone import supervisor as module
from services.standalone.probes import Probe
from services.standalone.process import Process, StackError
from services.standalone.supervisor import Supervisor
from services.standalone.watching import LONGEST_STEP_S, cpu_of
from tests.support.servers import ROOT, ReadyFile

SERVE = "trap 'echo {name} >> stopped; exit 0' TERM; touch {name}.ready; while :; do sleep 0.05; done"


def a_process(name: str, folder: Path, script: str = SERVE, probe: Probe | None = None, **options: object) -> Process:
    """A shell script; ready once it has made the file `<name>.ready`."""
    return Process(
        name=name,
        command=("/bin/sh", "-c", script.format(name=name)),
        environment={"PATH": os.defpath},
        folder=folder,
        **(options | {"probe": ReadyFile(folder / f"{name}.ready", probe)}),
    )


@asynccontextmanager
async def supervised(folder: Path, **options: object) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(folder, **options)
    try:
        yield supervisor
    finally:
        await supervisor.stop()


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_killed_process_is_back_at_once(tmp_path: Path) -> None:
    changes: list[None] = []
    async with supervised(tmp_path, on_change=lambda: changes.append(None)) as supervisor:
        await supervisor.start([a_process("one", tmp_path)])
        (before,) = supervisor.status()
        assert (before.state, before.restarts) == ("running", 0)
        (tmp_path / "one.ready").unlink()
        began_s = time.monotonic()
        os.kill(before.pid, signal.SIGKILL)
        await until(lambda: supervisor.status()[0].state == "running" and supervisor.status()[0].pid != before.pid)
        assert time.monotonic() - began_s < 1
        assert supervisor.status()[0].restarts == 1
        assert len(changes) >= 4


async def test_one_that_keeps_dying_waits_longer_each_time(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        began_s = time.monotonic()
        await supervisor.start([a_process("one", tmp_path, "touch {name}.ready; sleep 0.3; exit 1")])
        await until(lambda: supervisor.status()[0].restarts >= 4)
        assert time.monotonic() - began_s > 0.1 + 0.2 + 0.4 + 0.8


async def test_stages_start_in_order_and_stop_in_reverse(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        await supervisor.start([a_process("store", tmp_path, "sleep 0.3; " + SERVE)])
        assert (tmp_path / "store.ready").exists()
        await supervisor.start([a_process("service", tmp_path)])
        await supervisor.start([a_process("agent", tmp_path)])
    assert (tmp_path / "stopped").read_text().split() == ["agent", "service", "store"]
    assert {process.state for process in supervisor.status()} == {"stopped"}


async def test_one_is_stopped_alone_and_started_again_with_more_in_its_environment(tmp_path: Path) -> None:
    script = 'echo "$BOOT" >> boots; ' + SERVE
    async with supervised(tmp_path) as supervisor:
        await supervisor.start([a_process("a", tmp_path, script), a_process("b", tmp_path)])
        other = supervisor.status()[1]
        await supervisor.set_running("a", False)
        assert (supervisor.status()[0].state, supervisor.status()[0].pid) == ("stopped", None)
        await supervisor.set_running("a", True, {"BOOT": "1"})
        await supervisor.set_running("nobody", False)
        await until(lambda: supervisor.status()[0].state == "running")
        await until(lambda: (tmp_path / "boots").read_text() == "\n1\n")
        assert supervisor.status()[1] == other


async def test_one_that_will_not_stop_is_killed(tmp_path: Path) -> None:
    stubborn = "trap '' TERM; touch {name}.ready; while :; do sleep 0.05; done"
    async with supervised(tmp_path) as supervisor:
        await supervisor.start([a_process("one", tmp_path, stubborn, stop_within_s=0.2)])
        pid = supervisor.status()[0].pid
    assert gone(pid)


async def test_the_reason_of_a_failed_start_is_told(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_text("an earlier run\n")
    async with supervised(tmp_path) as supervisor:
        with pytest.raises(StackError, match=r"one ended before it was ready: status 3.*no such luck") as raised:
            await supervisor.start([a_process("one", tmp_path, "echo no such luck; exit 3")])
        assert "earlier" not in str(raised.value)


async def test_a_missing_program_is_told(tmp_path: Path) -> None:
    missing = Process(name="one", command=("/no/such/program",), environment={}, folder=tmp_path)
    async with supervised(tmp_path) as supervisor:
        with pytest.raises(StackError, match="No such file"):
            await supervisor.start([missing])


async def test_one_that_is_never_ready_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.1)
    async with supervised(tmp_path, start_within_s=2.4) as supervisor:
        with pytest.raises(StackError, match="not ready after 2 s without work: slow;"):
            await supervisor.start([a_process("slow", tmp_path, "sleep 60"), a_process("fine", tmp_path)])


async def test_a_start_goes_on_as_long_as_what_it_waits_for_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock and the processor time are made up: ten minutes of work, then none."""
    now_s = used_s = 0.0

    def a_minute_of_work(_: int) -> dict[int, float]:
        nonlocal now_s, used_s
        now_s, used_s = now_s + 60, used_s + 1.0
        if now_s == 600:
            (tmp_path / "slow.ready").touch()
        return {1: used_s}

    def a_minute_of_none(_: int) -> dict[int, float]:
        nonlocal now_s
        now_s += 60
        return {1: 5.0}

    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr("services.standalone.watching.cpu_of", a_minute_of_work)
    async with supervised(tmp_path, start_within_s=90) as supervisor:
        await supervisor.start([a_process("slow", tmp_path, "sleep 60")])
        assert now_s >= 600
        monkeypatch.setattr("services.standalone.watching.cpu_of", a_minute_of_none)
        began_s = now_s
        with pytest.raises(StackError, match="not ready after 90 s without work: stuck;"):
            await supervisor.start([a_process("stuck", tmp_path, "sleep 60")])
        assert now_s - began_s == 60 * (1 + 90 / LONGEST_STEP_S), "the first look has nothing to compare with"


async def test_the_work_of_what_it_has_started_is_its_own(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        await supervisor.start([a_process("one", tmp_path, "touch {name}.ready; (while :; do :; done) & wait")])
        pid = supervisor.status()[0].pid
        began = cpu_of(pid)
        await until(lambda: sum(cpu_of(pid).values()) > sum(began.values()) + 0.05)


async def test_a_migration_that_fails_is_told(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    await supervisor.finish(a_process("migrations", tmp_path, "exit 0"))
    with pytest.raises(StackError, match="migrations failed: no table"):
        await supervisor.finish(a_process("migrations", tmp_path, "echo no table; exit 1"))


@pytest.mark.parametrize("owns_its_group", [True, False])
async def test_what_a_dead_process_leaves_behind(tmp_path: Path, owns_its_group: bool) -> None:
    """A worker's pool dies with the worker; an agent's jobs outlive the agent."""
    script = "sleep 60 & echo $! > grandchild; touch {name}.ready; wait"
    async with supervised(tmp_path) as supervisor:
        await supervisor.start([a_process("one", tmp_path, script, owns_its_group=owns_its_group)])
        grandchild = int((tmp_path / "grandchild").read_text())
        os.kill(supervisor.status()[0].pid, signal.SIGKILL)
        await until(lambda: supervisor.status()[0].restarts == 1)
        assert gone(grandchild) == owns_its_group
        await until(lambda: (tmp_path / "grandchild").read_text().strip() not in ("", str(grandchild)))
    if not owns_its_group:
        os.kill(grandchild, signal.SIGKILL)
        os.kill(int((tmp_path / "grandchild").read_text()), signal.SIGKILL)


async def test_a_log_is_rotated_under_the_process_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOG_BYTES", 1_000)
    monkeypatch.setattr(module, "ROTATE_EVERY_S", 0.02)
    talkative = "touch {name}.ready; while :; do echo a line of text; sleep 0.01; done"
    async with supervised(tmp_path) as supervisor:
        await supervisor.start([a_process("one", tmp_path, talkative)])
        await until((tmp_path / "one.log.1").exists)
        await until(lambda: 0 < (tmp_path / "one.log").stat().st_size < 1_000)
    assert "\0" not in (tmp_path / "one.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")
async def test_a_killed_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from services.standalone.supervisor import Supervisor\n"
        "from tests.standalone.test_supervisor import a_process\n"
        "async def main():\n"
        "    folder = pathlib.Path(sys.argv[1])\n"
        "    supervisor = Supervisor(folder)\n"
        "    await supervisor.start([a_process('one', folder)])\n"
        "    print(supervisor.status()[0].pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    command = [sys.executable, "-c", program, tmp_path]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)  # noqa: ASYNC220
    assert starter.stdout
    pid = int(starter.stdout.readline())
    starter.kill()
    starter.communicate()
    await until(lambda: gone(pid))


@pytest.mark.slow
async def test_a_thousand_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)
    async with supervised(tmp_path) as supervisor:
        await supervisor.start([a_process("one", tmp_path, "touch {name}.ready; exec sleep 60")])
        for kills in range(1_000):
            await until(lambda kills=kills: supervisor.status()[0].restarts == kills and supervisor.status()[0].pid)
            os.kill(supervisor.status()[0].pid, signal.SIGKILL)
        await until(lambda: supervisor.status()[0].restarts == 1_000)


async def test_a_log_that_cannot_be_looked_at_leaves_the_others_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOG_BYTES", 1_000)
    monkeypatch.setattr(module, "ROTATE_EVERY_S", 0.02)
    (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
    talkative = "touch {name}.ready; while :; do echo a line of text; sleep 0.01; done"
    async with supervised(tmp_path) as supervisor:
        await supervisor.start([a_process("one", tmp_path, talkative)])
        await until((tmp_path / "one.log.1").exists, within_s=10)
