"""What a job has for itself on its node: IPC, temporary folders and devices; and what it sees of others there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_agent import shim
from gpu_agent.account import Account
from gpu_agent.confinement import Confinement
from gpu_agent.enclosure import SPACES
from gpu_agent.launch import Launcher
from gpu_agent.ranks import Launch, RankFolder
from gpu_agent.secrets import CannotStartError
from gpu_agent.settings import AgentSettings
from services.contracts.commands import StartGang
from services.contracts.jobs import JobSpec
from tests.agent.conftest import eventually, gpus
from tests.support.environments import torch_programs
from tests.support.ports import Ports

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")

KEY = 0x57A77 + os.getpid()
SYSTEM_V = f"import ctypes; c = ctypes.CDLL(None, use_errno=True); flags = 0o%s; key = {KEY}\n"
IDS = (
    "queue = c.mq_open(b'/wattshift-%d' % key, 0o102 if flags else 0, 0o666, None)\n"
    "print(c.shmget(key, 4096, flags), c.msgget(key, flags), c.semget(key, 1, flags), queue, flush=True)\n"
)
MAKE = SYSTEM_V % "1666" + IDS  # IPC_CREAT, for everybody
FIND = SYSTEM_V % "0" + IDS


class Host:
    """A node's confinement and launcher, without an agent."""

    def __init__(self, folder: Path, device_nodes: dict[int, tuple[int, int]] | None = None, **settings: Any) -> None:
        self.folder = folder
        for name, mode in (("data", 0o755), ("state", 0o711)):
            (folder / name).mkdir(mode=mode, exist_ok=True)
            (folder / name).chmod(mode)
        whole = AgentSettings(state_dir=folder / "state", data_dir=folder / "data", owner_tenants=["t"], **settings)
        self.confinement = Confinement(whole, device_nodes or {})
        self.launcher = Launcher(whole, None, gpus(4), self.confinement)

    def lacks(self, *names: str) -> str:
        """Return why this host cannot have some of the protections; empty if it can."""
        return "; ".join(
            f"{each.name}: {each.how}"
            for each in self.confinement.protections()
            if each.name in names and not each.holds
        )

    def start(
        self, name: str, *command: str, devices: tuple[int, ...] = (0,), port: int = 29_500, **spec: Any
    ) -> tuple[RankFolder, subprocess.Popen[bytes]]:
        """Start a job of one tenant; all jobs here are of that tenant, so that no owner or mode keeps them apart."""
        start = StartGang(
            allocation_id=name,
            job_id=name,
            generation=1,
            tenant_id="t",
            spec=JobSpec.model_validate({"name": "x", "command": list(command), "grace_s": 1.0, **spec}),
            devices=list(devices),
            node_rank=0,
            nnodes=1,
            world_size=len(devices),
            rank_offset=0,
            master_addr="127.0.0.1",
            master_port=port,
        )
        rank = RankFolder(self.folder / "state" / "allocations" / name)
        rank.path.mkdir(parents=True)
        return rank, rank.launch(self.launcher.prepare(start, rank, ""), shim.clock() + 120, 120)

    def run(self, name: str, *command: str, **options: Any) -> str:
        """Run a job to its end and return what it printed."""
        rank, process = self.start(name, *command, **options)
        process.wait()
        return printed(rank)

    def account(self) -> Account:
        """Return whose the jobs are."""
        account = self.confinement.identities.of_owners()["t"]
        assert isinstance(account, Account)
        return account

    def clear(self) -> None:
        """Remove control groups."""
        self.confinement.cgroups.sweep(())
        self.confinement.cgroups.close()


def printed(rank: RankFolder) -> str:
    """Return both streams of a rank that has ended, and why it could not run."""
    ended = rank.exit()
    streams = [(rank.path / name).read_text() for name in ("stdout", "stderr") if (rank.path / name).exists()]
    return "".join((*streams, ended.detail if ended and not any(streams) else ""))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """One whose files are beneath /tmp, which its jobs do not see but for what is theirs."""
    made = Host(tmp_path)
    if why := made.lacks("temporary_space"):
        pytest.skip(why)
    yield made
    made.clear()


async def test_ipc_and_temporary_folders_are_a_jobs_own(host: Host) -> None:
    files = [f"{space}/wattshift-test-{os.getpid()}" for space in SPACES]
    touch = "".join(f"open({path!r}, 'w').write('x')\n" for path in files)
    found = "import os\n" + "".join(
        f"print(os.path.exists({path!r}), os.listdir({os.path.dirname(path)!r}))\n" for path in files
    )
    rank, process = host.start(
        "job_1", "/usr/bin/python3", "-u", "-c", f"{MAKE}{touch}{found}import time; time.sleep(600)"
    )
    stdout = rank.path / "stdout"
    await eventually(lambda: stdout.exists() and stdout.read_text().count("True") == len(files))
    assert "-1" not in stdout.read_text().splitlines()[0], "it made all three"

    names = [os.path.basename(path) for path in files]
    own = [f"True {[name]}" for name in names]
    assert [
        line for line in stdout.read_text().splitlines()[1:] if os.path.basename(str(host.folder)) not in line
    ] == own[:2]
    assert not any(os.path.exists(path) for path in files), "the host does not have them"
    assert all(str(KEY) not in Path(f"/proc/sysvipc/{kind}").read_text() for kind in ("shm", "msg", "sem"))
    beside = host.run("job_2", "/usr/bin/python3", "-u", "-c", FIND + found)
    assert beside.splitlines()[0] == "-1 -1 -1 -1"
    assert "True" not in beside
    assert beside.count("False") == len(files)
    process.kill()  # as with an agent that dies: nobody clears up, and nothing is left
    process.wait()
    assert not any(os.path.exists(path) for path in files)


def test_what_is_temporary_has_one_size_and_says_when_it_is_full(host: Host) -> None:
    host.confinement.space_bytes = 3 * 2**20
    write = "for f in /dev/shm/a /tmp/b /var/tmp/c; do head -c 2097152 /dev/zero > $f && echo wrote $f; done"
    said = host.run("job_1", "sh", "-c", write)
    assert said.count("wrote") == 1
    assert "No space left on device" in said


def test_the_size_is_half_of_the_jobs_memory_or_what_the_site_says(tmp_path: Path) -> None:
    sizes = [
        Host(tmp_path, job_memory_gib=4.0, job_tmp_gib=asked).confinement.space_bytes / 2**30
        for asked in (None, 1.5, 9.0)
    ]
    assert sizes == [2.0, 1.5, 4.0]


def test_the_processes_of_a_rank_share_memory(host: Host) -> None:
    program = (
        "import os, time\nfrom multiprocessing import shared_memory\nrank = os.environ['RANK']\n"
        "if rank == '0':\n m = shared_memory.SharedMemory('both', create=True, size=8); m.buf[:5] = b'hello'\n"
        "while not os.path.exists('/dev/shm/both'): time.sleep(0.01)\n"
        "m = shared_memory.SharedMemory('both')\nwhile bytes(m.buf[:5]) != b'hello': time.sleep(0.01)\n"
        "print(f'rank {rank} has it', flush=True)\nopen(f'/tmp/{rank}', 'w')\n"
        "while len(set(os.listdir('/tmp')) & {'0', '1'}) < 2: time.sleep(0.01)\n"
    )
    said = host.run("job_1", "/usr/bin/python3", "-u", "-c", program, devices=(0, 1), processes="per_gpu")
    assert [said.count(f"rank {rank} has it") for rank in (0, 1)] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["per_gpu", "per_node"])
def test_workers_of_torch_hand_over_batches_through_the_jobs_shared_memory(host: Host, processes: str) -> None:
    programs, ports = torch_programs(), Ports()
    program = str(Path(__file__).with_name("loading_program.py"))
    command = [str(programs / "python"), program] if processes == "per_gpu" else [str(programs / "torchrun"), program]
    host.confinement._settings.shown_folders.extend([programs.parent, Path(program).parent])
    said = host.run("job_1", *command, devices=(0, 1), processes=processes, port=ports.take(29_900))
    ports.release()
    blocks = -(-host.confinement.space_bytes // os.statvfs("/dev/shm").f_frsize)
    for rank in (0, 1):
        assert f"rank {rank} of 2: 8 shared batches, same: True, file system: {blocks}" in said


def test_what_a_job_names_in_a_temporary_folder_is_the_hosts(host: Host) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made, tempfile.TemporaryDirectory(dir="/var/tmp") as other:
        named = Path(made)
        for folder in (named, Path(other)):
            folder.chmod(0o777)
        (named / "work").mkdir(mode=0o755)
        (named / "input").write_text("input\n")
        (named / "value").write_text("value\n")
        (Path(other) / "unnamed").write_text("unnamed")
        checkpoints = named / "kept" / "checkpoints"
        unnamed = f"n={os.path.basename(other)}; cat /var/tmp/$n/*"
        told = f"cat {named}/input; cat $VALUE; {unnamed}; pwd; echo x > {named}/new"
        said = host.run(
            *("job_1", "sh", "-c", told),
            environment={"VALUE": f"a={named / 'value'}"[2:]},
            working_dir=str(named / "work"),
            checkpoint_dir=str(checkpoints),
        )
        assert "input\n" in said
        assert "value\n" in said
        assert f"{named}/work\n" in said
        assert "unnamed\n" not in said
        assert (named / "new").read_text() == "x\n"
        assert checkpoints.stat().st_uid == host.account().user_id
        (named / "closed").mkdir(mode=0o700)
        with pytest.raises(CannotStartError, match="cannot make the folder"):
            host.run("job_2", "true", checkpoint_dir=str(named / "closed" / "checkpoints"))


@pytest.fixture
def link_to() -> Iterator[Callable[[Path | str], Path]]:
    """Make a link right in the host's /tmp."""
    made: list[Path] = []

    def link(target: Path | str) -> Path:
        made.append(Path(tempfile.mktemp(dir="/tmp")))
        made[-1].symlink_to(target)
        return made[-1]

    yield link
    for path in made:
        path.unlink()


def test_a_name_leads_to_nothing_that_its_user_cannot_reach(host: Host, link_to: Callable[[Path | str], Path]) -> None:
    secret, closed = host.folder / "data" / "secret", host.folder / "closed"
    (closed / "open").mkdir(parents=True)
    closed.chmod(0o700)
    for path in (secret, closed / "open" / "secret"):
        path.write_text("the secret")
    links = [link_to(host.folder / "data"), link_to(closed / "open")]
    rank, process = host.start("job_0", "sleep", "600")
    paths = [secret, closed / "open" / "secret", *(link / "secret" for link in links), rank.path / "users"]
    paths += [host.folder / "data", host.folder / "state"]
    said = host.run("job_1", "sh", "-c", 'for p; do cat "$p" && echo read; ls "$p"; done', "-", *map(str, paths))
    process.kill()
    process.wait()
    assert "read" not in said
    assert "the secret" not in said
    assert rank.path.name not in said.replace(str(rank.path), "")


def test_what_a_job_asks_for_is_opened_as_its_user(host: Host) -> None:
    """Its account has been tried before; but a link may be another one by then."""
    closed, account = host.folder / "closed", host.account()
    (closed / "open").mkdir(parents=True)
    (closed / "open" / "secret").write_text("the secret")
    closed.chmod(0o700)
    rank = RankFolder(host.folder / "rank")
    rank.path.mkdir()
    words = ["space 1048576", f"keep {rank.path}", f"asked {closed / 'open'}"]
    command = ["cat", f"{closed}/open/secret"]
    entries = [("confine", word) for word in words]
    launch = Launch(command, {"PATH": "/usr/bin:/bin"}, str(rank.path), 1.0, account=account, confinement=entries)
    rank.launch(launch, shim.clock() + 60, 60).wait()
    assert "No such file" in printed(rank)


@pytest.mark.parametrize("how", ["named", "asked"])
def test_a_link_in_the_hosts_temporary_folder_leads_to_nothing_but_the_jobs_own_view(
    host: Host, link_to: Callable[[Path | str], Path], how: str
) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as hosts:
        for number, name in enumerate(("/proc", "/dev/shm", "/etc")):
            link = link_to(name)
            asked = {"working_dir": str(link), "checkpoint_dir": str(link)} if how == "asked" else {}
            said = host.run(f"job_{number}", "sh", "-c", 'ls "$1/"; touch "$1/left"', "-", str(link), **asked)
            assert os.path.basename(hosts.name) not in said
            pids = {line for line in said.splitlines() if line.isdecimal()}
            assert bool(pids) is (name == "/proc")
            assert "1" not in pids, "it sees its own processes"
            assert ("passwd" in said) is (name == "/etc")
    assert not Path("/dev/shm/left").exists()


@pytest.mark.parametrize(("shares", "owner", "sees"), [(True, 0, True), (False, 0, False), (True, 4_321, False)])
def test_jobs_that_share_a_gpu_by_mps_meet_in_the_hosts_shared_memory(
    host: Host, shares: bool, owner: int, sees: bool
) -> None:
    pipes = host.folder / "pipes"
    pipes.mkdir()
    os.mkfifo(pipes / "control")
    os.chown(pipes / "control", owner, owner)
    options = {"may_share_gpu": shares, "gpus": {"min": 1, "max": 1, "memory_gib": 1}, "preemptible": True}
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as met:
        said = host.run("job_1", "ls", "/dev/shm", environment={"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}, **options)
        assert (os.path.basename(met.name) in said) is sees


# --- what is no temporary folder


def test_a_job_opens_its_own_gpu_and_no_other(tmp_path: Path) -> None:
    full, random = (
        (os.major(number), os.minor(number))
        for number in (os.stat(path).st_rdev for path in ("/dev/full", "/dev/random"))
    )
    host = Host(tmp_path, {0: full, 1: random})
    if why := host.lacks("devices"):
        pytest.skip(why)
    look = "for d in full random null; do (: < /dev/$d) 2> /dev/null && echo $d; done"
    said = [host.run(f"job_{gpu}", "sh", "-c", look, devices=(gpu,)).split() for gpu in (0, 1)]
    host.clear()
    assert said == [["full", "null"], ["random", "null"]]


def test_the_folders_of_the_installation_are_not_seen_whatever_their_modes(outside: Path) -> None:
    host = Host(outside)
    if why := host.lacks("folders"):
        pytest.skip(why)
    for name in ("data", "state"):
        (outside / name / "open").write_text("open to all")
        (outside / name).chmod(0o755)
    (outside / "beside").write_text("beside it")
    said = host.run(
        "job_1", "sh", "-c", f"cat {outside}/beside {outside}/data/open {outside}/state/open; ls {outside}/*"
    )
    host.clear()
    assert "beside it" in said
    assert "open to all" not in said


def test_a_closed_folder_shows_what_is_shown_in_it_and_nothing_else(outside: Path) -> None:
    shown, hidden = outside / "closed" / "shown", outside / "closed" / "hidden"
    for folder in (shown, hidden):
        folder.mkdir(mode=0o777, parents=True)
        folder.chmod(0o777)
        (folder / "file").write_text(f"of {folder.name}\n")
    (outside / "closed").chmod(0o700)
    host = Host(outside, shown_folders=[shown])
    if why := host.lacks("folders"):
        pytest.skip(why)
    look = f"cat {shown}/file {hidden}/file; ls {outside}/closed"
    # As its checkpoint folder, a job may name any that is there.
    said = host.run("job_1", "sh", "-c", look, checkpoint_dir=str(hidden))
    assert "of hidden" not in said
    said = host.run("job_2", "sh", "-c", look)
    host.clear()
    assert said.startswith("of shown\n")
    assert said.splitlines()[1] == "shown"
    assert "of hidden" not in said


# --- what is a user's


def test_a_jobs_path_is_a_users_and_the_site_may_pass_its_own(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    python = f"{sys.prefix}/bin"
    monkeypatch.setenv("PATH", f"/root/.cargo/bin:{python}:/usr/bin:/usr/sbin:/opt/agent/bin")
    assert host.run("job_1", "sh", "-c", "echo $PATH") == f"{python}:/usr/bin:/usr/local/bin:/bin\n"
    monkeypatch.setenv("PATH", "/root/.cargo/bin:/usr/sbin")
    assert host.run("job_2", "sh", "-c", "echo $PATH") == "/usr/local/bin:/usr/bin:/bin\n"
    own = {"PATH": "/opt/mine:/bin"}
    assert host.run("job_3", "sh", "-c", "echo $PATH", environment=own) == "/opt/mine:/bin\n"
    host = Host(host.folder, pass_environment=["PATH"])
    assert host.run("job_4", "/bin/sh", "-c", "echo $PATH") == "/root/.cargo/bin:/usr/sbin\n"


async def test_a_job_is_weighed_by_its_gpus(host: Host) -> None:
    if why := host.lacks("cpu_weight"):
        pytest.skip(why)
    if host.confinement.cgroups.version != "cgroup v1":
        pytest.skip("by contract: test_version_2_of_control_groups_by_contract")
    running = [host.start(f"job_{count}", "sleep", "600", devices=tuple(range(count))) for count in (1, 3)]
    shares = []
    for rank, process in running:
        lines = (line.split(":", 2) for line in _groups_of(await _command_of(rank)))
        (group,) = [path for _, controllers, path in lines if "cpu" in controllers.split(",")]
        shares.append(int(Path(f"/sys/fs/cgroup/cpu{group}/cpu.shares").read_text()))
        process.kill()
        process.wait()
    assert shares == [1024, 3072]


async def _command_of(rank: RankFolder) -> int:
    await eventually(rank.started)
    started = rank.started()
    assert started is not None
    pid = int(started["pid"])
    await eventually(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"))
    return pid


def _groups_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cgroup").read_text().splitlines()
