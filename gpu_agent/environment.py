"""The environment of a job's process, and the options of launchers that do not read it.

It starts empty, so that nothing of the agent's own leaks into a job.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpu_agent.ranks import RankFolder
from services.contracts.commands import StartGang
from services.contracts.jobs import Processes
from services.contracts.launchers import options_at

_PROXIES = frozenset(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"))

PASSED = _PROXIES | {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "no_proxy", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
}
"""Variables of the agent's own environment that every process needs; beside them ``LC_*``."""
_USERS_FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin")


def is_per_gpu(start: StartGang) -> bool:
    """Return whether each device of this node gets its own process.

    Jobs that were accepted before they could choose, and gangs of one GPU, have one process on each node.
    """
    return start.spec.processes is Processes.PER_GPU


def job_variables(
    start: StartGang, folder: RankFolder, checkpoint_dir: str, progress_url: str, devices: Sequence[str]
) -> dict[str, str]:
    """Return the variables that describe the gang; a job cannot replace them.

    Args:
        progress_url: Where its progress can be posted; empty if it cannot.
        devices: Its devices on this node as CUDA names them: numbers, or the UUIDs of MIG slices.
    """
    # With several devices, one process on a node is no rank: it starts the ranks, and finds out their numbers itself.
    is_a_rank = not is_per_gpu(start) and len(start.devices) == 1
    variables: dict[str, object] = {
        "WATTSHIFT_PORT": None if start.spec.service is None else start.master_port,
        "WATTSHIFT_BATCH_SIZE": start.batch_size,
        "WATTSHIFT_BASE_BATCH_SIZE": start.base_batch,
        "WATTSHIFT_JOB_ID": start.job_id,
        "WATTSHIFT_ALLOCATION_ID": start.allocation_id,
        "WATTSHIFT_GENERATION": start.generation,
        "WATTSHIFT_NNODES": start.nnodes,
        "WATTSHIFT_RANK_OFFSET": start.rank_offset,
        "WATTSHIFT_LOCAL_WORLD_SIZE": len(start.devices),
        "WATTSHIFT_CHECKPOINT_DIR": checkpoint_dir,
        "WATTSHIFT_PROGRESS_FILE": folder.progress_file,
        "WATTSHIFT_PROGRESS_URL": progress_url or None,
        "WATTSHIFT_DEVICE_FILE": folder.device_file,
        "WATTSHIFT_STOP_AT": folder.stop_at_file,
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": start.master_port,
        "WORLD_SIZE": start.world_size,
        "LOCAL_WORLD_SIZE": len(start.devices),
        "NODE_RANK": start.node_rank,
        "GROUP_RANK": start.node_rank,
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order, which device indices are in
        **(rank_variables(start, 0) if is_a_rank else {}),
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def rank_variables(start: StartGang, local_rank: int) -> dict[str, str]:
    """Return the variables that only the process of one device gets."""
    return {"RANK": str(start.rank_offset + local_rank), "LOCAL_RANK": str(local_rank)}


def launcher_variables(start: StartGang) -> dict[str, str]:
    """Return the variables that ``torchrun`` takes as defaults of its options; a job can replace them.

    The static rendezvous keeps the order of the nodes, so that ``RANK`` counts through the gang's devices. A job that
    prefers another needs to set only ``PET_RDZV_BACKEND=c10d``: endpoint and id are the same.
    """
    return {
        "PET_NNODES": str(start.nnodes),
        "PET_NPROC_PER_NODE": str(len(start.devices)),
        "PET_NODE_RANK": str(start.node_rank),
        "PET_MASTER_ADDR": start.master_addr,
        "PET_MASTER_PORT": str(start.master_port),
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ENDPOINT": f"{start.master_addr}:{start.master_port}",
        "PET_RDZV_ID": start.allocation_id,
    }


def path_of_users(own: str) -> str:
    """Return the ``PATH`` of a job whose account is not the agent's: ordinary users' folders, in the agent's order.

    If this Python is in the agent's own ``PATH``, as in images, it is in the job's too, in the same place.
    """
    kept = [each for each in own.split(":") if each in _USERS_FOLDERS or Path(each).is_relative_to(sys.prefix)]
    return ":".join(dict.fromkeys((*kept, *_USERS_FOLDERS)))


def passed_environment(also_passed: Iterable[str] = (), own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what of its own environment the agent's children get, with the variables ``also_passed``."""
    names = PASSED | set(also_passed)
    passed = {name: value for name, value in own.items() if name in names or name.startswith("LC_")}
    # Jobs get no credentials, not even those of a proxy.
    closed = {name for name in _PROXIES & passed.keys() if "@" in passed[name]}
    return {"PATH": os.defpath} | {name: value for name, value in passed.items() if name not in closed}


_DEEPSPEED = frozenset({"deepspeed", "deepspeed.launcher.runner"})
_DEEPSPEED_NODES = frozenset(
    {
        *("-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus", "--no_ssh"),
        *("--num_accelerators", "--launcher", "--force_multi", "--node_rank", "--master_addr"),
    }
)
_ACCELERATE_KINDS = frozenset(
    {"--multi_gpu", "--cpu", "--tpu", "--use_deepspeed", "--use_fsdp", "--use_megatron_lm", "--config_file"}
)


def with_options(start: StartGang, hostfile: str, devices: Sequence[int]) -> list[str]:
    """Return the job's command with the options that tell its launcher, if it uses one, about the gang.

    ``torchrun`` reads everything from ``PET_...`` variables. ``accelerate launch`` and ``deepspeed`` do not: without
    options, each node of a gang would train by itself, and two jobs on one host would collide on the same port. What
    the job's own command says about nodes and addresses is never changed.

    Args:
        hostfile: Where ``hostfile_text`` is; part of the command only if it is needed.
        devices: Numbers of this node's devices, as the command sees them.
    """
    command = start.spec.command
    name, at = options_at(command) or ("", 0)
    if name == "accelerate" and command[at : at + 1] == ["launch"]:
        name, at = "accelerate-launch", at + 1
    options: list[str] = []
    if name in _DEEPSPEED:
        options = _deepspeed(start, hostfile, devices, _given(command[at:]))
    elif name in ("accelerate-launch", "accelerate.commands.launch"):
        options = _accelerate(start, _given(command[at:]))
    return [*command[:at], *options, *command[at:]]


def hostfile_text(start: StartGang, devices: Sequence[int]) -> str:
    """Return the gang's nodes in DeepSpeed's format: their names serve only to tell them apart, as ssh is not used."""
    slots = start.gpus_per_node or [start.world_size // start.nnodes] * start.nnodes
    own = max(devices) + 1  # its devices are chosen from these
    return "".join(
        f"node-{rank} slots={own if rank == start.node_rank else count}\n" for rank, count in enumerate(slots)
    )


def _given(arguments: Sequence[str]) -> frozenset[str]:
    """Return the names of the options before the script; both spellings count as one."""
    names: set[str] = set()
    for word in arguments:
        if word.endswith(".py"):
            break
        if word.startswith("-"):
            name = word.partition("=")[0]
            names.add("--" + name[2:].replace("-", "_") if name.startswith("--") else name)
    return frozenset(names)


def _accelerate(start: StartGang, given: frozenset[str]) -> list[str]:
    # Accelerate divides the processes evenly; with this node's share times the nodes, each node starts its own share.
    wanted: Mapping[str, str] = {
        "--num_processes": str(len(start.devices) * start.nnodes),
        "--num_machines": str(start.nnodes),
        "--machine_rank": str(start.node_rank),
        "--main_process_ip": start.master_addr,
        "--main_process_port": str(start.master_port),
    }
    options = [word for name, value in wanted.items() if name not in given for word in (name, value)]
    if start.nnodes > 1 and len(start.devices) == 1 and not given & _ACCELERATE_KINDS:
        options.append("--multi_gpu")  # it decides by the devices of this node, and would train alone
    return options


def _deepspeed(start: StartGang, hostfile: str, devices: Sequence[int], given: frozenset[str]) -> list[str]:
    options = [] if "--master_port" in given else ["--master_port", str(start.master_port)]
    if start.nnodes == 1 or given & _DEEPSPEED_NODES:
        return options
    nodes = [f"node-{rank}" for rank in range(start.nnodes)]
    nodes[start.node_rank] += ":" + ",".join(map(str, devices))
    options += ["--hostfile", hostfile, "--no_ssh", "--node_rank", str(start.node_rank)]
    return [*options, "--master_addr", start.master_addr, "--include", "@".join(nodes)]
