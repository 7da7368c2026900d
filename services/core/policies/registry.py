"""Every policy by name: what an operator may pick, and how a choice becomes a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.core.cycle.policy import Policy
from services.core.domain.errors import PolicyConfigError
from services.core.policies.baselines.fifo import Fifo, FifoConfig
from services.core.policies.baselines.las import Las, LasConfig
from services.core.policies.green.config import GreenConfig
from services.core.policies.green.mlfq import Green
from services.core.policies.parameters import ParameterDescription, build_config, describe_parameters


@dataclass(frozen=True)
class PolicyEntry:
    """A policy an operator may pick.

    Attributes:
        summary: One sentence for a list of policies.
        paper: Where it comes from.
        config: The frozen dataclass of its parameters.
        build: Makes the policy from a ``config``.
    """

    summary: str
    paper: str
    config: type
    build: Callable[[Any], Policy[Any]]


@dataclass(frozen=True)
class PolicyDescription:
    """A policy and its parameters, for people and for forms."""

    name: str
    summary: str
    paper: str
    parameters: tuple[ParameterDescription, ...]


POLICIES: dict[str, PolicyEntry] = {
    "fifo": PolicyEntry(
        summary="Jobs start in order of submission and run to their end.",
        paper="",
        config=FifoConfig,
        build=Fifo,
    ),
    "green": PolicyEntry(
        summary="Jobs grow while their energy efficiency holds; then those that emitted least run first, and "
        "power-hungry ones in the grid's greener hours.",
        paper="Xu et al., GREEN: Carbon-efficient Resource Scheduling for Machine Learning Clusters, NSDI'25",
        config=GreenConfig,
        build=Green,
    ),
    "las": PolicyEntry(
        summary="Jobs that have had the least GPU time run first (discretised 2D-LAS).",
        paper="Gu et al., Tiresias: A GPU Cluster Manager for Distributed Deep Learning, NSDI'19",
        config=LasConfig,
        build=Las,
    ),
}
"""By name, in alphabetical order."""


def build_policy(name: str, parameters: Mapping[str, object]) -> Policy[Any]:
    """Return the named policy with the given parameters; the others keep their defaults.

    Raises:
        PolicyConfigError: no such policy (empty pointer), an unknown parameter, or a bad value, with a JSON pointer
        into
            ``parameters``.
    """
    entry = POLICIES.get(name)
    if entry is None:
        raise PolicyConfigError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return entry.build(build_config(entry.config, parameters))


def describe_policies() -> tuple[PolicyDescription, ...]:
    """Return every policy with its parameters, by name."""
    return tuple(
        PolicyDescription(name, entry.summary, entry.paper, describe_parameters(entry.config))
        for name, entry in POLICIES.items()
    )
