"""What runs on one machine: the services, their workers, and one agent per node."""

import importlib
import importlib.util
import os
import pwd
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.core.domain.errors import DomainError
from services.core.domain.gpus import gpu_model
from services.kit.pulse import PULSE_FILE
from services.kit.settings import NOT_POSTGRES, SharedSettings, is_postgres, settings_faults
from services.kit.sockets import LISTEN_AT
from services.kit.tls import Tls
from services.standalone.doors import Door
from services.standalone.postgres import SYSTEM_USER as POSTGRES_USER
from services.standalone.probes import HttpProbe, PulseProbe
from services.standalone.process import BadInputError, Process

_PLACEHOLDERS = {
    "WATTSHIFT_SERVICE_TOKEN": "made by the installation",
    "WATTSHIFT_NODE_JOIN_TOKEN": "made by the installation",
}
"""Secrets that the installation has of its own, which are never set by hand."""

PYTHON = (sys.executable, "-P")  # -P: a file in the working folder must not stand in for a module


@dataclass(frozen=True)
class Service:
    """A process that answers HTTP, at `port` if it has one; its settings are variables that begin with `prefix`."""

    name: str
    module: str
    prefix: str
    port: int


SERVICES = (
    Service("gateway", "gateway.app", "GATEWAY_", 8000),
    Service("carbon", "carbon_service.app", "CARBON_", 8010),
    Service("admission", "services.admission.app", "ADMISSION_", 8020),
    Service("scheduler", "services.scheduler.app", "SCHEDULER_", 8030),
    Service("optimizer", "optimizer_service.app", "OPTIMIZER_", 8040),
    Service("router", "services.router.app", "ROUTER_", 8050),
    Service("serving", "services.serving.app", "SERVING_", 8090),
    Service("simulator", "services.simulator.app", "SIMULATOR_", 8080),
    Service("telemetry", "services.telemetry.app", "TELEMETRY_", 8060),
)
AGENT = Service("agent", "gpu_agent.app", "GPU_AGENT_", 8070)
MIGRATIONS = ("-m", "migrations")
NEW_ADMIN_KEY = ("-m", "services.admission.admin_key")
ROOT = Path(__file__).resolve().parents[2]
_SHOWN = ("examples", "clients")  #: Of the checkout, beside its Python: what jobs of the examples need
_ONE_AT_A_TIME = ("--concurrency", "1", "--loglevel", "INFO", "--without-mingle", "--without-gossip")
WORKERS = {
    "worker": ("-m", "celery", "-A", "optimizer_service.tasks", "worker", "-Q", "optimizer,lengths", *_ONE_AT_A_TIME),
    "plan-solver": ("-m", "celery", "-A", "optimizer_service.tasks", "worker", "-Q", "plan-solves", *_ONE_AT_A_TIME),
    "simulator-worker": (
        *("-m", "celery", "-A", "services.simulator.tasks", "worker", "-Q", "simulator,experiments"),
        *_ONE_AT_A_TIME,
    ),
}
"""One for each kind of work: a what-if run of half an hour must not hold up the plan of the next one."""

DEFAULT_MODEL = "A100-SXM4-40GB"


@dataclass(frozen=True)
class Node:
    """A node to run an agent for: `gpus` simulated GPUs of `model`, or the machine's own if `gpus` is None.

    `zone` is its grid zone; without one it is the environment's.
    """

    node_id: str
    gpus: int | None = None
    model: str = DEFAULT_MODEL
    zone: str | None = None


def parse_nodes(text: str | None, *, simulate: bool = False) -> tuple[Node, ...]:
    """Read `2x4:A100-SXM4-40GB,1x8:H100-SXM5-80GB@DE`: two nodes of four GPUs, and one of eight in grid zone DE.

    Model and zone may be left out; a model may have any of its names in the GPU catalogue. None is this machine as one
    node with its GPUs, or `2x4` with ``simulate``; the empty text is no node.

    Raises:
        BadInputError: the text is not of that form, names an unknown GPU model, or names more than 64 nodes; or it is
            None on a machine without GPUs: none are simulated unless that is asked for.
    """
    if text == "":
        return ()
    if text is None:
        if simulate:
            return parse_nodes("2x4")
        if lack := lack_of_gpus():
            raise BadInputError(
                f"this machine has no GPUs: {lack}. `--nodes 2x4` simulates two nodes of four GPUs, and `--nodes ''` "
                "starts the control plane alone"
            )
        return (Node("node-1"),)
    sizes: list[tuple[int, str, str | None]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})x(\d{1,3})(?::([\w.-]+))?(?:@([A-Za-z0-9][A-Za-z0-9._-]{0,62}))?\s*", part)
        if not match or not int(match[1]) or not int(match[2]):
            wanted = f"COUNTxGPUS[:MODEL][@ZONE][,...], such as 2x4:{DEFAULT_MODEL}@DE"
            raise BadInputError(f"nodes have the form {wanted}, not {part!r}")
        try:
            model = gpu_model(match[3] or DEFAULT_MODEL).name
        except DomainError as error:
            raise BadInputError(str(error)) from error
        sizes += [(int(match[2]), model, match[4])] * int(match[1])
    if len(sizes) > 64:
        raise BadInputError(f"at most 64 nodes run on one machine, not {len(sizes)}")
    return tuple(Node(f"node-{number}", *size) for number, size in enumerate(sizes, start=1))


def lack_of_gpus() -> str:
    """Return why this machine has no GPUs to run jobs on; empty if it has some."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return "" if pynvml.nvmlDeviceGetCount() > 0 else "NVML shows none"
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:  # no driver, or one that does not answer
        return f"NVML does not answer ({error})"


def host_of(service: Service, environment: Mapping[str, str]) -> str:
    """Return the address at which processes on this machine reach `service`."""
    host = environment.get(f"{service.prefix}HOST") or "127.0.0.1"
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def agent_process(node: Node, door: Door, environment: Mapping[str, str], nodes_folder: Path) -> Process:
    """Return the agent of `node`; its state is kept in its own folder beneath `nodes_folder`."""
    state = nodes_folder / node.node_id
    state.mkdir(mode=0o700, exist_ok=True)
    own = {
        "GPU_AGENT_NODE_ID": node.node_id,
        "GPU_AGENT_STATE_DIR": str(state),
        # SIGTERM comes from `down` alone: nothing is left running then. After a crash the jobs are found again.
        "GPU_AGENT_STOP_RANKS_ON_EXIT": environment.get("GPU_AGENT_STOP_RANKS_ON_EXIT", "true"),
    }
    if node.gpus is None:
        own["GPU_AGENT_DRIVER"] = environment.get("GPU_AGENT_DRIVER", "auto")
    else:
        own["GPU_AGENT_DRIVER"] = "simulated"
        own["GPU_AGENT_SIMULATED_GPUS"] = str(node.gpus)
        own["GPU_AGENT_SIMULATED_MODEL"] = node.model
    if node.zone is not None:
        own["GPU_AGENT_ZONE"] = node.zone
    return http_process(f"agent-{node.node_id}", AGENT, door, {**environment, **own}, state, owns_its_group=False)


def first_account(environment: Mapping[str, str]) -> str:
    """Return the account that jobs of the installation's own admin key run as: that of whoever starts it.

    If root starts it by ``sudo``, it is the account that called ``sudo``. It is empty, which leaves the choice to the
    agents, if ``GPU_AGENT_RUN_AS`` names an account, if root itself starts it (no job runs as root), or if the user id
    has no account.
    """
    if environment.get("GPU_AGENT_RUN_AS"):
        return ""
    if given := environment.get("ADMISSION_FIRST_ACCOUNT"):
        return given
    try:
        if os.geteuid() == 0:
            caller = pwd.getpwnam(environment.get("SUDO_USER") or "root")
            return caller.pw_name if caller.pw_uid else ""
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def accounts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings for the accounts that jobs run as, and for what those can read of the installation."""
    shown = [environment.get("GPU_AGENT_SHOWN_FOLDERS", ""), *(str(ROOT / name) for name in _SHOWN)]
    settings = {"GPU_AGENT_SHOWN_FOLDERS": ",".join(filter(None, shown))}
    if os.geteuid() == 0 and "GPU_AGENT_RESERVED_ACCOUNTS" not in environment:
        settings["GPU_AGENT_RESERVED_ACCOUNTS"] = POSTGRES_USER
    return {"ADMISSION_FIRST_ACCOUNT": first_account(environment), **settings}


def zones_of(nodes: Iterable[Node], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the grid zones of `nodes`, the installation's own first."""
    own = environment.get("WATTSHIFT_ZONE") or SharedSettings.model_fields["zone"].default
    of_agents = environment.get("GPU_AGENT_ZONE") or own
    return tuple(dict.fromkeys((own, *(node.zone or of_agents for node in nodes))))


def command_process(name: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> Process:
    """Return a process that ends by itself, such as a migration."""
    return Process(name=name, command=(*PYTHON, *arguments), environment=environment, folder=folder)


def queues_of(worker: str) -> list[str]:
    words = WORKERS[worker]
    return words[words.index("-Q") + 1].split(",")


def worker_process(name: str, environment: Mapping[str, str], folder: Path, pulses: Path) -> Process:
    """Return one of the Celery workers, which have no port: it touches a file in `pulses`."""
    pulse = pulses / name
    return Process(
        name=name,
        command=(*PYTHON, *WORKERS[name]),
        environment={**environment, PULSE_FILE: str(pulse)},
        folder=folder,
        probe=PulseProbe(pulse),
        replaces_children=True,
    )


def http_process(
    name: str,
    service: Service,
    door: Door,
    environment: Mapping[str, str],
    folder: Path,
    *,
    owns_its_group: bool = True,
) -> Process:
    address, tls = door.address, None
    if isinstance(address, Path):
        own = {LISTEN_AT: str(address)}
    else:
        tls, own = Tls.of_environment(environment), {f"{service.prefix}PORT": str(address[1])}
        environment = {f"{service.prefix}HOST": address[0], **environment}
    return Process(
        name=name,
        command=(*PYTHON, "-m", service.module),
        environment={**environment, **own},
        folder=folder,
        probe=HttpProbe(address, tls),
        address=address,
        sockets=door.sockets,
        owns_its_group=owns_its_group,
    )


def check_settings(services: Sequence[Service], environment: Mapping[str, str]) -> None:
    """Check what processes would read from ``environment``; ``BadInputError`` has a line for each wrong variable."""
    given = {**environment, **_PLACEHOLDERS}
    faults = [
        fault
        for service in services
        if (settings_type := _settings_of(service)) is not None
        for fault in settings_faults(settings_type, given)
    ]
    if given.get("DATABASE_URL") and not is_postgres(given["DATABASE_URL"]):
        faults.append(NOT_POSTGRES)
    if faults:
        raise BadInputError("\n".join(dict.fromkeys(faults)))


def _settings_of(service: Service) -> type[SharedSettings] | None:
    """Return the settings class of a process: the one in its ``settings`` module with its prefix."""
    package = service.module.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(f"{package}.settings")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return None
    for value in vars(importlib.import_module(found.name)).values():
        if (
            isinstance(value, type)
            and issubclass(value, SharedSettings)
            and value.model_config.get("env_prefix") == service.prefix
        ):
            return value
    return None
