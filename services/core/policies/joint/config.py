"""The parameters of ``joint``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from services.core.policies.parameters import Parameter, check_parameters

LOST_TIMES = 4.0  #: How many hours gained an hour is worth that a job takes longer than as its user asked for it


@dataclass(frozen=True)
class JointConfig:
    """Parameters of ``joint``; all defaults are ours."""

    hour_share: Annotated[
        float,
        Parameter(
            "What an hour of a job's completion time is worth, as a share of what the job draws in an hour at the size "
            "its user asked for, at the day's mean intensity: jobs run wider and faster, and wait less for greener "
            "hours, as long as an hour gained costs no more. An hour that width or a power limit loses against that "
            "size counts four times. 0: carbon alone counts.",
            minimum=0.0,
            maximum=1e3,
        ),
    ] = 0.2
    hour_wh: Annotated[
        float | None,
        Parameter(
            "The worth of an hour for all jobs alike, gained or lost, in place of hour_share: 1,000 Wh at 200 gCO2/kWh "
            "are 200 grams. null: hour_share.",
            unit="Wh",
            minimum=0.0,
            maximum=1e6,
        ),
    ] = None
    widest_gpus: Annotated[
        int | None,
        Parameter(
            "No gang is made wider than this; one whose smallest size is wider keeps that. null: as wide as the job "
            "allows.",
            unit="GPUs",
            minimum=1,
        ),
    ] = None
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
    width_by_hour: Annotated[
        bool | None,
        Parameter(
            "Whether a job that has time to spare is planned with its hours and sizes together: wider in the greenest "
            "hours, narrower or not at all in others. false: it gets one size first, and then hours for that. null: "
            "together while the cluster has room for the widest gangs of all jobs at once."
        ),
    ] = None
    ahead_s: Annotated[
        float,
        Parameter(
            "How far ahead hours are compared; a forecast that ends before goes on with its last day.",
            unit="s",
            minimum=86_400.0,
            maximum=345_600.0,
        ),
    ] = 172_800.0
    length_quantile: Annotated[
        float | None,
        Parameter(
            "Which quantile of a predicted length counts, where its spread is known: 0.9 takes jobs to need what nine "
            "in ten of their kind do not exceed, so that fewer end late. null: the prediction itself.",
            minimum=0.05,
            maximum=0.95,
        ),
    ] = None
    intensity_quantile: Annotated[
        float,
        Parameter(
            "Which quantile of the intensity ahead counts, where forecasts come with theirs: above 0.5 jobs wait for "
            "greener hours only where these are the surer. 0.5: the forecast's middle.",
            minimum=0.05,
            maximum=0.95,
        ),
    ] = 0.5
    order: Annotated[
        Literal["shortest", "submitted"],
        Parameter(
            "Who goes first, after users' priorities: late jobs and then those of the least GPU hours left, or those "
            "submitted first."
        ),
    ] = "shortest"
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
        float | None,
        Parameter(
            "Draw of the host that goes with a busy GPU. null: as measured, or else a sixth of the board's peak.",
            unit="W",
            minimum=0.0,
            maximum=10_000.0,
        ),
    ] = None
    sleep_after_s: Annotated[
        float | None,
        Parameter("Nodes that nobody uses are powered down after this long; null: never.", unit="s", minimum=0.0),
    ] = 60.0

    placement: Annotated[
        Literal["cluster", "heavy-edge", "refined"],
        Parameter(
            "How gangs sit whose stages and bytes are known: by Heavy-Edge, refined until no exchange shortens their "
            "iterations, or as the cluster places all others."
        ),
    ] = "refined"
    least_speed_share: Annotated[
        float,
        Parameter(
            "Such a gang does not start where it would run at less than this share of its best speed, until it has "
            "waited as long as that would delay it. 0: it takes what there is.",
            minimum=0.0,
            maximum=1.0,
        ),
    ] = 0.5

    def __post_init__(self) -> None:
        check_parameters(self)

    @property
    def lost_times(self) -> float:
        """How many times an hour counts that is lost relative to the size the user asked for."""
        return LOST_TIMES if self.hour_wh is None else 1.0
