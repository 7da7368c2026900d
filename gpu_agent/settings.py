"""The agent's settings: `GPU_AGENT_...`, and those that the whole installation shares."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from services.contracts.commands import MASTER_PORTS
from services.contracts.schema import Name, many, said
from services.kit.enrolment import NodeSettings
from services.kit.extras import first_missing
from services.kit.ids import host_name
from services.kit.settings import SECRET_VARIABLES
from services.kit.tls import Tls

T = TypeVar("T")


def _read(by: Callable[[str], object]) -> BeforeValidator:
    """Return a validator that reads a text as it is written in a variable."""
    return BeforeValidator(lambda value: by(value) if isinstance(value, str) else value)


_Listed = Annotated[list[T], NoDecode, _read(lambda text: [each.strip() for each in text.split(",") if each.strip()])]
_Port = Annotated[int, Field(ge=1, le=65_535)]


class AgentSettings(NodeSettings):
    model_config = SettingsConfigDict(env_prefix="GPU_AGENT_", env_ignore_empty=True)

    node_id: Name = Field(default_factory=host_name)
    own_zone: Name | None = Field(
        None, validation_alias="GPU_AGENT_ZONE", description="Grid zone of this node; by default the cluster's."
    )
    labels: dict[str, str] = Field(default_factory=dict[str, str])
    host: str = "127.0.0.1"
    port: int = Field(8070, ge=1, le=65_535)
    jobs_port: int | None = Field(
        None,
        validation_alias="GPU_AGENT_PROGRESS_PORT",
        ge=1,
        le=65_535,
        description="Where jobs post their progress over HTTP, on this host alone; by default GPU_AGENT_PORT + 100.",
    )
    address: str = Field("127.0.0.1", description="Address at which other hosts reach this one.")
    tls_pin: str = Field(
        "",
        pattern="^([0-9a-f]{64})?$",
        description="SHA-256 of the one certificate by which telemetry is known, in the place of an authority; "
        "`wattshift join` sets it.",
    )
    relayed: bool = Field(
        False,
        description="Whether telemetry relays this node's commands, instead of a Valkey or Redis that it reaches; "
        "`wattshift join` sets it.",
    )

    measure_only: bool = Field(
        False, description="Report devices, health and energy, and run nothing: no jobs, no clocks, no limits, no root."
    )
    engine_node: Name | None = Field(
        None,
        description="With measure_only: by which name the bridge to an engine reports this host, ENGINE.NODE with this "
        "node's own id as NODE; the energy is then booked to that engine's jobs.",
    )
    engine_delay_s: float = Field(
        30.0, ge=0, le=3_600, description="How late it is reported then: the bridge has told of the jobs by that time."
    )

    driver: Literal["auto", "nvml", "simulated"] = Field(
        "auto", description="Devices are simulated only if this says so; auto is nvml."
    )
    simulated_gpus: int = Field(4, ge=1, le=1_024)
    simulated_model: str = "A100-SXM4-40GB"
    simulated_boot: str = Field("", description="A new value means that the simulated host has booted again.")
    probe_controls: bool = Field(
        True, description="Find out whether controls are permitted by setting the power limit that is in force."
    )
    zeusd: str | None = Field(
        None, description="Where Zeus' daemon sets clocks and power limits instead: its socket's path, or HOST:PORT."
    )
    zeusd_token_file: Path | None = Field(None, description="The token that Zeus' daemon wants, if it does.")
    containers: Literal["auto", "off"] = "auto"

    health: Literal["on", "off"] = Field("on", description="Whether sick GPUs are taken out of service.")
    health_interval_s: float = Field(2.0, gt=0, le=600, description="How often the GPUs are looked at.")
    health_xids: _Listed[int] = said(
        "Xids that say that a GPU is broken, and not a program.",
        default_factory=lambda: [46, 48, 61, 62, 64, 74, 79, 95, 119, 120, 140, 143],
    )
    health_uncorrected_errors: int = Field(0, ge=0, description="Uncorrected ECC errors of a GPU that are accepted.")
    health_temperature_c: float | None = Field(
        None, gt=0, description="From which on a GPU is too hot; by default from where its board slows itself down."
    )
    health_foreign: Literal["on", "off"] = Field(
        "on", description="Whether a GPU is taken out of service on which processes compute that belong to no job."
    )
    health_allowed_processes: _Listed[str] = said(
        "Names of processes that may compute on GPUs although they belong to no job, 15 letters at most.",
        default_factory=lambda: ["nvidia-cuda-mps", "nv-hostengine", "dcgmi"],
    )
    health_lasts_s: float = Field(10.0, ge=0, description="How long heat, or foreign processes, must last.")
    health_return_s: float = Field(
        60.0, ge=0, description="How long what was the matter must be over before a GPU is used again, or probed."
    )
    health_probe: Annotated[list[str], NoDecode, _read(shlex.split)] = many(
        "A command, {gpu} and {uuid} in it, that exits with 0 if a GPU that was taken out of service is "
        "well; with it, GPUs return when it passes, and not before."
    )
    health_probe_timeout_s: float = Field(300.0, gt=0)

    latency_clocks: Literal["on", "dry_run", "off"] = Field(
        "on", description="Whether clocks follow latency where a pool says so; dry_run only reports what they would be."
    )
    latency_stale_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="Without a router's report for so long, a server's GPUs return to default clocks.",
    )

    tick_s: float = Field(0.25, gt=0, le=5, description="How often ranks and their progress are checked.")
    sample_interval_s: float = Field(1.0, gt=0, le=60)
    energy_interval_s: float = Field(2.0, gt=0, le=600)
    retry_s: float = Field(1.0, gt=0, le=60, description="Pause after a failed call to the control plane or Redis.")

    partition_retry_s: float = Field(
        5.0, gt=0, le=3_600, description="Pause before a GPU that was in use is asked again to be cut into slices."
    )

    host_power: Literal["auto", "rapl", "modelled"] = "auto"
    cpu_power_curve: Annotated[
        list[tuple[float, float]], NoDecode, _read(lambda text: [point.split(":") for point in text.split(",")])
    ] = said(
        "Watts of all CPUs at utilisations from 0 to 1, as 0:60,0.5:170,1:240; linear between them.",
        default=[(0.0, 60.0), (0.5, 170.0), (1.0, 240.0)],
    )
    static_w: float = Field(100.0, ge=0, description="Watts of everything that is neither GPU nor CPU.")

    run_as: str = Field(
        "", description="User that jobs of the owner's tenants run as if the agent is root; empty: their tenant's own."
    )
    owner_tenants: _Listed[str] = said(
        "Tenants of whoever runs the agent. Where it is not root, it runs no jobs but theirs.",
        default_factory=lambda: ["default"],
    )
    tenant_uids: Annotated[tuple[int, int], NoDecode, _read(lambda text: text.split("-"))] = said(
        "User ids that the jobs of tenants get, as FIRST-LAST; no users of the host may have them.",
        default=(2_000_000_000, 2_147_483_000),
    )
    reserved_accounts: _Listed[str] = many("Users of this host that processes of the control plane run as.")
    shown_folders: _Listed[Path] = many(
        "Folders that every job may read, also where it could not pass through to them."
    )
    seccomp: Literal["on", "off"] = Field("on", description="Whether system calls that jobs do not need are refused.")
    jobs_may_reach: _Listed[_Port] = many(
        "Ports of this host that jobs may reach beside those of their own account's jobs, such as a "
        "proxy's; no job may bind them."
    )
    jobs_may_not_bind: _Listed[_Port] = many("Further ports that no job may bind, such as other agents' of this host.")
    master_ports: tuple[int, int] = Field(
        MASTER_PORTS,
        validation_alias="SCHEDULER_MASTER_PORTS",
        description="As the scheduler's: of these, each gang may bind the one that it was given, and no other.",
    )
    jobs_memory_share: float = Field(0.9, gt=0, le=1, description="Of the host's memory, for all jobs together.")
    job_memory_gib: float | None = Field(None, gt=0, description="Memory of one job on this node.")
    job_tmp_gib: float | None = Field(
        None,
        gt=0,
        description="/tmp, /var/tmp and /dev/shm of one job together, in memory and within its limit; by default half "
        "of that.",
    )
    job_processes: int = Field(16_384, ge=64, description="Processes and threads of one job on this node.")
    job_open_files: int = Field(65_536, ge=64, description="Files that one process of a job may have open.")
    job_output_bytes: int = Field(
        2 * 2**30, ge=2**20, description="Output of one rank on the disk at once, both streams together; more ends it."
    )
    job_scratch_gib: float | None = Field(
        None,
        gt=0,
        description="Files of one job in its own folder on the disk of the state folder; more ends it. By default half "
        "of that disk.",
    )
    tenant_scratch_gib: float | None = Field(
        None,
        gt=0,
        description="Those of all jobs of a tenant that run here, and of its home folder; more ends the largest of the "
        "jobs. By default half of that disk.",
    )
    disk_reserve_bytes: int = Field(
        2**30,
        ge=0,
        description="Free on the disk of the state folder, of a small one a tenth at most: below, no work is taken.",
    )
    images: _Listed[str] = said("Patterns of the container images that jobs may run.", default_factory=lambda: ["*"])
    stop_ranks_on_exit: bool = Field(
        False, description="End the ranks with the agent instead of leaving them to the next agent."
    )
    exit_grace_s: float = Field(6.0, ge=0, le=3_600)
    exec_sessions: int = Field(32, ge=0, description="Commands that `wattshift exec` may run here at once.")
    exec_idle_s: float = Field(
        3_600.0, gt=0, description="A session in which nothing is typed or printed for so long is ended."
    )
    exec_longest_s: float = Field(86_400.0, gt=0, description="Longest session of `wattshift exec`.")
    log_stream_bytes: int = Field(256 * 2**20, ge=2**20, description="Output kept per rank and stream while it runs.")
    source_max_bytes: int = Field(
        4 * 2**30, gt=0, description="Size of an uploaded archive of a job's files, unpacked."
    )
    source_cache_bytes: int = Field(2 * 2**30, gt=0, description="Uploaded archives kept for the next job with them.")
    git_timeout_s: float = Field(90.0, gt=0, description="How long fetching a job's repository may take.")
    git_local: bool = Field(False, description="Whether jobs may name repositories on the node's own disk (file://).")
    checkpoints: Literal["shared", "store", "local"] = Field(
        "shared",
        description="Where a job's checkpoints are if it names no folder: in a folder that all nodes share; on the "
        "node, and copied to a store; or on the node alone.",
    )
    checkpoint_store: str = Field("", description="s3://BUCKET/PREFIX, or a folder that all nodes reach.")
    checkpoint_store_endpoint: str = Field("", description="Address of the S3 API; by default that of Amazon.")
    checkpoint_store_region: str = ""
    checkpoint_store_key: str = Field("", description="Its access key; without one, that of the host's role.")
    checkpoint_store_secret: str = ""
    checkpoint_interval_s: float = Field(
        300.0, gt=0, description="How often the checkpoint of a gang that runs on one node is copied."
    )
    checkpoint_wait_s: float = Field(
        10.0, ge=0, description="How long the end of a gang waits at least for its copy; at most its grace period."
    )
    checkpoint_max_bytes: int = Field(2**40, gt=0, description="A larger checkpoint is not copied.")
    retention_s: float = Field(7 * 86_400, gt=0, description="How long the folders of ended ranks are kept.")
    retention_bytes: int = Field(10 * 2**30, gt=0)
    pass_environment: _Listed[str] = many(
        "Further variables of the agent's environment that jobs get, separated by commas."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.measure_only and self.zeusd:
            raise ValueError("GPU_AGENT_ZEUSD sets clocks and limits, and GPU_AGENT_MEASURE_ONLY sets none")
        if self.engine_node and not self.measure_only:
            raise ValueError("GPU_AGENT_ENGINE_NODE is for GPU_AGENT_MEASURE_ONLY=true: else our jobs run on this node")
        if self.engine_node and not self.engine_node.endswith(f".{self.node_id}"):
            raise ValueError(f"GPU_AGENT_ENGINE_NODE must be ENGINE.{self.node_id}: an agent speaks for its own host")
        shares = [share for share, _ in self.cpu_power_curve]
        if shares[:1] != [0.0] or shares[-1:] != [1.0] or any(a >= b for a, b in pairwise(shares)):
            raise ValueError("cpu_power_curve must rise from a utilisation of 0 to 1")
        first, last = self.tenant_uids
        if not 0 < first <= last < 2**32 - 1:
            raise ValueError("tenant_uids must be FIRST-LAST, user ids from 1 to 4294967294")
        if credentials := sorted(SECRET_VARIABLES & set(self.pass_environment)):
            raise ValueError(f"pass_environment must not name {', '.join(credentials)}: jobs get no credentials")
        if (self.checkpoints == "store") != bool(self.checkpoint_store):
            raise ValueError("GPU_AGENT_CHECKPOINTS=store and GPU_AGENT_CHECKPOINT_STORE go together")
        if self.checkpoint_store and not re.match(r"s3://[^/]|/", self.checkpoint_store):
            raise ValueError("GPU_AGENT_CHECKPOINT_STORE must be s3://BUCKET/PREFIX or the absolute path of a folder")
        if self.checkpoint_store and (hint := first_missing("obstore")):
            raise ValueError(f"GPU_AGENT_CHECKPOINT_STORE: {hint}")
        if bool(self.checkpoint_store_key) != bool(self.checkpoint_store_secret):
            raise ValueError("GPU_AGENT_CHECKPOINT_STORE_KEY and GPU_AGENT_CHECKPOINT_STORE_SECRET go together")
        if self.tls_pin and not self.telemetry_url.startswith("https://"):
            raise ValueError("GPU_AGENT_TLS_PIN needs a WATTSHIFT_TELEMETRY_URL that begins with https://")
        return self

    @property
    def tls(self) -> Tls:
        """How this agent identifies itself, and verifies telemetry."""
        return replace(super().tls, pin=self.tls_pin)

    @property
    def progress_port(self) -> int:
        return self.jobs_port or (self.port + 100 if self.port + 100 < 65_536 else self.port - 100)

    @property
    def agent_url(self) -> str:
        """The address at which the control plane calls this agent."""
        return f"{self.tls.scheme}://{self.address}:{self.port}"
