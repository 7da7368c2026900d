"""PowerFlow's parameters; where the paper prints values, they are the defaults."""

from dataclasses import dataclass
from typing import Literal

from services.core.domain.errors import PolicyConfigError
from services.core.policies.parameters import check_parameters, parameter, seconds, share

HOURS = 24.0


@dataclass(frozen=True)
class PowerflowConfig:
    """Parameters of PowerFlow. If the paper prints no value, the meaning says that the default is ours."""

    eta: float = share(
        1.0,
        "Share of a fully allocated cluster's power, at default clocks and power limits, that the cluster may "
        "draw; 1 sets no limit (section 5.1).",
    )
    power_limit_w: float | None = parameter(
        None, "The cluster's power limit; null for none. Of several limits the lowest holds.", unit="W", minimum=0.0
    )
    power_limit_curve: tuple[tuple[float, float], ...] = parameter(
        (),
        "A limit that changes with time: [when, watts] pairs in ascending order, each in force until the next. "
        "If all times are below 24 they are hours of the day, UTC; otherwise they are UTC seconds, and no limit "
        "holds before the first.",
        unit="W",
        minimum=0.0,
    )
    gpu_max_w: float | None = parameter(
        None,
        "P_max: what a GPU and its share of the host draw in training at the default power limit and clock; null "
        "for the mean over the known kinds of jobs.",
        unit="W",
        minimum=1.0,
    )
    margin: float = parameter(
        0.0, "Share of the limit kept in reserve for the models' error. Default: ours.", minimum=0.0, maximum=0.9
    )
    limit_ahead_s: float = seconds(
        1_800.0,
        "How long before the limit falls the cluster reduces its power, if the next active round is not known. "
        "Default: ours.",
    )
    grace_s: float = seconds(120.0, "How long a stopped gang may still draw power. Default: the agents' grace period.")
    control: Literal["clock", "power_limit"] = parameter(
        "power_limit",
        "Which control is measured and used on devices that have both. The paper uses clocks; the default is the "
        "power limit, for which we have measurements.",
        formerly="setting",
    )
    profiling: Literal["unknown", "first_run", "each_job", "never"] = parameter(
        "unknown",
        "Which gangs are measured online: unknown, the first gang of an unknown kind of job; first_run, every "
        "job's first gang; each_job, every job's first gang of each size (as printed); never, none. Default: ours.",
    )
    profiling_s: float = seconds(
        240.0, "How long a gang is measured, over all power limits or clocks together (section 5.2).", minimum=1.0
    )
    profiling_steps: int = parameter(
        8, "Over how many power limits or clocks that time is shared, if their number is not known. Default: ours."
    )
    marginal: Literal["energy", "energy_and_gpu", "power"] = parameter(
        "energy",
        "By what GPUs and power are given out: energy, eq. 20 and 21; energy_and_gpu, the same per GPU; power, "
        "time saved per watt of the limit.",
    )
    queue: Literal["submitted", "shortest"] = parameter(
        "submitted", "Order of the jobs that have no GPU yet. Default: ours."
    )
    at_limit: Literal["stop", "skip"] = parameter(
        "stop", "What ends when a step would exceed the limit: the whole allocation, or that job's."
    )
    restart_s: float = seconds(60.0, "Time a gang loses when it is stopped and started again. Default: ours.")
    resize_gain: float = parameter(
        2.0,
        "A running job grows or moves only if that saves this many times the cost of its restart. Default: ours; "
        "the paper prints no cost of scaling.",
        minimum=0.0,
    )
    placement: Literal["buddy", "consolidated"] = parameter("buddy", "How gangs are placed (section 5.3).")
    migration: bool = parameter(
        True, "Whether jobs are moved to free blocks of GPUs or whole nodes if that pays for itself (section 5.3)."
    )
    power_down: bool = parameter(True, "Whether unused nodes that may be powered down are (section 5.3).")
    spare_nodes: int = parameter(1, "How many unused nodes stay on for new jobs. Default: ours.", minimum=0)
    default_gpu_w: float = parameter(
        300.0, "Assumed draw of a GPU of an unknown job. Default: ours.", unit="W", minimum=1.0
    )
    default_scaling: float = parameter(
        0.9, "Assumed exponent of an unknown job's speed over GPUs. Default: ours.", minimum=0.0
    )

    def __post_init__(self) -> None:
        check_parameters(self)
        times = [when for when, _ in self.power_limit_curve]
        for at in range(len(times)):
            if times[at] < 0 or (at and times[at] <= times[at - 1]):
                raise PolicyConfigError("times ascend from 0", pointer=f"/power_limit_curve/{at}/0")
