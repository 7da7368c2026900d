"""GPU models: the one table of boards that simulated devices, simulations and priors read.

A row is a board, not a chip: the PCIe and SXM boards of one chip have different limits and clocks. A real device's own
limits, clocks and memory come from its driver and are never looked up here.

========================== ===========================================================================================
figure                     source
========================== ===========================================================================================
``peak_w``, ``memory_gib`` NVIDIA's data sheet of the board: its power limit, not the most that was ever measured
``lowest_limit_w``         the lowest limit its driver accepts; V100 PCIe and P100: the lowest in Zeus' tables
``highest_clock_mhz``      the boost clock of the data sheet; P100, RTX 3090, RTX A6000: the highest clock of the driver
``lowest_clock_mhz``       the lowest clock to which the driver locks it
``idle_w``                 by ``idle_source``. ``measured``: read from an idle board. ``bound``: the lowest draw in
                           a table of measurements, which the idle draw does not exceed. ``typical``: what
                           ``nvidia-smi`` usually shows for an idle board; not measured here
========================== ===========================================================================================

Measured or bounded idle draws:

- H200, 83.8 W: measured for this project at the idle clock of 345 MHz (the first row of its training table). The same
  board drew 133 W just after a load, at its working clocks.
- V100 PCIe, 36 W: the floor of Zeus' V100 table (``summary_power_v100.csv`` of its NSDI'23 artifact), where the
  recommender NCF at its largest batch draws 34.8 to 37.6 W whatever the limit, with a median of 36.2. Zeus' V100 is the
  250 W board.
- P100 PCIe, 33 W: the lowest draw in Zeus' P100 table (33.3 W).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from services.core.domain.errors import DomainError


class IdleSource(StrEnum):
    """Where an idle draw comes from; see the module."""

    MEASURED = "measured"
    BOUND = "bound"
    TYPICAL = "typical"


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU board.

    Attributes:
        lowest_clock_mhz, highest_clock_mhz: The range of SM clocks that it can be locked to; it runs at the highest
            by default.
    """

    name: str  #: The one name under which nodes, jobs and results know it
    chip: str  #: What it shares with other boards of its kind, such as ``A100``
    idle_w: float  #: Draw while nothing runs on it, watts
    peak_w: float  #: Its power limit, watts
    lowest_limit_w: float  #: The lowest power limit that can be set, watts
    memory_gib: float  #: Device memory
    lowest_clock_mhz: int
    highest_clock_mhz: int
    idle_source: IdleSource = IdleSource.TYPICAL  #: Where ``idle_w`` comes from
    aliases: tuple[str, ...] = ()
    """Other names: the short one, and NVML's name for the board where that differs from ``name``."""


_BOUND, _MEASURED = IdleSource.BOUND, IdleSource.MEASURED
_BOARDS = (
    GpuModel("K80", "K80", 30, 150, 100, 12, 324, 875, aliases=("Tesla K80",)),
    GpuModel("P100-PCIE-16GB", "P100", 33, 250, 125, 16, 544, 1328, _BOUND, ("P100",)),
    GpuModel("V100-SXM2-32GB", "V100", 40, 300, 150, 32, 135, 1530, aliases=("V100", "V100-SXM2")),
    GpuModel("V100-SXM2-16GB", "V100", 40, 300, 150, 16, 135, 1530),
    GpuModel("V100-PCIE-32GB", "V100", 36, 250, 100, 32, 135, 1380, _BOUND, ("V100-PCIE",)),
    GpuModel("V100-PCIE-16GB", "V100", 36, 250, 100, 16, 135, 1380, _BOUND),
    GpuModel("T4", "T4", 10, 70, 60, 16, 300, 1590),
    GpuModel("RTX2080Ti", "RTX2080TI", 20, 250, 100, 11, 300, 1545),
    GpuModel("RTX3090", "RTX3090", 30, 350, 100, 24, 210, 2100),
    GpuModel("RTX4090", "RTX4090", 25, 450, 150, 24, 210, 2520),
    GpuModel("RTX-A6000", "RTXA6000", 22, 300, 100, 48, 210, 2100, aliases=("A6000",)),
    GpuModel("A10", "A10", 20, 150, 100, 24, 210, 1695),
    GpuModel("L4", "L4", 16, 72, 40, 24, 210, 2040),
    GpuModel("A100-SXM4-40GB", "A100", 55, 400, 100, 40, 210, 1410, aliases=("A100", "A100-SXM4")),
    GpuModel("A100-SXM4-80GB", "A100", 60, 400, 100, 80, 210, 1410, aliases=("A100-80GB",)),
    GpuModel("A100-PCIE-40GB", "A100", 40, 250, 150, 40, 210, 1410, aliases=("A100-PCIE",)),
    GpuModel("A100-PCIE-80GB", "A100", 45, 300, 150, 80, 210, 1410, aliases=("A100 80GB PCIe",)),
    GpuModel("H100-SXM5-80GB", "H100", 70, 700, 200, 80, 345, 1980, aliases=("H100", "H100-SXM5", "H100 80GB HBM3")),
    GpuModel("H100-PCIE-80GB", "H100", 50, 350, 200, 80, 210, 1755, aliases=("H100 PCIe",)),
    GpuModel("H200-SXM-141GB", "H200", 83.8, 700, 200, 141, 345, 1980, _MEASURED, ("H200", "H200-SXM")),
)
GPU_MODELS: Mapping[str, GpuModel] = {board.name: board for board in _BOARDS}
"""Every board by its name. The first one of a chip is the one that the chip's short name means."""


def _bare(name: str) -> str:
    return re.sub(r"^(NVIDIA|TESLA|GEFORCE|QUADRO|SIMULATED)+", "", re.sub(r"[^A-Z0-9]", "", name.upper()))


_BY_NAME = {_bare(name): board for board in _BOARDS for name in (board.name, *board.aliases)}


def find_gpu_model(name: str) -> GpuModel | None:
    """Return a board by its name or an alias, ignoring case, separators and the maker's prefix; None if unknown.

    ``simulated`` in front of a name is treated as such a prefix.
    """
    return _BY_NAME.get(_bare(name))


def gpu_model(name: str) -> GpuModel:
    """Return a board by its name or an alias; ``DomainError`` lists the names that are known."""
    found = find_gpu_model(name)
    if found is None:
        raise DomainError(f"unknown GPU model {name!r}; known: {', '.join(GPU_MODELS)}")
    return found


@cache
def likeliest_gpu_model(name: str) -> GpuModel | None:
    """Return the board that a name most likely means: itself, else the usual board of the chip it names; else None.

    For estimates about a board of which only the driver's name is known, such as ``NVIDIA A100-SXM-64GB``.
    """
    bare = _bare(name)
    if (found := _BY_NAME.get(bare)) is not None:
        return found
    chips = [board for board in _BOARDS if re.search(rf"{board.chip}(?!\d)", bare)]
    return max(chips, key=lambda board: len(board.chip), default=None)


SLICE_SEVENTHS = (1, 2, 3, 4, 7)  #: The sizes of slices that a GPU can be cut into: 1g, 2g, 3g, 4g and 7g

_MIG_MEMORY_GIB: Mapping[tuple[str, float], tuple[float, float, float, float, float]] = {
    ("A100", 40): (5, 10, 20, 20, 40),
    ("A100", 80): (10, 20, 40, 40, 80),
    ("H100", 80): (10, 20, 40, 40, 80),
    ("H200", 141): (18, 35, 71, 71, 141),
}
"""Memory of a slice of each size, as NVIDIA's profile names say it (``1g.5gb``)."""


def mig_memory_gib(board: GpuModel) -> tuple[float, float, float, float, float] | None:
    """Return the memory of a MIG slice of each of ``SLICE_SEVENTHS``; None for a board that cannot be cut."""
    return _MIG_MEMORY_GIB.get((board.chip, board.memory_gib))


def can_be_sliced(name: str) -> bool:
    """Return whether GPUs of this model can be cut into MIG slices."""
    board = find_gpu_model(name)
    return board is not None and mig_memory_gib(board) is not None


def slice_memory_gib(board: GpuModel) -> tuple[float, float, float, float, float]:
    """Return the memory of a slice of each of ``SLICE_SEVENTHS``.

    Boards without MIG share memory under MPS; a slice then has its sevenths of it.
    """
    found = mig_memory_gib(board)
    if found is not None:
        return found
    one, two, three, four, seven = (board.memory_gib * size / 7 for size in SLICE_SEVENTHS)
    return one, two, three, four, seven
