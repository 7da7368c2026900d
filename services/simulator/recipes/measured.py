"""The measured models as job profiles: speed from Sia's tables, power from Zeus's and our own.

``lab/recipes/measured.py`` makes them from the sources' tables, says which model stands for which and why, and writes
``measured.npz``, which is read here. It has no board: every power is a share of a board's dynamic range, mapped to that
of the simulated board, ``idle + share * (peak - idle)``, by the idle draws and limits of ``services.core.domain.gpus``.

========================= ======================================== ====================================================
array                     shape                                    what
========================= ======================================== ====================================================
``speed``                 (kinds, tags, 2, sizes)                  on one node and over several; 1: one reference GPU
``power``                 (kinds, tags, 2, sizes)                  mean draw of each GPU, share of the range
``tuned_speed``, ``_power`` (kinds, tags, stages, 2, sizes)        the same with the batch tuned, by stage
``tuned_batch``           (kinds, tags, stages, 2, sizes)          total batch, samples
``batch_range``           (kinds, 2)                               smallest and largest total batch
``limit``                 (curves, 3, limits)                      power limit, share; speed; power, share; NaN: none
``curve``                 (kinds, tags, 2)                         index of ``limit``; of a P100 the second; -1: none
``tuned_curve``           (kinds, tags, stages, 2)                 the same with the batch tuned
``slice_speed``           (kinds, 8)                               by sevenths, relative to a whole GPU; NaN: none
``median_power``          ()                                       median over kinds, one GPU on its board, share
========================= ======================================== ====================================================

**Host.** A node draws ``HOST_IDLE_W_PER_GPU`` for each of its GPUs, busy or not, and as much again for each busy one:
60 W idle and 120 W at work on a node of two. The paper gives no watts; its 28 kW peak on 64 boards of 350 W leaves at
most 175 W per node. SPECpower, as Cloud Carbon Footprint interprets it (Skylake, 0.64 to 4.2 W per thread, 0.39 W per
GB), gives the paper's 20 cores and 64 GB 51 W idle and 193 W at full load, 122 W at half. A job that holds n of a
node's GPUs is charged n shares of the node's static draw, as the agents' meter splits it.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.gpus import GPU_MODELS
from services.simulator import bundles
from services.simulator.raw import MOST_GPUS
from services.simulator.workload import ANY_MODEL, Behaviour, JobProfile

HOST_IDLE_W_PER_GPU = 30.0
HOST_W_PER_GPU = 2 * HOST_IDLE_W_PER_GPU
SIZES: Ints = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24], dtype=np.int64)
REFERENCE_GPU = "RTX3090"
Power = TypeVar("Power", float, Floats)
TAGS = ("rtx", "aws", "dgx-ext")  #: Of Sia's tables
_TAG_OF = {"T4": "aws", "A100": "dgx-ext", "H100": "dgx-ext", "H200": "dgx-ext"}
BATCHES = {
    "shufflenet": (64, 257, 1024),
    "bert": (4, 8, 12),
    "deepspeech2": (10, 20, 40),
    "resnet50": (57, 115, 200),
    "gpt2": (4, 8, 12),
}
"""By model the samples per GPU: small, medium and large among those measured."""
KINDS = tuple((model, batch) for model, batches in BATCHES.items() for batch in batches)
FILE = Path(bundles.__file__).with_name("measured.npz")


@cache
def _table() -> dict[str, np.ndarray[Any, Any]]:
    with np.load(FILE) as stored:
        return dict(stored)


def speed_tag(gpu_model: str) -> str:
    """Return the tag of Sia's tables whose speeds stand for a board: ``rtx`` for all but four chips."""
    return _TAG_OF.get(GPU_MODELS[gpu_model].chip, "rtx")


def power_w(share: Power, gpu_model: str) -> Power:
    """Return what a board draws at a share of its dynamic range, or at each of several shares, watts."""
    board = GPU_MODELS[gpu_model]
    return board.idle_w + share * (board.peak_w - board.idle_w)


@cache
def tuning_profile(model: str, batch: int) -> JobProfile:
    """Return a measured model at one batch per GPU, on every board we know; it can tune its batch."""
    kind, table = KINDS.index((model, batch)), _table()
    true = {name: _behaviour("", (kind,), name) for name in GPU_MODELS}
    true[ANY_MODEL] = true[REFERENCE_GPU]
    smallest, largest = table["batch_range"][kind].tolist()
    on_slices: list[float] = table["slice_speed"][kind].tolist()
    return JobProfile(
        f"{model}, batch {batch}",
        true,
        host_power_w=HOST_W_PER_GPU,
        adaptive=partial(_adaptive, kind),
        batch_range=(smallest, largest),
        slice_speeds={sevenths: speed for sevenths, speed in enumerate(on_slices) if speed > 0},
    )


@cache
def _adaptive(kind: int, gpu_model: str) -> tuple[Behaviour, ...]:
    """Return how a model runs on a board with its batch tuned, by stage; on an unknown one as on the reference's."""
    board = gpu_model if gpu_model in GPU_MODELS else REFERENCE_GPU
    stages = _table()["tuned_batch"].shape[2]
    return tuple(_behaviour("tuned_", (kind, stage), board) for stage in range(stages))


def _behaviour(prefix: str, of: tuple[int, ...], board: str) -> Behaviour:
    """Return what is stored of a kind, or of a kind and a stage, on a board."""
    table, at = _table(), (of[0], TAGS.index(speed_tag(board)), *of[1:])
    speed, spread_speed = table[f"{prefix}speed"][at]
    drawn_w, spread_w = power_w(table[f"{prefix}power"][at], board)
    curve = int(table[f"{prefix}curve"][(*at, int(GPU_MODELS[board].chip == "P100"))])
    controls = {} if curve < 0 else {ControlKind.POWER_LIMIT: _limits(table["limit"][curve], board)}
    batches = table["tuned_batch"][at] if prefix else None
    return Behaviour(SIZES, speed, drawn_w, spread_speed, spread_w, controls, batches=batches)


def _limits(stored: Floats, board: str) -> ControlCurve:
    limits, speed, power = stored[:, ~np.isnan(stored[0])]
    return ControlCurve(np.round(power_w(limits, board)), speed, power_w(power, board))


def flat_profile(name: str, share: float) -> JobProfile:
    """Return a job whose speed grows linearly with its gang and that draws a fixed share of the dynamic range."""
    true = {board: lossless(power_w(share, board)) for board in GPU_MODELS}
    true[ANY_MODEL] = true[REFERENCE_GPU]
    return JobProfile(name, true, host_power_w=HOST_W_PER_GPU)


def lossless(gpu_power_w: float) -> Behaviour:
    """Return a job that is n times as fast on n GPUs, for any n, each drawing this power."""
    return Behaviour(np.array([1, MOST_GPUS]), np.array([1.0, MOST_GPUS]), np.full(2, gpu_power_w))


def median_fraction() -> float:
    """Return the median share of the dynamic range over the measured models and batches."""
    return float(_table()["median_power"])
