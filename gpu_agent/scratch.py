"""How much of the node's disk running jobs use for their own files: it is measured, and whoever uses too much is ended.

A job's files are those in its working folder on the node and those that it was submitted with; a tenant's are its jobs'
files and those in its home folder here. Where the file system has no quotas that a job's account runs into, measuring
is all that can be done. ``du`` does it, in its own process: a job can make more files than the agent has time for.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpu_agent.gangs import Gang
from gpu_agent.ranks import SCRATCH
from gpu_agent.shim import clock
from gpu_agent.sources import FOLDER
from services.contracts.commands import StartGang
from services.contracts.nodes import EndedBy
from services.kit.logging import Log

log = Log(__name__)

_LOOK_S = 5.0
_SHARE = 0.05  #: Of the time, at most, in which something is measured
_MEASURE = ("nice", "-n", "19", "du", "-sx0B1", "--")


@dataclass(frozen=True)
class Holding:
    """A job that runs here: its tenant, and the folders that count for it and for the tenant."""

    tenant_id: str
    own: tuple[Path, ...]
    tenants: tuple[Path, ...]


def to_end(
    holdings: Mapping[str, Holding], taken_bytes: Mapping[Path, int], job_bytes: int, tenant_bytes: int
) -> dict[str, str]:
    """Return which jobs should end, and why: each that uses too much, and the largest of a tenant that does.

    Args:
        taken_bytes: The disk use of folders; nothing is known of those that are missing.
        tenant_bytes: What all jobs of one tenant, and its home folder, may use together.
    """

    def size(folders: Iterable[Path]) -> int:
        return sum(taken_bytes.get(folder, 0) for folder in set(folders))

    sizes = {name: size(holding.own) for name, holding in holdings.items()}
    found = {
        name: f"Its files took {_gib(taken)} of the node's disk; a job may take {_gib(job_bytes)}."
        for name, taken in sizes.items()
        if taken > job_bytes
    }
    for tenant_id in {holding.tenant_id for holding in holdings.values()}:
        jobs = [name for name, holding in holdings.items() if holding.tenant_id == tenant_id]
        taken = size(path for name in jobs for path in (*holdings[name].own, *holdings[name].tenants))
        if taken > tenant_bytes and not found.keys() & set(jobs):
            found[max(jobs, key=lambda name: (sizes[name], name))] = (
                f"Its tenant's files took {_gib(taken)} of the node's disk, this job's the most; "
                f"a tenant may take {_gib(tenant_bytes)}."
            )
    return found


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.1f} GiB"


class Scratch:
    """Watches the disk of one node; ``home_of`` returns the home folder that a job's tenant has here, if any."""

    def __init__(
        self, gangs: Iterable[Gang], home_of: Callable[[StartGang], Path | None], job_bytes: int, tenant_bytes: int
    ) -> None:
        self._gangs = gangs
        self._home_of = home_of
        self._limits = job_bytes, tenant_bytes
        self._is_blind = False

    async def watch(self) -> None:
        """Measure again and again, with pauses that grow with how long it takes."""
        while True:
            began_s = clock()
            await self.look()
            await asyncio.sleep(max(_LOOK_S, (clock() - began_s) * (1 / _SHARE - 1)))

    async def look(self) -> None:
        """Measure once, and end jobs that use too much."""
        running = [(gang, gang.start) for gang in self._gangs if gang.holding and gang.start]
        holdings, folders = await asyncio.to_thread(self._find, running)
        taken = await measured(folders) if folders else {}
        if folders and bool(taken) is self._is_blind:
            self._is_blind = not taken
            log.warning("scratch.measured", works=bool(taken), by=" ".join(_MEASURE))
        ends = to_end(holdings, taken, *self._limits)
        for gang, start in running:
            if (why := ends.get(gang.allocation_id)) and not (gang.is_over or gang.folder.stop_requested()):
                log.warning("gang.too_large", allocation_id=gang.allocation_id, detail=why)
                with suppress(OSError):
                    gang.folder.request_stop(EndedBy.ITSELF, start.spec.grace_s, why)

    def _find(self, running: Iterable[tuple[Gang, StartGang]]) -> tuple[dict[str, Holding], set[Path]]:
        """Return what counts for whom, and the existing folders; looking up accounts may query a directory service."""
        holdings = {
            gang.allocation_id: Holding(
                start.tenant_id,
                (gang.folder.path / SCRATCH, gang.folder.path / FOLDER),
                tuple(filter(None, [self._home_of(start)])),
            )
            for gang, start in running
        }
        return holdings, {path for each in holdings.values() for path in (*each.own, *each.tenants) if path.is_dir()}


async def measured(folders: Iterable[Path]) -> dict[Path, int]:
    """Return the disk use of folders in bytes, without what cannot be read; empty if there is no suitable ``du``."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(*_MEASURE, *map(str, folders)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return {}
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    lines = (line.partition(b"\t") for line in printed.split(b"\0") if line)
    return {Path(os.fsdecode(path)): int(size) for size, _, path in lines}
