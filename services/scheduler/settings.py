"""The scheduler's settings: `SCHEDULER_...`, and those that the whole installation shares."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.contracts.commands import MASTER_PORTS
from services.core.cycle.placers import PLACERS
from services.core.parallel.iteration import Network
from services.kit.settings import SharedSettings


class SchedulerSettings(SharedSettings):
    """What the operator of the scheduler may choose."""

    model_config = SettingsConfigDict(env_prefix="SCHEDULER_", extra="ignore", frozen=True, populate_by_name=True)

    host: str = "127.0.0.1"
    port: int = Field(8030, ge=0, le=65_535)
    pool_size: int = Field(6, ge=2, le=100, description="Connections to the database.")

    policy: str = Field(
        "joint", description="Policy of a new installation; afterwards operators change it through the API."
    )
    round_interval_s: float = Field(1_800, gt=0, description="Between active rounds; GREEN's is 30 minutes.")
    passive_interval_s: float = Field(0.2, ge=0, description="Shortest time between passive rounds.")
    min_run_s: float = Field(
        0, ge=0, description="How long a gang has its GPUs before a policy may stop it; see docs/steering.md."
    )
    save_wait_s: float | None = Field(
        None,
        ge=0,
        description="How long a gang that a policy stops may go on until it saves its work; unless given, as long as a "
        "round. See docs/steering.md.",
    )
    tick_s: float = Field(
        1.0, gt=0, le=60, description="How often the scheduler checks by itself when nothing wakes it."
    )

    lease_margin_s: float = Field(
        5.0, ge=0, description="How long after the end of a node's lease its gangs are considered gone."
    )
    node_return_s: float = Field(
        5.0,
        ge=0,
        description="After the scheduler has started, or the database took no writes, nodes get so long to be heard "
        "again before any is given up; unless it is 0, a lease and its margin after a start at least, as the "
        "database's clock may have been set before.",
    )
    start_timeout_s: float = Field(120, gt=0, description="How long a gang may take to run on all its nodes.")
    start_attempts: int = Field(5, ge=1, description="Gangs that may fail to start before the job fails.")
    max_node_losses: int = Field(
        3, ge=1, description="Nodes or GPUs that may be lost under a job, no day apart, before the job is held."
    )
    restart_pause_s: float = Field(
        1, ge=0, description="Before the second restart of a job that ends soon; twice as long each time, to 5 min."
    )
    engine_start_timeout_s: float = Field(
        600, gt=0, description="How long an engine may take to start a job that was released; then it is planned again."
    )
    engine_new_jobs_s: float = Field(
        5, ge=0, description="How soon after another one an active round is held for new jobs of Slurm or Kueue."
    )
    engine_tenant: str = Field("default", description="Whose the jobs of engines are.")
    republish_after_s: float = Field(5, gt=0, description="A command that has shown no effect is sent again.")
    master_ports: tuple[int, int] = Field(
        MASTER_PORTS, description="First and last port that rank 0 may listen on; unique per address while in use."
    )

    min_profile_s: float = Field(60, ge=0, description="A gang size counts as profiled after this long.")
    carbon_refresh_s: float = Field(1.0, gt=0, description="The carbon service is asked at most this often.")
    carbon_window_s: float = Field(172_800, gt=0, description="Grid time to look back, and to look ahead.")
    default_intensity_gco2_per_kwh: float = Field(
        400, gt=0, description="Assumed, and marked stale, until the carbon service has answered once."
    )

    placement: str = Field(
        "consolidated",
        description="How gangs are placed by policies that leave it open: consolidated, buddy, first-fit, heavy-edge "
        "or refined.",
    )
    inter_gbps: float = Field(
        10, gt=0, description="A node's NIC, gigabits per second; for placement by a job's layout."
    )
    intra_gbytes: float = Field(
        300, gt=0, description="Between GPUs of a node, gigabytes per second; for the same purpose."
    )

    control_curves: Path | None = Field(
        None,
        validation_alias="SCHEDULER_SETTING_CURVES",
        description="File of measured speed and power by power limit and clock, for policies that set them.",
    )
    power_limit_w: float | None = Field(
        None,
        gt=0,
        description="What GPUs and hosts of the cluster may draw at any time, whatever the policy; none by default.",
    )
    power_interval_s: float = Field(
        10, gt=0, description="Time between checks of the cluster's power while the policy limits it; each is a round."
    )
    power_settle_s: float = Field(
        5, ge=0, description="How long after a change measured power is ignored, until agents have acted and reported."
    )
    measures_controls: bool = Field(
        True,
        validation_alias="SCHEDULER_MEASURES_SETTINGS",
        description="Whether policies may measure gangs by running them at each power limit or clock in turn.",
    )
    measured_settings: int = Field(
        8, ge=2, le=64, description="At how many values gangs are measured, the default included."
    )

    node_power: Literal["none", "command", "ipmi"] = Field("none", description="How nodes are powered down and woken.")
    node_power_on_command: tuple[str, ...] = Field(
        (), description="JSON list of words, without a shell; {node} and {address} stand for the node's."
    )
    node_power_off_command: tuple[str, ...] = ()
    node_power_file: Path | None = Field(
        None,
        description="TOML file of the nodes' management controllers, for ipmi; it refers to secrets but contains none.",
    )
    node_power_time_limit_s: float = Field(
        300, gt=0, description="How long one command, or one IPMI request, may take."
    )
    node_down_timeout_s: float = Field(
        300, gt=0, description="A node that still sends heartbeats this long after its hook succeeded stays on."
    )
    node_wake_timeout_s: float = Field(
        600,
        gt=0,
        description="If a node sends no heartbeat for this long after its hook succeeded, the hook runs again.",
    )
    node_power_attempts: int = Field(
        3, ge=1, le=100, description="How often a hook runs before its node counts as failed."
    )
    node_power_backoff_s: float = Field(
        10, gt=0, description="Before a hook that failed is run again; doubled each time, five minutes at most."
    )
    node_max_wakes: int = Field(
        4, ge=1, description="Most nodes that boot at once, to limit the inrush on the power supply."
    )
    node_min_on_s: float = Field(600, ge=0, description="Shortest time between waking and powering down by a plan.")
    node_min_off_s: float = Field(60, ge=0, description="Shortest time that a node stays off; gangs that need it wait.")
    node_standby_w: float = Field(0, ge=0, description="Power of a node that is off, for the ledger.")
    node_boot_w: float = Field(0, ge=0, description="Power of a node that boots, for the ledger.")

    openadr_url: str = Field("", description="Address of an OpenADR 3 server (VTN) whose events become orders.")
    openadr_token_url: str = Field("", description="Where its OAuth tokens are; by default auth/token at its address.")
    openadr_client_id: str = Field("", description="Of the OAuth client; without one, nothing is authenticated.")
    openadr_client_secret: str = Field("", repr=False)
    openadr_client_name: str = Field("wattshift", description="How reports to the VTN are signed.")
    openadr_programs: tuple[str, ...] = Field((), description="Names of the programs that count; by default all.")
    openadr_zone: str | None = Field(None, description="The grid zone that its events are for; by default all nodes.")
    openadr_poll_s: float = Field(5.0, gt=0, description="How often the VTN is asked.")
    openadr_simple_cuts: tuple[float, float, float] = Field(
        (0.1, 0.25, 0.5), description="What levels 1, 2 and 3 of a SIMPLE event leave out of the baseline, as shares."
    )

    plans_kept: int = Field(20_000, ge=1, description="Rounds kept for operators to read.")

    @field_validator("placement")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in PLACERS:
            raise ValueError(f"must be one of {', '.join(PLACERS)}")
        return value

    @property
    def network(self) -> Network:
        """What connects GPUs, except for the width of nodes, which the nodes report."""
        return Network(self.inter_gbps * 1e9 / 8, self.intra_gbytes * 1e9)
