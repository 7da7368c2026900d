"""Data-parallel training as PyTorch does it, in NumPy and sockets: what `init_process_group("env://")` reads is enough.

Each process computes the gradient of its share of the batch; rank 0 adds the gradients up and returns the sum
(all-reduce). The batch of a step is the same at every world size, so a job that is stopped and continues with more or
fewer GPUs follows the same losses, up to rounding.

RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT   as in torch.distributed. Without RANK this is one process on each node: it
                                             starts LOCAL_WORLD_SIZE processes, as torch.multiprocessing.spawn would
WATTSHIFT_RANK_OFFSET                        the rank of this node's first GPU
WATTSHIFT_CHECKPOINT_DIR                     checkpoint.npz, replaced whole; losses.jsonl, one line for each step
WATTSHIFT_PROGRESS_FILE                      where rank 0 reports its progress

Exit status: 0 the work is done; 143 told to stop (SIGTERM), checkpoint saved; 1 a process was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

STOPPED, LOST = 143, 1
DIMENSIONS, BATCH, RATE = 16, 64, 0.05
MEET_S = 60.0

stop_asked = False


def main() -> int:
    """Train as one rank, or start this node's ranks."""
    signal.signal(signal.SIGTERM, on_sigterm)
    parser = argparse.ArgumentParser(description="Data-parallel training in NumPy.")
    parser.add_argument("--steps", type=int, default=1_000, help="the whole work")
    parser.add_argument("--step-seconds", type=float, default=0.02, help="time that a step takes at least")
    options = parser.parse_args()
    if "RANK" not in os.environ and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        return start_ranks()
    folder = Path(os.environ.get("WATTSHIFT_CHECKPOINT_DIR", "checkpoint"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return train(Group(), folder, options.steps, options.step_seconds)
    except OSError as error:
        print(f"a process was lost: {error}", file=sys.stderr)
        return STOPPED if stop_asked else LOST


def on_sigterm(*_: object) -> None:
    """Record that the process should end; all ranks agree on the step after which they do."""
    global stop_asked
    stop_asked = True


def start_ranks() -> int:
    """Start a process for each of this node's GPUs; return the first exit status that is not 0."""
    first = int(os.environ.get("WATTSHIFT_RANK_OFFSET", "0"))
    ranks = [
        subprocess.Popen(sys.orig_argv, env=os.environ | {"RANK": str(first + local), "LOCAL_RANK": str(local)})
        for local in range(int(os.environ["LOCAL_WORLD_SIZE"]))
    ]
    return next(filter(None, [rank.wait() for rank in ranks]), 0)


class Group:
    """All processes of the gang, connected to rank 0."""

    def __init__(self) -> None:
        get = os.environ.get
        self.rank, self.size = int(get("RANK", "0")), int(get("WORLD_SIZE", "1"))
        master = get("MASTER_ADDR", "127.0.0.1"), int(get("MASTER_PORT", "29500"))
        self._peers: list[socket.socket] = []
        if self.rank > 0:
            self._peers = [self._reach(master)]
        elif self.size > 1:
            with socket.create_server(("", master[1]), backlog=128) as listener:
                listener.settimeout(MEET_S)
                while len(self._peers) < self.size - 1:
                    self._peers.append(listener.accept()[0])
        for peer in self._peers:
            peer.settimeout(MEET_S)

    @staticmethod
    def _reach(master: tuple[str, int]) -> socket.socket:
        give_up = time.monotonic() + MEET_S
        while True:
            try:
                return socket.create_connection(master, timeout=MEET_S)
            except OSError:
                if stop_asked or time.monotonic() > give_up:
                    raise
                time.sleep(0.05)

    def all_reduce(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of the values of all ranks, float64, the same on each."""
        if self.rank > 0:
            send(self._peers[0], values)
            return receive(self._peers[0])
        total = values + sum(receive(peer) for peer in self._peers)
        for peer in self._peers:
            send(peer, total)
        return total


def send(peer: socket.socket, values: np.ndarray) -> None:
    """Send an array of float64."""
    data = values.tobytes()
    peer.sendall(struct.pack("<I", len(data)) + data)


def receive(peer: socket.socket) -> np.ndarray:
    """Return what ``send`` sent."""
    return np.frombuffer(read(peer, struct.unpack("<I", read(peer, 4))[0]))


def read(peer: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes."""
    data = b""
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return data


def train(group: Group, folder: Path, steps: int, step_s: float) -> int:
    """Train from the last checkpoint until the work is done or any rank is told to stop."""
    step, weights = 0, np.zeros(DIMENSIONS)
    if (folder / "checkpoint.npz").exists():
        with np.load(folder / "checkpoint.npz") as saved:
            step, weights = int(saved["step"]), saved["weights"]
    if group.rank == 0:
        print(f"{group.size} processes, from step {step}", flush=True)
    truth = np.random.default_rng(0).normal(size=DIMENSIONS)
    while step < steps:
        inputs = np.random.default_rng((1, step)).normal(size=(BATCH, DIMENSIONS))[group.rank :: group.size]
        errors = inputs @ (weights - truth)
        told = np.concatenate([inputs.T @ errors, [float(errors @ errors), float(stop_asked)]])
        summed = group.all_reduce(told)
        weights = weights - RATE * summed[:DIMENSIONS] / BATCH
        step += 1
        if group.rank == 0:
            note(folder, {"step": step, "loss": summed[DIMENSIONS] / BATCH, "world_size": group.size}, steps)
        if summed[-1]:
            break
        time.sleep(step_s)
    if group.rank == 0:
        draft = folder / "draft.npz"
        np.savez(draft, step=step, weights=weights)
        draft.replace(folder / "checkpoint.npz")
    return 0 if step >= steps else STOPPED


def note(folder: Path, line: dict[str, float], steps: int) -> None:
    """Write a step's loss where people and the agent look."""
    with (folder / "losses.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    if "WATTSHIFT_PROGRESS_FILE" in os.environ:
        with open(os.environ["WATTSHIFT_PROGRESS_FILE"], "a") as file:
            file.write(json.dumps({"done": line["step"], "total": steps}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
