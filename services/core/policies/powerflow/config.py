"""What can be turned in PowerFlow, with the paper's values as defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from services.core.domain.errors import PolicyConfigError
from services.core.policies.parameters import Parameter, check_parameters
from services.core.policies.powerflow.allocate import Greedy

HOURS = 24.0


@dataclass(frozen=True)
class PowerflowConfig:
    """Parameters of PowerFlow. Where the paper prints no value, the meaning says that the default is ours."""

    eta: Annotated[
        float,
        Parameter(
            "Share of the power of a fully allocated cluster at default settings that the cluster may draw; 1 sets no "
            "limit by itself (section 5.1).",
            minimum=0.0,
            maximum=1.0,
        ),
    ] = 1.0
    power_limit_w: Annotated[
        float | None,
        Parameter("The cluster's power limit; null for none. The least of all limits holds.", unit="W", minimum=0.0),
    ] = None
    power_limit_curve: Annotated[
        tuple[tuple[float, float], ...],
        Parameter(
            "A limit by the hour: [when, watts] pairs, ascending, each in force until the next. When is an hour of the "
            "day, UTC, if all are below 24, and otherwise UTC seconds; before the first of those there is no limit.",
            unit="W",
            minimum=0.0,
        ),
    ] = ()
    gpu_max_w: Annotated[
        float | None,
        Parameter(
            "P_max: what a GPU with its host draws while it trains at the default setting; null for the mean of the "
            "kinds of jobs the cluster knows.",
            unit="W",
            minimum=1.0,
        ),
    ] = None
    margin: Annotated[
        float,
        Parameter(
            "Share of the limit kept back, for the error of the models. Default: ours.", minimum=0.0, maximum=0.9
        ),
    ] = 0.0
    limit_ahead_s: Annotated[
        float,
        Parameter(
            "How far ahead of a falling limit the cluster comes down, where the next active round is not known. "
            "Default: ours.",
            unit="s",
            minimum=0.0,
        ),
    ] = 1_800.0
    grace_s: Annotated[
        float,
        Parameter("How long a gang that is stopped may still draw power. Default: the agents'.", unit="s", minimum=0.0),
    ] = 120.0
    setting: Annotated[
        Literal["clock", "power_limit"],
        Parameter(
            "What is measured and set where a device takes both. The paper sets clocks; what is measured here, and so "
            "the default, is power limits."
        ),
    ] = "power_limit"
    profiling: Annotated[
        Literal["unknown", "first_run", "each_job", "never"],
        Parameter(
            "Whose settings are measured online: the first gang of a kind nothing is known of, every job's first gang, "
            "every job the first time it runs on a number of GPUs (as printed), or nobody's. Default: ours."
        ),
    ] = "unknown"
    profiling_s: Annotated[
        float, Parameter("How long a gang is measured, all settings together (section 5.2).", unit="s", minimum=1.0)
    ] = 240.0
    profiling_steps: Annotated[
        int, Parameter("Settings among which that time is sliced, where it is not known how many. Default: ours.")
    ] = 8
    marginal: Annotated[
        Literal["energy", "energy_and_gpu", "power"],
        Parameter("What a GPU or a setting returns: eq. 20 and 21, the same per GPU, or time per watt of the limit."),
    ] = "energy"
    queue: Annotated[
        Literal["submitted", "shortest"], Parameter("Which job without a GPU is first. Default: ours.")
    ] = "submitted"
    at_limit: Annotated[
        Literal["stop", "skip"], Parameter("What a step beyond the limit ends: the allocation, or the job's.")
    ] = "stop"
    restart_s: Annotated[
        float,
        Parameter("What stopping a gang and starting it again costs it. Default: ours.", unit="s", minimum=0.0),
    ] = 60.0
    resize_gain: Annotated[
        float,
        Parameter(
            "A running job grows, or moves, only where that saves this many times what its restart costs. Default: "
            "ours; the paper prints no cost of scaling.",
            minimum=0.0,
        ),
    ] = 2.0
    placement: Annotated[Literal["buddy", "consolidated"], Parameter("How gangs are placed (section 5.3).")] = "buddy"
    migration: Annotated[
        bool, Parameter("Whether jobs are moved to free blocks and nodes where that pays for itself (section 5.3).")
    ] = False
    power_down: Annotated[bool, Parameter("Whether unused nodes are powered down where they may be (section 5.3).")] = (
        True
    )
    spare_nodes: Annotated[
        int, Parameter("Unused nodes that stay awake for the next arrival. Default: ours.", minimum=0)
    ] = 1
    default_gpu_w: Annotated[
        float,
        Parameter("Draw of a GPU of a job that nothing is known of. Default: ours.", unit="W", minimum=1.0),
    ] = 300.0
    default_scaling: Annotated[
        float,
        Parameter("Exponent of speed over GPUs of a job that nothing is known of. Default: ours.", minimum=0.0),
    ] = 0.9

    def __post_init__(self) -> None:
        check_parameters(self)
        times = [when for when, _ in self.power_limit_curve]
        for at in range(len(times)):
            if times[at] < 0 or (at and times[at] <= times[at - 1]):
                raise PolicyConfigError("times ascend from 0", pointer=f"/power_limit_curve/{at}/0")

    @property
    def greedy(self) -> Greedy:
        """How the allocation departs from the print."""
        return Greedy(self.marginal, self.queue, self.at_limit)
