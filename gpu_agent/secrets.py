"""Secrets of a rank: from the control plane to its processes without touching a disk.

The agent fetches the values when the rank is about to start and passes them to the shim through a pipe. The shim puts
those that are variables into the environment of the processes and writes those that are files into a folder in memory,
which it removes when nothing of the rank is left. If the shim was killed, the agent removes the folder: its name is
derived from the rank's own folder, so that the next agent finds it too. After a restart of the host it is gone.
"""

import hashlib
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from gpu_agent import shim
from gpu_agent.containers import env_file_text
from services.contracts.jobs import JobSpec
from services.contracts.secrets import SECRETS_DIR, SecretUse
from services.kit.logging import Log

log = Log(__name__)

KEY_VARIABLES = ("VLLM_API_KEY", "LLAMA_API_KEY", "WATTSHIFT_API_KEY")
"""The variables that have an instance's key: those of vLLM and llama.cpp, and one to pass on as an argument."""
MEMORY = Path("/dev/shm")
CONTAINER_VARIABLES = ".env"  #: The file for a container engine; the name of a job's own file never begins with a dot


class InputError(Exception):
    """A gang cannot start because something its job names is missing; the message is a sentence for the job's owner."""


class CannotStartError(InputError):
    """The gang could not start however often it was tried."""


def secrets_folder(rank: Path) -> Path:
    """Return where the secret files of a rank are: in memory, or in its own folder on hosts where they cannot be."""
    return memory_folder(rank) / hashlib.sha256(os.fsencode(rank.absolute())).hexdigest()[:32]


def memory_folder(rank: Path) -> Path:
    """Return the folder in memory that all agents of this user share, or else one in the rank's folder."""
    return _ours() if _has_memory() and _may_be_used(_ours()) else rank / "secrets"


def prepare_memory() -> None:
    """Make the folder in memory before any job runs that could make it first.

    If somebody else has made it, secrets that are files are on the disk while their rank runs, and the log says so.
    """
    if _has_memory():
        try:
            os.close(shim.open_own_folder(str(_ours())))
        except OSError as error:
            log.warning("secrets.not_in_memory", folder=str(_ours()), error=str(error))


def remove_secrets(rank: Path) -> None:
    """Remove what a shim left of a rank's secret files, if anything."""
    shim.remove_secrets(str(secrets_folder(rank)))


def variables_for(spec: JobSpec, rank: Path) -> dict[str, str]:
    """Return the variable that tells a job where its secret files are, if it has any."""
    return {SECRETS_DIR: str(secrets_folder(rank))} if has_files(spec) else {}


def has_files(spec: JobSpec) -> bool:
    return any(use.file for use in spec.secrets or ())


def with_instance_key(spec: JobSpec, values: Mapping[str, str], key: str | None) -> tuple[JobSpec, dict[str, str]]:
    """Return a spec and its secrets with the key of an instance added, as the variables that servers look for.

    It has a name that no user's secret can have, and comes last so that it wins: it is what the routers send.
    """
    if key is None:
        return spec, dict(values)
    uses = [SecretUse.model_construct(name="", env=name, file=None) for name in KEY_VARIABLES]
    return spec.model_copy(update={"secrets": [*(spec.secrets or ()), *uses]}), {**values, "": key}


def shim_entries(
    spec: JobSpec, values: Mapping[str, str], taken: Collection[str], *, in_container: bool
) -> list[tuple[str, str]]:
    """Return what the shim reads from its pipe, as entries of ``shim.spec_bytes``.

    Args:
        taken: Variables that describe the gang; a job cannot replace them.
        in_container: Whether the processes are clients of a container engine, which reads variables from a file.

    Raises:
        CannotStartError: A value cannot be passed to a container as a variable.
    """
    uses = spec.secrets or ()
    variables = {use.env: values[use.name] for use in uses if use.env is not None and use.env not in taken}
    files = [("secret_file", f"{use.file}={values[use.name]}") for use in uses if use.file is not None]
    if not in_container:
        return [("env", f"{name}={value}") for name, value in variables.items()] + files
    for name, value in variables.items():
        if "\n" in value:
            raise CannotStartError(f"The secret for {name} has several lines; a container can have it as a file only.")
    return [("secret_file", f"{CONTAINER_VARIABLES}={env_file_text(variables)}"), *files] if variables else files


def _has_memory() -> bool:
    return MEMORY.is_mount() and os.access(MEMORY, os.W_OK)


def _ours() -> Path:
    return MEMORY / f"wattshift-{os.geteuid()}"


def _may_be_used(folder: Path) -> bool:
    """Return whether a folder in memory is, or can become, this user's own: everybody may make folders there."""
    try:
        found = folder.lstat()
    except OSError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
