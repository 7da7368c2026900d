"""For Hugging Face's Trainer: ``pip install 'wattshift[transformers]'``.

    from wattshift.integrations.transformers import WattshiftCallback, last_checkpoint

    trainer = Trainer(..., callbacks=[WattshiftCallback()])
    trainer.train(resume_from_checkpoint=last_checkpoint(trainer.args.output_dir))

``output_dir`` should be inside ``job.checkpoint_dir``, which is kept when the job is stopped and started again.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from wattshift import job
from wattshift.integrations.torch import should_checkpoint


class WattshiftCallback(TrainerCallback):
    """Reports every step; when the job is being stopped, has the Trainer save a checkpoint and end."""

    def __init__(self, *, save_s: float | None = None) -> None:
        """Choose how long to go on.

        Args:
            save_s: How long a step and saving take: training continues until only that much time is left. By
                default it ends at once.
        """
        self._save_s = save_s
        self._is_ending = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start watching for the job being stopped."""
        job.should_checkpoint()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Report the step."""
        local_batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        job.progress(state.global_step, total=state.max_steps, local_batch=local_batch)
        if should_checkpoint(args.device, self._save_s):
            self._is_ending = True
            control.should_save = True
            control.should_training_stop = True
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report that a checkpoint was written."""
        job.saved()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the job's footprint in an active MLflow or W&B run."""
        if not (
            self._is_ending or job.should_checkpoint()
        ):  # when the job is being stopped, time is short, and it will go on
            job.log_footprint()


def last_checkpoint(output_dir: str | None) -> str | None:
    """Return the newest checkpoint in a folder; None if there is none, as in the job's first run."""
    try:
        return None if output_dir is None else get_last_checkpoint(output_dir)
    except FileNotFoundError:
        return None
