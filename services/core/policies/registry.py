"""Every policy by name, and how an operator's choice becomes a policy.

A policy of ours is one entry of ``POLICIES``. Those of other packages are added as a process starts
(``services.kit.policies``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cache
from typing import Any

from services.core.cycle.policy import Policy
from services.core.domain.errors import PolicyConfigError
from services.core.policies.asrpt.policy import Asrpt, AsrptConfig
from services.core.policies.baselines.afs import Afs, AfsConfig
from services.core.policies.baselines.fifo import Fifo, FifoConfig
from services.core.policies.baselines.gandiva import Gandiva, GandivaConfig
from services.core.policies.baselines.las import Las, LasConfig
from services.core.policies.baselines.predicted_order import PredictedOrderConfig, in_order
from services.core.policies.baselines.shortest import ShortestConfig, Sjf, Srtf
from services.core.policies.carbon.carbon_scaler import CarbonScaler, CarbonScalerConfig
from services.core.policies.carbon.ecovisor import Ecovisor, EcovisorConfig
from services.core.policies.carbon.gaia import Gaia, GaiaConfig
from services.core.policies.carbon.wait_awhile import WaitAwhile, WaitAwhileConfig
from services.core.policies.fair.config import FairConfig
from services.core.policies.fair.wrapper import fair
from services.core.policies.green.config import GreenConfig
from services.core.policies.green.mlfq import Green
from services.core.policies.joint.config import JointConfig
from services.core.policies.joint.policy import Joint
from services.core.policies.parameters import ParameterDescription, build_config, describe_parameters
from services.core.policies.pollux.config import PolluxConfig
from services.core.policies.pollux.policy import Pollux
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.policy import Powerflow
from services.core.policies.zeus.combined import GandivaZeusConfig, ZeusLasConfig, gandiva_zeus, zeus_las


@dataclass(frozen=True)
class PolicyEntry:
    """A policy that an operator may choose.

    Attributes:
        summary: One sentence for a list of policies.
        paper: Where it comes from.
        config: The frozen dataclass of its parameters.
        build: Makes the policy from a ``config``.
        elastic: Whether it chooses the sizes of gangs; the others run jobs at one size.
        preempts: Whether it may stop running jobs.
        replans: Whether it is asked at every change, even if no job waits: it has controls to set or nodes to
            power down.
        waits_by: Columns of the job table in whose order jobs wait in every round, smallest first, after users'
            priorities and before ids; none where the order is another or depends on more.
        keeps_queue: Whether it keeps its own queue of those that wait: a simulation then tells it who is new there,
            rather than who may start.
        tunes_batch: Whether it takes jobs to tune their batch size to the gang they get.
        sets_controls: Whether it may set power limits or clocks; bounds count on it where it does not.
        powers_nodes: Whether it may power nodes down; likewise.
        orders: Whether jobs wait in one order, whose first that fits starts when GPUs come free; False where GPUs are
            shared out anew at every round, so that no job is ahead of another.
    """

    summary: str
    paper: str
    config: type
    build: Callable[[Any], Policy[Any]]
    elastic: bool = False
    preempts: bool = True
    replans: bool = False
    waits_by: tuple[str, ...] = ()
    keeps_queue: bool = False
    tunes_batch: bool = False
    sets_controls: bool = False
    powers_nodes: bool = False
    orders: bool = True


@dataclass(frozen=True)
class PolicyDescription:
    """A policy and its parameters, for people and for forms."""

    name: str
    summary: str
    paper: str
    parameters: tuple[ParameterDescription, ...]


PREDICTION = "Luo et al., Prediction-Assisted Online Distributed Deep Learning Workload Scheduling in GPU Clusters"

POLICIES: dict[str, PolicyEntry] = {
    "a-srpt": PolicyEntry(
        summary="Jobs start in the order in which one machine as fast as the whole cluster would finish them, running "
        "the shortest remaining job first; a gang that a bad placement would slow down waits a while for a good one.",
        paper=f"{PREDICTION} (A-SRPT)",
        config=AsrptConfig,
        build=Asrpt,
        preempts=False,
        keeps_queue=True,
    ),
    "afs": PolicyEntry(
        summary="Each GPU goes to the job where it shortens the mean completion time most.",
        paper="Hwang et al., Elastic Resource Sharing for Distributed Deep Learning, NSDI'21",
        config=AfsConfig,
        build=Afs,
        elastic=True,
        orders=False,
    ),
    "carbon-scaler": PolicyEntry(
        summary="Each job scales with the grid: of all steps of its gang in all hours before its deadline it takes "
        "those of the most work per carbon.",
        paper="Hanafy et al., CarbonScaler: Leveraging Cloud Workload Elasticity for Optimizing Carbon-Efficiency, "
        "SIGMETRICS'24",
        config=CarbonScalerConfig,
        build=CarbonScaler,
        elastic=True,
        tunes_batch=True,
    ),
    "ecovisor": PolicyEntry(
        summary="Jobs start in order of submission, and only in the greenest tenth of the hours.",
        paper="Souza et al., Ecovisor: A Virtual Energy System for Carbon-Efficient Applications, ASPLOS'23",
        config=EcovisorConfig,
        build=Ecovisor,
        preempts=False,
    ),
    "fifo": PolicyEntry(
        summary="Jobs start in order of submission and run to their end.",
        paper="",
        config=FifoConfig,
        build=Fifo,
        preempts=False,
        waits_by=("submitted_s",),
    ),
    "gaia": PolicyEntry(
        summary="Each job starts when that saves the most carbon per second of completion time (Carbon-Time).",
        paper="Hanafy et al., Going Green for Less Green: Optimizing the Cost of Reducing Cloud Carbon Emissions, "
        "ASPLOS'24",
        config=GaiaConfig,
        build=Gaia,
        preempts=False,
    ),
    "gandiva": PolicyEntry(
        summary="Jobs take turns on the GPUs, one quantum each; two share one where others wait and they do more so; "
        "gangs that span nodes are moved together.",
        paper="Xiao et al., Gandiva: Introspective Cluster Scheduling for Deep Learning, OSDI'18",
        config=GandivaConfig,
        build=Gandiva,
    ),
    "gandiva+zeus": PolicyEntry(
        summary="Jobs take turns, each at the power limit that costs least in energy and time together.",
        paper="Gandiva, OSDI'18, with You et al., Zeus: Understanding and Optimizing GPU Energy Consumption of DNN "
        "Training, NSDI'23",
        config=GandivaZeusConfig,
        build=gandiva_zeus,
        sets_controls=True,
    ),
    "green": PolicyEntry(
        summary="Jobs grow as long as they stay energy efficient, on a share of the cluster; of all others those that "
        "have emitted least run first, and high-power jobs in the grid's greener hours.",
        paper="Xu et al., GREEN: Carbon-efficient Resource Scheduling for Machine Learning Clusters, NSDI'25",
        config=GreenConfig,
        build=Green,
        elastic=True,
    ),
    "joint": PolicyEntry(
        summary="Jobs run as wide, as fast and as early as an hour of their completion time is worth, in greener hours "
        "where they have time; unused nodes sleep.",
        paper="",
        config=JointConfig,
        build=Joint,
        elastic=True,
        replans=True,
        tunes_batch=True,
        sets_controls=True,
        powers_nodes=True,
    ),
    "las": PolicyEntry(
        summary="Jobs that have had the least GPU time run first (discretised 2D-LAS).",
        paper="Gu et al., Tiresias: A GPU Cluster Manager for Distributed Deep Learning, NSDI'19",
        config=LasConfig,
        build=Las,
    ),
    "pollux": PolicyEntry(
        summary="GPUs go to the jobs they speed up most against a fair share; jobs tune their batch size to them.",
        paper="Qiao et al., Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning, OSDI'21",
        config=PolluxConfig,
        build=Pollux,
        elastic=True,
        orders=False,
        tunes_batch=True,
    ),
    "powerflow": PolicyEntry(
        summary="GPUs go to the jobs that finish an hour sooner for the least energy, within a power limit for the "
        "cluster; then the GPUs' own power limits or clocks rise as far as it allows.",
        paper="Gu et al., Energy-Efficient GPU Clusters Scheduling for Deep Learning (PowerFlow)",
        config=PowerflowConfig,
        build=Powerflow,
        elastic=True,
        orders=False,
        replans=True,
        sets_controls=True,
        powers_nodes=True,
    ),
    "sjf": PolicyEntry(
        summary="The job that needs the least time starts first; a bound if lengths are known exactly.",
        paper="",
        config=ShortestConfig,
        build=Sjf,
        preempts=False,
        waits_by=("remaining_s", "submitted_s"),
    ),
    "spjf": PolicyEntry(
        summary="The job predicted to be shortest starts first, and no other passes it.",
        paper=f"{PREDICTION}, a baseline",
        config=PredictedOrderConfig,
        build=in_order("spjf", "duration", backfill=False),
        preempts=False,
        waits_by=("remaining_s", "submitted_s"),
    ),
    "spwf": PolicyEntry(
        summary="The job predicted to take the fewest GPU hours starts first, and no other passes it.",
        paper=f"{PREDICTION}, a baseline",
        config=PredictedOrderConfig,
        build=in_order("spwf", "workload", backfill=False),
        preempts=False,
        waits_by=("remaining_s", "submitted_s"),
    ),
    "srtf": PolicyEntry(
        summary="The job that will finish first runs; a bound if lengths are known exactly.",
        paper="",
        config=ShortestConfig,
        build=Srtf,
    ),
    "wait-awhile": PolicyEntry(
        summary="Each job runs in the greenest hours of its window, with pauses.",
        paper="Wiesner et al., Let's Wait Awhile: How Temporal Workload Shifting Can Reduce Carbon Emissions in the "
        "Cloud, Middleware'21",
        config=WaitAwhileConfig,
        build=WaitAwhile,
    ),
    "wcs-duration": PolicyEntry(
        summary="Jobs that fit start, the one predicted to be shortest first.",
        paper=f"{PREDICTION}, a baseline",
        config=PredictedOrderConfig,
        build=in_order("wcs-duration", "duration", backfill=True),
        preempts=False,
        waits_by=("remaining_s", "submitted_s"),
    ),
    "wcs-subtime": PolicyEntry(
        summary="Jobs that fit start, in order of submission.",
        paper=f"{PREDICTION}, a baseline",
        config=PredictedOrderConfig,
        build=in_order("wcs-subtime", "submission", backfill=True),
        preempts=False,
        waits_by=("submitted_s",),
    ),
    "wcs-workload": PolicyEntry(
        summary="Jobs that fit start, the one predicted to take the fewest GPU hours first.",
        paper=f"{PREDICTION}, a baseline",
        config=PredictedOrderConfig,
        build=in_order("wcs-workload", "workload", backfill=True),
        preempts=False,
        waits_by=("remaining_s", "submitted_s"),
    ),
    "zeus+las": PolicyEntry(
        summary="LAS decides what runs, each job at the power limit that costs least in energy and time together.",
        paper="You et al., Zeus: Understanding and Optimizing GPU Energy Consumption of DNN Training, NSDI'23, with "
        "Tiresias, NSDI'19",
        config=ZeusLasConfig,
        build=zeus_las,
        sets_controls=True,
    ),
}
"""By name, in alphabetical order."""

FAIR = "fair+"
"""Before a policy's name: the same policy, with its GPUs shared between tenants."""

ALIASES = {"las+zeus": "zeus+las", "zeus+gandiva": "gandiva+zeus"}
"""Other names that operators may write."""


def add_policy(name: str, entry: PolicyEntry) -> None:
    """Add a policy of another package; adding the same entry again changes nothing.

    Raises:
        PolicyConfigError: The name is taken, the policy's own name is another, or its parameters are not valid.
    """
    if POLICIES.get(name) is entry:
        return
    if name in POLICIES or name in ALIASES or name.startswith(FAIR):
        raise PolicyConfigError(f"there is a policy called {name!r} already")
    describe_parameters(entry.config)
    own_name = entry.build(build_config(entry.config, {})).name
    if own_name != name:
        raise PolicyConfigError(f"the policy calls itself {own_name!r}, not {name!r}")
    known = {**POLICIES, name: entry}
    POLICIES.clear()
    POLICIES.update(sorted(known.items()))


def policy_name(name: str) -> str:
    """Return the name in the registry of a policy, which may be given by another name."""
    if name.startswith(FAIR):
        return FAIR + policy_name(name.removeprefix(FAIR))
    return ALIASES.get(name, name)


def entry_of(name: str) -> PolicyEntry | None:
    """Return a policy's entry by any of its names; None if there is none.

    ``fair+`` goes before any name of ``POLICIES``, once.
    """
    name = policy_name(name)
    if name in POLICIES:
        return POLICIES[name]
    wrapped = POLICIES.get(name.removeprefix(FAIR))
    return None if wrapped is None else _fair_entry(name, wrapped)


def policy_entry(name: str) -> PolicyEntry:
    """Return a policy's entry by any of its names.

    Raises:
        PolicyConfigError: no such policy (empty pointer).
    """
    entry = entry_of(name)
    if entry is None:
        raise PolicyConfigError(f"unknown policy {name!r}; known: {known_policies()}")
    return entry


@cache
def _fair_entry(name: str, wrapped: PolicyEntry) -> PolicyEntry:
    """Return the entry of a policy whose GPUs are shared between tenants.

    Its rounds follow every change, so that usage is counted exactly, unless the policy keeps its own queue and goes by
    its rounds; and no order stands without looking at tenants.
    """
    own = name.removeprefix(FAIR)
    bases = (wrapped.config, FairConfig)
    config = make_dataclass(f"Fair{wrapped.config.__name__}", [], bases=bases, frozen=True)

    def build(given: Any) -> Policy[Any]:
        mine = {each.name: getattr(given, each.name) for each in fields(wrapped.config)}
        return fair(name, wrapped.build(wrapped.config(**mine)), given)

    return replace(
        wrapped,
        summary=f"As {own}, with the GPUs shared between tenants by their weights: who has had less than its share "
        "comes first.",
        config=config,
        build=build,
        replans=wrapped.replans or not wrapped.keeps_queue,
        waits_by=(),
    )


def build_policy(name: str, parameters: Mapping[str, object]) -> Policy[Any]:
    """Return the named policy with the given parameters; the others keep their defaults.

    Raises:
        PolicyConfigError: no such policy (empty pointer), an unknown parameter, or a bad value, with a JSON pointer
            into ``parameters``.
    """
    entry = policy_entry(name)
    return entry.build(build_config(entry.config, parameters))


def known_policies() -> str:
    """Return the names of all policies, for messages."""
    return f"{', '.join(POLICIES)}; any of them with {FAIR} before it"


def describe_policies() -> tuple[PolicyDescription, ...]:
    """Return every policy with its parameters, by name; not those with ``fair+`` before them."""
    return tuple(map(_described, POLICIES, POLICIES.values()))


def describe_policy(name: str) -> PolicyDescription | None:
    """Return one policy with its parameters, None if there is none of that name."""
    entry = entry_of(name)
    return None if entry is None else _described(policy_name(name), entry)


def _described(name: str, entry: PolicyEntry) -> PolicyDescription:
    return PolicyDescription(name, entry.summary, entry.paper, describe_parameters(entry.config))
