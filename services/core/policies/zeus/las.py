"""Zeus with Tiresias: least attained service decides what runs, Zeus at which power limit."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.policies.baselines.las import Las, LasConfig, LasMemory
from services.core.policies.zeus.wrapper import Zeus, ZeusConfig


@dataclass(frozen=True)
class ZeusLasConfig(LasConfig, ZeusConfig):
    """Parameters of both."""


def zeus_las(config: ZeusLasConfig) -> Zeus[LasMemory]:
    """Return LAS under Zeus."""
    return Zeus("zeus+las", Las(config), config)
