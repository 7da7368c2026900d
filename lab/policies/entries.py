"""The policies of the lab, each an entry that ``pyproject.toml`` beside names in the group ``wattshift.policies``."""

from __future__ import annotations

from lab.policies.baselines.afs import Afs, AfsConfig
from lab.policies.baselines.gandiva import Gandiva, GandivaConfig
from lab.policies.baselines.predicted_order import PredictedOrderConfig, in_order
from lab.policies.baselines.shortest import ShortestConfig, Sjf, Srtf
from lab.policies.carbon.carbon_scaler import CarbonScaler, CarbonScalerConfig
from lab.policies.carbon.ecovisor import Ecovisor, EcovisorConfig
from lab.policies.carbon.gaia import Gaia, GaiaConfig
from lab.policies.carbon.wait_awhile import WaitAwhile, WaitAwhileConfig
from lab.policies.pollux.config import PolluxConfig
from lab.policies.pollux.policy import Pollux
from lab.policies.zeus.combined import GandivaZeusConfig, ZeusLasConfig, gandiva_zeus, zeus_las
from services.core.policies.registry import PolicyEntry

PREDICTION = "Luo et al., Prediction-Assisted Online Distributed Deep Learning Workload Scheduling in GPU Clusters"

AFS = PolicyEntry(
    summary="Each GPU goes to the job where it shortens the mean completion time most.",
    paper="Hwang et al., Elastic Resource Sharing for Distributed Deep Learning, NSDI'21",
    config=AfsConfig,
    build=Afs,
    elastic=True,
    orders=False,
)

CARBON_SCALER = PolicyEntry(
    summary="Each job scales with the grid: of all steps of its gang in all hours before its deadline it takes "
    "those of the most work per carbon.",
    paper="Hanafy et al., CarbonScaler: Leveraging Cloud Workload Elasticity for Optimizing Carbon-Efficiency, "
    "SIGMETRICS'24",
    config=CarbonScalerConfig,
    build=CarbonScaler,
    elastic=True,
    tunes_batch=True,
)

ECOVISOR = PolicyEntry(
    summary="Jobs start in order of submission, and only in the greenest tenth of the hours.",
    paper="Souza et al., Ecovisor: A Virtual Energy System for Carbon-Efficient Applications, ASPLOS'23",
    config=EcovisorConfig,
    build=Ecovisor,
    preempts=False,
)

GAIA = PolicyEntry(
    summary="Each job starts when that saves the most carbon per second of completion time (Carbon-Time).",
    paper="Hanafy et al., Going Green for Less Green: Optimizing the Cost of Reducing Cloud Carbon Emissions, "
    "ASPLOS'24",
    config=GaiaConfig,
    build=Gaia,
    preempts=False,
)

GANDIVA = PolicyEntry(
    summary="Jobs take turns on the GPUs, one quantum each; two share one where others wait and they do more so; "
    "gangs that span nodes are moved together.",
    paper="Xiao et al., Gandiva: Introspective Cluster Scheduling for Deep Learning, OSDI'18",
    config=GandivaConfig,
    build=Gandiva,
)

GANDIVA_ZEUS = PolicyEntry(
    summary="Jobs take turns, each at the power limit that costs least in energy and time together.",
    paper="Gandiva, OSDI'18, with You et al., Zeus: Understanding and Optimizing GPU Energy Consumption of DNN "
    "Training, NSDI'23",
    config=GandivaZeusConfig,
    build=gandiva_zeus,
    sets_controls=True,
)

POLLUX = PolicyEntry(
    summary="GPUs go to the jobs they speed up most against a fair share; jobs tune their batch size to them.",
    paper="Qiao et al., Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning, OSDI'21",
    config=PolluxConfig,
    build=Pollux,
    elastic=True,
    orders=False,
    tunes_batch=True,
)

SJF = PolicyEntry(
    summary="The job that needs the least time starts first; a bound if lengths are known exactly.",
    paper="",
    config=ShortestConfig,
    build=Sjf,
    preempts=False,
)

SPJF = PolicyEntry(
    summary="The job predicted to be shortest starts first, and no other passes it.",
    paper=f"{PREDICTION}, a baseline",
    config=PredictedOrderConfig,
    build=in_order("spjf", "duration", backfill=False),
    preempts=False,
)

SPWF = PolicyEntry(
    summary="The job predicted to take the fewest GPU hours starts first, and no other passes it.",
    paper=f"{PREDICTION}, a baseline",
    config=PredictedOrderConfig,
    build=in_order("spwf", "workload", backfill=False),
    preempts=False,
)

SRTF = PolicyEntry(
    summary="The job that will finish first runs; a bound if lengths are known exactly.",
    paper="",
    config=ShortestConfig,
    build=Srtf,
)

WAIT_AWHILE = PolicyEntry(
    summary="Each job runs in the greenest hours of its window, with pauses.",
    paper="Wiesner et al., Let's Wait Awhile: How Temporal Workload Shifting Can Reduce Carbon Emissions in the "
    "Cloud, Middleware'21",
    config=WaitAwhileConfig,
    build=WaitAwhile,
)

WCS_DURATION = PolicyEntry(
    summary="Jobs that fit start, the one predicted to be shortest first.",
    paper=f"{PREDICTION}, a baseline",
    config=PredictedOrderConfig,
    build=in_order("wcs-duration", "duration", backfill=True),
    preempts=False,
)

WCS_SUBTIME = PolicyEntry(
    summary="Jobs that fit start, in order of submission.",
    paper=f"{PREDICTION}, a baseline",
    config=PredictedOrderConfig,
    build=in_order("wcs-subtime", "submission", backfill=True),
    preempts=False,
)

WCS_WORKLOAD = PolicyEntry(
    summary="Jobs that fit start, the one predicted to take the fewest GPU hours first.",
    paper=f"{PREDICTION}, a baseline",
    config=PredictedOrderConfig,
    build=in_order("wcs-workload", "workload", backfill=True),
    preempts=False,
)

ZEUS_LAS = PolicyEntry(
    summary="LAS decides what runs, each job at the power limit that costs least in energy and time together.",
    paper="You et al., Zeus: Understanding and Optimizing GPU Energy Consumption of DNN Training, NSDI'23, with "
    "Tiresias, NSDI'19",
    config=ZeusLasConfig,
    build=zeus_las,
    sets_controls=True,
)

ENTRIES = {
    "afs": AFS,
    "carbon-scaler": CARBON_SCALER,
    "ecovisor": ECOVISOR,
    "gaia": GAIA,
    "gandiva": GANDIVA,
    "gandiva+zeus": GANDIVA_ZEUS,
    "pollux": POLLUX,
    "sjf": SJF,
    "spjf": SPJF,
    "spwf": SPWF,
    "srtf": SRTF,
    "wait-awhile": WAIT_AWHILE,
    "wcs-duration": WCS_DURATION,
    "wcs-subtime": WCS_SUBTIME,
    "wcs-workload": WCS_WORKLOAD,
    "zeus+las": ZEUS_LAS,
}
"""By name, in alphabetical order."""
