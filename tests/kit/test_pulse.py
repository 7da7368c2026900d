"""Servers and workers say that their event loops turn: to a file, and to systemd."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kit.pulse import PULSE_FILE, Pulse, is_beating
from services.standalone.processes import WORKERS
from tests.support.ports import Ports
from tests.support.servers import ROOT, running, scratch_folder, tcp_valkey, tcp_valkey_url, wait_until

SERVICE = """
import os, sys
from fastapi import FastAPI
from services.kit.app import serve
from services.kit.settings import SharedSettings
assert "NOTIFY_SOCKET" in os.environ
serve(FastAPI(), "one", SharedSettings(service_token="a-token-for-tests-only"), "127.0.0.1", int(sys.argv[1]))
"""


@pytest.fixture
def port() -> Iterator[int]:
    ports = Ports()
    yield ports.take(25_000 + os.getpid() % 5_000)
    ports.release()


def touched_again(path: Path) -> None:
    before = path.stat().st_mtime_ns if path.exists() else 0
    wait_until(lambda: path.exists() and path.stat().st_mtime_ns != before)


def test_a_service_says_that_it_is_ready_and_then_that_it_lives(tmp_path: Path, port: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{tmp_path}/notify")
        manager.settimeout(60)
        environment = {**os.environ, "NOTIFY_SOCKET": f"{tmp_path}/notify", PULSE_FILE: f"{tmp_path}/pulse"}
        process = subprocess.Popen([sys.executable, "-c", SERVICE, str(port)], cwd=ROOT, env=environment)
        try:
            assert manager.recv(100) == b"READY=1\nWATCHDOG=1"
            assert manager.recv(100) == b"WATCHDOG=1"
            assert is_beating(tmp_path / "pulse")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, -signal.SIGTERM)
        finally:
            process.kill()
            process.wait()


def test_nobody_to_tell_is_no_reason_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PULSE_FILE, str(tmp_path / "nowhere" / "pulse"))
    monkeypatch.setenv("NOTIFY_SOCKET", "@nobody-listens-here")
    pulse = Pulse()
    assert not {PULSE_FILE, "NOTIFY_SOCKET"} & os.environ.keys(), "its children have pulses of their own, or none"
    pulse.beat()
    pulse.beat()
    assert not is_beating(tmp_path / "nowhere" / "pulse")


def test_a_worker_beats_also_without_its_broker(tmp_path: Path, port: int) -> None:
    pulse = tmp_path / "pulse"
    environment = {
        **os.environ,
        PULSE_FILE: str(pulse),
        "REDIS_URL": tcp_valkey_url(port),
        "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/nothing",
        "WATTSHIFT_SERVICE_TOKEN": "a-token-for-tests-only",
    }
    with scratch_folder() as folder:
        server = tcp_valkey(folder / "valkey", port)
        command = [sys.executable, *WORKERS["worker"]]
        with (tmp_path / "log").open("w") as log:
            worker = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            try:
                touched_again(pulse)
                wait_until(lambda: "Cannot connect" in (tmp_path / "log").read_text())
                with running(server):
                    wait_until(lambda: "ready" in (tmp_path / "log").read_text())
                    touched_again(pulse)
                    touched_again(pulse)
                touched_again(pulse)
                touched_again(pulse)
            finally:
                worker.kill()
                worker.wait()
