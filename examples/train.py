"""A small elastic training program: what a job can do so that it may be started, grown, moved and stopped at any time.

It really fits a linear model by SGD, and takes as long for a step as the options say. The work of a GPU is simulated by
pacing: a gang of n GPUs makes `n * scaling ** log2(n)` times the steps of one, so `--scaling 0.95` loses five per cent
of each GPU's speed at every doubling. Step i uses batch i, whichever process computes it: however often the job is
interrupted and resized, the result is the same to the last bit.

It needs only NumPy, and the following of Wattshift's variables, each of which may be missing:

WATTSHIFT_CHECKPOINT_DIR   checkpoint.npz, replaced whole; steps.jsonl, who made which steps; result.json at the end
WATTSHIFT_PROGRESS_FILE    one JSON line a second: done, total, loss, gpu_load
WATTSHIFT_DEVICE_FILE      relative_speed of simulated devices
WATTSHIFT_GENERATION, WORLD_SIZE, RANK, LOCAL_RANK, NODE_RANK, WATTSHIFT_NNODES, MASTER_ADDR, MASTER_PORT

It may be one process on each node or one for each GPU; with `RANK` it is the latter. The first process leads: it waits
until the others have joined, trains, checkpoints and reports; the others follow and end when it does. Exit status: 0
the work is done; 143 told to stop (SIGTERM), everything saved; 1 a process was lost; 97 another process already works
in this checkpoint folder; 98 a newer gang has worked in it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import numpy as np

STOPPED, LOST, TWIN, OUTDATED = 143, 1, 97, 98

DIMENSIONS, BATCH, RATE = 16, 32, 0.02
TICK_S = 0.2
REPORT_S = 1.0
JOIN_S = 60.0

stop_asked = False


def main() -> int:
    """Train, or follow the process that does."""
    signal.signal(signal.SIGTERM, on_sigterm)  # before anything slow: a stop may come at once
    options = read_options()
    gang = Gang.from_environment()
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    claim(options.checkpoint_dir, gang)
    return lead(gang, options) if gang.rank == 0 else follow(gang, options)


def on_sigterm(*_: object) -> None:
    """Record that the process should end; it checks this at every tick."""
    global stop_asked
    stop_asked = True


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="A small elastic training program.")
    parser.add_argument("--steps", type=int, default=1_000, help="the whole work")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="time of a step on one GPU at full clock")
    parser.add_argument("--scaling", type=float, default=0.95, help="share of a GPU's speed kept at each doubling")
    parser.add_argument("--gpu-load", type=float, default=0.9, help="how busy the job keeps its devices, 0 to 1")
    parser.add_argument("--checkpoint-every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    folder = Path(os.environ.get("WATTSHIFT_CHECKPOINT_DIR", "checkpoint"))
    parser.add_argument("--checkpoint-dir", type=Path, default=folder)
    return parser.parse_args()


@dataclass(frozen=True)
class Gang:
    """This process's place in its gang."""

    generation: int
    world_size: int
    rank: int
    processes: int
    local_rank: int
    master: tuple[str, int]

    @classmethod
    def from_environment(cls) -> Gang:
        """Read the agent's variables."""
        get = os.environ.get
        is_per_gpu = "RANK" in os.environ
        return cls(
            generation=int(get("WATTSHIFT_GENERATION", "0")),
            world_size=int(get("WORLD_SIZE", "1")),
            rank=int(get("RANK", "0") if is_per_gpu else get("NODE_RANK", "0")),
            processes=int(get("WORLD_SIZE", "1") if is_per_gpu else get("WATTSHIFT_NNODES", "1")),
            local_rank=int(get("LOCAL_RANK", "0")),
            master=(get("MASTER_ADDR", "127.0.0.1"), int(get("MASTER_PORT", "29500"))),
        )

    def speedup(self, scaling: float) -> float:
        """Return how many steps the gang makes in the time one GPU takes for one."""
        return self.world_size * scaling ** math.log2(self.world_size)


# --- at most one gang at a time


def claim(folder: Path, gang: Gang) -> None:
    """Hold this rank's lock in the checkpoint folder for as long as the process lives; end if it is not ours."""
    lock = os.open(folder / f"rank-{gang.rank}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report_twin(folder, gang, "another process holds the lock", TWIN)
    recorded = folder / f"rank-{gang.rank}.generation"
    with suppress(FileNotFoundError):
        latest = int(recorded.read_text())
        if latest > gang.generation:
            report_twin(folder, gang, f"generation {latest} has been here", OUTDATED)
        if latest == gang.generation != 0:
            report_twin(folder, gang, "this generation was started before", TWIN)
    replace(recorded, str(gang.generation).encode())


def report_twin(folder: Path, gang: Gang, why: str, status: int) -> NoReturn:
    """Write a line for tests that look for gangs that ran twice, and end."""
    line = {"at": time.time(), "pid": os.getpid(), "why": why, "status": status, **vars(gang)}
    with (folder / "twins.log").open("a") as log:
        log.write(json.dumps(line) + "\n")
    sys.exit(status)


# --- the work


class Model:
    """A linear model, the steps it has made, and who made them."""

    def __init__(self, folder: Path, seed: int) -> None:
        import numpy  # here, because following processes do without

        self._numpy = numpy
        self._folder = folder
        self._seed = seed
        self._truth: np.ndarray = numpy.random.default_rng(seed).normal(size=DIMENSIONS)
        self.weights: np.ndarray = numpy.zeros(DIMENSIONS)
        self.step = 0
        self.loss = float(self._truth @ self._truth)
        self.ledger: list[dict[str, int]] = []
        self._load()

    def advance(self, steps: int) -> None:
        """Make so many steps."""
        for _ in range(steps):
            random = self._numpy.random.default_rng([self._seed, self.step])
            inputs = random.normal(size=(BATCH, DIMENSIONS))
            wanted = inputs @ self._truth + 0.01 * random.normal(size=BATCH)
            error = inputs @ self.weights - wanted
            self.weights -= RATE * 2 / BATCH * (inputs.T @ error)
            self.loss = float(error @ error) / BATCH
            self.step += 1

    def save(self, gang: Gang) -> None:
        """Replace the checkpoint; a crash at any moment leaves the old or the new one."""
        first = self.ledger[-1]["last"] if self.ledger else 0
        if self.step > first:
            if self.ledger and self.ledger[-1]["generation"] == gang.generation:
                first = self.ledger.pop()["first"]
            life = {"generation": gang.generation, "world_size": gang.world_size}
            self.ledger.append(life | {"first": first, "last": self.step})
        draft = self._folder / "checkpoint.npz.tmp"
        with draft.open("wb") as file:
            ledger = json.dumps(self.ledger)
            self._numpy.savez(file, weights=self.weights, step=self.step, loss=self.loss, ledger=ledger)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._folder / "checkpoint.npz")
        lines = "".join(json.dumps(entry) + "\n" for entry in self.ledger)
        replace(self._folder / "steps.jsonl", lines.encode())

    def save_result(self) -> None:
        """Write the result, so that two runs can be compared."""
        digest = hashlib.sha256(self.weights.tobytes()).hexdigest()
        result = {"steps": self.step, "loss": self.loss, "weights_sha256": digest}
        replace(self._folder / "result.json", json.dumps(result).encode())

    def _load(self) -> None:
        with suppress(FileNotFoundError), self._numpy.load(self._folder / "checkpoint.npz") as saved:
            self.weights = saved["weights"]
            self.step, self.loss = int(saved["step"]), float(saved["loss"])
            self.ledger = json.loads(str(saved["ledger"]))


class Reporter:
    """Writes progress for the agent and lines for people."""

    def __init__(self, gpu_load: float) -> None:
        self._path = os.environ.get("WATTSHIFT_PROGRESS_FILE")
        self._gpu_load = gpu_load
        self._due = 0.0

    def tell(self, *, now: bool = False, **said: Any) -> None:
        """Report once a second, or now."""
        if not now and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + REPORT_S
        if "done" in said:
            print(f"step {said['done']}/{said['total']} loss {said['loss']:.6f}", flush=True)
        if self._path:
            with open(self._path, "a") as file:
                file.write(json.dumps(said | {"gpu_load": self._gpu_load}) + "\n")


def lead(gang: Gang, options: argparse.Namespace) -> int:
    """Train until the work is done, a stop is requested, or a process is lost."""
    reporter = Reporter(options.gpu_load)
    followers = Followers(gang)
    if not followers.join():
        return followers.dismiss(STOPPED if stop_asked else LOST)
    model = Model(options.checkpoint_dir, options.seed)
    rate = gang.speedup(options.scaling) / options.step_seconds
    print(f"gang {gang.generation}: {gang.world_size} GPUs, from step {model.step}, {rate:.1f} steps/s", flush=True)

    def tell(*, now: bool = False) -> None:
        reporter.tell(now=now, done=model.step, total=options.steps, loss=model.loss)

    tell(now=True)
    credit, last, saved = 0.0, time.monotonic(), time.monotonic()
    while model.step < options.steps and not stop_asked and followers.are_well():
        speed = rate * relative_speed()
        left_s = (options.steps - model.step - credit) / speed
        followers.wait(min(TICK_S, max(left_s, 0.01)))
        now = time.monotonic()
        credit, last = credit + (now - last) * speed, now
        steps = min(int(credit), options.steps - model.step)
        model.advance(steps)
        credit -= steps
        if now - saved > options.checkpoint_every:
            model.save(gang)
            saved = now
        tell()
    model.save(gang)
    tell(now=True)
    if model.step >= options.steps:
        model.save_result()
        return followers.dismiss(0)
    return followers.dismiss(STOPPED if stop_asked or followers.were_stopped else LOST)


def relative_speed() -> float:
    """Return the speed of the simulated devices as a share of their highest; 1 where nothing says so."""
    try:
        said = json.loads(Path(os.environ["WATTSHIFT_DEVICE_FILE"]).read_text())
        return max(float(said["relative_speed"]), 0.01)
    except (KeyError, OSError, ValueError, TypeError):
        return 1.0


# --- gangs of several processes


class Followers:
    """The other processes, as rank 0 sees them."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._connections: dict[int, socket.socket] = {}
        self._lost = False
        self.were_stopped = False

    def join(self) -> bool:
        """Wait until every process is there; False if one is missing after a minute, or a stop is requested."""
        if self._gang.processes == 1:
            return True
        deadline = time.monotonic() + JOIN_S
        with listen(self._gang.master) as listener:
            listener.settimeout(TICK_S)
            while len(self._connections) < self._gang.processes - 1:
                if stop_asked or time.monotonic() > deadline:
                    return False
                with suppress(TimeoutError):
                    self._welcome(listener.accept()[0])
        for connection in self._connections.values():
            send(connection, {"go": True})
        return True

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(JOIN_S)
        said = receive(connection)
        if said and said.get("generation") == self._gang.generation:
            self._connections[int(said["rank"])] = connection
        else:
            connection.close()  # of another gang

    def wait(self, seconds: float) -> None:
        """Wait, and receive what other processes send."""
        if not self._connections:
            time.sleep(seconds)
            return
        for connection in select.select(list(self._connections.values()), [], [], seconds)[0]:
            said = receive(connection)
            self.were_stopped |= bool(said and said.get("stopping"))
            self._lost |= not said

    def are_well(self) -> bool:
        """Whether every process is connected and wants to continue."""
        return not self._lost and not self.were_stopped

    def dismiss(self, status: int) -> int:
        """Let the other processes end as this one does."""
        for connection in self._connections.values():
            send(connection, {"end": status})
            connection.close()
        return status


def follow(gang: Gang, options: argparse.Namespace) -> int:
    """Join rank 0 and keep the devices busy until rank 0 ends the training."""
    connection = reach(gang.master)
    if connection is None:
        return STOPPED if stop_asked else LOST
    send(connection, {"rank": gang.rank, "generation": gang.generation})
    reporter = Reporter(options.gpu_load) if gang.local_rank == 0 else None  # one for each node is enough
    while not stop_asked:
        if reporter:
            reporter.tell()
        if select.select([connection], [], [], TICK_S)[0]:
            said = receive(connection)
            if not said:
                return LOST
            if "end" in said:
                return int(said["end"])
    send(connection, {"stopping": True})
    return STOPPED


def reach(address: tuple[str, int]) -> socket.socket | None:
    """Connect to rank 0, which may take a moment to come; None after a minute, or when a stop is requested."""
    deadline = time.monotonic() + JOIN_S
    while not stop_asked and time.monotonic() < deadline:
        try:
            return socket.create_connection(address, timeout=JOIN_S)
        except OSError:
            time.sleep(TICK_S)
    return None


def listen(address: tuple[str, int]) -> socket.socket:
    """Listen where the others connect: on the given address, or on all if that is not this host's own."""
    try:
        return socket.create_server(address, backlog=128)
    except OSError:
        return socket.create_server(("", address[1]), backlog=128)


def send(connection: socket.socket, said: dict[str, Any]) -> None:
    """Send one line; a lost process is noticed when reading from it."""
    with suppress(OSError):
        connection.sendall(json.dumps(said).encode() + b"\n")


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return one received line, None if the other side is gone."""
    line = b""
    try:
        while not line.endswith(b"\n"):
            piece = connection.recv(1)
            if not piece:
                return None
            line += piece
        return dict(json.loads(line))
    except (OSError, ValueError):
        return None


def replace(path: Path, content: bytes) -> None:
    """Replace a file, all or nothing."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
