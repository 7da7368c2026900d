"""The bridge's settings: `ENGINE_SLURM_...`, and those that the whole installation shares."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from services.contracts.engines import EngineMode
from services.contracts.schema import Name, many, said
from services.kit.bridges.process import BridgeSettings


class SlurmSettings(BridgeSettings):
    model_config = SettingsConfigDict(env_prefix="ENGINE_SLURM_", env_ignore_empty=True)

    node_id: Name = Field("slurm", description="The name of the bridge, and of its Slurm; its nodes are NAME.NODE.")
    own_zone: Name | None = Field(
        None, validation_alias="ENGINE_SLURM_ZONE", description="Grid zone of the nodes; by default the cluster's."
    )

    mode: EngineMode = Field(
        EngineMode.DRY_RUN, description="dry_run changes nothing in Slurm and counts what it would do; control does it."
    )
    partitions: Annotated[list[str], NoDecode] = many("Partitions whose jobs are steered; by default all.")
    leave_partitions: Annotated[list[str], NoDecode] = many("Partitions whose jobs are left alone.")
    leave_qos: Annotated[list[str], NoDecode] = many("QOS whose jobs are left alone.")
    order: Literal["none", "user", "account", "partition"] = Field(
        "none",
        description="Among which jobs the plan's order counts: those of one user (and QOS, account and partition), of "
        "one account, or of one partition; `none`: Slurm's order alone. It is set by `nice`, and needs "
        "priority/multifactor.",
    )
    alive_file: Path | None = Field(
        None, description="A file that says until when `job_submit.lua` is to delay new jobs; by default none."
    )
    nodes_interval_s: float = Field(10.0, gt=0, le=600, description="How often its nodes are.")
    hold_s: float = Field(
        900.0, ge=60, le=86_400, description="A hold ends by itself after so long, unless it is renewed."
    )
    silence_s: float = Field(
        60.0, gt=0, description="Without an answer of the control plane for so long, no hold is renewed."
    )
    missing_after_s: float = Field(
        30.0, ge=0, description="How long a job must be gone, and unknown to accounting, before it counts as lost."
    )
    cancel_ended: bool = Field(
        True,
        description="Whether a steered job that has ended, and that slurmctld shows waiting or running again after a "
        "crash, is cancelled there; otherwise Slurm runs it again, and that run is a job of its own.",
    )
    gpu_models: dict[str, str] = said(
        'GPU models by GRES type, as JSON: `{"h200": "H200-SXM5-141GB"}`; by default the type itself.',
        default_factory=dict[str, str],
    )
    energy_interval_s: float = Field(
        60.0, ge=10, le=3_600, description="How often energy is booked, by the models of the GPUs that jobs hold."
    )
    energy: bool = Field(True, description="Whether it is; false where agents on the nodes measure it.")
    rest: str = Field(
        "",
        pattern=r"^(https?://\S+|unix:/\S+)?$",
        description="slurmrestd, `http://HOST:PORT` or `unix:/PATH`; by default Slurm's commands do everything.",
    )
    rest_user: str = Field("root", description="The user of its token, an operator or administrator of Slurm.")
    rest_token_file: Path | None = Field(
        None, description="A file with a token of `scontrol token`, read at every request; a Unix socket needs none."
    )
    command_timeout_s: float = Field(30.0, gt=0, le=600, description="How long one of Slurm's commands may take.")

    @field_validator("partitions", "leave_partitions", "leave_qos", mode="before")
    @classmethod
    def _read_names(cls, value: object) -> object:
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
