"""What can be turned in GREEN, with the paper's values as defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from services.core.domain.errors import PolicyConfigError
from services.core.policies.parameters import Parameter, check_parameters

CarbonFactor = Literal["footprint", "gpu_seconds"]
GammaCompares = Literal["minimum", "previous", "marginal"]
WaitsFor = Literal["high_power", "all"]


@dataclass(frozen=True)
class GreenConfig:
    """Parameters of GREEN. Where the paper prints no value, the meaning says that the default is ours."""

    mu: Annotated[
        float,
        Parameter(
            "Strength of temporal shifting: factors lie between 1/mu and mu; 1 switches it off. "
            "Default: GREEN sections 5.2 and A.2.",
            minimum=1.0,
        ),
    ] = 2.0
    theta: Annotated[
        float,
        Parameter(
            "Share of the cluster's GPUs that the upper queue may take ahead of the lower one. Default: section 6.4.",
            minimum=0.0,
            maximum=1.0,
        ),
    ] = 0.30
    gamma_empty: Annotated[
        float,
        Parameter(
            "Least efficiency degradation at which a job still scales out on an empty cluster. Default: ours.",
            minimum=0.0,
            maximum=2.0,
        ),
    ] = 0.70
    gamma_full: Annotated[
        float,
        Parameter(
            "The same on a full cluster; equal ends give the fixed threshold of section 5.1 (0.9). Default: ours.",
            minimum=0.0,
            maximum=2.0,
        ),
    ] = 0.95
    gamma_compares: Annotated[
        GammaCompares,
        Parameter(
            "What gamma is held against: the efficiency at the present gang over that at the smallest (equation 4), or "
            "over that before the last step (one reading of line 4 of Algorithm 1), or what the last step alone turns "
            "a joule into, over the smallest gang's (ours)."
        ),
    ] = "minimum"
    step_back: Annotated[
        bool,
        Parameter(
            "A job whose last step fell below gamma leaves the upper queue at the size before it; Algorithm 1 leaves "
            "it at the size that proved too wide. Default: the paper's."
        ),
    ] = False
    job_cap_gpus: Annotated[
        int,
        Parameter(
            "No job scales out beyond this, unless its minimum gang is wider (section 5.1). Default: ours.",
            unit="GPUs",
            minimum=1,
        ),
    ] = 8
    starvation_s: Annotated[
        float | None,
        Parameter(
            "A job that has waited this long is placed first, and only what it emits from then on counts against "
            "it (section 9); null never does. Default: ours, the day over which section 2.3 preserves shares.",
            unit="s",
            minimum=1.0,
        ),
    ] = 86_400.0
    curve_window_s: Annotated[
        float,
        Parameter(
            "Length of the carbon intensity curve whose mean separates green hours from dirty ones. "
            "Default: section 8.1, 24 hours.",
            unit="s",
            minimum=60.0,
        ),
    ] = 86_400.0
    slack_s: Annotated[
        float,
        Parameter(
            "How much later than at once a job without a deadline may end, so that GPUs stand idle in dirty hours; "
            "a job with a deadline may then be held until it. 0, as the paper: never while a GPU is free.",
            unit="s",
            minimum=0.0,
        ),
    ] = 0.0
    slack_share: Annotated[
        float | None,
        Parameter("A second limit on that delay, as a share of the time the job itself needs.", minimum=0.0),
    ] = None
    slack_of: Annotated[
        WaitsFor,
        Parameter("Which jobs of the lower queue are held where slack_s allows it: those of high power, or all."),
    ] = "all"
    carbon_factor: Annotated[
        CarbonFactor,
        Parameter("What counts against a job in the lower queue: its emissions, or its GPU seconds (ablation of A.1)."),
    ] = "footprint"
    fixed_gpus: Annotated[
        int | None,
        Parameter(
            "Run every job at this size, or the nearest it may have, without scaling (ablation of A.1); null scales.",
            unit="GPUs",
            minimum=1,
        ),
    ] = None
    unmeasured_s: Annotated[
        float,
        Parameter(
            "A job that has run this long at one size without a measured efficiency stops scaling and leaves the "
            "upper queue. Default: ours, two active rounds.",
            unit="s",
            minimum=0.0,
        ),
    ] = 3_600.0

    def __post_init__(self) -> None:
        check_parameters(self)
        if self.gamma_full < self.gamma_empty:
            raise PolicyConfigError("must be at least gamma_empty: a full cluster scales less", pointer="/gamma_full")
