"""What really runs: the processes of jobs, as the kernel has them, whatever Wattshift says of them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Set
from pathlib import Path

PROC = Path("/proc")
LOOK_S = 0.25
_ALLOCATION = b"WATTSHIFT_ALLOCATION_ID="


class Watch:
    """Looks at all processes, again and again; ``twins`` are the jobs of which two gangs were alive at once."""

    def __init__(self, program: Path) -> None:
        self._program = str(program).encode()
        self.twins: dict[str, str] = {}

    def look(self) -> dict[str, set[str]]:
        """Return the live allocations of each job, by the environment of its processes; note twins."""
        live = self._live()
        if any(len(allocations) > 1 for allocations in live.values()):
            again = self._live()  # one look takes a moment, in which one gang may end and the next begin
            for job, allocations in live.items():
                if len(both := allocations & again.get(job, set())) > 1:
                    self.twins.setdefault(job, " and ".join(sorted(both)))
        return live

    async def keep_looking(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    async def left(self, jobs: Set[str], within_s: float = 15.0) -> list[str]:
        """Return which of these jobs, that are over, still have processes after a while."""
        for _ in range(int(within_s / LOOK_S)):
            if not jobs & self.look().keys():
                return []
            await asyncio.sleep(LOOK_S)
        return sorted(jobs & self.look().keys())

    def _live(self) -> dict[str, set[str]]:
        live: defaultdict[str, set[str]] = defaultdict(set)
        for folder in PROC.iterdir():
            if folder.name.isdigit() and (allocation := self._allocation_of(folder)):
                live[allocation.rpartition(".")[0]].add(allocation)
        return dict(live)

    def _allocation_of(self, folder: Path) -> str:
        try:
            if self._program not in (folder / "cmdline").read_bytes().split(b"\0"):
                return ""
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            return ""  # it is gone, or going: what it had is free
        return next((each[len(_ALLOCATION) :].decode() for each in variables if each.startswith(_ALLOCATION)), "")
