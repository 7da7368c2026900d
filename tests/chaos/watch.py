"""What really runs: the processes of jobs and model servers as the kernel has them, whatever Wattshift says."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from services.core.domain.gpus import SLICE_SEVENTHS

PROC = Path("/proc")
LOOK_S = 0.25
SEVENTHS, EIGHTHS = 7, 8
MEMORY_EIGHTHS = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
"""Memory of a slice by its sevenths of the GPU, as MIG has it."""
_MOST_GPUS = 8


@dataclass(frozen=True)
class Running:
    """A process of a job or a model server, by its environment.

    Attributes:
        devices: The GPUs that it was given on its node: number, and the sevenths of it, which are 7 for a whole GPU,
            where they begin.
        owner, terms: Of a model server: what it belongs to, and for which terms of that it was started.
    """

    pid: int
    allocation: str
    node: str
    devices: tuple[tuple[int, int, int], ...]
    owner: str = ""
    terms: str = ""

    @property
    def job(self) -> str:
        """The job that the allocation is one of."""
        return self.allocation.rpartition(".")[0]

    def __str__(self) -> str:
        shares = ", ".join(f"{sevenths}/7 of GPU {gpu} from {start}" for gpu, sevenths, start in self.devices)
        return f"{self.allocation} (pid {self.pid}, {self.owner} {self.terms}) on {self.node}: {shares}"


class Watch:
    """Looks at all processes, again and again.

    Attributes:
        twins: The jobs of which two gangs were alive at once.
        overcommitted: The GPUs of which more was given away than they have, and to whom.
    """

    def __init__(self, *programs: Path) -> None:
        self._programs = {str(program).encode() for program in programs}
        self.twins: dict[str, str] = {}
        self.overcommitted: dict[str, str] = {}

    def look(self) -> list[Running]:
        """Return what runs, and note what must not be."""
        live = self._live()
        if any(len(gangs) > 1 for gangs in _gangs(live).values()) or overcommitted(live):
            again = self._live()  # one look takes a moment, in which one gang may end and the next begin
            both = [each for each in live if each in again]
            for job, gangs in _gangs(both).items():
                if len(gangs) > 1:
                    self.twins.setdefault(job, " and ".join(sorted(gangs)))
            for gpu, holders in overcommitted(both).items():
                self.overcommitted.setdefault(gpu, holders)
        return live

    async def keep_looking(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    async def left(self, jobs: Set[str], within_s: float = 15.0) -> list[str]:
        """Return which of these jobs, that are over, still have processes after a while."""
        for _ in range(int(within_s / LOOK_S)):
            if not jobs & _gangs(self.look()).keys():
                return []
            await asyncio.sleep(LOOK_S)
        return sorted(jobs & _gangs(self.look()).keys())

    def _live(self) -> list[Running]:
        found = (self._running(folder) for folder in PROC.iterdir() if folder.name.isdigit())
        return [each for each in found if each]

    def _running(self, folder: Path) -> Running | None:
        try:
            if not self._programs & set((folder / "cmdline").read_bytes().split(b"\0")):
                return None
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return None  # it is gone, or going: what it had is free
        values = {name: value for name, _, value in (variable.partition("=") for variable in variables)}
        if not (allocation := values.get("WATTSHIFT_ALLOCATION_ID", "")):
            return None
        node = next(
            (part for part in Path(values.get("WATTSHIFT_PROGRESS_FILE", "")).parts if part.startswith("node-")), ""
        )
        owner, _, terms = values.get("CHAOS_TERMS", "").partition(" ")
        devices = tuple(device_of(node, name) for name in values.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)
        return Running(int(folder.name), allocation, node, devices, owner, terms)


def device_of(node: str, name: str) -> tuple[int, int, int]:
    """Return the GPU, the sevenths of it, and where they begin: of a number, or of the UUID of a simulated slice."""
    if re.fullmatch(r"\d+", name):
        return int(name), SEVENTHS, 0
    for gpu in range(_MOST_GPUS):
        for sevenths in SLICE_SEVENTHS:
            for start in range(EIGHTHS):
                text = f"wattshift:{node}:{gpu}:{sevenths}g@{start}"
                if name == f"MIG-{uuid.uuid5(uuid.NAMESPACE_URL, text)}":
                    return gpu, int(sevenths), start
    raise ValueError(f"{node} has no slice {name}")


def _gangs(running: Iterable[Running]) -> dict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for each in running:
        found[each.job].add(each.allocation)
    return dict(found)


def overcommitted(running: Sequence[Running]) -> dict[str, str]:
    """Return the GPUs of which allocations together have more than there is, or one part twice, and who has it."""
    holders: defaultdict[tuple[str, int], set[tuple[str, int, int]]] = defaultdict(set)
    for each in running:
        for gpu, sevenths, start in each.devices:
            holders[each.node, gpu].add((each.allocation, sevenths, start))
    found: dict[str, str] = {}
    for (node, gpu), shares in holders.items():
        parts = [(sevenths, start) for _, sevenths, start in shares]
        memory = sum(MEMORY_EIGHTHS[sevenths] for sevenths, _ in parts)
        if len(parts) > len(set(parts)) or sum(sevenths for sevenths, _ in parts) > SEVENTHS or memory > EIGHTHS:
            held = ", ".join(
                f"{allocation} {sevenths}/7 from {start}" for allocation, sevenths, start in sorted(shares)
            )
            found[f"GPU {gpu} of {node}"] = held
    return found
