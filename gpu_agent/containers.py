"""Jobs with a container image: the container engine of the host, and the command line that runs the image."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from gpu_agent.account import Account
from services.contracts.commands import StartGang
from services.contracts.exec_sessions import ExecRequest
from services.contracts.jobs import JobSpec

_ENGINES = ("docker", "podman")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_PROBE_S = 5.0
_CLOSED = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges")
"""Of every container. Options come from here alone: a job names an image, a command, and folders of its own."""


@dataclass(frozen=True)
class Engine:
    name: str
    program: str
    gpu_flags: Literal["nvidia", "none"]


def find_engine(*, with_gpus: bool) -> Engine | None:
    """Return an engine that answers, None if there is none; called once, when the agent starts."""
    for name in _ENGINES:
        program = shutil.which(name)
        if program is None:
            continue
        try:
            answer = subprocess.run([program, "info"], capture_output=True, timeout=_PROBE_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0:
            return Engine(name, program, "nvidia" if with_gpus else "none")
    return None


def refusal(spec: JobSpec, images: Iterable[str]) -> str:
    """Return why this site does not run a job's image; empty if it does."""
    image = spec.image or ""
    if not _IMAGE.fullmatch(image):
        return f"{image!r} is no container image"
    if not any(fnmatchcase(image, pattern) for pattern in images):
        return f"this node does not run the image {image} (GPU_AGENT_IMAGES)"
    for path in (spec.working_dir, spec.checkpoint_dir):
        if path and ":" in path:
            return f"a container cannot have the folder {path}: there is a colon in its name"
    return ""


def container_name(start: StartGang, local_rank: int | None = None) -> str:
    """Return a container's name: unique among gangs, and among the nodes of one gang that share a host.

    Args:
        local_rank: The local rank of the process, where each device has its own process and so its own container.
    """
    name = f"wattshift-{start.allocation_id}-{start.node_rank}"
    return name if local_rank is None else f"{name}-{local_rank}"


def run_argv(
    engine: Engine,
    start: StartGang,
    devices: Sequence[str],
    variables: dict[str, str],
    env_file: str,
    mounts: list[str],
    account: Account | None = None,
    local_rank: int | None = None,
    secret_file: str = "",
    limits: Sequence[str] = (),
) -> list[str]:
    """Return the command that runs the job's image in the foreground.

    The container shares the host's network, as gangs that span nodes need. The job's variables are passed in
    ``env_file`` and not in the environment of the engine's client, which reads variables of its own there (DOCKER_HOST,
    PATH). Values with line breaks do not fit into that file and are given as arguments.

    Args:
        devices: The gang's devices on this node, by number, or by UUID if they are MIG slices.
        env_file: Where ``env_file_text(variables)`` was written.
        mounts: Folders and files that have the same path inside.
        account: The user of the command in the container; None is this process's own, because root in a container could
            change whatever is mounted into it.
        local_rank: The local rank of the process, where each device has its own container.
        limits: Options that limit what it may use.
        secret_file: A file in the format of ``env_file`` with the job's secrets; the variables of ``env_file`` win.
    """
    name = container_name(start, local_rank)
    argv = [engine.program, "run", "--rm", "--init", "--name", name, "--network", "host", *_CLOSED, *limits]
    if engine.gpu_flags == "nvidia":
        if engine.name == "docker":
            argv += ["--gpus", f'"device={",".join(devices)}"']
        else:
            argv += [word for device in devices for word in ("--device", f"nvidia.com/gpu={device}")]
    if secret_file:
        argv += ["--env-file", secret_file]
    argv += ["--env-file", env_file]
    argv += [word for name, value in variables.items() if "\n" in value for word in ("--env", f"{name}={value}")]
    argv += [word for path in mounts for word in ("--volume", f"{path}:{path}")]
    user = (os.geteuid(), os.getegid()) if account is None else (account.user_id, account.group_id)
    argv += ["--user", f"{user[0]}:{user[1]}"]
    if start.spec.working_dir:
        argv += ["--workdir", start.spec.working_dir]
    return [*argv, start.spec.image or "", *start.spec.command]


def exec_argv(engine: Engine, start: StartGang, request: ExecRequest, local_rank: int | None, mark: str) -> list[str]:
    """Return the command that runs another command in a running container.

    Args:
        local_rank: As in ``run_argv``.
        mark: ``NAME=value`` for its environment, by which the process can be found: it is not a child of the engine's
            client, and does not end with it.
    """
    options = ["--interactive"] if request.stdin or request.terminal is not None else []
    options += ["--tty"] if request.terminal is not None else []
    return [engine.program, "exec", *options, "--env", mark, container_name(start, local_rank), *request.command]


def remove_argv(engine: Engine, start: StartGang, local_ranks: Iterable[int | None] = (None,)) -> list[str]:
    """Return the command that removes the containers, whether or not ``run`` has ended."""
    return [engine.program, "rm", "--force", *(container_name(start, local_rank) for local_rank in local_ranks)]


def env_file_text(variables: dict[str, str]) -> str:
    """Return the variables in the format of the engines' ``--env-file``."""
    return "".join(f"{name}={value}\n" for name, value in variables.items() if "\n" not in value)


def container_variables(start: StartGang, variables: dict[str, str]) -> dict[str, str]:
    """Return the variables of the container: the job's and the gang's.

    The engine shows the container only its own devices, counted from 0.
    """
    inside = start.spec.environment | variables
    return inside | {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in range(len(start.devices)))}
