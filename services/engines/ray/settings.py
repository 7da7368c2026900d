"""The bridge's settings: `ENGINE_RAY_...`, and those that the whole installation shares."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.contracts.engines import EngineMode
from services.contracts.schema import Name, said
from services.kit.bridges.process import BridgeSettings


class RaySettings(BridgeSettings):
    model_config = SettingsConfigDict(env_prefix="ENGINE_RAY_", env_ignore_empty=True)

    node_id: Name = Field("ray", description="The name of the bridge, and of its cluster; its nodes are NAME.NODE.")
    own_zone: Name | None = Field(
        None,
        validation_alias="ENGINE_RAY_ZONE",
        description="Grid zone of nodes without a resource `zone:ZONE`; by default the installation's.",
    )

    mode: EngineMode = Field(
        EngineMode.DRY_RUN, description="dry_run starts every job at once and counts what it would do; control does it."
    )
    address: str = Field("http://127.0.0.1:8265", description="Ray's dashboard, which serves its job API.")
    auth_token: str = Field("", description="Ray's own token, where it asks for one.")
    listen_address: str = Field(
        "127.0.0.1:8267",
        pattern=r"^\S+:[0-9]{1,5}$",
        description="Where the entry points of jobs ask; every node that runs drivers must reach it.",
    )
    nodes_interval_s: float = Field(10.0, gt=0, le=600, description="How often its nodes are.")
    hold_s: float = Field(900.0, ge=1, le=86_400, description="A job that hears nothing for so long starts by itself.")
    silence_s: float = Field(
        60.0, gt=0, description="Without an answer of the control plane for so long, every job starts."
    )
    missing_after_s: float = Field(
        30.0, ge=0, description="How long a job must be unknown to Ray before it counts as lost."
    )
    gpu_models: dict[str, str] = said(
        'GPU models by Ray\'s accelerator type, as JSON: `{"H100": "H100-SXM5-80GB"}`; else the type.',
        default_factory=dict[str, str],
    )
    energy: bool = Field(True, description="Whether energy is modelled; false where agents on the nodes measure it.")
    energy_interval_s: float = Field(60.0, ge=10, le=3_600, description="How often it is booked.")
    timeout_s: float = Field(30.0, gt=0, le=600, description="How long one answer of Ray may take.")
