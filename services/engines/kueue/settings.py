"""The bridge's settings: `ENGINE_KUEUE_...`, and those that the whole installation shares."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.contracts.engines import EngineMode
from services.contracts.schema import Name, said
from services.kit.bridges.process import BridgeSettings


class KueueSettings(BridgeSettings):
    model_config = SettingsConfigDict(env_prefix="ENGINE_KUEUE_", env_ignore_empty=True)

    node_id: Name = Field("kueue", description="The name of the bridge, and of its cluster; its nodes are NAME.NODE.")
    own_zone: Name | None = Field(
        None, validation_alias="ENGINE_KUEUE_ZONE", description="Grid zone of the nodes; by default the installation's."
    )

    mode: EngineMode = Field(
        EngineMode.DRY_RUN, description="dry_run admits every workload at once and counts what it would do."
    )
    controller: str = Field("wattshift.io/carbon", description="The controllerName of the AdmissionChecks to answer.")
    resource: str = Field("nvidia.com/gpu", description="The resource that GPUs are.")
    model_label: str = Field("nvidia.com/gpu.product", description="The node label of a flavor that names its GPUs.")
    gpu_models: dict[str, str] = said(
        "GPU models by that label or by flavor, as JSON; else the label.", default_factory=dict[str, str]
    )
    interval_s: float = Field(1.0, gt=0, le=600, description="How often workloads are compared with what is decided.")
    queues_interval_s: float = Field(10.0, gt=0, le=600, description="How often queues and flavors are read.")
    silence_s: float = Field(
        60.0, gt=0, description="Without an answer of the control plane for so long, all workloads are admitted."
    )
    order: bool = Field(
        False,
        description="Whether plans order workloads of one ClusterQueue and priority that wait for quota, by "
        "kueue.x-k8s.io/priority-boost, which needs Kueue's feature gate PriorityBoost.",
    )
    dispatch: bool = Field(
        False, description="Whether it nominates the worker clusters of MultiKueue, in a manager cluster."
    )
    dispatch_wait_s: float = Field(
        300.0, gt=0, le=86_400, description="How long a nominated cluster has to take a workload before the next may."
    )
    dispatch_length_s: float = Field(
        3_600.0, gt=0, le=1e7, description="How long workloads are expected to run that do not say how long they may."
    )
    outlook_interval_s: float = Field(300.0, gt=0, le=86_400, description="How often zones' outlooks are asked for.")
    lease_namespace: str = Field("wattshift", description="Where the bridge's Lease is.")
    release_after_s: float = Field(
        600.0, ge=60, description="A bridge whose Lease is older is dead: `--release` then admits in its place."
    )
    kubeconfig: Path | None = Field(None, description="By default that of the pod's service account, else the user's.")
