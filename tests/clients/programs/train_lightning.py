"""Eight steps with Lightning; with STOP_AT, SIGTERM comes during that step."""

import os
import signal
from typing import Any

import lightning
import torch

from wattshift.integrations.lightning import WattshiftCallback, last_checkpoint

STOP_AT = int(os.environ.get("STOP_AT", "0"))


class Model(lightning.LightningModule):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.steps = 0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss."""
        self.steps += 1
        if self.steps == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.1)


data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=4)
trainer = lightning.Trainer(
    max_steps=8,
    callbacks=[WattshiftCallback(local_batch=4)],
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), data, ckpt_path=last_checkpoint())
print("steps", trainer.global_step)
