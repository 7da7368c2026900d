"""What is assumed of a GPU model before any job has run on it; without NumPy, because a node's agent uses it too.

Limits, clocks and idle draws are those of ``services.core.domain.gpus``, ``f0`` is at 0.6 of the top clock (our
reading: no source prints it), and speed is relative to a V100.
"""

from dataclasses import dataclass

from services.core.domain.gpus import likeliest_gpu_model


@dataclass(frozen=True)
class Board:
    """A GPU model: idle and peak draw (W), top clock and ``f0`` (MHz), and speed relative to a V100."""

    idle_w: float
    peak_w: float
    top_mhz: float
    speed: float

    @property
    def break_mhz(self) -> float:
        """The breaking point ``f0``, MHz."""
        return 0.6 * self.top_mhz


RELATIVE_SPEED = {
    "P100": 0.6,
    "V100": 1.0,
    "T4": 0.4,
    "RTX2080TI": 0.8,
    "RTX3090": 1.1,
    "A10": 1.0,
    "A100": 2.0,
    "H100": 4.0,
    "H200": 4.5,
}
"""By chip. T4 and A100 by Sia's step times, P100 by Zeus', the rest by dense throughput; a V100 is 1."""
ANY_BOARD = Board(50.0, 350.0, 1_600.0, 1.5)


def board_of(gpu_model: str) -> Board:
    """Return a GPU model by any of its names ("NVIDIA A100-SXM4-40GB"); an average board if unknown."""
    known = likeliest_gpu_model(gpu_model)
    if known is None:
        return ANY_BOARD
    speed = RELATIVE_SPEED.get(known.chip, ANY_BOARD.speed)
    return Board(known.idle_w, known.peak_w, float(known.highest_clock_mhz), speed)
