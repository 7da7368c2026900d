"""A port and files of a running job, here: by commands that run as if they were the job's."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import EXIT_UNAVAILABLE, EXIT_USAGE, CliError
from services.cli.jobs import forward
from services.cli.main import app

JOB = f"job_{'0' * 26}"


class Running:
    """A gateway whose job is this machine: it runs commands in a folder, as the agent does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sessions: list[subprocess.Popen[bytes]] = []
        self.commands: list[list[str]] = []
        self.loses = False
        self.state = "running"

    def get(self, path: str) -> dict[str, str]:
        assert path == f"/v1/jobs/{JOB}"
        return {"state": self.state}

    def __call__(self) -> Running:
        return self

    @contextmanager
    def stream(self, path: str, *, method: str, json: dict[str, Any]) -> Iterator[Any]:
        if self.state != "running":
            assert (path, method) == (f"/v1/jobs/{JOB}/files", "POST")
            json = {"command": ["tar", "-cf", "-", "--", json["path"]]}
        else:
            assert (path, method) == (f"/v1/jobs/{JOB}/exec", "POST")
        self.commands.append(json["command"])
        session = subprocess.Popen(
            json["command"], cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.sessions.append(session)
        with session:
            yield Answer(session, len(self.sessions) - 1, loses=self.loses)
            session.kill()

    def put(self, path: str, body: dict[str, Any]) -> dict[str, int]:
        session = self.sessions[int(path.rpartition("/")[2])]
        data = base64.b64decode(body.get("data", ""))
        assert session.stdin
        session.stdin.write(data)
        session.stdin.flush()
        if body.get("end"):
            session.stdin.close()
        return {"offset": body["offset"] + len(data)}


class Answer:
    def __init__(self, session: subprocess.Popen[bytes], number: int, *, loses: bool) -> None:
        self.session, self.number, self.loses = session, number, loses

    def iter_lines(self) -> Iterator[str]:
        assert self.session.stdout
        assert self.session.stderr
        yield _line(type="started", session_id=str(self.number))
        while data := os.read(self.session.stdout.fileno(), 1 << 16):
            yield _line(type="output", stream="stdout", data=base64.b64encode(data).decode())
        if self.loses:
            return
        if said := self.session.stderr.read():
            yield _line(type="output", stream="stderr", data=base64.b64encode(said).decode())
        yield _line(type="exit", code=self.session.wait())


def _line(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    folder = tmp_path / "job"
    folder.mkdir()
    running = Running(folder)
    monkeypatch.setattr(forward, "Gateway", running)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return running


def test_bytes_pass_both_ways_over_many_connections_and_the_ends_of_both(job: Running) -> None:
    def echo(listener: socket.socket) -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                got = b"".join(iter(lambda c=connection: c.recv(1 << 16), b""))
                connection.sendall(b"got " + got)

    sent = os.urandom(300_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        echoing = threading.Thread(target=echo, args=(listener,), daemon=True)
        echoing.start()
        for _ in range(2):
            mine, theirs = socket.socketpair()
            carried = threading.Thread(
                target=forward.carry, args=(job, JOB, listener.getsockname()[1], theirs), daemon=True
            )
            carried.start()
            mine.sendall(sent)
            mine.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda c=mine: c.recv(1 << 16), b"")) == b"got " + sent
            carried.join(60)
            mine.close()
        echoing.join(60)


@pytest.mark.parametrize("state", ["failed", "succeeded", "cancelled"])
def test_a_job_that_has_ended_has_no_ports(job: Running, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(Running, "get", lambda *_, **__: {"state": state}, raising=False)
    with pytest.raises(CliError, match=rf"has ended \({state}\)"):
        app(["forward", JOB, "80", "--local", "0"], standalone_mode=False)


def test_it_ends_with_the_job_and_not_while_nobody_answers(
    job: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = CliError("the control plane does not answer", EXIT_UNAVAILABLE)
    answers: list[Any] = ["running", away, "running", away, "succeeded"]

    def get(*_: Any, **__: Any) -> Any:
        if isinstance(answer := answers.pop(0), CliError):
            raise answer
        return {"state": answer}

    monkeypatch.setattr(Running, "get", get, raising=False)
    monkeypatch.setattr(forward, "LOOK_S", 0.01)
    app(["forward", JOB, "80", "--local", "0"], standalone_mode=False)
    assert answers == []
    assert f"wattshift: {JOB} has ended" in capsys.readouterr().err


def test_a_port_at_which_nobody_listens_is_said(job: Running, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    mine, theirs = socket.socketpair()

    forward.carry(job, JOB, port, theirs)  # type: ignore[arg-type]

    with mine:
        assert mine.recv(1) == b""
    assert (
        capsys.readouterr().err == f"wattshift: port {port}: ConnectionRefusedError: [Errno 111] Connection refused\n"
    )


def test_a_port_that_is_taken_here_is_said(job: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        with pytest.raises(CliError, match=f"cannot listen on port {port}: .*choose another with --local") as refused:
            app(["forward", JOB, "80", "--local", port], standalone_mode=False)
    assert refused.value.exit_code == EXIT_USAGE


def test_a_folder_and_a_file_come_here(job: Running, tmp_path: Path) -> None:
    (job.folder / "out" / "deep").mkdir(parents=True)
    (job.folder / "out" / "deep" / "model").write_bytes(os.urandom(200_000))
    (job.folder / "-rf").write_text("a name like an option")

    app(["cp", f"{JOB}:out", "."], standalone_mode=False)
    app(["cp", f"{JOB}:{job.folder}/-rf"], standalone_mode=False)

    assert Path("out/deep/model").read_bytes() == (job.folder / "out" / "deep" / "model").read_bytes()
    assert Path("-rf").read_text() == "a name like an option"


def test_what_comes_gets_the_name_that_is_asked_for(job: Running) -> None:
    (job.folder / "out").mkdir()
    (job.folder / "out" / "model").write_text("7")
    os.link(job.folder / "out" / "model", job.folder / "out" / "newest")

    app(["cp", f"{JOB}:out", "run-7"], standalone_mode=False)
    app(["cp", f"{JOB}:out/model", "run-7/model.old"], standalone_mode=False)

    assert {path.name: path.read_text() for path in Path("run-7").iterdir()} == dict.fromkeys(
        ["model", "newest", "model.old"], "7"
    )
    assert [path.name for path in Path().iterdir()] == ["run-7"]


def test_files_of_a_job_that_has_ended_come_here(job: Running) -> None:
    (job.folder / "out").mkdir()
    (job.folder / "out" / "model").write_bytes(os.urandom(200_000))
    job.state = "failed"

    app(["cp", f"{JOB}:out", "."], standalone_mode=False)

    assert Path("out/model").read_bytes() == (job.folder / "out" / "model").read_bytes()
    with pytest.raises(CliError, match=r"nothing.*No such file"):
        app(["cp", f"{JOB}:nothing"], standalone_mode=False)
    job.loses = True
    with pytest.raises(CliError, match="connection to the command was lost"):
        app(["cp", f"{JOB}:out"], standalone_mode=False)


def test_what_cannot_be_copied_is_said_and_leaves_nothing(job: Running) -> None:
    for words, says in (
        ([f"{JOB}:nothing"], "nothing.*No such file"),
        ([f"{JOB}"], "name a job and a path"),
        ([f"{JOB}:/"], "name a job and a path"),
        ([f"{JOB}:x", "nowhere/x"], "nowhere is not a folder"),
    ):
        with pytest.raises(CliError, match=says):
            app(["cp", *words], standalone_mode=False)
    (job.folder / "big").write_bytes(b"x" * 100_000)
    job.loses = True
    with pytest.raises(CliError, match="connection to the command was lost"):
        app(["cp", f"{JOB}:big"], standalone_mode=False)
    assert list(Path().iterdir()) == []


def test_what_has_no_room_here_is_said(job: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.folder / "big").write_bytes(b"x" * 100_000)
    monkeypatch.setattr(forward.tempfile, "TemporaryFile", lambda: io.FileIO("/dev/full", "w+"))
    for job.state in ("running", "failed"):
        with pytest.raises(CliError, match=r"cannot keep what came of .*:big: No space left on device"):
            app(["cp", f"{JOB}:big"], standalone_mode=False)


def test_an_archive_writes_nothing_outside_the_folder(job: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.folder / "evil.txt").write_text("x")

    def evil(_: Any, __: str, ___: list[str], out: Callable[[bytes], object], *____: Any) -> tuple[int, str]:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as made:
            made.add(job.folder / "evil.txt", arcname="../escaped")
        out(archive.getvalue())
        return 0, ""

    monkeypatch.setattr(forward, "piped", evil)
    with pytest.raises(CliError, match="cannot unpack"):
        app(["cp", f"{JOB}:evil"], standalone_mode=False)
    assert not Path("../escaped").exists()
