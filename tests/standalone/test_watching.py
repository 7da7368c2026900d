"""Whoever hangs is replaced; whoever is busy, or lacks something, is left alone."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from services.standalone import supervisor as supervision
from services.standalone import watching
from services.standalone.probes import HttpProbe, PostgresProbe, PulseProbe, ValkeyProbe
from services.standalone.watching import BUSY_S, IDLE_S, START_S, Activity, Patience
from tests.standalone.test_supervisor import a_process, gone, supervised, until

BEAT = "while :; do touch {name}.ready; sleep 0.05; done"
STUCK = "touch {name}.ready; sleep 0.2; touch {name}.ready; exec sleep 60"
SPIN = "touch {name}.ready; sleep 0.2; touch {name}.ready; while :; do :; done"
SLEEPS, WORKS = Activity(1.0, psutil.STATUS_SLEEPING), Activity(1.0, psutil.STATUS_RUNNING)
STOPPED = Activity(1.0, psutil.STATUS_STOPPED)


def silent_for(patience: Patience, found: list[Activity], every_s: float = 3.0) -> float | None:
    """Return after how many seconds without an answer a process is replaced; None if it is not while `found` lasts."""
    for number, each in enumerate(found, start=1):
        if patience.missed(every_s, each):
            return number * every_s
    return None


def has_answered() -> Patience:
    patience = Patience()
    patience.answered()
    return patience


def test_how_long_each_kind_of_silence_is_borne() -> None:
    assert silent_for(has_answered(), [STOPPED] * 10) == 6
    assert silent_for(has_answered(), [SLEEPS] * 10) == IDLE_S
    assert silent_for(has_answered(), [WORKS] * 100) == BUSY_S
    # In a sleep now and then, as one that waits for its turn on a machine with too much to do: it used the processor.
    used = [Activity(1 + 0.1 * number, psutil.STATUS_SLEEPING) for number in range(100)]
    assert silent_for(has_answered(), used) == BUSY_S
    waits_for_a_disk = [SLEEPS, Activity(1.0, psutil.STATUS_DISK_SLEEP), *[SLEEPS] * 20]
    assert silent_for(has_answered(), waits_for_a_disk) is None
    assert silent_for(Patience(), [SLEEPS] * 100) == START_S
    assert silent_for(Patience(), used) is None, "it is being started, and works on it"
    assert silent_for(Patience(), [*used[:50], *[used[49]] * 100]) == 50 * 3 + START_S - 3
    assert silent_for(Patience(), [STOPPED] * 10) == 6


def test_a_supervisor_that_stood_still_itself_blames_nobody() -> None:
    patience = has_answered()
    assert not patience.missed(3_600, WORKS)
    assert not patience.missed(3_600, SLEEPS)
    patience.answered()
    assert not patience.missed(3_600, STOPPED)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVERY_S", "AGAIN_S"):
        monkeypatch.setattr(watching, name, 0.05)
    monkeypatch.setattr(watching, "IDLE_S", 0.5)
    monkeypatch.setattr(Patience, "timeout_s", lambda self: 0.3)


@pytest.mark.usefixtures("quick")
async def test_one_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    probe = PulseProbe(tmp_path / "one.ready", look_every_s=0.01)
    states: set[str] = set()
    async with supervised(tmp_path, on_change=lambda: states.update(note())) as supervisor:

        def note() -> list[str]:
            return [process.state for process in supervisor.status()]

        await supervisor.start([a_process("one", tmp_path, BEAT, probe=probe)])
        (before,) = supervisor.status()
        os.kill(before.pid, signal.SIGSTOP)
        await until(lambda: supervisor.status()[0].state == "running" and supervisor.status()[0].restarts == 1)
        assert gone(before.pid)
        assert "it was stopped" in supervisor.status()[0].detail
        assert "restarting" in states
        assert "supervisor: one: it was stopped, and was killed" in (tmp_path / "one.log").read_text()


@pytest.mark.usefixtures("quick")
async def test_one_that_does_nothing_is_replaced_and_one_that_works_is_not(tmp_path: Path) -> None:
    processes = [
        a_process(name, tmp_path, script, probe=PulseProbe(tmp_path / f"{name}.ready", look_every_s=0.01))
        for name, script in (("stuck", STUCK), ("busy", SPIN))
    ]
    async with supervised(tmp_path) as supervisor:
        await supervisor.start(processes)
        await until(lambda: supervisor.status()[0].restarts == 2)
        await until(lambda: supervisor.status()[1].state == "unresponsive")
        assert supervisor.status()[1].restarts == 0
        assert "did nothing" in supervisor.status()[0].detail


@pytest.mark.usefixtures("quick")
async def test_a_supervisor_that_does_not_watch_leaves_it_to_who_stopped_the_process(tmp_path: Path) -> None:
    probe = PulseProbe(tmp_path / "one.ready", look_every_s=0.01)
    async with supervised(tmp_path, watches=False) as careless, supervised(tmp_path) as supervisor:
        await careless.start([a_process("one", tmp_path, STUCK, probe=probe)])
        await supervisor.start([a_process("two", tmp_path, STUCK, probe=PulseProbe(tmp_path / "two.ready"))])
        await until(lambda: supervisor.status()[0].restarts == 1)
        assert (careless.status()[0].state, careless.status()[0].restarts) == ("running", 0)


@pytest.mark.usefixtures("quick")
async def test_a_stopped_child_of_one_that_replaces_its_children_is_killed(tmp_path: Path) -> None:
    script = "while :; do sleep 1000 & echo $! > child; touch {name}.ready; wait; done"
    pulses = f"(while :; do touch {{name}}.pulse; sleep 0.05; done) & {script}"
    probe = PulseProbe(tmp_path / "one.pulse", look_every_s=0.01)
    async with supervised(tmp_path) as supervisor:
        await supervisor.start([a_process("one", tmp_path, pulses, probe=probe, replaces_children=True)])
        child = int((tmp_path / "child").read_text())
        os.kill(child, signal.SIGSTOP)
        await until(lambda: gone(child))
        assert supervisor.status()[0].restarts == 0
    await until(lambda: gone(int((tmp_path / "child").read_text())))


async def test_what_cannot_start_is_prepared_again_and_then_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
    done: list[str] = []

    def repair() -> None:
        done.append("repaired")
        (tmp_path / "readable").touch()

    script = "test -e readable && touch {name}.ready && exec sleep 60; exit 1"
    hooks = {"before_start": lambda: done.append("prepared"), "repair": repair}
    async with supervised(tmp_path) as supervisor:
        await supervisor.start([a_process("one", tmp_path, script, **hooks)])
    assert done == [*["prepared"] * supervision.REPAIR_AFTER, "repaired", "prepared"]


@pytest.fixture
async def talks() -> AsyncIterator[dict[bytes, bytes]]:
    """What a server on `talks[b"port"]` answers to what a request begins with; nothing to others."""
    answers: dict[bytes, bytes] = {}

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.read(1_000)
        writer.write(next((answer for begin, answer in answers.items() if asked.startswith(begin)), b""))
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        answers[b"port"] = str(server.sockets[0].getsockname()[1]).encode()
        yield answers


async def test_probes_tell_silence_from_what_a_process_lacks(talks: dict[bytes, bytes]) -> None:
    port = int(talks[b"port"])
    http = HttpProbe(("127.0.0.1", port))
    for probe in (http, PostgresProbe(("127.0.0.1", port), "u", "d"), ValkeyProbe(("127.0.0.1", port), "secret")):
        with pytest.raises(ConnectionError):
            await probe.answer()
    talks[b"GET /healthz"] = b'HTTP/1.1 200 OK\r\n\r\n{"status":"ok"}'
    talks[b"GET /readyz"] = b'HTTP/1.1 503 no\r\n\r\n{"status":"degraded","detail":"not ready: carbon service"}'
    await http.answer()
    assert await http.lacks() == "not ready: carbon service"
    talks[b"GET /readyz"] = b"HTTP/1.1 200 OK\r\n\r\n{}"
    assert await http.lacks() == ""
    talks[b"\0\0\0"] = b"E\0\0\0\x20SFATAL\0Mthe database system is starting up\0\0"
    await PostgresProbe(("127.0.0.1", port), "u", "d").answer()
    assert await PostgresProbe(("127.0.0.1", port), "u", "d").lacks() == "the database system is starting up"
    talks[b"AUTH secret"] = b"+OK\r\n-LOADING the dataset\r\n"
    await ValkeyProbe(("127.0.0.1", port), "secret").answer()
    assert await ValkeyProbe(("127.0.0.1", port), "secret").lacks() == "LOADING the dataset"


async def test_the_real_servers_lack_nothing(postgres_url: str, redis_url: str) -> None:
    def port_of(url: str) -> int:
        return int(url.rpartition(":")[2].partition("/")[0])

    assert await PostgresProbe(("127.0.0.1", port_of(postgres_url)), "wattshift", "wattshift").lacks() == ""
    assert await ValkeyProbe(("127.0.0.1", port_of(redis_url)), "secret").lacks() == ""
