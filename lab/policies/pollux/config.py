"""What can be turned in Pollux, with the paper's values as defaults."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class PolluxConfig:
    """Parameters of Pollux."""

    fairness: float = parameter(
        -1.0,
        "p of the power mean of speedups that is maximised: 1 is the arithmetic mean, 0 the geometric mean; the "
        "lower p, the more the jobs with the least speedup count. Default: Pollux section 4.2.",
        minimum=-10.0,
        maximum=1.0,
    )
    restart_s: float = parameter(
        30.0,
        "Assumed cost of a change of a job's GPUs; the younger a job and the more often it was restarted, the "
        "less a change is worth. Default: Pollux section 4.2.",
        unit="s",
        minimum=0.0,
    )
    growth: float = parameter(
        2.0,
        "A job whose speed is not predicted gets at most this many times the GPUs it has ever had. "
        "Default: Pollux section 4.1.",
        minimum=1.0,
    )
    avoid_interference: bool = parameter(
        True, "Whether at most one gang that spans nodes may use a node. Default: Pollux section 4.2."
    )

    def __post_init__(self) -> None:
        check_parameters(self)
