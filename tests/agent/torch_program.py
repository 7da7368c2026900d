"""A job in plain PyTorch: DistributedDataParallel over gloo on CPU. It knows nothing of Wattshift but two variables."""

# pyright: basic, reportMissingImports=false

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

BATCH = 64


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    dist.init_process_group("gloo", init_method="env://")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(os.environ["WATTSHIFT_CHECKPOINT_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1, dtype=torch.float64)
    truth = torch.randn(16, 1, dtype=torch.float64)
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        step = saved["step"]
        model.load_state_dict(saved["model"])
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    while step < steps:
        inputs = torch.randn(BATCH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))[rank::size]
        loss = (parallel(inputs) - inputs @ truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        shared = torch.tensor([loss.item() / size, float(bool(told))], dtype=torch.float64)
        dist.all_reduce(shared)
        if rank == 0:
            with (folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": shared[0].item(), "world_size": size}) + "\n")
        if shared[1]:
            break
        time.sleep(0 if len(sys.argv) > 1 else 0.05)
    if rank == 0:
        torch.save({"step": step, "model": model.state_dict()}, folder / "draft.pt")
        (folder / "draft.pt").replace(checkpoint)
    dist.barrier()
    dist.destroy_process_group()


main()
