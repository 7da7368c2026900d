"""A job in plain PyTorch whose workers hand batches to it through shared memory, on two ranks that train together."""

# pyright: basic, reportMissingImports=false

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, WIDTH = 512, 4_096


def main() -> None:
    dist.init_process_group("gloo", init_method="env://")
    rank, size = dist.get_rank(), dist.get_world_size()
    data = TensorDataset(torch.arange(SAMPLES * WIDTH, dtype=torch.float32).reshape(SAMPLES, WIDTH))
    loader = DataLoader(data, batch_size=32, num_workers=2, sampler=DistributedSampler(data, size, rank, shuffle=False))
    total = torch.zeros(1, dtype=torch.float64)
    shared = 0
    for (batch,) in loader:
        shared += batch.is_shared()
        total += batch.double().sum()
    dist.all_reduce(total)
    same = int(total.item()) == SAMPLES * WIDTH * (SAMPLES * WIDTH - 1) // 2
    print(
        f"rank {rank} of {size}: {shared} shared batches, same: {same}, file system: {os.statvfs('/dev/shm').f_blocks}"
    )
    dist.destroy_process_group()


main()
