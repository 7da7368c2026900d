"""A hostile job of another tenant: it reaches neither the agent, nor other jobs, nor what confines it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from pydantic import ValidationError

from gpu_agent import cgroups, seccomp
from gpu_agent.account import Identities, TenantAccounts
from gpu_agent.cgroups import Cgroups, Limits, attach_device_program
from gpu_agent.environment import passed_environment
from gpu_agent.settings import AgentSettings
from services.cli.site.opening import open_to
from services.core.domain.errors import DomainError
from tests.agent.conftest import Node, a_confinement, eventually
from tests.agent.test_exec import run
from tests.agent.test_small_parts import a_start
from tests.support.servers import ROOT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")


def needs_cgroup(controller: str) -> pytest.MarkDecorator:
    """Skip a test where this process cannot make control groups of version 1."""
    folder = Path("/sys/fs/cgroup") / controller
    return pytest.mark.skipif(not os.access(folder, os.W_OK), reason=f"cannot write to {folder}")


MAKES_ROOM = (
    "import ctypes; c = ctypes.CDLL(None); k = 0x57A77000; c.shmget(k, 9, 950); c.msgget(k, 950); c.semget(k, 1, 950)"
)
ATTACK = ROOT / "tests" / "agent" / "hostile_job.py"


@pytest.fixture
def node(open_node: Node) -> Node:
    return open_node


async def test_a_hostile_job_of_another_tenant_gets_nowhere(node: Node) -> None:
    script, helper = node.folder / "attack.py", node.folder / "whoami"
    shutil.copy(ATTACK, script)
    shutil.copy("/usr/bin/id", helper)
    helper.chmod(0o4755)
    script.chmod(0o644)
    (node.folder / "data" / "admin.key").write_text("wsk_the_admin_key")
    (node.folder / "data" / "admin.key").chmod(0o600)
    servers = [_listening(node.folder / "data" / "valkey.sock")]
    await node.start(GPU_AGENT_OWNER_TENANTS="default", GPU_AGENT_JOB_TMP_GIB=str(2**-7))
    servers.append(_listening(node.state_dir / "agent.sock"))
    secret = "the-victims-own-value"
    room = f"/usr/bin/python3 -c '{MAKES_ROOM}'; for d in /tmp /var/tmp /dev/shm; do echo {secret} > $d/victims; done"
    listens = "import socket, time; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True)"
    says = f"{room}; echo {secret} > $WATTSHIFT_CHECKPOINT_DIR/mine; echo {secret} > mine; echo {secret}; "
    says += f'/usr/bin/python3 -c "{listens}; time.sleep(600)" > port & sleep 600'
    victim = await node.run("sh", "-c", f"umask 0; {says}", tenant="victims", environment={"OWN": secret}, devices=[0])
    stdout = node.rank_dir(victim) / "stdout"
    await eventually(lambda: stdout.exists() and secret in stdout.read_text())
    assert node.process
    pid = next(process.pid for process in node.processes("sleep"))
    facts = [str(node.process.pid), str(pid), str(node.rank_dir(victim)), victim.split(".")[0], str(node.folder)]
    [network] = [each for each in await _protections(node) if each["name"] == "network"]
    if network["holds"]:
        listening = node.rank_dir(victim) / "scratch" / "port"
        await eventually(lambda: listening.exists() and listening.read_text())
        facts += [listening.read_text().strip(), str(node.port), str(urlsplit(node.plane.url).port)]
    attack = ["/usr/bin/python3", str(script), *facts]
    hostile = await node.run("sh", "-c", '"$@"; exec sleep 600', "-", *attack, tenant="attackers", devices=[1])
    output = node.rank_dir(hostile) / "stdout"
    await eventually(lambda: output.exists() and "done" in output.read_text())
    beside = await run(node, hostile, *attack)
    paths = {server.getsockname() for server in servers}
    for server in servers:
        server.close()

    for printed in (output.read_text(), beside.stdout.decode()):
        assert "done" in printed, printed + beside.stderr.decode()
        assert "reached where progress is posted" in printed
        assert [line for line in printed.splitlines() if line.startswith("BROKE")] == []
        assert secret not in printed
        assert [line.split()[-1] for line in printed.splitlines() if line.startswith("made")] == ["True"] * 6
        assert paths <= {line.split()[1] for line in printed.splitlines() if line.startswith("server")}
    assert [path for path in ("/tmp", "/var/tmp", "/dev/shm") if (Path(path) / "hostile").exists()] == []
    for kind in ("shm", "msg", "sem"):
        assert not {"1470590976", "1470590977"} & set(Path(f"/proc/sysvipc/{kind}").read_text().split())
    assert stdout.read_text() == f"{secret}\n"
    assert node.plane.state(victim) == "running"
    users = {(node.rank_dir(gang) / "stdout").stat().st_uid for gang in (hostile, victim)}
    assert len({*users, 0}) == 3, "each tenant has an account of its own, and none is root's"


async def _protections(node: Node) -> list[dict[str, Any]]:
    _, _, body = await node.get("/v1/state")
    return json.loads(body)["protections"]


async def _exit(node: Node, gang: str) -> tuple[int | None, str, str]:
    """Return a rank's exit code, the reason that is reported, and its standard output."""
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    stdout = node.rank_dir(gang) / "stdout"
    return rank.exit_code, rank.detail or "", stdout.read_text() if stdout.exists() else ""


async def test_a_fork_bomb_stays_within_its_limit(node: Node) -> None:
    await node.start(GPU_AGENT_JOB_PROCESSES="64")
    bomb = (
        "import os,time\nn=0\nwhile True:\n try:\n  pid=os.fork()\n except OSError: break\n"
        " if not pid: time.sleep(600)\n n+=1\nprint(n, flush=True)\nos.killpg(0, 9)"
    )
    gang = await node.run("/usr/bin/python3", "-c", bomb)
    _, _, printed = await _exit(node, gang)
    assert 0 < int(printed) < 64


@needs_cgroup("memory")
async def test_a_job_that_uses_too_much_memory_is_killed_alone(node: Node) -> None:
    await node.start(GPU_AGENT_JOB_MEMORY_GIB="0.0625")
    beside = await node.run("sleep", "600", devices=[0])
    gang = await node.run("/usr/bin/python3", "-c", "b = bytearray(2**28); print('used it')", devices=[1])
    code, detail, printed = await _exit(node, gang)
    assert (code, printed) == (-9, "")
    assert detail == "It was killed because it used more memory than its limit of 0.1 GiB (peak 0.1 GiB)."
    assert node.plane.state(beside) == "running"
    worker = "import os; os.fork() or bytearray(2**28); raise SystemExit(os.wait()[1] != 0)"
    gang = await node.run("/usr/bin/python3", "-c", worker, devices=[1])
    code, detail, _ = await _exit(node, gang)
    assert code == 1
    assert detail.startswith("One of its processes was killed because it used more memory than its limit of 0.1 GiB")


async def test_output_beyond_the_limit_ends_the_job(node: Node) -> None:
    await node.start(GPU_AGENT_JOB_OUTPUT_BYTES=str(2 * 2**20))
    write = "head -c 4000000 /dev/zero"
    gang = await node.run("sh", "-c", f"trap '' TERM; {write}; {write} >&2; sleep 600")
    code, detail, _ = await _exit(node, gang)
    assert (code, detail) == (-25, "Its output took more than 2 MiB of the disk at once.")


async def test_a_link_in_the_place_of_a_checkpoint_folder_is_refused(node: Node) -> None:
    await node.start()
    foreign = node.folder / "foreign"
    foreign.mkdir(mode=0o700)
    (node.folder / "data" / "checkpoints").mkdir()
    (node.folder / "data" / "checkpoints" / "job_link").symlink_to(foreign)
    gang = await node.run("sh", "-c", "echo $WATTSHIFT_CHECKPOINT_DIR", job="job_link")
    code, _, printed = await _exit(node, gang)
    assert foreign.stat().st_uid == 0
    assert code == 126 or "data/checkpoints" not in printed


@pytest.mark.parametrize("how", ["path", "link"])
async def test_the_folder_of_another_rank_is_no_working_folder(node: Node, how: str) -> None:
    """Accounts have to pass through it to its files, so its mode alone would let them in."""
    await node.start()
    other = await node.run("sleep", "600", tenant="victims", devices=[0])
    await eventually(lambda: node.plane.state(other) == "running")
    link = node.folder / "link"
    link.symlink_to(node.rank_dir(other))
    asked = str(node.rank_dir(other) if how == "path" else link)
    gang = await node.run("cat", "users", tenant="attackers", devices=[1], working_dir=asked)
    code, detail, printed = await _exit(node, gang)
    assert code not in (0, None), printed
    assert (printed, "working" in detail) == ("", True)


async def test_what_a_closed_folder_holds_is_shown_if_the_installation_says_so(node: Node) -> None:
    closed = node.folder / "closed"
    (closed / "examples").mkdir(parents=True)
    (closed / "examples" / "train").write_text("echo trained")
    (closed / "private").write_text("private")
    closed.chmod(0o700)
    await node.start(GPU_AGENT_SHOWN_FOLDERS=str(closed / "examples"))
    say = f"sh {closed}/examples/train; cat {closed}/private; echo x > {closed}/examples/train"
    gang = await node.run("sh", "-c", f"{say}; {sys.executable} -c 'print(1)'")
    code, _, printed = await _exit(node, gang)
    assert (code, printed) == (0, "trained\n1\n")
    assert (closed / "examples" / "train").read_text() == "echo trained"


async def test_a_folder_that_its_owner_opened_to_the_account_is_shown_beneath_closed_ones(node: Node) -> None:
    closed = node.folder / "closed"
    for name in ("mine", "others"):
        (closed / name).mkdir(parents=True)
        (closed / name / "data").write_text(name)
        (closed / name / "data").chmod(0o600)
    closed.chmod(0o700)
    await node.start()
    script = f"pwd; cat data; echo made >result; cat {closed}/others/data; ls {closed}"
    refused = await node.run("sh", "-c", script, working_dir=str(closed / "mine"))
    code, detail, _ = await _exit(node, refused)
    assert (code, "cannot enter its working folder" in detail) == (126, True)
    (account,) = (node.folder / "data" / "accounts").iterdir()
    try:
        open_to(int(account.name), closed / "mine", writes=True)
        open_to(int(account.name) + 1, closed / "others", writes=True)
    except OSError as error:
        pytest.skip(f"no access lists here: {error}")

    gang = await node.run("sh", "-c", script, working_dir=str(closed / "mine"))
    code, _, printed = await _exit(node, gang)

    assert (code, printed) == (0, f"{closed}/mine\nminemine\n")
    assert (closed / "mine" / "result").read_text() == "made\n"
    gang = await node.run("cat", "data", working_dir=str(closed / "others"))
    assert (await _exit(node, gang))[0] == 126


async def test_what_a_killed_agent_left_is_cleared_up(node: Node) -> None:
    await node.start()
    # It leaves its group, its session, its parent and its environment: nothing but the control group knows it.
    daemon = "import os\nif not os.fork():\n os.setsid()\n if not os.fork():\n  "
    daemon += f"os.execve('/bin/sleep', ['left-on-{node.id}', '611'], {{}})\n"
    gang = await node.run("/usr/bin/python3", "-c", daemon + "import time; time.sleep(600)")
    await eventually(lambda: _named(f"left-on-{node.id}"))
    (left,) = _named(f"left-on-{node.id}")
    node.kill()
    node.kill_ranks()
    assert left.is_running()
    await node.start()
    await eventually(lambda: node.plane.state(gang) == "exited")
    await eventually(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE)
    await eventually(lambda: not [each for each in _groups() if each.name == gang and _is_of(node, each)])


def test_no_job_runs_as_root_or_as_a_user_of_the_control_plane(tmp_path: Path) -> None:
    confinement = a_confinement(tmp_path, reserved_accounts=["nobody"])
    start = a_start()
    for account, words in (("nobody", "processes of the control plane do"), ("toor", "does not exist")):
        with pytest.raises(DomainError, match=words):
            confinement.identities.account_of(start.model_copy(update={"account": account}))
    of_tenants = [
        confinement.identities.account_of(start.model_copy(update={"tenant_id": tenant, "account": account}))
        for tenant, account in (("a", None), ("a", "root"), ("b", None))
    ]
    assert of_tenants[0] == of_tenants[1] != of_tenants[2]
    assert all(each is not None and each.user_id >= 2_000_000_000 for each in of_tenants)


def test_two_tenants_never_get_the_same_user_id(tmp_path: Path) -> None:
    given = TenantAccounts(70_000, 70_002, tmp_path / "accounts", tmp_path / "homes")
    numbers = [given.account_of(tenant).user_id for tenant in ("a", "b", "c", "a", "b", "c")]
    assert sorted(numbers[:3]) == [70_000, 70_001, 70_002]
    assert numbers[3:] == numbers[:3]
    with pytest.raises(DomainError, match="all 3 user ids"):
        given.account_of("d")


def test_an_agent_that_cannot_separate_refuses_strangers_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = Identities(None, None, ["mine"], ())
    start = a_start().model_copy(update={"tenant_id": "theirs"})
    with pytest.raises(DomainError, match="runs none as root"):
        identities.account_of(start)
    monkeypatch.setattr(os, "geteuid", lambda: 4_321)
    with pytest.raises(DomainError, match="cannot tell tenants apart: its agent runs as user id 4321"):
        identities.account_of(start)
    assert identities.account_of(start.model_copy(update={"tenant_id": "mine"})) is None


def test_no_credential_is_passed_on() -> None:
    own = {"REDIS_URL": "redis://:x@h", "https_proxy": "http://me:secret@proxy:1", "http_proxy": "http://proxy:1"}
    assert passed_environment(("LANG",), own | {"WATTSHIFT_SERVICE_TOKEN": "t", "LANG": "C"}) == {
        "http_proxy": "http://proxy:1",
        "LANG": "C",
        "PATH": os.defpath,
    }
    with pytest.raises(ValidationError, match="jobs get no credentials"):
        AgentSettings(pass_environment=["REDIS_URL"])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole_for_every_architecture(machine: str) -> None:
    program = seccomp.program(machine)
    code = list(struct.iter_unpack("HBBI", program))
    for at, (operation, on, off, _) in enumerate(code):
        if operation & 0x07 == 0x05:  # a jump: forward, and within the program
            assert at + 1 + max(on, off) < len(code)
        else:
            assert (on, off) == (0, 0)
    assert code[-1] == (0x06, 0, 0, 0x7FFF0000)
    assert seccomp.NUMBERS["x86_64"].keys() - seccomp.NUMBERS["aarch64"].keys() == {"iopl", "ioperm"}


def test_the_filter_refuses_what_it_names() -> None:
    look = (
        "import ctypes,sys; sys.path.append(sys.argv[1]); import enclosure\n"
        "enclosure._try_enclosure(('seal', 'filter '+sys.argv[2]))\n"
        "call = ctypes.CDLL(None, use_errno=True).syscall\n"
        "for number in map(int, sys.argv[3:]): call(number, 0x10000000, 0, 0, 0, 0, 0) ; print(ctypes.get_errno())"
    )
    names = ["mount", "bpf", "keyctl", "unshare", "clone3", "init_module"]
    numbers = [str(seccomp.NUMBERS[platform.machine()][name]) for name in names]
    folder = os.path.dirname(seccomp.__file__)
    command = [sys.executable, "-I", "-S", "-c", look, folder, seccomp.program().hex(), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", "1", "1", str(errno.ENOSYS), "1"]


@needs_cgroup("devices")
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_devices_of_others_cannot_be_opened(tmp_path: Path, version: str) -> None:
    full = os.makedev(1, 7)
    assert os.stat("/dev/full").st_rdev == full
    if version == "v1":
        groups = Cgroups(tmp_path, Limits(2**30, 2**30, 64))
        groups.prepare()
        procs = next(path for path in groups.make("rank", [(1, 7)]) if "devices" in path.parts)
    else:
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if " cgroup2 " in line]
        if not mounted:
            pytest.skip("no cgroup v2 is mounted here")
        group = Path(mounted[0]) / f"wattshift-test-{os.getpid()}"
        group.mkdir()
        attach_device_program(group, [(1, 7)])
        procs = group / "cgroup.procs"
    try:
        look = f"echo 0 > {procs}; for d in null full zero; do : < /dev/$d && echo $d; done"
        done = subprocess.run(["sh", "-c", f"exec 2>/dev/null; {look}"], capture_output=True, text=True)
        assert done.stdout.split() in (["null", "zero"], ["null"])  # a shell ends at a redirection that fails
    finally:
        if version == "v1":
            groups.sweep(())
            groups.close()
        else:
            procs.parent.rmdir()


def test_version_2_of_control_groups_by_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids")
    (tmp_path / "cgroup.subtree_control").write_text("cpu io memory pids")
    scheduler = tmp_path / "block" / "vda" / "queue" / "scheduler"
    scheduler.parent.mkdir(parents=True)
    scheduler.write_text("none [mq-deadline] bfq\n")
    monkeypatch.setattr(cgroups, "_DISKS", tmp_path / "block")
    groups = Cgroups(Path("/state"), Limits(2**20, 2**30, 77), tmp_path)
    groups.prepare()
    assert set(groups.lacking) == {"devices", "io"}
    assert "no disk's scheduler weighs jobs" in groups.lacking["io"]
    (tmp_path / "io.cost.qos").write_text("8:0 enable=1 ctrl=auto")
    groups = Cgroups(Path("/state"), Limits(2**20, 2**30, 77), tmp_path)
    groups.prepare()
    assert set(groups.lacking) == {"devices"}
    parent = tmp_path / groups._name
    assert (parent / "cgroup.subtree_control").read_text() == "+io +memory +pids"
    rank = parent / "rank"
    rank.mkdir()
    for name in ("cpu.weight", "io.weight"):  # which the kernel makes
        (rank / name).write_text("")
    groups.make("rank", [], 1 / 7)
    (procs,) = groups.make("rank", [], 2.0)
    assert procs.parent == rank
    written = {path.name: path.read_text() for path in rank.iterdir()}
    wanted = {"memory.max": str(2**20), "pids.max": "77", "cpu.weight": "200", "io.weight": "200"}
    assert written == wanted
    assert (parent / "memory.max").read_text() == str(2**30)


def _listening(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    path.chmod(0o777)
    return server


def _named(name: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [""])[0] == name]


def _groups() -> list[Path]:
    """Return those of all agents; others' come and go meanwhile, which a glob would not bear."""
    found = ((Path(folder), names) for folder, names, _ in os.walk("/sys/fs/cgroup"))
    return [folder / name for folder, names in found if folder.name.startswith("wattshift-") for name in names]


def _is_of(node: Node, group: Path) -> bool:
    return group.parent.name == f"wattshift-{hashlib.sha256(os.fsencode(node.state_dir)).hexdigest()[:16]}"
