"""Options for launchers that take their place in the gang only from the command line.

``torchrun`` reads everything from ``PET_...`` variables. ``accelerate launch`` and ``deepspeed`` do not: without
options, each node of a gang would train by itself, and two jobs on one host would collide on the same port. What the
job's own command says about nodes and addresses is never changed.
"""

from collections.abc import Mapping, Sequence

from services.contracts.commands import StartGang
from services.contracts.launchers import options_at

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

    Args:
        hostfile: Where ``hostfile_text`` is; part of the command only if it is needed.
        devices: Numbers of this node's devices, as the command sees them.
    """
    command = start.spec.command
    found = options_at(command)
    if found is None:
        return command
    name, at = found
    if name in _DEEPSPEED:
        options = _deepspeed(start, hostfile, devices, _given(command[at:]))
    elif name == "accelerate" and command[at : at + 1] == ["launch"]:
        at += 1
        options = _accelerate(start, _given(command[at:]))
    elif name in ("accelerate-launch", "accelerate.commands.launch"):
        options = _accelerate(start, _given(command[at:]))
    else:
        options = []
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
