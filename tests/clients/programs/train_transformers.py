"""Eight steps with the Trainer of Hugging Face; with STOP_AT, SIGTERM comes during that step."""

import os
import signal
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from wattshift import job
from wattshift.integrations.transformers import WattshiftCallback, last_checkpoint

STOP_AT = int(os.environ.get("STOP_AT", "0"))


class Line(torch.utils.data.Dataset):
    """Points of a line."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), index / 64), "labels": torch.tensor([index / 64])}


class Model(torch.nn.Module):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.steps = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return the loss."""
        self.steps += 1
        if self.steps == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        guess = self.layer(x)
        return {"loss": ((guess - labels) ** 2).mean(), "logits": guess}


arguments = TrainingArguments(
    output_dir=str(job.checkpoint_dir),
    max_steps=8,
    per_device_train_batch_size=4,
    use_cpu=True,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=Model(), args=arguments, train_dataset=Line(), callbacks=[WattshiftCallback()])
trainer.train(resume_from_checkpoint=last_checkpoint(arguments.output_dir))
print("steps", trainer.state.global_step)
