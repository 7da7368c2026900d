"""Power for the nodes of one machine: the agent of a node that is off does not run.

    python -m services.standalone.node_power DATA_DIR on|off NODE

is the command of a scheduler with ``SCHEDULER_NODE_POWER=command`` here, unless other commands are configured. It
stores the request (``power/NODE`` in the data folder) and returns once the supervisor has carried it out. A node that
comes back counts as a machine that has booted: its simulated devices drew nothing in the meantime.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from services.kit import files
from services.standalone.data_folder import DataFolder

LOOK_EVERY_S = 0.2
WITHIN_S = 30.0


@dataclass(frozen=True)
class Wanted:
    """Whether a node should run, and how often it has been powered up again."""

    on: bool = True
    boots: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell an agent that its host has booted again."""
        return {"GPU_AGENT_SIMULATED_BOOT": str(self.boots)} if self.boots else {}


def commands(folder: DataFolder) -> dict[str, str]:
    """Return the scheduler's settings with the power commands for nodes of this installation."""
    words = [sys.executable, "-P", "-m", "services.standalone.node_power", str(folder.path)]
    return {
        "SCHEDULER_NODE_POWER_ON_COMMAND": json.dumps([*words, "on", "{node}"]),
        "SCHEDULER_NODE_POWER_OFF_COMMAND": json.dumps([*words, "off", "{node}"]),
    }


def read_wanted(folder: DataFolder) -> dict[str, Wanted]:
    found: dict[str, Wanted] = {}
    for path in _folder(folder).glob("[!.]*"):
        if path.suffix == files.DRAFT:
            continue
        with contextlib.suppress(OSError, ValueError, TypeError):  # somebody else's file
            found[path.name] = Wanted(**json.loads(path.read_text()))
    return found


def write_wanted(folder: DataFolder, node_id: str, on: bool) -> None:
    """Request that a node run or not; a request that was already made is not repeated."""
    before = read_wanted(folder).get(node_id, Wanted())
    if before.on != on:
        _folder(folder).mkdir(mode=0o700, exist_ok=True)
        wanted = json.dumps(asdict(Wanted(on, before.boots + on))).encode()
        files.replace(_folder(folder) / node_id, wanted, durable=False)


async def follow(folder: DataFolder, set_running: Callable[[str, Wanted], Awaitable[None]]) -> None:
    """Carry out requests until cancelled; all nodes run at first."""
    done: dict[str, Wanted] = {}
    while True:
        for node_id, wanted in (await asyncio.to_thread(read_wanted, folder)).items():
            if wanted.on != done.get(node_id, Wanted()).on:
                await set_running(node_id, wanted)
            done[node_id] = wanted
        await asyncio.sleep(LOOK_EVERY_S)


def power(folder: DataFolder, node_id: str, on: bool) -> str:
    """Have a node powered up or down, and wait for it; return what went wrong, empty if nothing did."""
    name = f"agent-{node_id}"
    deadline = time.monotonic() + WITHIN_S
    if name not in {process.name for process in folder.status().processes}:
        return f"no node {node_id} runs in {folder.path}"
    write_wanted(folder, node_id, on)
    while time.monotonic() < deadline:
        for process in folder.status().processes:
            if process.name == name and (process.state == "stopped") is not on and (process.pid is not None) is on:
                return ""
        time.sleep(LOOK_EVERY_S)
    return f"{name} is not {'on' if on else 'off'} after {WITHIN_S:g} s"


def _folder(folder: DataFolder) -> Path:
    return folder.path / "power"


def main() -> None:
    match sys.argv[1:]:
        case [path, ("on" | "off") as word, node_id]:
            sys.exit(power(DataFolder(path), node_id, word == "on") or 0)
        case _:
            sys.exit("usage: python -m services.standalone.node_power DATA_DIR on|off NODE")


if __name__ == "__main__":
    main()
