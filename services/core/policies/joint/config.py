"""What can be turned in ``joint``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from services.core.policies.parameters import Parameter, check_parameters


@dataclass(frozen=True)
class JointConfig:
    """Parameters of ``joint``; all defaults are ours."""

    hour_wh: Annotated[
        float,
        Parameter(
            "What an hour of a job's completion time is worth, as energy at the day's mean intensity (1,000 Wh at 200 "
            "gCO2/kWh are 200 grams per hour): jobs run wider and faster, and wait less for greener hours, as long as "
            "an hour gained costs no more. 0: carbon alone counts.",
            unit="Wh",
            minimum=0.0,
            maximum=1e6,
        ),
    ] = 60.0
    widest_gpus: Annotated[
        int,
        Parameter(
            "No gang is made wider than this; one whose smallest size is wider keeps that.", unit="GPUs", minimum=1
        ),
    ] = 2
    slack_s: Annotated[
        float,
        Parameter(
            "How much later a job without a deadline may end for greener hours than if it had run alone from its "
            "submission on; 0: only jobs with deadlines wait for greener hours.",
            unit="s",
            minimum=0.0,
        ),
    ] = 0.0
    slack_share: Annotated[
        float, Parameter("The same as a share of the job's own length; the smaller of the two holds.", minimum=0.0)
    ] = 1.0
    oldest_s: Annotated[
        float | None,
        Parameter(
            "A job without a deadline does not wait for greener hours beyond this age, unless it is longer than that: "
            "a guard on the longest completion times. null: no guard.",
            unit="s",
            minimum=0.0,
        ),
    ] = None
    limits: Annotated[bool, Parameter("Whether power limits are set.")] = True
    profile_window_s: Annotated[
        float,
        Parameter(
            "How long an unknown kind of job is measured at each power limit.", unit="s", minimum=0.1, maximum=3600.0
        ),
    ] = 5.0
    restart_s: Annotated[
        float,
        Parameter("A running job is resized only where that is worth this much of its work.", unit="s", minimum=0.0),
    ] = 120.0
    stay_share: Annotated[
        float,
        Parameter(
            "A running job stops for greener hours only where the intensity now, less this share, is still too high.",
            minimum=0.0,
            maximum=0.5,
        ),
    ] = 0.03
    host_w: Annotated[
        float, Parameter("Draw of the host that goes with a busy GPU.", unit="W", minimum=0.0, maximum=10_000.0)
    ] = 60.0
    sleep_after_s: Annotated[
        float | None,
        Parameter("Nodes that nobody uses are powered down after this long; null: never.", unit="s", minimum=0.0),
    ] = 60.0

    def __post_init__(self) -> None:
        check_parameters(self)
