"""The energy of a GPU, split among its slices. Without NumPy, because agents are installed without it.

A GPU that is cut has one energy counter. What each slice uses is therefore an estimate, but the parts add up to the
whole.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from services.core.domain.errors import DomainError

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class SliceUse:
    """One slice over an interval."""

    sevenths: int  #: Its size
    in_use: bool  #: Whether work holds it
    activity: float | None = None  #: How busy its own multiprocessors were, 0 to 1; None if not measured


def split_slice_energy(energy_j: float, idle_j: float, slices: Mapping[Key, SliceUse]) -> dict[Key, float]:
    """Return the energy of each slice of a GPU, joules; together they add up to ``energy_j``.

    What the GPU would have drawn idle is split by size over all its slices, so that a slice in use pays the same
    whether or not its neighbours are in use. The rest is split among the slices in use: by measured activity times
    size if all of them are measured and at least one was active, otherwise by size. If none is in use, all of it is
    split by size.

    Args:
        energy_j: Energy of the whole GPU; finite and >= 0.
        idle_j: What it would have drawn idle, counted up to ``energy_j``; 0 if unknown.

    Raises:
        DomainError: an energy or an activity is out of range or not a number, or there is no slice.
    """
    if not (math.isfinite(energy_j) and energy_j >= 0 and math.isfinite(idle_j) and idle_j >= 0):
        raise DomainError("the energy of a GPU is a finite number of joules >= 0")
    if not slices:
        raise DomainError("energy is split among at least one slice")
    for use in slices.values():
        if use.activity is not None and not 0 <= use.activity <= 1:
            raise DomainError("the activity of a slice is a share from 0 to 1")
    sizes = {key: float(use.sevenths) for key, use in slices.items()}
    held = {key: size for key, size in sizes.items() if slices[key].in_use}
    active = {key: size * (slices[key].activity or 0.0) for key, size in held.items()}
    is_measured = all(slices[key].activity is not None for key in held)
    weights = active if is_measured and sum(active.values()) > 0 else held or sizes
    floor_j = min(idle_j, energy_j)
    parts = {key: floor_j * size / sum(sizes.values()) for key, size in sizes.items()}
    for key, weight in weights.items():
        parts[key] += (energy_j - floor_j) * weight / sum(weights.values())
    return parts
