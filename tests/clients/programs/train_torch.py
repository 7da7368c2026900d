"""Eight steps in plain PyTorch, alone or under torchrun; with STOP_AT, SIGTERM comes to rank 0 during that step."""

import os
import signal

import torch
import torch.distributed as dist

from wattshift import job
from wattshift.integrations.torch import Loop

STOP_AT = int(os.environ.get("STOP_AT", "0"))

if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
replica = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
loop = Loop({"model": model, "optimizer": optimizer}, total=8, local_batch=4)
for step in loop:
    optimizer.zero_grad()
    replica(torch.full((4, 2), step / 8)).mean().backward()
    optimizer.step()
    if step + 1 == STOP_AT and job.world.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
if job.world.rank == 0:
    print("steps", loop.step, f"{model.weight.detach().sum().item():.9f}")
if dist.is_initialized():
    dist.destroy_process_group()
