"""Decides who a job's processes are and what confines them; the shim then does it (``enclosure``).

What this host permits is found out once, when the agent starts, by trying it in a child. What it does not permit is
left out and reported: ``wattshift nodes`` says which protections hold on a node, and which do not, with the reason.
"""

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from gpu_agent import enclosure, files, seccomp
from gpu_agent.account import Account, Identities, TenantAccounts, find_account, may_change_accounts
from gpu_agent.cgroups import Cgroups, Limits
from gpu_agent.network import Rules
from gpu_agent.settings import AgentSettings
from services.contracts.commands import StartGang
from services.contracts.nodes import RUNS_AS, Protection, ProtectionName
from services.kit.disk import disk_space
from services.kit.logging import Log

log = Log(__name__)

USERS = "users"  #: In a rank's folder: the host's list of users, and the tenant's account
_PROBE_S = 20.0
_HOST_USERS = Path("/etc/passwd")
_DNS_PORT = 53
_NOT_ROOT = "the agent is not root"
_NAMED = re.compile(rf"(?<![\w.-])((?:{'|'.join(enclosure.SPACES)})/)/*([^/\s\"'`$*?;:,|&<>()\[\]{{}}=]+)")
_MPS_PIPES, _MPS_VARIABLE = "/tmp/nvidia-mps", "CUDA_MPS_PIPE_DIRECTORY"
_SHARED_MEMORY = Path("/dev/shm")


def probe(user_id: int) -> dict[str, str]:
    """Find out what is refused here, by trying it in a child of this process; return the reasons."""
    wanted = ("mounts", "proc", "space", "seal", "filter", "users")
    if sys.platform != "linux":
        return dict.fromkeys(wanted, "this is not Linux")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", enclosure.__file__, seccomp.program().hex(), str(user_id)],
            capture_output=True,
            text=True,
            env={},
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return dict.fromkeys(wanted, f"it could not be tried: {error}")
    found = {what: why for what, _, why in (line.partition(": ") for line in done.stdout.splitlines())}
    refused = {what: found.get(what, "it could not be tried") for what in wanted if found.get(what, "-")}
    if not seccomp.program():
        refused["filter"] = "system calls of this processor are not listed"
    if not may_change_accounts():
        refused["users"] = _NOT_ROOT if os.geteuid() else "its container forbids it"
        refused |= {what: refused["users"] for what in ("mounts", "proc", "space") if what in refused}
    return refused


class Confinement:
    def __init__(self, settings: AgentSettings, device_nodes: Mapping[int, tuple[int, int]]) -> None:
        """Find out what is permitted, and make what all jobs share.

        Args:
            device_nodes: Major and minor numbers of the GPUs, by their indices.

        Raises:
            DomainError: The account that was chosen for jobs cannot be used.
        """
        first, last = settings.tenant_uids
        self._settings = settings
        self.device_nodes = device_nodes
        self.refused = probe(first)  #: Why this host does not permit something to the agent
        self._can_become = "users" not in self.refused
        homes, given = settings.state_folder / "homes", settings.data_folder / "accounts"
        reserved = [account.user_id for name in settings.reserved_accounts if (account := _find(name)) is not None]
        tenants = TenantAccounts(first, last, given, homes) if self._can_become else None
        self.identities = Identities(tenants, find_account(settings.run_as), settings.owner_tenants, reserved)
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        all_bytes = int(total * settings.jobs_memory_share)
        own_bytes = all_bytes if settings.job_memory_gib is None else int(settings.job_memory_gib * 2**30)
        limits = Limits(min(own_bytes, all_bytes), all_bytes, settings.job_processes)
        self.cgroups = Cgroups(settings.state_folder, limits)
        # The kernel's own default for a file system in memory: who fills it reads "no space left", and is not killed.
        half_bytes = limits.memory_bytes // 2
        asked_bytes = half_bytes if settings.job_tmp_gib is None else int(settings.job_tmp_gib * 2**30)
        self.space_bytes = min(asked_bytes, limits.memory_bytes)
        if self._can_become:
            self.cgroups.prepare()
            self.cgroups.prepare_network(rules_of(settings), first)

    def begin(self, running: Collection[str]) -> None:
        """Clear up what a killed agent left of ranks that are not running."""
        if self._can_become:
            self.cgroups.sweep_everywhere(running)
        self._say_who_jobs_are()
        lacking = [f"{each.name}: {each.how}" for each in self.protections() if not each.holds]
        if lacking:
            log.warning("confinement.incomplete", lacking=lacking)

    def _say_who_jobs_are(self) -> None:
        """Write down, for whoever submits on this host, which accounts jobs run as and what those can reach."""
        runners = {
            tenant_id: {name: getattr(account, name) for name in ("name", "user_id", "group_id", "groups")}
            for tenant_id, account in self.identities.of_owners().items()
        }
        sees_its_own = self.can_mount()
        written = {
            "runners": runners,
            "shown": [str(path) for path in self._shown()] if sees_its_own else [],
            "passed": [] if sees_its_own else [str(self._settings.state_folder)],
        }
        files.store(self._settings.state_folder / RUNS_AS, written, "accounts.not_written", durable=False)

    def entries(
        self,
        start: StartGang,
        rank: Path,
        account: Account | None,
        gpus: float,
        kept: Sequence[Path] = (),
        asked: Sequence[Path] = (),
    ) -> list[tuple[str, str]]:
        """Return what the shim does to confine the processes of a rank, as entries of its spec.

        Args:
            account: Who its processes run as; None for the agent's own user.
            gpus: How many GPUs it has here, which weighs its processes against others.
            kept: Folders that the agent made for it; it sees them even beneath a covered folder.
            asked: Folders that it asked for; it sees them likewise, as far as its account can reach them or their owner
                has opened them to it.
        """
        words: list[str] = []
        limits = {"CORE": 0, "NOFILE": self._settings.job_open_files}
        if account is not None:
            words += self._mount_words(start, rank, account, kept, asked)
            if not self.cgroups.has("pids"):
                limits["NPROC"] = self._settings.job_processes
            # GPUs that it must not open; a slice's own GPU it may, as the slice needs it.
            own = {node for index, node in self.device_nodes.items() if index in start.devices}
            made = self.cgroups.make(rank.name, sorted({*self.device_nodes.values()} - own), gpus, start.master_port)
            words += [f"cgroup {path}" for path in made]
        words += [f"limit {name} {value}" for name, value in limits.items()] + self._seal_words()
        entries = [("confine", word) for word in words] + [("output_bytes", str(self._settings.job_output_bytes))]
        with suppress(OSError):
            disk = disk_space(self._settings.state_folder, self._settings.disk_reserve_bytes)
            entries.append(("reserve_bytes", str(disk.reserve_bytes)))
        return entries

    def view(
        self, start: StartGang, rank: Path, account: Account, kept: Sequence[Path], asked: Sequence[Path]
    ) -> list[tuple[str, str]]:
        """Return what gives a program the file system as an ended rank saw it; see ``entries``."""
        words = [*self._mount_words(start, rank, account, kept, asked), "limit CORE 0", *self._seal_words()]
        return [("confine", word) for word in words]

    def container_limits(self, is_alone: bool = True) -> list[str]:
        """Return the options that limit a container as control groups limit other jobs.

        Args:
            is_alone: Whether it is the only one of its rank: several share the host's memory to find each other.
        """
        limits = self.cgroups.limits
        ipc = ["--ipc", "private", "--shm-size", str(self.space_bytes)] if is_alone else ["--ipc", "host"]
        return [
            *ipc,
            *("--memory", str(limits.memory_bytes), "--pids-limit", str(limits.processes)),
            *("--ulimit", "core=0", "--ulimit", f"nofile={self._settings.job_open_files}"),
        ]

    def shows(self, folder: Path) -> bool:
        """Return whether a folder that jobs' accounts cannot enter is shown to them, or leads to one that is."""
        return "mounts" not in self.refused and any(
            each.is_relative_to(folder) or folder.is_relative_to(each) for each in self._shown()
        )

    def sees(self, account: Account, folder: Path) -> bool:
        """Return whether an account's jobs can use a folder: it can enter it, or an access list opens it."""
        return (self.can_mount() and _is_opened(account, folder)) or account.can_enter(folder)

    def can_mount(self) -> bool:
        """Return whether a job sees its own folders wherever they are."""
        return self._can_become and "mounts" not in self.refused

    def has_space(self) -> bool:
        """Return whether each job has temporary folders of its own."""
        return self.can_mount() and "space" not in self.refused

    def protections(self) -> list[Protection]:
        """Return which protections hold for jobs on this node, and which do not."""

        def of(name: ProtectionName, why_not: str | None, how: str) -> Protection:
            return Protection(name=name, holds=not why_not, how=(why_not or how)[:200])

        refused, groups = self.refused, self.cgroups
        off = None if self._settings.seccomp == "on" else "GPU_AGENT_SECCOMP is off"
        only_root = refused.get("users")
        mounts = only_root or refused.get("mounts")
        spaces = f"IPC, /tmp, /var/tmp and /dev/shm of its own, {self.space_bytes / 2**30:,.1f} GiB"
        return [
            of("accounts", only_root, "an account of its own for each tenant"),
            of("folders", mounts, "a mount namespace without other jobs' folders"),
            of("temporary_space", mounts or refused.get("space"), spaces),
            of("processes", only_root or refused.get("proc"), "/proc shows a job its own account's processes"),
            of("privileges", refused.get("seal"), "no new privileges"),
            of("system_calls", refused.get("seal") or refused.get("filter") or off, "seccomp"),
            of("memory", only_root or groups.lacking.get("memory"), groups.version),
            of("process_count", only_root, groups.version if groups.has("pids") else "a resource limit"),
            of("cpu_weight", only_root or groups.lacking.get("cpu"), f"{groups.version}, by the GPUs that a job has"),
            of("io_weight", only_root or groups.lacking.get("io"), f"{groups.version}, by the GPUs that a job has"),
            of("devices", only_root or groups.lacking.get("devices"), groups.version),
            of("network", only_root or groups.lacking.get("network"), "programs on cgroup v2"),
        ]

    def _shown(self) -> list[Path]:
        """Return what every job may read: this Python, and the folders in the installation's settings."""
        paths = [Path(sys.prefix), Path(sys.base_prefix), *self._settings.shown_folders]
        return list(dict.fromkeys(path.absolute() for path in paths))

    def _mount_words(
        self, start: StartGang, rank: Path, account: Account, kept: Sequence[Path], asked: Sequence[Path]
    ) -> list[str]:
        """Return the mounts of a rank: the node's folders are covered, and what the rank may see is shown again."""
        words = [] if "proc" in self.refused else ["proc"]
        if "mounts" in self.refused:
            return words
        own = [rank, *([Path(account.home)] if account.is_tenants else []), *kept]
        if "space" not in self.refused:
            words.append(f"space {self.space_bytes}")
            words += [f"named {path}" for path in sorted(_named(start, account))]
            if start.spec.may_share_gpu and _has_mps(start):
                words.append(f"keep {_SHARED_MEMORY}")
        covers = {self._settings.state_folder, self._settings.data_folder}
        # Above a folder that the account cannot pass through, nothing else is the account's either.
        covers |= {
            closed for path in (*own, *asked, *self._shown()) if (closed := _first_closed(path, account)) is not None
        }
        words += [f"cover {path}" for path in sorted(covers) if path != Path("/")]
        words += [f"show {path}" for path in self._shown()] + [f"keep {path}" for path in dict.fromkeys(own)]
        for path in dict.fromkeys(path for path in asked if path not in own):
            words.append(f"{'opened' if _is_opened(account, path) else 'asked'} {path}")
        if account.is_tenants:
            with suppress(OSError):
                listed = rank / USERS
                text = _HOST_USERS.read_text(errors="replace").rstrip("\n") + f"\n{account.entry}\n"
                files.replace(listed, text.encode(), durable=False, mode=0o644)
                words.append(f"replace {_HOST_USERS} {listed}")
        return words

    def _seal_words(self) -> list[str]:
        if "seal" in self.refused:
            return []
        is_filtered = "filter" not in self.refused and self._settings.seccomp == "on"
        return ["seal", *([f"filter {seccomp.program().hex()}"] if is_filtered else [])]


def _is_opened(account: Account, folder: Path) -> bool:
    return enclosure.is_opened_to(account.user_id, os.fsencode(folder))


def _named(start: StartGang, account: Account) -> set[str]:
    """Return the entries of temporary folders that a job's command, variables, repository or home folder names.

    The whole top-level entry, not only the path named: programs find their libraries, and scripts their modules, there.
    """
    spec = start.spec
    git = spec.source.git.url if spec.source and spec.source.git else ""
    said = "\n".join((*spec.command, *spec.environment.values(), git, account.home, *_mps(start)))
    return {space + name for space, name in _NAMED.findall(said) if name not in (".", "..")}


def _mps(start: StartGang) -> list[str]:
    """Return the folder of MPS's pipes for a job that may share its GPU."""
    return [start.spec.environment.get(_MPS_VARIABLE, _MPS_PIPES)] if start.spec.may_share_gpu else []


def _has_mps(start: StartGang) -> bool:
    """Return whether root runs MPS on this node for a job: its server and the job then meet in host shared memory."""
    with suppress(OSError):
        return any(os.stat(os.path.join(pipes, "control")).st_uid == 0 for pipes in _mps(start))
    return False


def rules_of(settings: AgentSettings) -> Rules:
    """Return what jobs of the node may connect to and bind, including this host's DNS port and proxies."""
    proxies = [urlsplit(value) for name, value in os.environ.items() if name.lower().endswith("_proxy")]
    used = [each.port for each in proxies if each.port and each.hostname in ("localhost", "127.0.0.1", "::1")]
    reachable = (*settings.jobs_may_reach, *used, settings.progress_port)
    kept = (*reachable, *settings.jobs_may_not_bind, settings.port)
    return Rules((*reachable, _DNS_PORT), kept, settings.master_ports)


def _find(name: str) -> Account | None:
    with suppress(Exception):
        return find_account(name)
    return None


def _first_closed(path: Path, account: Account) -> Path | None:
    """Return the first folder on the way to a path that an account cannot enter; None if it can reach the path.

    Owners and modes decide, which is much faster than trying; if an access list lets the account in after all, more is
    covered than necessary.
    """
    real = Path(os.path.realpath(path))
    for folder in reversed(real.parents):
        try:
            status = folder.stat()
        except OSError:
            return None
        groups = (account.group_id, *account.groups)
        shift = 6 if status.st_uid == account.user_id else 3 if status.st_gid in groups else 0
        if not status.st_mode >> shift & 0o1:
            return folder
    return None
