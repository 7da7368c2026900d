"""Every policy by name, and how an operator's choice becomes a policy.

A policy of the product is one entry of ``POLICIES``. Those of other packages, including the lab's, are added when a
process starts (``services.kit.policies``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cache
from typing import Any

from services.core.cycle.policy import Policy
from services.core.domain.errors import PolicyConfigError
from services.core.policies.asrpt.policy import Asrpt, AsrptConfig
from services.core.policies.baselines.fifo import Fifo, FifoConfig
from services.core.policies.baselines.las import Las, LasConfig
from services.core.policies.fair import FairConfig, fair
from services.core.policies.green.config import GreenConfig
from services.core.policies.green.mlfq import Green
from services.core.policies.joint.config import JointConfig
from services.core.policies.joint.policy import Joint
from services.core.policies.parameters import build_config, describe_parameters
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.policy import Powerflow


@dataclass(frozen=True)
class PolicyEntry:
    """A policy that an operator may choose."""

    summary: str  #: One sentence for a list of policies
    paper: str  #: Where it comes from
    config: type  #: The frozen dataclass of its parameters
    build: Callable[[Any], Policy[Any]]  #: Makes the policy from a ``config``
    elastic: bool = False  #: Whether it chooses the sizes of gangs; otherwise jobs run at one size
    preempts: bool = True  #: Whether it may stop running jobs
    resizes: bool = False
    """Whether active rounds give running gangs the sizes that it would choose anew. If not, orders of the grid narrow
    none, because it would stay narrow."""
    replans: bool = False
    """Whether it is asked at every change, even if no job waits, because it has controls to set or nodes to power
    down."""
    keeps_queue: bool = False  #: Whether it keeps its own queue of waiting jobs
    tunes_batch: bool = False  #: Whether it assumes that jobs tune their batch size to the gang they get
    sets_controls: bool = False  #: Whether it may set power limits or clocks; if not, bounds rely on that
    powers_nodes: bool = False  #: Whether it may power nodes down; if not, bounds rely on that
    orders: bool = True
    """Whether jobs wait in one order, in which the first that fits starts when GPUs become free; False if GPUs are
    shared out anew at every round, so that no job is ahead of another."""


POLICIES: dict[str, PolicyEntry] = {
    "a-srpt": PolicyEntry(
        summary="Jobs start in the order in which one machine as fast as the whole cluster would finish them, running "
        "the shortest remaining job first; a gang that a bad placement would slow down waits a while for a good one.",
        paper="Luo et al., Prediction-Assisted Online Distributed Deep Learning Workload Scheduling in GPU Clusters "
        "(A-SRPT)",
        config=AsrptConfig,
        build=Asrpt,
        preempts=False,
        keeps_queue=True,
    ),
    "fifo": PolicyEntry(
        summary="Jobs start in order of submission and run to their end.",
        paper="",
        config=FifoConfig,
        build=Fifo,
        preempts=False,
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
        resizes=True,
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
        resizes=True,
    ),
    "powerflow": PolicyEntry(
        summary="GPUs go to the jobs that finish an hour sooner for the least energy, within a power limit for the "
        "cluster; then the GPUs' own power limits or clocks rise as far as it allows.",
        paper="Gu et al., Energy-Efficient GPU Clusters Scheduling for Deep Learning (PowerFlow)",
        config=PowerflowConfig,
        build=Powerflow,
        elastic=True,
        resizes=True,
        orders=False,
        replans=True,
        sets_controls=True,
        powers_nodes=True,
    ),
}
"""By name, in alphabetical order."""

FAIR = "fair+"  #: Before a policy's name: the same policy, with its GPUs shared between tenants

ALIASES = {"las+zeus": "zeus+las", "zeus+gandiva": "gandiva+zeus"}  #: Other names that operators may write

LAB = frozenset(
    {
        *("afs", "carbon-scaler", "ecovisor", "gaia", "gandiva", "gandiva+zeus", "pollux", "sjf", "spjf", "spwf"),
        *("srtf", "wait-awhile", "wcs-duration", "wcs-subtime", "wcs-workload", "zeus+las"),
    }
)
"""Policies of the package wattshift-lab (``lab/policies``): their names only serve the message where it is missing."""


def add_policy(name: str, entry: PolicyEntry) -> None:
    """Add a policy from another package; adding the same entry again changes nothing.

    Raises:
        PolicyConfigError: the name is taken, the policy's own name differs, or its parameters are not valid.
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
    """Return a policy's registry name, given that name or an alias."""
    if name.startswith(FAIR):
        return FAIR + policy_name(name.removeprefix(FAIR))
    return ALIASES.get(name, name)


def entry_of(name: str) -> PolicyEntry | None:
    """Return a policy's entry by any of its names; None if there is none.

    ``fair+`` may precede any name of ``POLICIES``, once.
    """
    name = policy_name(name)
    if name in POLICIES:
        return POLICIES[name]
    wrapped = POLICIES.get(name.removeprefix(FAIR))
    return None if wrapped is None else _fair_entry(name, wrapped)


def policy_entry(name: str) -> PolicyEntry:
    """Return a policy's entry by any of its names; ``PolicyConfigError`` with an empty pointer if there is none."""
    entry = entry_of(name)
    if entry is None:
        raise PolicyConfigError(unknown_policy(name))
    return entry


def unknown_policy(name: str) -> str:
    """Return why there is no policy of this name, and what to do, for messages."""
    if policy_name(name).removeprefix(FAIR) in LAB:
        return (
            f"the policy {name!r} is in the package wattshift-lab, which is not installed here; "
            "in a checkout of this release: pip install ./lab"
        )
    return f"unknown policy {name!r}; known: {known_policies()}"


@cache
def _fair_entry(name: str, wrapped: PolicyEntry) -> PolicyEntry:
    """Return the entry of a policy whose GPUs are shared between tenants.

    The policy is asked at every change, so that usage is counted exactly, unless the policy keeps its own queue and its
    own rounds.
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
    return f"{', '.join(POLICIES)}; any of them with {FAIR} before it"
