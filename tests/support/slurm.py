"""A real Slurm on this machine: Debian's packages, several virtual nodes of eight GPUs that are none.

Slurm's daemons must run as root. ``install`` gets the packages where they are missing; ``SlurmLab`` brings up munge, a
controller and the nodes' daemons in one folder, on ports of their own, and ends what it started.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import scratch_folder

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurmrestd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "slurm-wlm-jwt-plugin",
    "munge",
)
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server")
MODEL = "h200"

CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=slurm
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={folder}/state/jwt.key
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/ctld.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/ctld.log
SlurmdLogFile={folder}/log/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/linux
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PriorityType={priority}
MaxJobCount=20000
MinJobAge=300
MessageTimeout=60
GresTypes=gpu
JobSubmitPlugins=lua
ReturnToService=2
KillWait=3
Licenses=matlab:1
JobRequeue=1
{extra}
NodeName=gpu[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] \
CPUs=64 RealMemory=64000 Gres=gpu:h200:8 State=UNKNOWN
PartitionName=batch Nodes=gpu[1-{nodes}] Default=YES MaxTime=7-0 State=UP PriorityTier=1
PartitionName=private Nodes=gpu[1-{nodes}] MaxTime=7-0 State=UP PriorityTier=1
"""

ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={folder}/munge/socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=limits,qos
PriorityWeightAge=1000
PriorityMaxAge=1-0
PriorityWeightFairshare=50000
PriorityWeightQOS=10000
PriorityDecayHalfLife={half_life}
PriorityCalcPeriod=1
"""
DATABASE = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost=localhost
DbdPort={dbd_port}
SlurmUser=slurm
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=root
StorageLoc=slurm_acct
LogFile={folder}/log/dbd.log
PidFile={folder}/run/dbd.pid
"""
ASSOCIATIONS = (
    "add account bio",
    "add account ml",
    "add qos capped set MaxTRESPerUser=gres/gpu=8",
    "add user nobody account=ml qos=normal,capped",
    "add user daemon account=bio",
)
"""Of two users in accounts of equal shares; in the QOS ``capped`` one may hold eight GPUs at once."""


def missing() -> str:
    """Return why there can be no Slurm here; empty if there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    if shutil.which("slurmctld") is None and shutil.which("apt-get") is None:
        return "no slurmctld, and no apt-get to install it with"
    return ""


def install(*, accounting: bool = False) -> str:
    """Install what is missing; return why that failed, empty if it did not."""
    wanted = ["slurmctld", "slurmd", "munged", "squeue", "slurmrestd"]
    if all(map(shutil.which, wanted + ["slurmdbd", "mariadbd", "mariadb-install-db"] * accounting)):
        return ""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = PACKAGES + ACCOUNTING_PACKAGES * accounting
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    for attempt in (["apt-get", "update", "-qq"], command):
        done = subprocess.run(attempt, env=environment, capture_output=True, text=True, timeout=300)
    return "" if done.returncode == 0 else f"apt-get cannot install Slurm: {done.stderr[-300:]}"


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that nobody listens on."""
    for first in range(17_000 + os.getpid() % 500 * 20, 60_000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, each in enumerate(sockets):
                each.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError("no ports are free")


class SlurmLab:
    """A Slurm of ``nodes`` virtual nodes, with eight GPUs each.

    With ``accounting`` it has slurmdbd, accounts, QOS and fair share, and priorities of many factors.
    """

    def __init__(
        self, folder: Path, nodes: int = 2, extra: str = "", *, accounting: bool = False, half_life: str = "1-0"
    ) -> None:
        self.folder, self.nodes, self.extra, self.accounting = folder, nodes, extra, accounting
        self.half_life = half_life
        self.conf = folder / "slurm.conf"
        self.alive = folder / "run" / "alive"
        """Where the bridge says to ``job_submit.lua`` until when new jobs are to wait for it."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need."""
        return {**os.environ, "SLURM_CONF": str(self.conf), "SLURM_TIME_FORMAT": "%s"}

    def start(self) -> None:
        """Bring everything up and return once the nodes take jobs."""
        slurm = pwd.getpwnam("slurm")
        host, first = socket.gethostname().split(".")[0], free_ports(self.nodes + 4)
        self.folder.mkdir(parents=True, exist_ok=True)
        for above in [self.folder, *self.folder.parents]:
            if above.owner() == "root" and above != Path("/"):
                above.chmod(above.stat().st_mode | 0o055)
        for name in ("state", "spool", "log", "run", "dev"):
            (self.folder / name).mkdir(exist_ok=True)
            os.chown(self.folder / name, slurm.pw_uid, slurm.pw_gid)
        key = self.folder / "state" / "jwt.key"
        key.write_bytes(os.urandom(32))
        os.chown(key, slurm.pw_uid, slurm.pw_gid)
        key.chmod(0o600)
        for device in range(8):
            os.mknod(self.folder / "dev" / f"nvidia{device}", 0o20666, os.makedev(1, 3))
        last = first + self.nodes
        dbd_port = last + 1
        extra = self.extra + (
            ACCOUNTING.format(folder=self.folder, dbd_port=dbd_port, half_life=self.half_life)
            if self.accounting
            else ""
        )
        self.conf.write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=host,
                ctld_port=first,
                first_port=first + 1,
                last_port=last,
                nodes=self.nodes,
                priority="priority/multifactor" if self.accounting else "priority/basic",
                extra=extra,
            )
        )
        gres = f"NodeName=gpu[1-{self.nodes}] Name=gpu Type={MODEL} File={self.folder}/dev/nvidia[0-7]\n"
        (self.folder / "gres.conf").write_text("AutoDetect=off\n" + gres)
        script = (ROOT / "deploy" / "slurm" / "job_submit.lua").read_text()
        script = script.replace("PARTITIONS = {}", "PARTITIONS = { batch = true }")
        (self.folder / "job_submit.lua").write_text(script.replace("/run/wattshift-slurm/alive", str(self.alive)))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        self._munge()
        if self.accounting:
            self._database(dbd_port, dbd_port + 1)
        self.start_controller("-i")
        for words in ASSOCIATIONS if self.accounting else ():
            self.run("sacctmgr", "-i", *words.split())
        for node in range(1, self.nodes + 1):
            self._spawn(f"gpu{node}", "slurmd", "-D", "-N", f"gpu{node}")
        self.wait(lambda: self.run("sinfo", "-h", "-o", "%T") == "idle", 30, "the nodes are idle")

    def start_controller(self, *options: str) -> None:
        """Start the controller and return once it answers."""
        self._spawn("slurmctld", "slurmctld", "-D", *options)
        self.wait(lambda: "UP" in self.run("scontrol", "ping"), 20, "the controller answers")

    @contextlib.contextmanager
    def slurmrestd(self, version: int) -> Iterator[dict[str, str]]:
        """Run slurmrestd with one version until the end of the block; yield the bridge's settings for it."""
        port, daemon = free_ports(1), pwd.getpwnam("daemon")
        token = self.folder / "run" / "token"
        token.write_text(self.run("scontrol", "token", "username=root", "lifespan=3600"))
        with (self.folder / "log" / "slurmrestd.out").open("ab") as log:
            process = subprocess.Popen(
                [
                    *(shutil.which("slurmrestd") or "/usr/sbin/slurmrestd", "-a", "rest_auth/jwt"),
                    *("-s", f"openapi/v0.0.{version}", f"127.0.0.1:{port}"),
                ],
                env={**self.environment, "SLURM_JWT": "daemon"},
                stdout=log,
                stderr=log,
                cwd="/",
                user=daemon.pw_uid,
                group=daemon.pw_gid,
                extra_groups=[],
            )
        try:
            self.wait(
                lambda: socket.create_connection(("127.0.0.1", port), 1).close() is None, 20, "slurmrestd answers"
            )
            yield {"rest": f"http://127.0.0.1:{port}", "rest_token_file": str(token)}
        finally:
            process.kill()
            process.wait()

    def kill_controller(self) -> None:
        """Kill the controller as a crash would."""
        process = self.processes.pop("slurmctld")
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End all jobs and daemons."""
        if "slurmctld" in self.processes:
            for user in ("nobody", "daemon", "root"):
                self.run("scancel", f"--user={user}", check=False)
            time.sleep(0.5)
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        self.processes.clear()

    def run(self, *command: str, check: bool = True, user: str = "", **options: Any) -> str:
        """Return what one of Slurm's commands prints, run as root, or as a user."""
        if user:
            account = pwd.getpwnam(user)
            options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, cwd="/", **options
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout.strip()

    def sbatch(self, script: str, *options: str, gpus: int = 1, user: str = "nobody") -> str:
        """Submit a script as an ordinary user; return Slurm's number of the job."""
        text = f"#!/bin/sh\n{script}\n"
        gres = [f"--gres=gpu:{MODEL}:{gpus}"] if gpus else []
        output = ["--output=/dev/null", "--chdir=/tmp", "--cpus-per-task=1"]
        answer = self.run("sbatch", "--parsable", *gres, *output, "--mem=10", *options, user=user, input=text)
        return answer.split(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm says of a job."""
        line = self.run("scontrol", "-o", "show", "job", number)
        pairs = [part.partition("=") for part in line.split(" ") if "=" in part]
        return {name: value for name, _, value in pairs}

    def state(self, number: str) -> str:
        """Return a job's state."""
        return self.job(number)["JobState"]

    @staticmethod
    def wait(ready: Callable[[], object], within_s: float, what: str) -> None:
        """Return once something is so.

        Raises:
            TimeoutError: It is not in time.
        """
        until = time.monotonic() + within_s
        last: object = ""
        while time.monotonic() < until:
            try:
                if ready():
                    return
            except (RuntimeError, subprocess.SubprocessError, OSError) as error:
                last = error
            time.sleep(0.2)
        raise TimeoutError(f"not within {within_s:g} s: {what}; {last}")

    def _database(self, dbd_port: int, sql_port: int) -> None:
        """Start MariaDB and slurmdbd, which the controller then tells of its GPUs."""
        data, conf = self.folder / "sql", self.folder / "slurmdbd.conf"
        mysql = pwd.getpwnam("mysql")
        data.mkdir()
        os.chown(data, mysql.pw_uid, mysql.pw_gid)
        subprocess.run(
            ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=mysql", "--skip-test-db"],
            check=True,
            capture_output=True,
        )
        own = [f"--datadir={data}", f"--socket={data}/socket", f"--port={sql_port}", "--bind-address=127.0.0.1"]
        self._spawn("mariadbd", "mariadbd", "--no-defaults", "--user=mysql", "--skip-grant-tables", *own)
        self.wait(lambda: socket.create_connection(("127.0.0.1", sql_port), 1).close() is None, 30, "MariaDB answers")
        conf.write_text(DATABASE.format(folder=self.folder, dbd_port=dbd_port, sql_port=sql_port))
        slurm = pwd.getpwnam("slurm")
        os.chown(conf, slurm.pw_uid, slurm.pw_gid)
        conf.chmod(0o600)
        self._spawn("slurmdbd", "slurmdbd", "-D")
        self.wait(lambda: self.run("sacctmgr", "-n", "show", "cluster") == "", 30, "slurmdbd answers")
        self.run("sacctmgr", "-i", "add", "cluster", "lab")

    def _munge(self) -> None:
        """Start a munge of this Slurm alone, so that another lab may end its own."""
        folder = self.folder / "munge"
        folder.mkdir()
        folder.chmod(0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{name}-file={folder}/{name}" for name in ("key", "log", "pid", "seed")]
        self._spawn("munged", "munged", "-F", "--force", f"--socket={folder}/socket", *files)
        said = ["munge", "-n", f"--socket={folder}/socket"]
        self.wait(lambda: subprocess.run(said, capture_output=True).returncode == 0, 10, "munge answers")

    def _spawn(self, name: str, program: str, *options: str) -> None:
        path = shutil.which(program) or f"/usr/sbin/{program}"
        command: Sequence[str] = [path, *options]
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, cwd="/", start_new_session=True
            )


@contextlib.contextmanager
def a_slurm(nodes: int = 2, extra: str = "", *, accounting: bool = False, half_life: str = "1-0") -> Iterator[SlurmLab]:
    """Yield a Slurm that is up, in a folder of its own; skip the test where there can be none."""
    if problem := install(accounting=accounting):
        pytest.skip(problem)
    with scratch_folder() as folder:
        made = SlurmLab(folder / "lab", nodes, extra, accounting=accounting, half_life=half_life)
        try:
            made.start()
            yield made
        finally:
            made.stop()
