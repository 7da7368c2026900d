"""Every placer by name: what an operator may pick."""

from __future__ import annotations

from services.core.cycle.buddy import buddy
from services.core.cycle.placing import Placer, consolidated

PLACERS: dict[str, Placer] = {"consolidated": consolidated, "buddy": buddy}
"""``consolidated`` fills the tightest node and spans as few as it can; ``buddy`` keeps to aligned blocks."""
