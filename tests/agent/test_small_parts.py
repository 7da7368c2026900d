"""Containers, retention, settings, processes: each on its own."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from gpu_agent import containers, exec_shim, shim, sources, trees
from gpu_agent.account import Account, find_account
from gpu_agent.containers import Engine
from gpu_agent.environment import job_variables
from gpu_agent.processes import cpu_seconds, kill_marked
from gpu_agent.ranks import RankFolder
from gpu_agent.retention import Retention
from gpu_agent.settings import AgentSettings
from services.contracts.commands import StartGang
from services.contracts.exec_sessions import ExecRequest, TerminalSize
from services.contracts.jobs import JobSpec
from services.core.domain.errors import DomainError

DOCKER = Engine("docker", "/usr/bin/docker", "nvidia")


def a_start(**spec: object) -> StartGang:
    return StartGang(
        allocation_id="job_1.2",
        job_id="job_1",
        generation=2,
        tenant_id="t",
        spec=JobSpec.model_validate({"name": "x", "image": "example.org/train:1", **spec}),
        devices=[2, 3],
        node_rank=1,
        nnodes=2,
        world_size=4,
        rank_offset=2,
        master_addr="10.0.0.1",
        master_port=29_500,
    )


def test_docker_gets_the_gangs_devices_and_nothing_of_the_clients_environment() -> None:
    start = a_start(command=["python", "train.py"], working_dir="/work", environment={"A": "1", "DOCKER_HOST": "x"})
    variables = containers.container_variables(start, {"WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "2,3", "N": "a\nb"})
    argv = containers.run_argv(DOCKER, start, ["2", "3"], variables, "/r/env", ["/ckpt", "/r"])
    assert argv == [
        *("/usr/bin/docker", "run", "--rm", "--init", "--name", "wattshift-job_1.2-1"),
        *("--network", "host", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--gpus", '"device=2,3"', "--env-file", "/r/env", "--env", "N=a\nb"),
        *("--volume", "/ckpt:/ckpt", "--volume", "/r:/r"),
        *("--user", f"{os.geteuid()}:{os.getegid()}", "--workdir", "/work"),
        *("example.org/train:1", "python", "train.py"),
    ]
    text = "A=1\nDOCKER_HOST=x\nWORLD_SIZE=4\nCUDA_VISIBLE_DEVICES=0,1\n"
    assert containers.env_file_text(variables) == text
    assert containers.remove_argv(DOCKER, start) == ["/usr/bin/docker", "rm", "--force", "wattshift-job_1.2-1"]


def test_a_command_enters_the_container_of_its_rank_and_can_be_found() -> None:
    mark = "WATTSHIFT_EXEC=s"
    argv = containers.exec_argv(DOCKER, a_start(), ExecRequest(command=["nvidia-smi", "-L"]), None, mark)
    assert argv == [
        *("/usr/bin/docker", "exec", "--env", "WATTSHIFT_EXEC=s", "wattshift-job_1.2-1", "nvidia-smi", "-L")
    ]
    size = TerminalSize(rows=1, columns=1)
    request = ExecRequest(command=["bash"], stdin=True, terminal=size)
    argv = containers.exec_argv(DOCKER, a_start(), request, 1, mark)
    assert argv[2:4] == ["--interactive", "--tty"]
    assert argv[-2:] == ["wattshift-job_1.2-1-1", "bash"]


def test_a_standing_service_is_told_its_port() -> None:
    paths = RankFolder(Path("/r")), "/ckpt", "http://127.0.0.1:1"

    assert job_variables(a_start(service={}), *paths, ["2", "3"])["WATTSHIFT_PORT"] == "29500"
    assert "WATTSHIFT_PORT" not in job_variables(a_start(), *paths, ["2", "3"])


def test_a_container_runs_as_the_jobs_user() -> None:
    account = Account("jobs", 1001, 1002, (1002,), "/home/jobs", "/bin/sh")
    argv = containers.run_argv(DOCKER, a_start(), ["2", "3"], {}, "/e", [], account)
    assert argv[argv.index("--user") + 1] == "1001:1002"


def test_a_site_names_the_images_and_no_image_is_an_option() -> None:
    spec = a_start().spec
    assert containers.refusal(spec, ["example.org/*"]) == ""
    assert "does not run the image example.org/train:1" in containers.refusal(spec, ["other/*"])
    for image in ("--privileged", "a b", "-v/:/host"):
        assert "is no container image" in containers.refusal(spec.model_copy(update={"image": image}), ["*"])
    assert "a colon" in containers.refusal(spec.model_copy(update={"working_dir": "/etc:/x"}), ["*"])


def test_podman_names_devices_its_own_way_and_simulated_nodes_have_none() -> None:
    podman = containers.run_argv(Engine("podman", "podman", "nvidia"), a_start(), ["2", "3"], {}, "/e", [])
    assert podman[12:16] == ["--device", "nvidia.com/gpu=2", "--device", "nvidia.com/gpu=3"]
    assert podman[-1] == "example.org/train:1"
    simulated = containers.run_argv(Engine("docker", "docker", "none"), a_start(), ["2", "3"], {}, "/e", [])
    assert not {"--gpus", "--device"} & set(simulated)


def test_an_engine_counts_only_if_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert containers.find_engine(with_gpus=True) is None
    for name, status in (("docker", 1), ("podman", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    found = containers.find_engine(with_gpus=True)
    assert found == Engine("podman", str(tmp_path / "podman"), "nvidia")


def test_a_rank_is_finished_when_its_secrets_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("the disk does not answer")

    folder = RankFolder(tmp_path / "rank")
    folder.path.mkdir()
    spec = folder.path / shim.SPEC
    spec.write_text("TOKEN=secret")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", fails)
        with pytest.raises(OSError, match="does not answer"):
            folder.release()
    assert not folder.is_released(), "else the next agent would leave them there"
    folder.release()
    assert folder.is_released()
    assert not spec.exists()


def test_settled_folders_go_by_age_and_then_by_size(tmp_path: Path) -> None:
    now = time.time()
    ages_s = {"oldest": 900, "old": 500, "young": 100, "unsettled": 9_000}
    for name, age_s in ages_s.items():
        folder = RankFolder(tmp_path / name)
        folder.path.mkdir()
        (folder.path / "stdout").write_bytes(b"x" * 40_000)
        if name != "unsettled":
            folder.release()
        os.utime(folder.path, (now - age_s, now - age_s))
    (tmp_path / "generations").mkdir()
    kept = Retention(tmp_path, tmp_path / "generations")
    kept.clean(age_s=700, total_bytes=1 << 30)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "young", "unsettled", "generations"}
    kept.clean(age_s=700, total_bytes=60_000)
    assert {path.name for path in tmp_path.iterdir()} == {"young", "unsettled", "generations"}


def test_a_settled_folder_is_looked_into_once_and_those_that_end_later_stay_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[str]()

    def measure(path: Path) -> int:
        measured.append(path.name)
        return 1

    monkeypatch.setattr(trees, "disk_bytes", measure)
    kept, now = Retention(tmp_path, tmp_path / "generations"), time.time()
    for at, name in enumerate(("b", "a", "c")):
        folder = RankFolder(tmp_path / name)
        folder.path.mkdir()
        assert kept.clean(age_s=1_000, total_bytes=10) == 0
        folder.release()
        (folder.path / sources.FOLDER).mkdir()
        os.utime(folder.path, (now - 100 + at,) * 2)
        assert kept.clean(age_s=1_000, total_bytes=10) == 0
    assert measured == ["b", "a", "c"]
    assert not [*tmp_path.glob(f"*/{sources.FOLDER}")]
    trees.remove(tmp_path / "a")
    assert kept.clean(age_s=1_000, total_bytes=10, lacking_bytes=1) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"c"}
    assert Retention(tmp_path, tmp_path).clean(age_s=1_000, total_bytes=0) == 1
    assert measured == ["b", "a", "c", "c"]


def test_old_generations_are_forgotten(tmp_path: Path) -> None:
    for name, age_s in (("job_old", 40 * 86_400), ("job_new", 86_400)):
        (tmp_path / name).write_text("1")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    Retention(tmp_path / "none", tmp_path).clean(1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["job_new"]


def test_settings_read_lists_and_fill_in_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "GPU_AGENT_NODE_ID": "gpu-17",
        "GPU_AGENT_ZONE": "DE",
        "GPU_AGENT_CPU_POWER_CURVE": "0:80,1:300",
        "GPU_AGENT_PASS_ENVIRONMENT": "A, B,",
        "GPU_AGENT_LABELS": '{"rack": "r1"}',
        "WATTSHIFT_DATA_DIR": str(tmp_path),
        "GPU_AGENT_STATE_DIR": "",
    }.items():
        monkeypatch.setenv(name, value)
    settings = AgentSettings()  # pyright: ignore[reportCallIssue]
    assert settings.cpu_power_curve == [(0, 80), (1, 300)]
    assert settings.pass_environment == ["A", "B"]
    assert (settings.own_zone, settings.labels) == ("DE", {"rack": "r1"})
    assert settings.state_folder == tmp_path / "nodes" / "gpu-17"


def test_an_account_must_exist_and_be_within_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_account("") is None
    with pytest.raises(DomainError, match="no user 'nobody-at-all'"):
        find_account("nobody-at-all")
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    with pytest.raises(DomainError, match="runs as root"):
        find_account("nobody")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CPU_POWER_CURVE", "0.1:80,1:300"),
        ("CPU_POWER_CURVE", "0:80,0.5:90,0.5:95,1:300"),
        ("CPU_POWER_CURVE", "0:80"),
        ("CPU_POWER_CURVE", "nonsense"),
        ("NODE_ID", "a b"),
        ("PORT", "0"),
        ("DRIVER", "rocm"),
        ("TICK_S", "-1"),
    ],
)
def test_settings_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"GPU_AGENT_{name}", value)
    with pytest.raises(ValidationError):
        AgentSettings()  # pyright: ignore[reportCallIssue]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_familys_cpu_time_includes_those_who_have_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    script = f"{sys.executable} -I -c '{burn}'; {sys.executable} -I -c '{burn}'; sleep 60"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as family:
        try:
            while not any(child.name() == "sleep" for child in psutil.Process(family.pid).children()):
                time.sleep(0.02)
            used = cpu_seconds({"a": family.pid, "gone": 2**22 + 1})
            assert set(used) == {"a"}
            assert 0.5 < used["a"] < 3
        finally:
            os.killpg(family.pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_marked_processes_are_killed_wherever_they_went() -> None:
    mark = f"WATTSHIFT_TEST_MARK={os.getpid()}"
    name, _, value = mark.partition("=")
    shell = ["sh", "-c", "setsid sh -c 'sleep 606 & sleep 606' & echo up; wait"]
    with subprocess.Popen(shell, env={**os.environ, name: value}, stdout=subprocess.PIPE) as family:
        assert family.stdout
        family.stdout.readline()
        assert kill_marked(mark) >= 2
        assert family.wait(60) == -signal.SIGKILL
    assert kill_marked(mark) == 0


def test_a_command_beside_a_rank_that_cannot_be_started_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def start(request: exec_shim.Request, error: int) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    sessions = exec_shim.Sessions(start)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(exec_shim.DOOR)
        door.listen(1)
        sessions.look(0.0)
        agent, _ = door.accept()
    with agent, (tmp_path / "output").open("wb") as output:
        socket.send_fds(agent, [shim.spec_bytes([("argv", "true")])], [output.fileno()] * 3)
        (tmp_path / exec_shim.DOOR).unlink()
        sessions.look(0.0)
        assert agent.recv(100) == b"11 cannot start a process"
        assert agent.recv(100) == b""
    assert sessions.pids() == []


def test_a_rank_outlives_the_files_of_the_release_that_started_it(tmp_path: Path) -> None:
    release, rank = tmp_path / "release", tmp_path / "rank"
    for folder in (release, rank):
        folder.mkdir()
    shutil.copy(shim.__file__, release)  # and exec_shim is gone
    (rank / shim.SPEC).write_bytes(shim.spec_bytes([("argv", "true"), ("env", "PATH=/bin:/usr/bin")]))
    (rank / shim.EXEC_DOOR).touch()
    shim.write_lease(str(rank / shim.LEASE), shim.clock() + 60, 60)
    subprocess.run([sys.executable, "-I", "-S", release / "shim.py", str(rank)], check=True)
    assert (shim.read_facts(str(rank / shim.EXITED)) or {})["code"] == "0"
