"""Cuts this node's GPUs into the slices that the control plane wants, one GPU at a time and never under a job.

The plan, and how the GPU was cut before, is on disk before the driver is asked; a cut that was interrupted by the
agent's end is finished or undone by the next agent. If the driver refuses, the GPU is cut as it was before. If the
driver says that the GPU is in use, by a process that is none of ours, it is asked again later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from pydantic import BaseModel, Field, TypeAdapter

from gpu_agent import files
from gpu_agent.devices.driver import Cut, DeviceBusyError, DeviceError, Driver, cut_of
from gpu_agent.shim import clock
from services.contracts.nodes import PartitionState, PartitionStatus, WantedPartition
from services.core.domain.errors import DomainError
from services.core.domain.mig import gpu_of, placed
from services.kit.logging import Log

log = Log(__name__)


class _Record(BaseModel):
    """What is known of a GPU's wanted partition."""

    gpu: int
    revision: int
    sizes: list[int]
    state: PartitionState = PartitionState.PENDING
    detail: str = ""
    is_open: bool = False
    """Whether the driver was asked, and the GPU is not known to have either the wanted cut or the former one."""
    before: Cut = None  #: How the GPU was cut before; meaningful while it is open
    confirmed: bool = Field(default=False, exclude=True)
    """Whether a control plane has named it since this agent started. Otherwise only open ones are touched."""
    retry_at: float = Field(default=0.0, exclude=True)  #: The earliest next attempt, on the clock of leases

    @property
    def wanted(self) -> Cut:
        """The cut that is wanted; ``DomainError`` if no cut has these slices."""
        return placed(self.sizes) if self.sizes else None


_RECORDS = TypeAdapter(list[_Record])


class Partitions:
    """Reconciles the GPUs of one node with the wanted cuts.

    Args:
        driver: Used by only one thread at a time.
        state_file: The wanted cuts and their progress, for the next agent.
        held_by: Returns the allocations that hold a GPU, or slices of it.
        on_cut: Called when a GPU may have other slices, before the cut is reported as done.
        retry_s: The pause before a driver that said busy, or that failed to restore a cut, is asked again.
    """

    def __init__(
        self,
        driver: Driver,
        state_file: Path,
        lock: asyncio.Lock,
        *,
        held_by: Callable[[int], list[str]],
        on_cut: Callable[[], Awaitable[None]],
        retry_s: float,
    ) -> None:
        self._driver = driver
        self._file = state_file
        self._lock = lock
        self._held_by = held_by
        self._on_cut = on_cut
        self._retry_s = retry_s
        self._task: asyncio.Task[None] | None = None
        self._cutting: int | None = None
        left = files.read(state_file, _RECORDS.validate_python, "partitions.unreadable")
        self._records = {record.gpu: record for record in left or ()}
        self._cuts: dict[int, Cut] = {}
        self._can_be_cut: frozenset[int] = frozenset()
        self._look()
        self.problem = ""  #: Why what is wanted cannot be written down; empty if it can

    def want(self, wanted: Iterable[WantedPartition]) -> None:
        """Take in what the control plane wants; GPUs that it does not name stay as they are."""
        named = {each.gpu: each for each in wanted}
        before = {gpu: record.revision for gpu, record in self._records.items()}
        for gpu, each in named.items():
            record = self._records.get(gpu)
            if record is None or record.revision != each.revision:
                opened = record.model_dump(include={"is_open", "before"}) if record else {}
                record = self._records[gpu] = _Record(gpu=gpu, revision=each.revision, sizes=each.sizes, **opened)
            elif record.state is PartitionState.APPLIED and not self._is_reached(gpu, record):
                record.state = PartitionState.PENDING  # somebody else has cut it, or the host has restarted
            record.confirmed = True
        for gpu in [gpu for gpu, record in self._records.items() if gpu not in named and not record.is_open]:
            del self._records[gpu]
        if before != {gpu: record.revision for gpu, record in self._records.items()}:
            self._save()

    def statuses(self) -> list[PartitionStatus] | None:
        """Return the cuts, and their progress, of GPUs that can or should be cut; None if there are none."""
        known = sorted(self._can_be_cut | self._records.keys())
        return [self._status(gpu) for gpu in known] if known else None

    def is_open(self, devices: Iterable[int]) -> bool:
        """Return whether a device is, or is a slice of, a GPU that is being cut: nothing may start on it."""
        gpus = map(gpu_of, devices)
        return any(gpu == self._cutting or (gpu in self._records and self._records[gpu].is_open) for gpu in gpus)

    def step(self) -> None:
        """Begin the next cut that can be made now, if none is in progress."""
        if self._cutting is not None:
            return
        for gpu, record in sorted(self._records.items()):
            if self._is_due(gpu, record):
                self._cutting = gpu
                self._task = asyncio.create_task(self._run(gpu, record), name=f"cut GPU {gpu}")
                return

    async def finish(self, within_s: float) -> None:
        """Wait for the cut in progress, because the agent ends."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within_s)

    async def _run(self, gpu: int, record: _Record) -> None:
        try:
            await self._settle(gpu, record)
        except Exception:  # a fault here must not end the cutting of other GPUs
            record.retry_at = clock() + self._retry_s
            log.exception("partition.interrupted", gpu=gpu)
        finally:
            self._cutting = None

    def _is_due(self, gpu: int, record: _Record) -> bool:
        if gpu not in self._cuts:
            record.state, record.detail = PartitionState.FAILED, "this node has no such GPU"
            return False
        if not (record.is_open or record.confirmed) or clock() < record.retry_at:
            return False
        if record.state in (PartitionState.APPLIED, PartitionState.FAILED) and not record.is_open:
            return False
        holders = self._held_by(gpu)
        if holders and not self._is_reached(gpu, record):
            record.state, record.detail = PartitionState.PENDING, f"still used by {', '.join(holders[:5])}"
            return False
        return True

    async def _settle(self, gpu: int, record: _Record) -> None:
        """Bring a GPU to the wanted cut, or back to the former one."""
        async with self._lock:
            if self._is_reached(gpu, record):
                state, detail = PartitionState.APPLIED, ""
            elif record.is_open and record.state is PartitionState.FAILED:
                state, detail = record.state, record.detail
                if not await self._restore(gpu, record):
                    return
            else:
                if not self._open(gpu, record):
                    return
                state, detail = await self._cut(gpu, record)
        await self._on_cut()
        record.state, record.detail = state, detail
        if state is PartitionState.APPLIED:
            record.is_open = False
        self._save()
        log.info("partition.settled", gpu=gpu, revision=record.revision, state=state.value, detail=detail)

    def _open(self, gpu: int, record: _Record) -> bool:
        """Record how the GPU is cut before the driver is asked; return False if that is not possible."""
        if not record.is_open:
            record.is_open, record.before = True, self._cuts.get(gpu)
            if not self._save():
                record.is_open, record.retry_at = False, clock() + self._retry_s
        return record.is_open

    async def _cut(self, gpu: int, record: _Record) -> tuple[PartitionState, str]:
        """Ask the driver; after an error, restore the former cut."""
        try:
            await self._ask(gpu, record.wanted)
            return PartitionState.APPLIED, ""
        except DeviceBusyError as error:
            record.state, record.detail = PartitionState.BUSY, str(error)
        except (DeviceError, DomainError) as error:
            record.state, record.detail = PartitionState.FAILED, str(error)
        log.warning("partition.refused", gpu=gpu, sizes=record.sizes, state=record.state.value, error=record.detail)
        record.retry_at = clock() + self._retry_s
        self._save()
        await self._restore(gpu, record)
        return record.state, record.detail

    async def _restore(self, gpu: int, record: _Record) -> bool:
        """Cut a GPU as it was before; return whether that was possible."""
        try:
            if self._cuts.get(gpu) != record.before:
                await self._ask(gpu, record.before)
        except DeviceError as error:
            record.retry_at = clock() + self._retry_s
            note = f"and it could not be cut as before: {error}"
            if note not in record.detail:
                record.detail = f"{record.detail}; {note}"
                log.error("partition.not_restored", gpu=gpu, error=str(error))
            return False
        record.is_open = False
        return True

    async def _ask(self, gpu: int, cut: Cut) -> None:
        """Ask the driver, and read what the GPU has then."""
        try:
            await asyncio.to_thread(self._driver.cut, gpu, cut)
        finally:
            self._look()

    def _look(self) -> None:
        devices = self._driver.devices()
        self._cuts = {each.index: cut_of(devices, each.index) for each in devices if each.parent is None}
        self._can_be_cut = frozenset(each.index for each in devices if each.can_partition)

    def _is_reached(self, gpu: int, record: _Record) -> bool:
        """Return whether the GPU has the wanted slices, wherever they are on it."""
        cut = self._cuts.get(gpu)
        if not record.sizes or cut is None:
            return not record.sizes and cut is None
        return sorted(record.sizes) == sorted(place.sevenths for place in cut)

    def _status(self, gpu: int) -> PartitionStatus:
        record = self._records.get(gpu) or _Record(gpu=gpu, revision=0, sizes=[], state=PartitionState.APPLIED)
        is_waiting = record.is_open and record.state is PartitionState.FAILED  # to be cut as before
        return PartitionStatus(
            gpu=gpu,
            revision=record.revision,
            state=PartitionState.BUSY if is_waiting else record.state,
            detail=record.detail[:2_000],
            sizes=[place.sevenths for place in self._cuts.get(gpu) or ()],
        )

    def _save(self) -> bool:
        try:
            files.replace(self._file, _RECORDS.dump_json([record for _, record in sorted(self._records.items())]))
        except OSError as error:
            self.problem = f"the state folder cannot be written: {error}"
            return False
        self.problem = ""
        return True
