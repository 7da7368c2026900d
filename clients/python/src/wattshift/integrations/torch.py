"""For training loops in plain PyTorch: ``pip install 'wattshift[torch]'``.

    from wattshift.integrations.torch import Loop

    loop = Loop({"model": model, "optimizer": optimizer}, total=steps, local_batch=32)
    for step in loop:
        train(step)

The loop continues from the job's last checkpoint, reports after every step and, when the job is being stopped, saves a
checkpoint and ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from wattshift import job

FILE = "wattshift.pt"
REPORT_S = 1.0


class Stateful(Protocol):
    """Anything with a state: a model, an optimizer, a scheduler, ..."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state."""
        ...


def should_checkpoint(device: torch.device | str | None = None, save_s: float | None = None) -> bool:
    """Return whether the job is being stopped, as far as any process of the gang has noticed.

    All processes get the same answer, so that they save together and none waits for one that has ended. Where
    ``torch.distributed`` is initialised, all of them have to call it at the same step.

    Args:
        device: Where to exchange the answer; by default this process's GPU for NCCL, else the CPU.
        save_s: How long saving takes; see ``job.should_checkpoint``.
    """
    is_asked = job.should_checkpoint(save_s)
    if not (dist.is_available() and dist.is_initialized()):
        return is_asked
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    asked = torch.tensor([int(is_asked)], device=device)
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return bool(asked.item())


class Loop:
    """Yields the remaining steps, from the last checkpoint on.

    Every process has to hold the whole state, as with ``DistributedDataParallel``: the one of rank 0 saves it for all.
    """

    def __init__(
        self,
        states: Mapping[str, Stateful],
        *,
        total: int,
        local_batch: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        every: int | None = None,
    ) -> None:
        """Read the last checkpoint, if there is one.

        Args:
            states: What is saved and restored, by names that stay the same.
            total: Number of steps of the whole training.
            local_batch: Samples per GPU and step, reported with the progress.
            folder: Where checkpoints are kept; by default the job's own folder. Without either, nothing is saved.
            every: Also save each time this many steps are done.
        """
        chosen = folder if folder is not None else job.checkpoint_dir
        self.path = None if chosen is None else Path(chosen) / FILE
        self.step = 0
        """Steps that have been done."""

        self.is_stopped = False
        """Whether training ended because the job is being stopped."""

        self._states = states
        self._total = total
        self._local_batch = local_batch
        self._every = every
        if self.path is not None and self.path.exists():
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            self.step = saved["step"]
            for name, state in states.items():
                state.load_state_dict(saved["states"][name])

    def __iter__(self) -> Iterator[int]:
        reported_s = -REPORT_S
        while self.step < self._total:
            if should_checkpoint():
                self.is_stopped = True
                break
            yield self.step
            self.step += 1
            if time.monotonic() >= reported_s + REPORT_S:
                self._report()
                reported_s = time.monotonic()
            if self._every and self.step % self._every == 0:
                self.save()
        self._report()
        self.save()
        if not self.is_stopped:
            job.log_footprint()

    def _report(self) -> None:
        job.progress(self.step, total=self._total, local_batch=self._local_batch)

    def save(self) -> None:
        """Write a checkpoint in place of the last one, which is never left half-written."""
        if self.path is not None and job.world.rank == 0:
            began_s = time.monotonic()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            states = {name: state.state_dict() for name, state in self._states.items()}
            with partial.open("wb") as file:
                torch.save({"step": self.step, "states": states}, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
            job.saved(time.monotonic() - began_s)
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
