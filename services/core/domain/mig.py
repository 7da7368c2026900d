"""How a GPU is cut into MIG slices: which slices fit on it together, where, and how they are numbered.

A GPU has seven sevenths of compute and eight memory slots. A slice of a given size can begin only at certain slots
(NVIDIA, "Multi-Instance GPU User Guide", the placements that ``nvidia-smi mig -lgipp`` lists for the A100, H100 and
H200).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from services.core.domain.errors import DomainError
from services.core.domain.gpus import SLICE_SEVENTHS, GpuModel, mig_memory_gib

MEMORY_SLOTS = 8  #: Memory slots of a GPU

WHOLE = SLICE_SEVENTHS[-1]  #: Sevenths of a whole GPU, and of the slice that has all of its compute

_WIDTHS: Mapping[int, int] = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
_STARTS: Mapping[int, tuple[int, ...]] = {1: tuple(range(7)), 2: (0, 2, 4), 3: (0, 4), 4: (0,), 7: (0,)}

MAX_SLICES = 7  #: The most slices of one GPU

FIRST_SLICE_INDEX = 1_024  #: Units below it are whole GPUs, by the driver's order; from it on they are slices


class SlicePlace(NamedTuple):
    """A slice of a GPU: its size in sevenths and its first memory slot."""

    sevenths: int
    start: int


def slice_index(parent: int, start: int) -> int:
    """Return the unit number of the slice of GPU ``parent`` that begins at memory slot ``start``."""
    return FIRST_SLICE_INDEX + MEMORY_SLOTS * parent + start


def parent_of(index: int) -> int | None:
    """Return the GPU that a unit is a slice of; None if it is a whole GPU."""
    return (index - FIRST_SLICE_INDEX) // MEMORY_SLOTS if index >= FIRST_SLICE_INDEX else None


def gpu_of(index: int) -> int:
    """Return the GPU that a unit is, or is a slice of."""
    return index if (parent := parent_of(index)) is None else parent


def is_gpu(index: int) -> bool:
    """Whether a unit is a GPU rather than a slice of one; a GPU's draw includes that of its slices."""
    return index < FIRST_SLICE_INDEX


def slice_name(sevenths: int) -> str:
    """Return the name of a slice of that size, such as ``2g``."""
    return f"{sevenths}g"


def profile_name(board: GpuModel, sevenths: int) -> str:
    """Return the driver's name of a slice, such as ``2g.10gb``; ``DomainError`` if the board has none of that size."""
    memory_gib = mig_memory_gib(board)
    if memory_gib is None or sevenths not in SLICE_SEVENTHS:
        raise DomainError(f"{board.name} has no slice of {sevenths} sevenths")
    return f"{slice_name(sevenths)}.{memory_gib[SLICE_SEVENTHS.index(sevenths)]:g}gb"


def sevenths_of(name: str) -> int:
    """Return the size in sevenths of a slice such as ``2g``; ``DomainError`` if there is no such slice."""
    names = {slice_name(size): size for size in SLICE_SEVENTHS}
    if name not in names:
        raise DomainError(f"there is no slice {name!r}; slices are {', '.join(names)}")
    return names[name]


def placed(sizes: Sequence[int]) -> tuple[SlicePlace, ...]:
    """Return where slices of these sizes, in sevenths and any order, go on one GPU, ordered by place.

    Large slices come first in the placement; the same sizes always get the same one.

    Raises:
        DomainError: a size is not a slice's, or the sizes do not fit on one GPU together.
    """
    if unknown := sorted(set(sizes) - set(SLICE_SEVENTHS)):
        names = ", ".join(map(slice_name, SLICE_SEVENTHS))
        raise DomainError(f"there is no slice of {unknown[0]} sevenths; slices are {names}")
    found = _place(tuple(sorted(sizes, reverse=True))) if sum(sizes) <= WHOLE else None
    if found is None:
        names = ", ".join(map(slice_name, sizes))
        raise DomainError(f"slices of {names} do not fit on one GPU together")
    return found


@lru_cache(maxsize=1_024)
def _place(sizes: tuple[int, ...], taken: int = 0) -> tuple[SlicePlace, ...] | None:
    """Return places for sizes, largest first, that avoid the slots in the mask ``taken``; None if there are none."""
    if not sizes:
        return ()
    size = sizes[0]
    for start in _STARTS[size]:
        slots = ((1 << _WIDTHS[size]) - 1) << start
        if not taken & slots and (rest := _place(sizes[1:], taken | slots)) is not None:
            return tuple(sorted((SlicePlace(size, start), *rest), key=lambda place: place.start))
    return None


def fits(places: Sequence[SlicePlace]) -> bool:
    """Return whether slices may begin where they do, without overlapping."""
    taken = 0
    for sevenths, start in places:
        if start not in _STARTS.get(sevenths, ()):
            return False
        slots = ((1 << _WIDTHS[sevenths]) - 1) << start
        if taken & slots:
            return False
        taken |= slots
    return True
