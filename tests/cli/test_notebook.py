"""A server on GPUs, reached from here: it starts, is found at its port, and ends with the command."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, CliError
from services.cli.jobs import forward, notebook
from services.cli.main import app
from tests.cli.test_forward import JOB, Running

SERVER = Path(__file__).parent.parent / "support" / "echo_server.py"


class Gateway(Running):
    """A gateway that runs the job that is submitted on this machine."""

    url = "http://gateway.test"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.environment = os.environ | {"MASTER_PORT": str(port), "WATTSHIFT_CHECKPOINT_DIR": str(folder)}
        self.environment["NODE_RANK"] = "0"
        self.spec: dict[str, Any] = {}
        self.job: subprocess.Popen[bytes] | None = None

    def call(self, method: str, path: str, *, body: Any = None, key: str | None = None) -> Any:
        if path == "/v1/jobs":
            self.spec = body.model_dump()
            with (self.folder / "stderr").open("wb") as errors:
                command = self.spec["command"]
                self.job = subprocess.Popen(command, cwd=self.folder, env=self.environment, stderr=errors)
            return {"id": JOB, "number": 7, "name": self.spec["name"], "state": "queued"}
        assert path == f"/v1/jobs/{JOB}/cancel"
        assert self.job
        self.job.send_signal(signal.SIGTERM)
        self.job.wait()
        return {"name": self.spec["name"]}

    def get(self, path: str, **_: Any) -> Any:
        assert self.job
        code = self.job.poll()
        state = "running" if code is None else "failed" if code else "succeeded"
        job = {"id": JOB, "name": self.spec["name"], "state": state, "exit_code": code, "detail": "", "generation": 1}
        return job | {"footprint": {"energy_j": 0, "carbon_gco2": 0}}


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    found = Gateway(tmp_path)
    monkeypatch.setattr(notebook, "Gateway", found)
    monkeypatch.setattr(notebook, "check_folders", lambda *_: None)
    monkeypatch.setattr(forward, "LOOK_S", 0.05)
    monkeypatch.setattr(notebook.signal, "signal", lambda *_: None)
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)  # where its sessions run
    yield found
    if found.job:
        found.job.kill()
        found.job.wait()


class Shown(threading.Thread):
    """The command in a thread: what it prints, and how it ends."""

    def __init__(self, *words: str) -> None:
        super().__init__(daemon=True)
        self.words = words
        self.exit_code: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.exit_code = app(["notebook", "--local", "0", *self.words], standalone_mode=False)
        except Exception as error:
            self.error = error


def url_of(capsys: pytest.CaptureFixture[str], thread: Shown) -> tuple[int, str]:
    said = ""
    while thread.is_alive():
        said += capsys.readouterr().out
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/(\S*)\n", said):
            return int(found[1]), found[2]
        thread.join(0.05)
    raise AssertionError(said or thread.error)


def test_http_and_websockets_reach_the_server_until_it_ends(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    thread = Shown("--gpus", "2", sys.executable, str(SERVER), "--port={port}")
    thread.start()
    port, query = url_of(capsys, thread)

    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.makefile("rb").read().endswith(b"\r\n\r\nhello")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        key = base64.b64encode(b"0" * 16).decode()
        connection.sendall(f"GET / HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode())
        answer = connection.makefile("rb")
        assert answer.readline() == b"HTTP/1.1 101 Switching Protocols\r\n"
        while answer.readline() != b"\r\n":
            pass
        for sent in (b"one", b"two"):
            connection.sendall(bytes([0x81, 0x80 | len(sent)]) + b"\0\0\0\0" + sent)
            assert answer.read(2 + len(sent)) == bytes([0x81, len(sent)]) + sent

    assert query == ""
    spec = gateway.spec
    assert (spec["gpus"]["min"], spec["processes"], spec["preemptible"]) == (2, "per_node", False)
    assert gateway.job
    gateway.job.terminate()
    thread.join(30)
    assert thread.exit_code == EXIT_FAILED
    assert "notebook failed" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [False, True])
def test_it_ends_with_the_command_unless_it_is_to_be_kept(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, keep: bool
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(notebook, "carry_all", interrupted)
    words = (["--keep"] if keep else []) + [sys.executable, str(SERVER), "--port={port}"]
    app(["notebook", "--local", "0", *words], standalone_mode=False)

    assert gateway.job
    assert (gateway.job.poll() is None) == keep
    assert ("To end it: wattshift cancel 7" in capsys.readouterr().err) == keep


def test_a_submission_that_is_interrupted_leaves_no_job(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, sent, accepted = gateway.call, list[tuple[str, Any]](), dict[Any, Any]()

    def interrupted(method: str, path: str, *, body: Any = None, key: str | None = None) -> Any:
        sent.append((path, key))
        if key is None:
            return call(method, path, body=body)
        if key in accepted:
            return accepted[key]
        accepted[key] = call(method, path, body=body)
        raise KeyboardInterrupt  # it is accepted, and nobody has heard so

    monkeypatch.setattr(gateway, "call", interrupted)
    app(["notebook", "--local", "0", sys.executable, str(SERVER), "--port={port}"], standalone_mode=False)
    assert gateway.job
    assert gateway.job.poll() is not None
    assert [path for path, _ in sent] == ["/v1/jobs", "/v1/jobs", f"/v1/jobs/{JOB}/cancel"]


def test_a_job_that_cannot_be_ended_is_named(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    call = gateway.call

    def away(method: str, path: str, **given: Any) -> Any:
        if path.endswith("/cancel"):
            raise CliError("the control plane does not answer", EXIT_UNAVAILABLE)
        return call(method, path, **given)

    monkeypatch.setattr(notebook, "carry_all", interrupted)
    monkeypatch.setattr(gateway, "call", away)
    app(["notebook", "--local", "0", sys.executable, str(SERVER), "--port={port}"], standalone_mode=False)
    assert f"could not be ended: the control plane does not answer. To end it: wattshift cancel {JOB}" in (
        capsys.readouterr().err
    )


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a program that is called as Jupyter is: it serves, and says what it was given."""
    (folder / "jupyterlab.py").write_text(
        "import os, runpy, sys\n"
        "open('given', 'w').write(' '.join(sys.argv[1:]) + '\\n' + os.environ['JUPYTER_TOKEN'])\n"
        "sys.argv = ['', f\"--port={os.environ['MASTER_PORT']}\"]\n"
        f"runpy.run_path({str(SERVER)!r}, run_name='__main__')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_jupyter_gets_a_token_that_is_in_the_url_and_not_in_the_spec(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    gateway.environment["PYTHONPATH"] = str(tmp_path)
    thread = Shown()
    thread.start()
    _, query = url_of(capsys, thread)

    given, token = (tmp_path / "given").read_text().split("\n")
    port = gateway.environment["MASTER_PORT"]
    assert f"--no-browser --ip=127.0.0.1 --port={port} --ServerApp.port_retries=0" in given
    assert re.fullmatch("[0-9a-f]{48}", token)
    assert query == f"?token={token}"
    assert token not in str(gateway.spec)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert gateway.job
    gateway.job.terminate()
    thread.join(30)


def test_where_jupyter_is_missing_the_line_that_installs_it_is_said(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook.job_output, "last_lines", lambda *_: (tmp_path / "stderr").read_text().splitlines())
    with contextlib.suppress(ModuleNotFoundError):
        __import__("notebook")
        pytest.skip("this Python has Jupyter")

    with pytest.raises(
        CliError, match=r"exit code 127(?s:.*)this line installs it: \S+python3 -m pip install jupyterlab"
    ):
        app(["notebook", "--local", "0"], standalone_mode=False)


def test_a_command_says_where_its_port_goes(gateway: Gateway) -> None:
    with pytest.raises(CliError, match=r"write \{port\} where the command takes its port") as refused:
        app(["notebook", "tensorboard"], standalone_mode=False)
    assert refused.value.exit_code == EXIT_USAGE
    assert gateway.job is None
