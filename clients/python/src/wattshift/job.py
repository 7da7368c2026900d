"""For training code that runs as a job of Wattshift. It needs only the standard library.

    from wattshift import job

    for step in range(start, steps):
        train(step)
        job.progress(step + 1, total=steps)
        if job.should_checkpoint():
            save(job.checkpoint_dir / "model.pt")
            break

Outside a job everything is harmless: nothing is reported, ``world`` is one process and ``checkpoint_dir`` is None.

A job that was submitted with ``batch={"min": ..., "max": ...}`` reads the batch that was chosen for its gang, and
scales its learning rate by the rule that its user prefers:

    batch = job.batch(256, at_most=64)
    loader = DataLoader(data, batch_size=batch.at_once, ...)
    optimizer = SGD(model.parameters(), lr=0.1 * batch.learning_rate_factor("square_root"))
    ...  # a step is batch.passes times forward and backward

``world`` and ``checkpoint_dir`` are read from the environment each time they are used, as launchers such as torchrun
set some of it only for the processes that they start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

LearningRateRule = Literal["linear", "square_root", "adascale"]

REPORT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class World:
    """This process's place among the processes of its job.

    Attributes:
        rank: Number of this process, from 0 to ``world_size - 1``.
        local_rank: Number of this process on its node.
        world_size: Processes of the whole gang.
        local_world_size: Processes on this node.
        node_rank: Number of this node.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int


@dataclass(frozen=True)
class Batch:
    """The samples of one training step.

    Attributes:
        total: Samples per step of the whole gang.
        base: The total batch that the code's learning rate is for.
        per_rank: Samples per step of this process. Ranks differ by at most one, and together have ``total``.
        at_once: Samples of one pass, forward and backward; the last pass of a step may have fewer.
        passes: How many passes a step accumulates gradients over; the same on all ranks.
    """

    total: int
    base: int
    per_rank: int
    at_once: int
    passes: int

    @property
    def scale(self) -> float:
        """``total / base``."""
        return self.total / self.base

    def gain(self, noise_scale: float) -> float:
        """Return how many steps of the base batch a step of this one is worth, according to the gradient noise scale.

        Raises:
            ValueError: ``noise_scale`` is not positive.
        """
        if not noise_scale > 0:
            raise ValueError(f"noise_scale must be positive, not {noise_scale!r}")
        return self.scale * (noise_scale + self.base) / (noise_scale + self.total)

    def learning_rate_factor(self, rule: LearningRateRule, noise_scale: float | None = None) -> float:
        """Return the factor by which to multiply the learning rate that the code has for its base batch.

        The rule is the user's choice: ``linear`` (usual with SGD), ``square_root`` (usual with Adam), or ``adascale``,
        which needs the gradient noise scale and lies between 1 and linear.

        Raises:
            ValueError: There is no such rule, or AdaScale has no noise scale.

        Source: Goyal et al. 2017; Krizhevsky 2014; Johnson et al., AdaScale SGD, ICML 2020.
        """
        if rule == "linear":
            return self.scale
        if rule == "square_root":
            return self.scale**0.5
        if rule != "adascale":
            raise ValueError(f"unknown rule {rule!r}; known: linear, square_root, adascale")
        if noise_scale is None:
            raise ValueError("adascale needs the noise_scale")
        return self.gain(noise_scale)


def batch(base: int, *, at_most: int | None = None) -> Batch:
    """Return the batch of this run: chosen for its gang where the job permits that, else ``base``.

    It stays the same until the job is stopped and started again. From this call on, ``progress`` reports it.

    Args:
        base: Samples per step of the whole gang that the code's learning rate is for. Where the job permits a range,
            its ``global_batch``, or else the range's smallest, takes its place.
        at_most: Samples that one device can take at once; more are accumulated over several passes.

    Raises:
        ValueError: ``base`` or ``at_most`` is not positive.
    """
    for name, value in (("base", base), ("at_most", at_most)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value!r}")
    base = _number("WATTSHIFT_BASE_BATCH_SIZE", base)
    total = _number("WATTSHIFT_BATCH_SIZE", base)
    world = _world()
    most = -(-total // world.world_size)
    passes = 1 if at_most is None else -(-most // at_most)
    per_rank = total // world.world_size + (world.rank < total % world.world_size)
    _reported.local_batch = total / world.world_size
    return Batch(total, base, per_rank, -(-per_rank // passes), passes)


def noise_scale(small_norm_sq: float, small_batch: float, large_norm_sq: float, large_batch: float) -> float | None:
    """Return the gradient noise scale, in samples, from the squared norms of the gradients of two batches.

    In data-parallel training, take those of one rank before gradients are averaged, and of the gang afterwards. Both
    norms are noisy: average each over many steps before this call.

    Args:
        small_norm_sq: Squared norm of a gradient over ``small_batch`` samples.
        small_batch: Samples.
        large_norm_sq: The same over ``large_batch`` samples.
        large_batch: Samples; more than ``small_batch``.

    Returns:
        The noise scale; None if the norms are too noisy to show one.

    Raises:
        ValueError: ``large_batch`` is not larger than ``small_batch``, or ``small_batch`` is not positive.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, appendix A.1.
    """
    if not 0 < small_batch < large_batch:
        raise ValueError(f"large_batch must be larger than small_batch, not {large_batch!r} and {small_batch!r}")
    signal = (large_batch * large_norm_sq - small_batch * small_norm_sq) / (large_batch - small_batch)
    noise = (small_norm_sq - large_norm_sq) / (1.0 / small_batch - 1.0 / large_batch)
    return noise / signal if signal > 0 and noise > 0 else None


@dataclass
class _Reported:
    """What ``batch`` told the code, and what it told ``saved`` and ``progress``: kept for later reports."""

    local_batch: float | None = None
    progress: dict[str, float | None] = field(default_factory=dict)
    saved_at: float | None = None
    save_s: float | None = None
    saves_when_asked: bool | None = None


_reported = _Reported()

world: World
"""This process's place among the processes of its job."""

checkpoint_dir: Path | None
"""The folder that is kept when the job is stopped and started again; None outside a job."""


def is_inside() -> bool:
    """Return whether this process belongs to a job of Wattshift."""
    return "WATTSHIFT_JOB_ID" in os.environ


def progress(
    done: float, total: float | None = None, local_batch: int | None = None, noise_scale: float | None = None
) -> None:
    """Report how much of the work is done; in a gang, the process of rank 0 reports for all.

    A report that fails is dropped: training goes on. ``done`` is in the unit of the job's ``work``, counts from the
    beginning of the job, not of this run, and is best reported at most once a second.

    Args:
        done: Work done so far; finite and >= 0.
        total: The whole work, if the job was submitted without it.
        local_batch: Samples per GPU and step, which helps to predict how the job scales; by default what ``batch``
            told the code.
        noise_scale: The gradient noise scale, samples, which says how far larger batches pay off.

    Raises:
        ValueError: ``done`` or ``total`` is negative or not finite, or ``local_batch`` or ``noise_scale`` is not
            positive.
    """
    for name, value in (("done", done), ("total", total)):
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, not {value!r}")
    if local_batch is not None and local_batch < 1:
        raise ValueError(f"local_batch must be at least 1, not {local_batch!r}")
    if noise_scale is not None and not 0 < noise_scale < float("inf"):
        raise ValueError(f"noise_scale must be finite and positive, not {noise_scale!r}")
    if _world().rank != 0:
        return
    samples = _reported.local_batch if local_batch is None else local_batch
    _reported.progress = {"done": done, "total": total, "local_batch": samples, "noise_scale": noise_scale}
    _report()


def saved(save_s: float | None = None) -> None:
    """Say that a checkpoint has just been written, from which the job would continue.

    So a job that goes on when it is asked to stop is stopped right after its checkpoints, where that is possible, and
    not before them. In a gang, the process of rank 0 says so for all. It counts once progress is reported, too.

    Args:
        save_s: How long that took, seconds.

    Raises:
        ValueError: ``save_s`` is negative or not finite.
    """
    if save_s is not None and not 0 <= save_s < float("inf"):
        raise ValueError(f"save_s must be finite and not negative, not {save_s!r}")
    if _world().rank == 0:
        _reported.saved_at, _reported.save_s = time.time(), save_s
        _report()


def _report() -> None:
    """Report all that was said last: whoever reads the last line alone misses nothing."""
    kept = _reported.saved_at, _reported.save_s, _reported.saves_when_asked
    fields = {**_reported.progress, **dict(zip(("saved_at", "save_s", "saves_when_asked"), kept, strict=True))}
    line = json.dumps({name: value for name, value in fields.items() if value is not None}) + "\n"
    if file := os.environ.get("WATTSHIFT_PROGRESS_FILE"):
        try:
            with open(file, "a", encoding="utf-8") as reports:
                reports.write(line)
            return
        except OSError:
            pass  # in a container without the folder, the address below still works
    if url := os.environ.get("WATTSHIFT_PROGRESS_URL"):
        try:
            request = urllib.request.Request(url, line.encode(), {"content-type": "application/json"}, method="POST")
            urllib.request.urlopen(request, timeout=REPORT_TIMEOUT_S).close()
        except (OSError, ValueError):
            return


def log_footprint() -> bool:
    """Record what this job has used and emitted so far in the MLflow run and the W&B run that are active, if any.

    The callbacks call it when training ends. It asks the control plane, so the job needs `WATTSHIFT_URL` and
    `WATTSHIFT_API_KEY` (of a read-only key) in its environment, and httpx. Without them, without such a run, outside a
    job and in processes other than that of rank 0 it does nothing; a failure is logged by ``logging``.

    Returns:
        Whether it was recorded.
    """
    if not is_inside() or _world().rank != 0 or not {"mlflow", "wandb"} & sys.modules.keys():
        return False
    try:
        from wattshift.integrations.active import log_to_active_runs
    except ModuleNotFoundError:  # httpx is not installed
        return False
    return log_to_active_runs()


def should_checkpoint(save_s: float | None = None) -> bool:
    """Return whether the job is being stopped: save a checkpoint and end, within the grace period of the job.

    From the first call on, SIGTERM no longer ends this process: it is noticed here. So call this at every step, and
    for the first time before the first step. A handler that was set before is still called.

    Args:
        save_s: How long it takes to finish a step, save a checkpoint and end. Training then continues, even after
            SIGTERM, until no more than that is left of the time until ``stop_at``.
    """
    notice_stop()
    if save_s is None or (killed_at := stop_at()) is None:
        return _stop.asked
    return killed_at - time.time() <= save_s


def stop_at() -> float | None:
    """Return when this job will be killed, UTC seconds; None while that is unknown, and outside a job.

    It is known from the start if the job has a time limit, which is followed by its grace period, and otherwise once it
    is being stopped.
    """
    try:
        return float(Path(os.environ["WATTSHIFT_STOP_AT"]).read_text(encoding="ascii"))
    except (KeyError, OSError, ValueError):
        return None


def notice_stop(*, replace: bool = False) -> None:
    """Start noticing SIGTERM, as the first ``should_checkpoint`` does; only the main thread can do so.

    Args:
        replace: Do not call the handler that was set before: for libraries that would end training at once.
    """
    _stop.listen(replace)


class _Stop:
    """Whether SIGTERM has arrived."""

    def __init__(self) -> None:
        self.asked = False
        self._listening_pid: int | None = None
        self._earlier: Any = signal.SIG_DFL

    def listen(self, replace: bool) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        current = signal.getsignal(signal.SIGTERM)
        if current == self._notice:  # in a child that was forked too, which from now on notices for itself
            self._listening_pid = os.getpid()
            return
        _reported.saves_when_asked = True
        if self._listening_pid == os.getpid() and not replace:
            return  # a library that set its own handler after ours calls ours
        self._earlier = signal.SIG_DFL if replace else current
        self._listening_pid = os.getpid()
        signal.signal(signal.SIGTERM, self._notice)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if self._listening_pid != os.getpid():  # a child that was forked, such as a data loader: it ends as it would
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.asked = True
        if callable(self._earlier):
            self._earlier(number, frame)


_stop = _Stop()


def _world() -> World:
    first, size = _number("WATTSHIFT_RANK_OFFSET", 0), _number("WORLD_SIZE", 1)
    return World(
        rank=_number("RANK", first),
        local_rank=_number("LOCAL_RANK", 0),
        world_size=size,
        local_world_size=_number("LOCAL_WORLD_SIZE", _number("WATTSHIFT_LOCAL_WORLD_SIZE", 1)),
        node_rank=_number("NODE_RANK", _number("GROUP_RANK", 0)),
    )


def _number(name: str, otherwise: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return otherwise


def __getattr__(name: str) -> Any:
    """Read ``world`` and ``checkpoint_dir`` from the environment."""
    if name == "world":
        return _world()
    if name == "checkpoint_dir":
        folder = os.environ.get("WATTSHIFT_CHECKPOINT_DIR")
        return Path(folder) if folder else None
    raise AttributeError(f"module 'wattshift.job' has no attribute {name!r}")
