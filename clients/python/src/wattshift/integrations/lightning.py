"""For Lightning: ``pip install 'wattshift[lightning]'``.

from wattshift.integrations.lightning import WattshiftCallback, last_checkpoint

trainer = Trainer(..., callbacks=[WattshiftCallback(local_batch=32)])
trainer.fit(model, ckpt_path=last_checkpoint())
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from wattshift import job

FILE = "wattshift.ckpt"


class WattshiftCallback(Callback):
    """Reports every step; when the job is being stopped, saves a checkpoint and ends ``fit``.

    It takes SIGTERM over from Lightning, which would raise out of ``fit`` before anything is saved.
    """

    def __init__(
        self,
        *,
        local_batch: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        save_s: float | None = None,
    ) -> None:
        """Choose what is reported and where checkpoints go.

        Args:
            local_batch: Samples per GPU and step, reported with the progress.
            folder: Where the checkpoint is written; by default the job's own folder. Without either, none is written.
            save_s: How long a step and saving take: training continues until only that much time is left. By
                default it ends at once.
        """
        self._save_s = save_s
        self._is_ending = False
        self._local_batch = local_batch
        self._folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching for the job being stopped."""
        job.notice_stop(replace=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step."""
        steps = trainer.estimated_stepping_batches
        total = steps if 0 < steps < float("inf") else None
        job.progress(trainer.global_step, total=total, local_batch=self._local_batch)
        if (
            trainer.strategy.reduce_boolean_decision(job.should_checkpoint(self._save_s), all=False)
            and not trainer.should_stop
        ):
            if (path := _path(self._folder)) is not None:
                trainer.save_checkpoint(path)
                job.saved()
            trainer.should_stop = self._is_ending = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the job's footprint in an active MLflow or W&B run."""
        if not (
            self._is_ending or job.should_checkpoint()
        ):  # when the job is being stopped, time is short, and it will go on
            job.log_footprint()


def last_checkpoint(folder: str | os.PathLike[str] | None = None) -> str | None:
    """Return the checkpoint that the callback wrote; None if there is none, as in the job's first run."""
    path = _path(folder)
    return None if path is None or not path.exists() else str(path)


def _path(folder: str | os.PathLike[str] | None) -> Path | None:
    chosen = folder if folder is not None else job.checkpoint_dir
    return None if chosen is None else Path(chosen) / FILE
