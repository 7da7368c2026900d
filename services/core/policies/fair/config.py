"""The parameters of ``fair+``."""

from dataclasses import dataclass

from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class FairConfig:
    """The wrapper's own parameters, next to those of the wrapped policy."""

    share_half_life_s: float = parameter(
        604_800.0,
        "After this long, GPU time that a tenant has used counts half against it. Default: a week, Slurm's "
        "PriorityDecayHalfLife.",
        unit="s",
        minimum=60.0,
        maximum=3.2e8,
    )
    share_turn_s: float = parameter(
        1_800.0,
        "For how long a running job keeps its GPUs from a tenant that has used as much as its own: how often two "
        "tenants take turns on GPUs that they cannot divide. Default: ours.",
        unit="s",
        minimum=0.0,
        maximum=3.2e8,
    )

    def __post_init__(self) -> None:
        check_parameters(self)
