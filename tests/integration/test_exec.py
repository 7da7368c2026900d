"""Commands in running jobs, from the command line and Python, over all the processes in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import Installation
from tests.support.servers import ROOT, wait_until
from wattshift import ApiError, AsyncClient, Client, UnreachableError

HOLD = ["sh", "-c", "while :; do sleep 0.1; done"]


@pytest.fixture
def client(installation: Installation) -> Iterator[Client]:
    """A client of the installation."""
    with Client(installation.gateway.url, _key(installation)) as found:
        yield found


@pytest.fixture
def job(client: Client) -> Iterator[str]:
    """A job that runs, on two nodes."""
    found = client.submit(HOLD, name="entered", gpus=8, grace_s=1)
    wait_until(lambda: client.job(found).state == "running")
    yield found.id
    with contextlib.suppress(ApiError):
        client.cancel(found)
    client.wait(found, timeout_s=60)


def _key(installation: Installation) -> str:
    return (installation.folder / "admin.key").read_text().strip()


def _processes(mark: str) -> list[psutil.Process]:
    """Return the living processes of a command, without those of its client."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-1:] == [mark] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _command_line(installation: Installation, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "WATTSHIFT_URL": installation.gateway.url, "WATTSHIFT_API_KEY": _key(installation)}
    command = [sys.executable, "-m", "services.cli.main", *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, **options)


def test_a_command_runs_beside_each_rank_and_its_end_is_reported(client: Client, job: str) -> None:
    script = "echo $RANK $CUDA_VISIBLE_DEVICES; cat; echo no >&2; exit 3"
    for rank, devices in ((0, "0,1,2,3"), (5, "0,1,2,3")):
        found = client.exec(job, ["sh", "-c", script], rank=rank, stdin=b"typed\n")
        assert (found.text, found.stderr, found.exit_code) == (f"{rank} {devices}\ntyped\n", b"no\n", 3)
    second = client.job(job).placement[1].node_id
    assert client.exec(job, ["sh", "-c", "echo $RANK"], node=second).text == "4\n"


def test_files_of_an_ended_job_come_to_whoever_asks(installation: Installation, client: Client, tmp_path: Path) -> None:
    script = "mkdir -p results && echo 0.25 >results/loss"
    job = client.wait(client.submit(["sh", "-c", script], name="left", gpus=1), timeout_s=60)
    assert job.state == "succeeded"

    with _command_line(installation, "cp", f"{job.id}:results", str(tmp_path)) as copying:
        assert copying.wait(60) == 0, copying.stderr and copying.stderr.read()
    assert (tmp_path / "results" / "loss").read_text() == "0.25\n"
    with _command_line(installation, "cp", f"{job.id}:nothing", str(tmp_path)) as copying:
        said = copying.communicate(timeout=60)[1]
        assert copying.returncode
    assert b"nothing: Cannot stat: No such file or directory" in said
    audited = _audited(installation, "job.exec", job.id)
    assert [entry["data"]["command"] for entry in audited] == ["read nothing", "read results"]


async def test_five_megabytes_go_through_both_clients(installation: Installation, client: Client, job: str) -> None:
    data = os.urandom(5_000_000)
    assert (await asyncio.to_thread(client.exec, job, ["cat"], stdin=data)).stdout == data
    async with AsyncClient(installation.gateway.url, _key(installation)) as other:
        assert (await other.exec(job, ["cat"], stdin=data)).stdout == data


def test_only_its_tenants_users_may_run_commands(installation: Installation, client: Client, job: str) -> None:
    call = installation.gateway.call
    with contextlib.suppress(Exception):
        call("POST", "/v1/tenants", body={"id": "others"})
    keys = {
        (tenant, role): call("POST", "/v1/keys", body={"tenant_id": tenant, "role": role})["secret"]
        for tenant, role in (("others", "user"), ("default", "read_only"), ("default", "operator"))
    }
    refused = {("others", "user"): (404, "not_found"), ("default", "read_only"): (403, "forbidden")}
    for who, expected in refused.items():
        with Client(installation.gateway.url, keys[who]) as other, pytest.raises(ApiError) as error:
            other.exec(job, ["true"])
        assert (error.value.status, error.value.code) == expected
    with Client(installation.gateway.url, keys["default", "operator"]) as own:
        assert own.exec(job, ["true"]).exit_code == 0
        with client.stream(f"/v1/jobs/{job}/exec", method="POST", json={"command": ["sleep", "4001"]}) as answer:
            started = next(line for line in answer.iter_lines() if line.startswith("data: "))
            session = json.loads(started[6:])["session_id"]
            with pytest.raises(ApiError) as error:
                own.request("PUT", f"/v1/jobs/{job}/exec/{session}", json={"signal": "TERM"})
            assert error.value.status == 404, "another key's session"
    wait_until(lambda: not _processes("4001"))
    wait_until(lambda: len(_audited(installation, "job.exec_ended", job)) == 2)
    ended = _audited(installation, "job.exec_ended", job)
    assert [entry["data"]["exit_code"] for entry in ended] == [None, 0], "newest first; the first has lost its client"
    began = _audited(installation, "job.exec", job)
    assert [entry["data"]["command"] for entry in began] == ["sleep 4001", "true"]
    assert {entry["data"]["session"] for entry in began} == {entry["data"]["session"] for entry in ended}
    assert session not in json.dumps(began + ended)


def _audited(installation: Installation, action: str, job: str) -> list[Any]:
    return [
        entry
        for entry in installation.gateway.get("/v1/audit", action=action, limit=50)["items"]
        if (entry["action"], entry["target"]) == (action, job)
    ]


def test_a_users_job_takes_commands_of_that_user_alone(installation: Installation, client: Client) -> None:
    call = installation.gateway.call
    for name in ("exec-ann", "exec-ben"):
        call("POST", "/v1/tenants/default/users", body={"name": name})
    own, other = (
        call("POST", "/v1/keys", body={"tenant_id": "default", "role": "user", "user": name})["secret"]
        for name in ("exec-ann", "exec-ben")
    )
    with Client(installation.gateway.url, own) as ann, Client(installation.gateway.url, other) as ben:
        job = ann.submit(HOLD, name="of-ann", grace_s=1)
        wait_until(lambda: ann.job(job).state == "running")
        assert ann.exec(job, ["true"]).exit_code == client.exec(job, ["true"]).exit_code == 0
        with pytest.raises(ApiError, match="Job of-ann is exec-ann's") as error:
            ben.exec(job, ["true"])
        assert error.value.status == 403
        ann.cancel(job)
        ann.wait(job, timeout_s=30)


def test_a_job_that_does_not_run_takes_no_command(client: Client) -> None:
    held = client.submit(["true"], name="held", hold=True)
    with pytest.raises(ApiError, match="Job held is held; a command runs in a running job"):
        client.exec(held, ["true"])
    client.cancel(held)


def test_the_job_ends_and_takes_the_command_along(client: Client, job: str) -> None:
    path = f"/v1/jobs/{job}/exec"
    with client.stream(path, method="POST", json={"command": ["sleep", "4002"]}) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        client.cancel(job)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert (events[-1]["type"], events[-1]["code"]) == ("exit", 128 + signal.SIGTERM)
    assert not _processes("4002")
    assert client.wait(job, timeout_s=30).state == "cancelled"


@pytest.mark.parametrize("victim", ["client", "gateway", "admission", "agent"])
def test_whoever_is_killed_leaves_no_command_behind(
    installation: Installation, client: Client, job: str, victim: str
) -> None:
    node = client.job(job).placement[0].node_id
    mark = str(4100 + ["client", "gateway", "admission", "agent"].index(victim))
    with contextlib.ExitStack() as stack:
        command = stack.enter_context(_command_line(installation, "exec", job, "--", "sleep", mark))
        stack.callback(command.kill)
        wait_until(lambda: len(_processes(mark)) == 2)  # the client's own words end so too
        if victim == "client":
            command.kill()
        else:
            installation.kill(f"agent-{node}" if victim == "agent" else victim)
        code = command.wait(60)
        assert command.stderr is not None
        said = command.stderr.read().decode()
    wait_until(lambda: not _processes(mark))
    if victim != "client":
        assert (code, said) == (255, "wattshift: the connection to the command was lost; the command is being ended\n")
    # An agent that a busy machine brings back after its lease finds its jobs in the queue again.
    wait_until(lambda: client.job(job).state == "running")
    wait_until(lambda: _succeeds(client, job))


def _succeeds(client: Client, job: str) -> bool:
    try:
        return client.exec(job, ["echo", "again"]).text == "again\n"
    except (ApiError, UnreachableError):
        return False


class Terminal:
    """A person at a terminal of 30 by 100 characters, with a command of ours in it."""

    def __init__(self, installation: Installation, *words: str) -> None:
        self.screen = ""
        self.master, slave = pty.openpty()
        self.resize(30, 100)

        def lead() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts what runs in its background without it
            os.setsid()
            ioctl(0, termios.TIOCSCTTY, 0)

        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WATTSHIFT_")},
            "WATTSHIFT_URL": installation.gateway.url,
            "WATTSHIFT_API_KEY": _key(installation),
            "TERM": "vt100",
            "LINES": "24",
            "COLUMNS": "80",  # what the terminal is counts, and not what a shell once exported
        }
        command = [sys.executable, "-m", "services.cli.main", *words]
        streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=lead, **streams)
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def see(self, text: str, within_s: float = 60) -> None:
        """Read the screen until it shows a text."""
        while text not in self.screen:
            assert self._reads(within_s), f"the terminal was closed: {self.screen}"

    def _reads(self, within_s: float) -> bool:
        """Add what is shown next to the screen; False if the terminal is closed."""
        assert select.select([self.master], [], [], within_s)[0], f"nothing more is shown: {self.screen}"
        try:
            data = os.read(self.master, 4_096)
        except OSError:
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)

    def end(self) -> int:
        """Return the exit status."""
        while self._reads(120):
            pass
        code = self.process.wait(60)
        os.close(self.master)
        return code


def test_a_terminal_passes_keys_size_and_status(installation: Installation, job: str) -> None:
    terminal = Terminal(installation, "exec", "-t", job, "--", "sh", "-i")
    terminal.type("stty size; echo $TERM $RANK-\n")
    terminal.see("30 100")
    terminal.see("vt100 0-")
    terminal.resize(20, 70)
    os.killpg(terminal.process.pid, signal.SIGWINCH)
    terminal.type("while [ \"$(stty size)\" != '20 70' ]; do sleep 0.05; done; echo re''sized\n")
    terminal.see("resized")
    terminal.type("sleep 4200\n")
    wait_until(lambda: len(_processes("4200")) == 1)
    terminal.type("\x03")
    wait_until(lambda: not _processes("4200"))
    terminal.type("exit 7\n")
    assert terminal.end() == 7


def test_a_shell_holds_gpus_until_it_exits(installation: Installation, client: Client) -> None:
    terminal = Terminal(installation, "shell", "--name", "mine", "--gpus", "2", "--", "sh", "-i")
    terminal.see("runs; it ends with this terminal")
    terminal.type("echo held ${CUDA_VISIBLE_DEVICES}: $PWD-\n")
    terminal.see(f"held 0,1: {ROOT}-")
    (job,) = client.jobs(name="mine")
    assert (job.state, job.gpus, job.spec.time_limit_s, job.spec.preemptible) == ("running", 2, 3600, False)
    terminal.type("exit 5\n")
    assert terminal.end() == 5
    assert client.wait(job, timeout_s=30).state == "succeeded"


def test_a_shell_whose_client_is_killed_gives_its_gpus_back(installation: Installation, client: Client) -> None:
    terminal = Terminal(installation, "shell", "--name", "lost", "--", "sh", "-c", "sleep 4300; :")
    terminal.see("runs; it ends with this terminal")
    wait_until(lambda: len(_processes("4300")) == 1)
    terminal.process.kill()
    (job,) = client.jobs(name="lost")
    assert client.wait(job, timeout_s=60).gpus == 0
    assert not _processes("4300")
    terminal.end()


def test_ctrl_c_cancels_a_shell_that_waits(installation: Installation, client: Client, job: str) -> None:
    terminal = Terminal(installation, "shell", "--name", "waits")
    terminal.see("waits for 1 GPU; Ctrl-C cancels it")
    terminal.see("wattshift: ", 60)
    (found,) = client.jobs(name="waits")
    terminal.type("\x03")
    assert terminal.end() == 130
    assert client.wait(found, timeout_s=30).state == "cancelled"
    assert client.job(job).state == "running"


def test_a_shell_ends_at_its_time_limit(installation: Installation, client: Client) -> None:
    terminal = Terminal(installation, "shell", "--name", "short", "--time", "2s", "--grace", "1s", "--", "sh", "-i")
    assert terminal.end() == 128 + signal.SIGKILL
    assert "the job has reached its time limit: it is ended in 1 s" in terminal.screen
    (job,) = client.jobs(name="short")
    assert (client.wait(job, timeout_s=30).reason, client.job(job).gpus) == ("time_limit", 0)
