"""A job on a node connects to, and binds, only what is its own: hostile processes in control groups of jobs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gpu_agent import bpf, network, seccomp
from gpu_agent.cgroups import Cgroups, Limits
from gpu_agent.confinement import rules_of
from gpu_agent.enclosure import Enclosure
from gpu_agent.network import Rules
from gpu_agent.settings import AgentSettings
from tests.agent.conftest import a_confinement
from tests.support.ports import Ports

ATTACK = Path(__file__).with_name("hostile_network.py")
ATTACKERS, VICTIMS = 2_000_000_001, 2_000_000_002
OF_GANGS = (20_000, 32_000)
FIND = "/usr/bin/python3"
LISTEN = """
import socket, sys
found = socket.create_server(("::", int(sys.argv[1])), family=socket.AF_INET6, dualstack_ipv6=True)
beside = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
beside.bind(("::", found.getsockname()[1]))
print(found.getsockname()[1], flush=True)
sys.stdin.read()
for each, take in ((found, found.accept), (beside, lambda: beside.recvfrom(9))):
    each.setblocking(False)
    try:
        print("TOOK", take(), flush=True)
    except BlockingIOError:
        pass
print("quiet", flush=True)
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")


class Outside:
    """A server of the host's at all addresses, such as the control plane's; it takes note of what reaches it."""

    def __init__(self, port: int = 0) -> None:
        self.stream = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, reuse_port=True)
        self.port = self.stream.getsockname()[1]
        self.datagram = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        self.datagram.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.datagram.bind(("::", self.port))

    def took(self) -> list[object]:
        """Return what reached it."""
        found: list[object] = []
        for each, take in ((self.stream, self.stream.accept), (self.datagram, lambda: self.datagram.recvfrom(9))):
            each.setblocking(False)
            with suppress(BlockingIOError):
                found.append(take())
        return found

    def close(self) -> None:
        """End it."""
        self.stream.close()
        self.datagram.close()


def hosts() -> list[str]:
    """Return addresses of this host beside loopback's, one of each version of IP."""
    found: dict[int, str] = {}
    for device, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if device != "lo" and each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address:
                found.setdefault(each.family, each.address)
    return [*found.values()]


def skip_where_no_program_runs(folder: Path) -> None:
    """Skip where no program can be attached to a control group, not even one that allows everything."""
    try:
        group = network.hierarchy(Path("/sys/fs/cgroup")) / f"wattshift-test-{folder.name}"
        group.mkdir()
        try:
            everything = bpf.assembled([bpf.op(bpf.MOVE_VALUE, 0, value=1), bpf.op(bpf.END)])
            loaded = bpf.load(network._SKB, network._EGRESS, everything)
            bpf.attach(group, network._EGRESS, loaded)
            os.close(loaded)
        finally:
            group.rmdir()
    except OSError as error:
        pytest.skip(f"no program can be attached to a control group here: {error}")


class Jobs:
    """Starts processes as jobs of tenants, in control groups of their own."""

    def __init__(self, folder: Path, rules: Rules) -> None:
        self._folder, self.rules = folder, rules
        self.groups: Cgroups | None = None
        self._started: list[subprocess.Popen[str]] = []
        self.restart()

    def restart(self) -> None:
        """Do with the jobs to come as an agent that was started anew; those that run are not touched."""
        if self.groups is not None:
            assert self.groups._network is not None
            for _, program in self.groups._network._programs:
                os.close(program)
        self.groups = Cgroups(self._folder, Limits(2**30, 2**30, 1000))
        self.groups.prepare_network(self.rules, VICTIMS)
        if "network" in self.groups.lacking:
            skip_where_no_program_runs(self._folder)
            pytest.fail(self.groups.lacking["network"])

    def start(self, name: str, user_id: int, port: int, *words: str) -> subprocess.Popen[str]:
        """Start a program in the group of a rank whose gang was given a port."""
        assert self.groups is not None
        paths = self.groups.make(name, [], port=port)
        assert self.groups.make(name, [], port=port) == paths, "as for git, and then for the job"
        assert paths

        enclosure = Enclosure()
        for entry in (*(f"cgroup {path}" for path in paths), "seal", f"filter {seccomp.program().hex()}"):
            enclosure.add(entry.encode())

        def enter() -> None:
            enclosure.enter()
            os.setgroups([])
            os.setgid(user_id)
            os.setuid(user_id)
            enclosure.seal()

        pipe = subprocess.PIPE
        started = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, preexec_fn=enter, cwd="/")
        self._started.append(started)
        return started

    def listen(self, name: str, user_id: int, port: int = 0) -> tuple[subprocess.Popen[str], int]:
        """Start a job that listens; return the port too."""
        started = self.start(name, user_id, port, FIND, "-c", LISTEN, str(port))
        assert started.stdout
        return started, int(started.stdout.readline())

    def attack(self, name: str, own: int, **facts: object) -> list[str]:
        """Run the attack and return what it printed."""
        said = self.start(name, ATTACKERS, own, FIND, "-c", ATTACK.read_text(), json.dumps({"own": own, **facts}))
        return said.communicate(timeout=120)[0].splitlines()

    def close(self) -> None:
        """End what runs."""
        for each in self._started:
            each.kill()
            each.communicate()
        assert self.groups is not None
        self.groups.sweep(())
        self.groups.close()


@pytest.fixture
def ports() -> Iterator[Ports]:
    taken = Ports()
    yield taken
    taken.release()


@pytest.fixture
def outside() -> Iterator[Callable[..., Outside]]:
    made: list[Outside] = []

    def make(port: int = 0) -> Outside:
        made.append(Outside(port))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def of_gangs(ports: Ports) -> list[int]:
    return [ports.take(31_300) for _ in range(3)]


@pytest.fixture
def jobs(tmp_path: Path, open_door: Outside) -> Iterator[Jobs]:
    with socket.create_server(("", 0)) as free:
        kept = free.getsockname()[1]  # above those of gangs
    made = Jobs(tmp_path, Rules((open_door.port,), (kept,), OF_GANGS))
    yield made
    made.close()


@pytest.fixture
def open_door(outside: Callable[..., Outside]) -> Outside:
    return outside()


def test_a_job_reaches_and_binds_what_is_its_own(
    jobs: Jobs, outside: Callable[..., Outside], open_door: Outside, of_gangs: list[int]
) -> None:
    own, other, gangs = of_gangs
    closed = outside()
    victim, stolen = jobs.listen("victim", VICTIMS)
    _, beside = jobs.listen("beside", ATTACKERS, gangs)
    printed = jobs.attack(
        "attack",
        own,
        closed=[closed.port, stolen],
        open=open_door.port,
        bind=[other, OF_GANGS[0], OF_GANGS[1], *jobs.rules.kept],
        gangs=[beside],
        hosts=hosts(),
    )
    assert printed == ["done"], "\n".join(printed)
    assert closed.took() == []
    assert victim.communicate()[0].split() == ["quiet"]


def test_jobs_know_each_other_after_their_agent_was_started_anew(jobs: Jobs, of_gangs: list[int]) -> None:
    own, of_another = of_gangs[0], of_gangs[1]
    _, before = jobs.listen("before", ATTACKERS, of_gangs[2])
    victim, stolen = jobs.listen("victim", VICTIMS)
    jobs.restart()
    printed = jobs.attack("after", own, closed=[stolen], open=before, bind=[of_another], gangs=[before], hosts=[])
    assert printed == ["done"], "\n".join(printed)
    assert victim.communicate()[0].split() == ["quiet"]


def test_agents_of_one_host_share_who_is_whose(jobs: Jobs, tmp_path: Path, of_gangs: list[int]) -> None:
    """As the agents of a machine with several simulated nodes, which a gang may span."""
    (tmp_path / "other").mkdir()
    other = Jobs(tmp_path / "other", jobs.rules)
    try:
        _, port = other.listen("beside", ATTACKERS, of_gangs[1])
        assert jobs.attack("rank", of_gangs[0], closed=[], open=port, bind=[], gangs=[port], hosts=[]) == ["done"]
    finally:
        other.close()


ENTER = "import os, sys, time\nwith open(sys.argv[1], 'w') as group: group.write('0')\n"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("refused", "not permitted"),
        ("without effect", "connections of jobs are not stopped"),
        (f"{ENTER}time.sleep(600)", "no answer within 1 s"),
        (f"{ENTER}os.kill(os.getpid(), 9)", "ends with -9"),
    ],
    ids=["refused", "without effect", "hangs", "is killed"],
)
def test_what_cannot_be_had_is_said_and_jobs_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    if fault == "refused":
        monkeypatch.setattr(bpf, "_call", refuse)
    elif fault == "without effect":
        monkeypatch.setattr(network.Network, "attach", lambda *_: None)
    else:
        skip_where_no_program_runs(tmp_path)
        monkeypatch.setattr(network, "_TRY", fault)
        monkeypatch.setattr(network, "_TRY_S", 1.0)
    confinement = a_confinement(tmp_path)
    try:
        [found] = [each for each in confinement.protections() if each.name == "network"]
        assert not found.holds
        assert said in found.how
        assert not [path for path in confinement.cgroups.make("rank", []) if "unified" in path.parts]
    finally:
        confinement.cgroups.sweep(())
        confinement.cgroups.close()


def test_without_a_hierarchy_of_version_2_one_is_mounted_for_root_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "private" / "cgroup"
    try:
        found = network.hierarchy(tmp_path, mount)
    except OSError as error:
        pytest.skip(str(error))
    try:
        assert found == network.hierarchy(tmp_path, mount) == mount, "it is mounted once"
        assert mount.stat().st_dev != tmp_path.stat().st_dev
        assert mount.parent.stat().st_mode & 0o077 == 0
        assert (mount / "cgroup.procs").exists()
        looks = iter([False, True])
        monkeypatch.setattr(os.path, "ismount", lambda _: next(looks))
        assert network.hierarchy(tmp_path, mount) == mount, "another agent has mounted it since this one looked"
    finally:
        subprocess.run(["umount", mount], check=True)
    assert not (mount / "cgroup.procs").exists(), "it was mounted once"


def test_proxies_of_this_host_stay_reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://localhost:3128")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:8888")
    monkeypatch.setenv("no_proxy", "localhost")
    settings = AgentSettings(state_dir=tmp_path, port=8075, jobs_may_reach=[8000, 8050], jobs_may_not_bind=[8071])  # pyright: ignore[reportCallIssue]
    rules = rules_of(settings)
    assert set(rules.reachable) == {8000, 8050, 3128, 8175, 53}
    assert set(rules.kept) == {8000, 8050, 3128, 8175, 8075, 8071}
