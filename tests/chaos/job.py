"""A job whose work can be counted afterwards, and that notices a twin or a device that another job holds, too.

It runs by its path, with the standard library alone: ``job.py TICKS TICK_S EXIT_CODE NOTES``. Rank 0 adds a byte to
``ticks`` in the checkpoint folder for each tick, and makes ``done`` when all are there; the other ranks wait for that.
What must not be goes to the folder NOTES: a file for each kind, with a line each time.
"""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

STOPPED = 143
LOOK_S = 0.05

stop_asked = False


def main() -> int:
    """Work, or wait for rank 0."""
    signal.signal(signal.SIGTERM, on_sigterm)
    ticks, tick_s, exit_code, notes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    folder, rank = Path(os.environ["WATTSHIFT_CHECKPOINT_DIR"]), int(os.environ["NODE_RANK"])
    done = folder / "done"
    if done.exists():
        note(notes, "ran-again")
        return 0
    hold(folder / f"rank-{rank}.lock", notes, "twin")
    for device in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
        hold(notes / f"{node()}-{device}.lock", notes, "device-held-twice")
    while rank and not stop_asked and not done.exists():
        time.sleep(LOOK_S)
    if rank:
        return STOPPED if stop_asked else 0
    counted = os.open(folder / "ticks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while os.fstat(counted).st_size < ticks:
        time.sleep(tick_s)
        if stop_asked:
            return STOPPED
        os.write(counted, b".")
        report(os.fstat(counted).st_size)
    if exit_code == 0:
        done.touch(exist_ok=False)
    return exit_code


def on_sigterm(*_: object) -> None:
    """Remember that the job should end."""
    global stop_asked
    stop_asked = True


def node() -> str:
    """Return which node this is: its folder is in the path of the progress file."""
    parts = Path(os.environ["WATTSHIFT_PROGRESS_FILE"]).parts
    return next(part for part in parts if part.startswith("node-"))


def hold(path: Path, notes: Path, otherwise: str) -> None:
    """Hold a lock for as long as the process lives; note it if somebody else does."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(notes, otherwise, path.name)


def note(notes: Path, kind: str, what: str = "") -> None:
    """Write a line for the checks."""
    with (notes / kind).open("a") as file:
        file.write(f"{time.time():.3f} {os.environ['WATTSHIFT_ALLOCATION_ID']} on {node()} {what}\n")


def report(ticks: int) -> None:
    """Tell the agent; a full disk is no reason to stop."""
    try:
        with open(os.environ["WATTSHIFT_PROGRESS_FILE"], "a") as file:
            file.write(f'{{"done": {ticks}}}\n')
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
