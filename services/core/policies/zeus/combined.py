"""Zeus with the policies it is compared with: they decide what runs, Zeus at which power limit."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.policies.baselines.gandiva import Gandiva, GandivaConfig, GandivaMemory
from services.core.policies.baselines.las import Las, LasConfig, LasMemory
from services.core.policies.zeus.wrapper import Zeus, ZeusConfig


@dataclass(frozen=True)
class ZeusLasConfig(LasConfig, ZeusConfig):
    """Parameters of both."""


@dataclass(frozen=True)
class GandivaZeusConfig(GandivaConfig, ZeusConfig):
    """Parameters of both."""


def zeus_las(config: ZeusLasConfig) -> Zeus[LasMemory]:
    """Return LAS under Zeus."""
    return Zeus("zeus+las", Las(config), config)


def gandiva_zeus(config: GandivaZeusConfig) -> Zeus[GandivaMemory]:
    """Return Gandiva under Zeus."""
    return Zeus("gandiva+zeus", Gandiva(config), config)
