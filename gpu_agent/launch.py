"""Turn a StartGang into the command that the shim runs."""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpu_agent import containers, enclosure, environment, files, secrets
from gpu_agent.account import Account, NoAccountError
from gpu_agent.confinement import Confinement
from gpu_agent.containers import Engine
from gpu_agent.environment import hostfile_text, with_options
from gpu_agent.ranks import ENV_FILE, HOSTFILE, SCRATCH, Launch, Process, RankFolder
from gpu_agent.secrets import CannotStartError, InputError
from gpu_agent.settings import AgentSettings
from services.contracts.commands import StartGang
from services.contracts.nodes import DeviceInfo
from services.core.domain.errors import DomainError
from services.core.domain.mig import WHOLE, parent_of


@dataclass(frozen=True)
class Inputs:
    """What was fetched for a gang."""

    secrets: dict[str, str] = field(default_factory=dict[str, str], repr=False)  #: Values by the names of the secrets
    source: Path | None = None  #: The folder with the job's files; None if it has no source
    instance_key: str | None = field(default=None, repr=False)
    """The key that an instance of a pool must demand with each request."""


class Launcher:
    """Makes the command line, the environment and the folders of a rank.

    Args:
        devices: This node's devices; ``devices`` may be replaced when GPUs are cut.
        names_by_uuid: Whether CUDA may number the GPUs differently, because one is lost.
    """

    def __init__(
        self,
        settings: AgentSettings,
        engine: Engine | None,
        devices: Sequence[DeviceInfo],
        confinement: Confinement,
        names_by_uuid: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings, self._engine, self.devices = settings, engine, devices
        self._confinement, self._names_by_uuid = confinement, names_by_uuid
        # Where jobs that name no checkpoint folder get one: the first in which that can be made. For gangs that span
        # hosts, and for jobs that move, all nodes share it.
        shared = [settings.data_folder] if settings.checkpoints == "shared" else []
        self._checkpoint_folders = [folder / "checkpoints" for folder in (*shared, settings.state_folder)]
        # Over TLS, jobs report by their file alone: they do not know the authority of the installation.
        self._agent_url = "" if settings.tls_cert else f"http://127.0.0.1:{settings.progress_port}"

    def check(self, start: StartGang) -> None:
        """Return if this node can run its part of the gang.

        Raises:
            CannotStartError: It never can: the image may not be run, or there is no account to run it as.
            InputError: It cannot at present.
        """
        if lack := self._lack_of_devices(start):
            raise InputError(lack)
        if start.spec.image and self._engine is None:
            raise InputError("this node has no container engine")
        if start.spec.image and (why := containers.refusal(start.spec, self._settings.images)):
            raise CannotStartError(why)
        self._account_to_start_as(start)

    def _lack_of_devices(self, start: StartGang) -> str:
        """Return why this node does not have a gang's devices; empty if it does."""
        known = {device.index: device for device in self.devices if not device.mig_enabled}
        expected = dict(zip(start.devices, start.uuids, strict=False))
        for index in start.devices:
            found = known.get(index)
            if parent_of(index) is not None and (found is None or found.uuid != expected.get(index, found.uuid)):
                return f"Its MIG slice is gone: device {index} is no slice any more, or another one"
            if found is None:
                return f"this node has no device {index}, or it is cut into slices"
        return "" if start.devices else "this node has no devices for it"

    def _names_of_devices(self, start: StartGang) -> list[str]:
        """Return the devices as CUDA and container engines name them: GPUs by number, slices by UUID.

        While a GPU of the node is lost, GPUs too go by UUID: CUDA leaves the lost one out and renumbers those after it.
        """
        uuids = {device.index: device.uuid for device in self.devices}
        by_number = not self._names_by_uuid()
        return [str(index) if by_number and parent_of(index) is None else uuids[index] for index in start.devices]

    def _gpus(self, start: StartGang) -> float:
        """Return the number of GPUs that a gang has here, counting a slice as a fraction."""
        sevenths = {device.index: device.sevenths for device in self.devices}
        return sum(sevenths.get(index, WHOLE) for index in start.devices) / WHOLE

    def _account_to_start_as(self, start: StartGang) -> Account | None:
        try:
            return self.account_of(start)
        except NoAccountError as error:
            raise CannotStartError(str(error)) from None
        except DomainError as error:
            raise InputError(str(error)) from None

    def account_of(self, start: StartGang) -> Account | None:
        """Return the account of a job; None for the agent's own."""
        return self._confinement.identities.account_of(start)

    def home_of(self, start: StartGang) -> Path | None:
        """Return the home folder that a job's tenant has on this node, if it has one of its own."""
        with suppress(DomainError, OSError):
            if (account := self.account_of(start)) is not None and account.is_tenants:
                return Path(account.home)
        return None

    def confinement_of(self, start: StartGang, rank: Path) -> list[tuple[str, str]]:
        """Return what confines a job's processes while it has no folders other than its rank's."""
        return self._confinement.entries(start, rank, self.account_of(start), self._gpus(start))

    def view_of(self, start: StartGang, rank: Path) -> tuple[Account | None, list[tuple[str, str]]]:
        """Return the account of a job that has ended, and what gives a program the job's view of the file system.

        Raises:
            DomainError: This node cannot run anything as its account.
            OSError: The account cannot be written down.
        """
        account = self.account_of(start)
        if account is None:
            return None, []
        kept = [path for folder in self._checkpoint_folders if (path := folder / start.job_id).is_dir()]
        return account, self._confinement.view(start, rank, account, kept, self._asked(start, account, rank))

    def prepare(self, start: StartGang, folder: RankFolder, progress_token: str, inputs: Inputs = Inputs()) -> Launch:
        """Return what to run, and make the job's folders.

        Raises:
            CannotStartError: Its account no longer exists, or cannot enter its folder.
            InputError: A device no longer exists, or the inputs do not fit the way in which the job is started.
            OSError: A folder cannot be made.
        """
        if lack := self._lack_of_devices(start):  # a GPU may have been cut since the command came
            raise InputError(lack)
        if inputs.source is not None:
            folder_in_it = inputs.source / (start.spec.working_dir or "")
            start = start.model_copy(update={"spec": start.spec.model_copy(update={"working_dir": str(folder_in_it)})})
        spec, values = secrets.with_instance_key(start.spec, inputs.secrets, inputs.instance_key)
        start = start.model_copy(update={"spec": spec})
        account = self._account_to_start_as(start)
        if account is not None and start.spec.image is None:
            self._check_reach(account, start.spec.working_dir, folder.path.parent)
            asked = Path(start.spec.checkpoint_dir or "/")
            is_inside = self._confinement.has_space() and any(map(_is_space, asked.parents))
            if is_inside and not account.make(asked):
                raise CannotStartError(f"the account {account.name} cannot make the folder {asked}, or not enter it")
        checkpoint_dir = start.spec.checkpoint_dir or str(self._own_checkpoint_dir(start, account))
        progress_url = f"{self._agent_url}/v1/progress/{progress_token}" if self._agent_url else ""
        login = account.environment if account else {}
        if account and "PATH" not in self._settings.pass_environment:
            login |= {"PATH": environment.path_of_users(os.environ.get("PATH", ""))}
        passed = environment.passed_environment(self._settings.pass_environment, os.environ | login)
        names = self._names_of_devices(start)
        variables = environment.job_variables(start, folder, checkpoint_dir, progress_url, names)
        variables |= secrets.variables_for(start.spec, folder.path)
        local_ranks = range(len(start.devices)) if environment.is_per_gpu(start) else ()
        engine = self._engine if start.spec.image is not None else None
        taken = [*variables, *environment.rank_variables(start, 0)]
        entries = secrets.shim_entries(start.spec, values, taken, in_container=engine is not None)
        secrets_dir = str(secrets.secrets_folder(folder.path))
        command = self._command(start, folder, range(len(start.devices)) if engine else start.devices)
        if engine is None:
            folders = self._folders(start, checkpoint_dir, account, folder.path)
            return Launch(
                command,
                passed | environment.launcher_variables(start) | start.spec.environment | variables,
                start.spec.working_dir or str(folder.path / SCRATCH),
                start.spec.grace_s,
                start.spec.time_limit_s,
                [Process(_name(start, rank), environment.rank_variables(start, rank)) for rank in local_ranks],
                make_dir=checkpoint_dir,
                account=account,
                confinement=self._confinement.entries(start, folder.path, account, self._gpus(start), *folders),
                secrets_dir=secrets_dir,
                secrets=entries,
            )
        for path in (start.spec.checkpoint_dir, start.spec.working_dir):  # the engine, as root, would mount anything
            if account is None or not path or Path(path).is_relative_to(folder.path):
                continue
            if not account.can_enter(Path(path)):
                what = f"the account {account.name}, which the job runs as, cannot enter {path}"
                raise CannotStartError(f"{what}, which its container would have: make it, and let the account enter it")
        mounts = [checkpoint_dir, str(folder.path)]
        if secrets.has_files(start.spec):
            mounts.append(secrets_dir)
        if start.spec.working_dir:
            mounts.append(start.spec.working_dir)
        start = start.model_copy(update={"spec": start.spec.model_copy(update={"command": command})})
        ranks = local_ranks or (None,)
        argvs = [self._container_argv(engine, start, folder, names, variables, mounts, rank, account) for rank in ranks]
        runs = [Process(_name(start, rank), {}, argv) for rank, argv in zip(ranks, argvs, strict=True)]
        return Launch(
            runs[0].argv,
            environment.passed_environment(),
            str(folder.path / SCRATCH),
            start.spec.grace_s,
            start.spec.time_limit_s,
            runs if local_ranks else [],
            containers.remove_argv(engine, start, ranks),
            secrets_dir=secrets_dir,
            secrets=entries,
        )

    def _command(self, start: StartGang, folder: RankFolder, devices: Sequence[int]) -> list[str]:
        """Return the job's command in the form that its launcher needs."""
        hostfile = folder.path / HOSTFILE
        command = with_options(start, str(hostfile), devices)
        if str(hostfile) in command:
            files.replace(hostfile, hostfile_text(start, devices).encode(), durable=False, mode=0o644)
        return command

    def _container_argv(
        self,
        engine: Engine,
        start: StartGang,
        folder: RankFolder,
        devices: Sequence[str],
        variables: dict[str, str],
        mounts: list[str],
        local_rank: int | None,
        account: Account | None,
    ) -> list[str]:
        """Return the command of one container, and write its variables to a file."""
        own = {} if local_rank is None else environment.rank_variables(start, local_rank)
        inside = environment.launcher_variables(start) | containers.container_variables(start, variables | own)
        env_file = folder.path / (ENV_FILE if local_rank is None else f"{ENV_FILE}.{local_rank}")
        files.replace(env_file, containers.env_file_text(inside).encode(), durable=False)
        has_secrets = any(use.env for use in start.spec.secrets or ())
        secret_file = secrets.secrets_folder(folder.path) / secrets.CONTAINER_VARIABLES if has_secrets else ""
        limits = self._confinement.container_limits(is_alone=local_rank is None)
        return containers.run_argv(
            engine, start, devices, inside, str(env_file), mounts, account, local_rank, str(secret_file), limits
        )

    def _folders(
        self, start: StartGang, checkpoint_dir: str, account: Account | None, rank: Path
    ) -> tuple[list[Path], list[Path]]:
        """Return the folders that the job sees wherever they are: its own, and those that its account can enter.

        The folders of other ranks are not among them, although accounts have to pass through their parent.
        """
        if account is None:
            return [], []
        own = [] if start.spec.checkpoint_dir else [Path(checkpoint_dir)]
        own += [secrets.secrets_folder(rank)] if secrets.has_files(start.spec) else []
        return own, self._asked(start, account, rank)

    def _asked(self, start: StartGang, account: Account, rank: Path) -> list[Path]:
        """Return the folders that the job asked for and its account can enter."""
        return [
            path
            for path in map(Path, filter(None, (start.spec.checkpoint_dir, start.spec.working_dir)))
            if path.is_dir()
            and self._confinement.sees(account, path)
            and not _is_beside(path, rank)
            and not _is_space(path)
        ]

    def _check_reach(self, account: Account, working_dir: str | None, gangs_folder: Path) -> None:
        """Raise CannotStartError if an account cannot enter its job's folder; the shim reports one that is missing.

        A job without a folder runs in one of its own, beneath ``gangs_folder``.
        """
        if working_dir is None or Path(working_dir).is_relative_to(gangs_folder):
            if not self._confinement.can_mount() and not account.can_enter(gangs_folder):
                what = f"the account {account.name} cannot pass through to {gangs_folder}, where its jobs run"
                raise CannotStartError(
                    f"{what} on this node: let others enter the folders above it (chmod o+x), or move the agent's state"
                )
        elif os.path.isdir(working_dir) and not (
            self._confinement.sees(account, Path(working_dir)) or self._confinement.shows(Path(working_dir))
        ):
            what = f"the account {account.name}, which the job runs as, cannot enter its working folder {working_dir}"
            raise CannotStartError(
                f"{what}: let it enter that folder and those above it (chmod, setfacl), submit the files with the job "
                "(--upload), or choose another"
            )

    def _own_checkpoint_dir(self, start: StartGang, account: Account | None) -> Path:
        """Make the folder of a job that names none; one that is named is made by the job's own process."""
        *better, last = (folder / start.job_id for folder in self._checkpoint_folders)
        for path in better:
            with suppress(OSError):
                _make(path, account)
                if os.access(path, os.W_OK):
                    return path
        _make(last, account)
        return last


def _is_beside(path: Path, rank: Path) -> bool:
    """Return whether a path leads to the ranks' folders, but not into this rank's own."""
    real, own = Path(os.path.realpath(path)), Path(os.path.realpath(rank))
    return real.is_relative_to(own.parent) and not real.is_relative_to(own)


def _is_space(path: Path) -> bool:
    """Return whether a path is one of the folders that are private to each job."""
    return os.path.realpath(path) in map(os.path.realpath, enclosure.SPACES)


def _make(path: Path, account: Account | None) -> None:
    """Make a job's checkpoint folder, which nobody else can enter; its parents are the agent's."""
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if account is not None and status.st_uid != account.user_id:
        account.own(path)
        path.chmod(0o700)


def _name(start: StartGang, local_rank: int | None) -> str:
    return "" if local_rank is None else f"rank {start.rank_offset + local_rank}"
