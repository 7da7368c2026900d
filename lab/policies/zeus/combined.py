"""Zeus with the policies it is compared with: they decide what runs, Zeus at which power limit."""

from __future__ import annotations

from dataclasses import dataclass

from lab.policies.baselines.gandiva import Gandiva, GandivaConfig, GandivaMemory, TurnsConfig
from lab.policies.zeus.wrapper import Zeus, ZeusConfig
from services.core.policies.baselines.las import Las, LasConfig, LasMemory


@dataclass(frozen=True)
class ZeusLasConfig(LasConfig, ZeusConfig):
    """Parameters of both."""


@dataclass(frozen=True)
class GandivaZeusConfig(TurnsConfig, ZeusConfig):
    """Parameters of both; two jobs on one GPU would have no one best limit, so that none are packed."""


def zeus_las(config: ZeusLasConfig) -> Zeus[LasMemory]:
    """Return LAS under Zeus."""
    return Zeus("zeus+las", Las(config), config)


def gandiva_zeus(config: GandivaZeusConfig) -> Zeus[GandivaMemory]:
    """Return Gandiva under Zeus."""
    turns = GandivaConfig(quantum_s=config.quantum_s, migrate=config.migrate, gang=config.gang, packing=False)
    return Zeus("gandiva+zeus", Gandiva(turns), config)
