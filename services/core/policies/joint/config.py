"""The parameters of ``joint``."""

from dataclasses import dataclass
from typing import Literal

from services.core.policies.parameters import check_parameters, parameter, seconds, share

LOST_TIMES = 4.0  #: How many hours gained an hour is worth that a job takes longer than as its user asked for it


@dataclass(frozen=True)
class JointConfig:
    """Parameters of ``joint``; all defaults are ours."""

    hour_share: float = parameter(
        0.2,
        "What an hour of a job's completion time is worth, as a share of what the job draws in an hour at the size "
        "its user asked for, at the day's mean intensity: jobs run wider and faster, and wait less for greener "
        "hours, as long as an hour gained costs no more. An hour that width or a power limit loses against that "
        "size counts four times. 0: carbon alone counts.",
        minimum=0.0,
        maximum=1e3,
    )
    hour_wh: float | None = parameter(
        None,
        "The worth of an hour for all jobs alike, gained or lost, in place of hour_share: 1,000 Wh at 200 gCO2/kWh "
        "are 200 grams. null: hour_share.",
        unit="Wh",
        minimum=0.0,
        maximum=1e6,
    )
    widest_gpus: int | None = parameter(
        None,
        "No gang is made wider than this; one whose smallest size is wider keeps that. null: as wide as the job "
        "allows.",
        unit="GPUs",
        minimum=1,
    )
    slack_s: float = seconds(
        0.0,
        "How much later a job without a deadline may end for greener hours than if it had run alone from its "
        "submission on; 0: only jobs with deadlines wait for greener hours.",
    )
    slack_share: float = parameter(
        1.0, "The same as a share of the job's own length; the smaller of the two holds.", minimum=0.0
    )
    oldest_s: float | None = seconds(
        None,
        "A job without a deadline does not wait for greener hours beyond this age, unless it is longer than that: "
        "a guard on the longest completion times. null: no guard.",
    )
    width_by_hour: bool | None = parameter(
        None,
        "Whether a job that has time to spare is planned with its hours and sizes together: wider in the greenest "
        "hours, narrower or not at all in others. false: it gets one size first, and then hours for that. null: "
        "together while the cluster has room for the widest gangs of all jobs at once.",
    )
    ahead_s: float = seconds(
        172_800.0,
        "How far ahead hours are compared; a forecast that ends before goes on with its last day.",
        minimum=86_400.0,
        maximum=345_600.0,
    )
    length_quantile: float | None = parameter(
        None,
        "Which quantile of a predicted length counts, where its spread is known: 0.9 takes jobs to need what nine "
        "in ten of their kind do not exceed, so that fewer end late. null: the prediction itself.",
        minimum=0.05,
        maximum=0.95,
    )
    intensity_quantile: float = parameter(
        0.5,
        "Which quantile of the intensity ahead counts, where forecasts come with theirs: above 0.5 jobs wait for "
        "greener hours only where these are the surer. 0.5: the forecast's middle.",
        minimum=0.05,
        maximum=0.95,
    )
    tonne_price: float | None = parameter(
        None,
        "What a tonne of CO2 counts for beside the price of electricity, in the currency of the installation's "
        "prices: money and grams then decide together. 0: money alone. null: carbon alone.",
        minimum=0.0,
        maximum=1e9,
    )
    order: Literal["shortest", "submitted"] = parameter(
        "shortest",
        "Who goes first, after users' priorities: late jobs and then those of the least GPU hours left, or those "
        "submitted first.",
    )
    limits: bool = parameter(True, "Whether power limits are set.")
    profile_window_s: float = seconds(
        5.0, "How long an unknown kind of job is measured at each power limit.", minimum=0.1, maximum=3600.0
    )
    restart_s: float = seconds(120.0, "A running job is resized only where that is worth this much of its work.")
    stay_share: float = parameter(
        0.03,
        "A running job stops for greener hours only where the intensity now, less this share, is still too high.",
        minimum=0.0,
        maximum=0.5,
    )
    host_w: float | None = parameter(
        None,
        "Draw of the host that goes with a busy GPU. null: as measured, or else a sixth of the board's peak.",
        unit="W",
        minimum=0.0,
        maximum=10_000.0,
    )
    sleep_after_s: float | None = seconds(60.0, "Nodes that nobody uses are powered down after this long; null: never.")

    move: bool = parameter(
        True, "Whether running jobs move to free GPUs of zones in which they emit less, where that pays."
    )
    placement: Literal["cluster", "heavy-edge", "refined"] = parameter(
        "refined",
        "How gangs sit whose stages and bytes are known: by Heavy-Edge, refined until no exchange shortens their "
        "iterations, or as the cluster places all others.",
    )
    least_speed_share: float = share(
        0.5,
        "Such a gang does not start where it would run at less than this share of its best speed, until it has "
        "waited as long as that would delay it. 0: it takes what there is.",
    )

    def __post_init__(self) -> None:
        check_parameters(self)

    @property
    def lost_times(self) -> float:
        """How many times an hour counts that is lost relative to the size the user asked for."""
        return LOST_TIMES if self.hour_wh is None else 1.0
