"""Which commands start the processes of a distributed job themselves."""

from __future__ import annotations

import pytest

from services.contracts.launchers import is_launcher


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "train.py"],
        ["/opt/venv/bin/torchrun", "--nproc-per-node", "4", "train.py"],
        ["python3", "-m", "torch.distributed.run", "train.py"],
        ["/usr/bin/python3.11", "-u", "-X", "dev", "-m", "torch.distributed.launch", "train.py"],
        ["python", "/opt/venv/bin/torchrun", "train.py"],
        ["accelerate", "launch", "train.py"],
        ["deepspeed", "train.py"],
        ["mpirun", "-n", "4", "train"],
        ["srun", "train"],
        ["ray", "start", "--head"],
        ["env", "-u", "A", "OMP_NUM_THREADS=4", "torchrun", "train.py"],
        ["nice", "-n", "5", "timeout", "-k", "9", "1h", "numactl", "-N", "0", "torchrun", "train.py"],
        ["uv", "run", "--with", "torch", "torchrun", "train.py"],
        ["conda", "run", "-n", "base", "accelerate", "launch", "train.py"],
        ["sh", "-c", "torchrun train.py"],
        ["bash", "-lc", "cd /data && OMP_NUM_THREADS=4 exec torchrun --nnodes 2 train.py > log"],
        ["bash", "-e", "-c", "source venv/bin/activate; python -m torch.distributed.run train.py"],
        ["sh", "-c", "bash -c 'torchrun train.py'"],
    ],
)
def test_launchers(command: list[str]) -> None:
    assert is_launcher(command)


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["env"],
        ["sh", "-c"],
        ["python3", "train.py"],
        ["python3", "train.py", "-m", "torch.distributed.run"],
        ["python3", "-m", "trainer"],
        ["python3", "-m"],
        ["python3", "-c", "print('torchrun')"],
        ["./torchrun.py"],
        ["sh", "launch.sh"],
        ["sh", "launch.sh", "-c", "torchrun"],
        ["sh", "-c", "echo torchrun"],
        ["sh", "-c", "echo 'a; torchrun b'"],
        ["sh", "-c", "echo \\; torchrun"],
        ["sh", "-c", "echo 'unfinished; torchrun"],
        ["timeout", "1h", "python3", "train.py"],
    ],
)
def test_other_commands(command: list[str]) -> None:
    assert not is_launcher(command)
