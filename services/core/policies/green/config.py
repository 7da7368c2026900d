"""GREEN's parameters, with the paper's values as defaults."""

from dataclasses import dataclass
from typing import Literal

from services.core.domain.errors import PolicyConfigError
from services.core.policies.parameters import check_parameters, parameter, seconds, share

CarbonFactor = Literal["footprint", "gpu_seconds"]
GammaCompares = Literal["minimum", "previous", "marginal"]
WaitsFor = Literal["high_power", "all"]


@dataclass(frozen=True)
class GreenConfig:
    """Parameters of GREEN. If the paper prints no value, the meaning says that the default is ours."""

    mu: float = parameter(
        2.0,
        "Strength of temporal shifting: factors lie between 1/mu and mu; 1 switches it off. "
        "Default: GREEN sections 5.2 and A.2.",
        minimum=1.0,
    )
    theta: float = share(
        0.30,
        "Share of the cluster's GPUs that the upper queue may take ahead of the lower one; its other jobs rank "
        "among the lower queue's. Default: section 6.4.",
    )
    gamma_empty: float = parameter(
        0.70,
        "Least efficiency degradation at which a job still scales out on an empty cluster. Default: ours.",
        minimum=0.0,
        maximum=2.0,
    )
    gamma_full: float = parameter(
        0.95,
        "The same on a full cluster; two equal values give the fixed threshold of section 5.1 (0.9). Default: ours.",
        minimum=0.0,
        maximum=2.0,
    )
    gamma_compares: GammaCompares = parameter(
        "minimum",
        "What gamma is compared with: minimum, the present gang's efficiency over the smallest gang's (equation "
        "4); previous, over that before the last step (one reading of line 4 of Algorithm 1); marginal, the "
        "efficiency of the last step alone over the smallest gang's (ours).",
    )
    step_back: bool = parameter(
        False,
        "A job whose last step fell below gamma leaves the upper queue at the size before it; Algorithm 1 leaves "
        "it at the size that proved too wide. Default: the paper's.",
    )
    job_cap_gpus: int = parameter(
        8,
        "No job scales out beyond this, unless its minimum gang is wider (section 5.1). Default: ours.",
        unit="GPUs",
        minimum=1,
    )
    starvation_s: float | None = seconds(
        86_400.0,
        "A job that has waited this long is placed first, and only what it emits from then on counts against it "
        "(section 9); null: no job is. Default: ours, the day over which section 2.3 preserves shares.",
        minimum=1.0,
    )
    curve_window_s: float = seconds(
        86_400.0,
        "Length of the carbon intensity curve whose mean separates green hours from dirty ones. "
        "Default: section 8.1, 24 hours.",
        minimum=60.0,
    )
    slack_s: float = seconds(
        0.0,
        "How much later a job without a deadline may end than if it had never waited, so that GPUs stay idle in "
        "dirty hours; a job with a deadline may be held until it has just enough time. 0, as in the paper: no job "
        "is held while a GPU is free.",
    )
    slack_share: float | None = parameter(
        None, "A second limit on that delay, as a share of the time the job itself needs.", minimum=0.0
    )
    slack_of: WaitsFor = parameter(
        "all", "Which jobs of the lower queue slack_s may hold: those of high power, or all."
    )
    carbon_factor: CarbonFactor = parameter(
        "footprint",
        "What counts against a job in the lower queue: its emissions, or its GPU seconds (ablation of A.1).",
    )
    fixed_gpus: int | None = parameter(
        None,
        "Run every job at this size, or the nearest it may have, without scaling (ablation of A.1); null: jobs scale.",
        unit="GPUs",
        minimum=1,
    )
    unmeasured_s: float = seconds(
        3_600.0,
        "A job that has run this long at one size without a measured efficiency stops scaling and leaves the "
        "upper queue. Default: ours, two active rounds.",
    )

    def __post_init__(self) -> None:
        check_parameters(self)
        if self.gamma_full < self.gamma_empty:
            raise PolicyConfigError("must be at least gamma_empty: a full cluster scales less", pointer="/gamma_full")
