"""Checkpoints of jobs on nodes with no shared file system: copied to a store, and back before a gang starts elsewhere.

A gang's folder is copied while it runs and after it has ended; the node reports the end only once that last copy is
made, or its time is up. A note beside each folder says which gang used it last and what it started from, so that a
later gang knows whether the newest checkpoint is here or in the store.
"""

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import orjson

from gpu_agent import files, trees
from gpu_agent.account import Account
from gpu_agent.checkpoint_folders import ChangedError, DamagedError, Seen, UnfitError, listed, pieces, restore, walk
from gpu_agent.checkpoint_store import Copy, Entry, Manifest, Store, StoreError, leads_inside
from gpu_agent.ranks import Exit, RankFolder
from gpu_agent.settings import AgentSettings
from services.contracts.commands import StartGang
from services.contracts.nodes import NOT_COPIED
from services.core.domain.errors import DomainError
from services.kit.logging import Log
from services.kit.repeating import pauses
from services.kit.tasks import end_tasks

log = Log(__name__)

OUTCOME = "checkpoint.json"  #: File in a rank's folder: its checkpoint is settled, and what is to be said of it
_LOOK_S = 1.0


@dataclass
class _Known:
    """What this agent has copied of a gang: by path, the file's state at the time and its entry in the manifest."""

    files: dict[str, tuple[Seen, Entry]] = field(default_factory=dict[str, tuple[Seen, Entry]])
    copied: dict[str, Seen] | None = None
    at: float = 0.0


class Checkpoints:
    """The checkpoints of this node's gangs whose jobs name no folder of their own.

    Args:
        store: Where they are copied to; None on nodes without a store.
        account_of: Returns the account that runs a gang's job and owns its files.
        on_change: Called when a gang's end may be reported.
    """

    def __init__(
        self,
        settings: AgentSettings,
        store: Store | None,
        *,
        account_of: Callable[[StartGang], Account | None],
        on_change: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._folder = settings.state_folder / "checkpoints"
        self._store = store
        self._account_of = account_of
        self._on_change = on_change
        self._known: dict[str, _Known] = {}
        self._locks, self._finding = WeakValueDictionary[str, threading.Lock](), threading.Lock()
        self._last: dict[str, asyncio.Task[None]] = {}
        self._waits: dict[str, tuple[float, float]] = {}
        self._stopped = threading.Event()
        self.problem = ""

    # --- before a gang starts

    async def prepare(self, start: StartGang) -> None:
        """Put the newest known checkpoint into the job's folder; return when it is there."""
        if (store := self._store_for(start)) is None:
            return
        for pause_s in pauses(self._settings.retry_s):
            try:
                await asyncio.to_thread(self._prepare, start, store)
                return
            except (StoreError, DamagedError) as error:
                log.warning("checkpoint.not_fetched", allocation_id=start.allocation_id, error=str(error))
                await asyncio.sleep(pause_s)

    def _prepare(self, start: StartGang, store: Store) -> None:
        with self._lock(start.job_id):  # a gang that was given up meanwhile may still be at it
            generation, nodes, _ = self._used_last(start.job_id)
            if generation < start.generation:
                has_any = (self._folder / start.job_id).is_dir()
                self._make_newest(start, store, generation if has_any else -1, nodes)

    def _make_newest(self, start: StartGang, store: Store, generation: int, nodes: int) -> None:
        folder = self._folder / start.job_id
        self._folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        for left in self._folder.glob(f".{start.job_id}.*.draft"):
            trees.remove(left)
        newest, base = store.newest(start.job_id, start.generation), dict[str, Seen]()
        is_here = newest is None or (generation >= newest.generation and nodes == start.nnodes == 1)
        if newest is not None and not is_here:
            newest = self._fetch(start, store, newest)
            if newest is not None and start.nnodes > 1:
                base = listed(folder, None)
        written = {path: [seen.size_bytes, seen.changed_ns] for path, seen in base.items() if seen.kind == "file"}
        self._write_note(start, written)

    def _fetch(self, start: StartGang, store: Store, newest: Copy) -> Copy | None:
        """Replace the local checkpoint by a copy; by an older copy if one of its files is missing or damaged."""
        folder = self._folder / start.job_id
        draft = self._folder / f".{start.job_id}.{secrets.token_hex(4)}.draft"
        found: Copy | None = newest
        while found is not None:
            try:
                restore(store, start.job_id, found, draft, self._account_of(start), self._stopped.is_set)
                break
            except DamagedError as error:
                again = store.newest(start.job_id, start.generation)
                if again is not None and again.generation > found.generation:  # it was replaced meanwhile
                    found = again
                    continue
                generation = found.generation
                log.error("checkpoint.damaged", job_id=start.job_id, generation=generation, missing=str(error))
                found = store.newest(start.job_id, generation)
        if found is None:
            return None
        self._note(start.job_id).unlink(missing_ok=True)  # what is here counts for nothing until it is noted anew
        trees.remove(folder)
        draft.rename(folder)
        log.info("checkpoint.fetched", allocation_id=start.allocation_id, generation=found.generation)
        return found

    # --- while gangs run

    async def copy_running(self, gangs: Callable[[], Iterable[tuple[StartGang, RankFolder]]]) -> None:
        """Copy the checkpoints of running single-node gangs from time to time, for ever.

        In a wider gang each node has a part, and parts from different moments would not fit together.
        """
        while self._store is not None:
            try:
                await asyncio.to_thread(self._store.check)
                self.problem = ""
            except StoreError as error:
                self.problem = f"the store of checkpoints: {error}"
            for start, rank in gangs():
                known = self._known.setdefault(start.allocation_id, _Known(at=time.monotonic()))
                if start.nnodes > 1 or self._store_for(start) is None or rank.exit() is not None:
                    continue
                if time.monotonic() - known.at < self._settings.checkpoint_interval_s:
                    continue
                known.at = time.monotonic()
                try:
                    await asyncio.to_thread(self._copy, start)
                except (ChangedError, UnfitError, StoreError, DomainError, OSError) as error:
                    log.info("checkpoint.not_copied", allocation_id=start.allocation_id, error=str(error))
            await asyncio.sleep(min(_LOOK_S, self._settings.checkpoint_interval_s))

    # --- when a gang has ended

    def outcome(self, start: StartGang | None, rank: RankFolder, ended: Exit) -> str | None:
        """Return what to report of an ended gang's checkpoint; None while that has to wait."""
        if start is None or start.spec.checkpoint_dir is not None or self._is_shared() or rank.started() is None:
            return ""
        matters = ended.code != 0 or rank.stop_requested()
        if self._store is None:
            is_lacking = matters and self.is_held_here(start)
            return f"{NOT_COPIED}: it is on {self._settings.node_id} alone." if is_lacking else ""
        if (settled := _read_outcome(rank)) is not None:
            return settled
        if start.allocation_id not in self._last:
            self._last[start.allocation_id] = asyncio.create_task(self._copy_last(start, rank))
        if not matters:
            return ""
        wait_s, (asked_at, grace_s) = self._settings.checkpoint_wait_s, rank.stop_asked() or (0.0, 0.0)
        until = max(ended.ended_at.timestamp() + wait_s, asked_at + grace_s)
        known, deadline = self._waits.get(start.allocation_id, (None, 0.0))
        if known != until:  # from now on by a clock that cannot be set, and no longer than was asked for
            deadline = time.monotonic() + min(until - time.time(), max(wait_s, grace_s))
            self._waits[start.allocation_id] = until, deadline
        if time.monotonic() < deadline:
            return None
        return f"{NOT_COPIED} in time: elsewhere it continues from an earlier one, or from its start."

    def is_held_here(self, start: StartGang | None) -> bool | None:
        """Return whether a gang's job has a checkpoint that only this node has; None if other nodes can reach it.

        A folder that cannot be listed counts as a checkpoint.
        """
        if start is None or start.spec.checkpoint_dir is not None or self._is_shared() or self._store is not None:
            return None
        try:
            with os.scandir(self._folder / start.job_id) as entries:
                return next(entries, None) is not None
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def is_settled(self, start: StartGang | None, rank: RankFolder) -> bool:
        """Return whether nothing is left to do for the checkpoint of an ended gang."""
        return start is None or start.allocation_id not in self._last or _read_outcome(rank) is not None

    def forget(self, allocation_id: str) -> None:
        for each in (self._known, self._last, self._waits):
            each.pop(allocation_id, None)

    async def close(self) -> None:
        """Cancel running copies; the next agent continues."""
        self._stopped.set()
        await end_tasks(list(self._last.values()))

    async def _copy_last(self, start: StartGang, rank: RankFolder) -> None:
        detail = ""
        for pause_s in pauses(self._settings.retry_s):
            try:
                await asyncio.to_thread(self._copy, start, is_last=True)
            except UnfitError as error:
                detail = f"{NOT_COPIED}: {error}."
            except (ChangedError, StoreError, DomainError, OSError) as error:
                log.warning("checkpoint.not_copied", allocation_id=start.allocation_id, error=str(error))
                await asyncio.sleep(pause_s)
                continue
            if files.store(rank.path / OUTCOME, {"detail": detail}, "checkpoint.not_settled"):
                break
            await asyncio.sleep(pause_s)
        log.info("checkpoint.settled", allocation_id=start.allocation_id, detail=detail)
        self._on_change()

    def _copy(self, start: StartGang, *, is_last: bool = False) -> None:
        """Copy the folder of a gang's job; the copy counts if nothing in it changed meanwhile.

        Raises:
            UnfitError: It is too large, or contains something that cannot be copied.
            ChangedError: It changed.
            StoreError: The store did not take it.
        """
        with self._lock(start.job_id):
            generation, _, base = self._used_last(start.job_id)
            if self._store is not None and generation == start.generation:  # else it is a later gang's folder by now
                self._copy_to(self._store, start, base)
                if is_last:
                    self._write_note(start, base, copied=True)

    def _copy_to(self, store: Store, start: StartGang, base: Mapping[str, Sequence[int]]) -> None:
        account = self._account_of(start)
        folder, owner = self._folder / start.job_id, None if account is None else account.user_id
        known = self._known.setdefault(start.allocation_id, _Known())
        before = listed(folder, owner)
        size = sum(seen.size_bytes for seen in before.values())
        if size > (most := self._settings.checkpoint_max_bytes):
            raise UnfitError(f"it has {size:,} bytes, and GPU_AGENT_CHECKPOINT_MAX_BYTES is {most:,}")
        if before == known.copied:
            return
        written = {path: each for path, each in known.files.items() if before.get(path) == each[0]}
        series = secrets.token_hex(4)
        for number, (path, seen, above) in enumerate(walk(folder, owner)):
            if self._stopped.is_set():
                raise StoreError("this agent ends")
            is_new = base.get(path) != [seen.size_bytes, seen.changed_ns]
            if seen.kind != "file" or path in written or not (is_new or start.node_rank == 0):
                continue
            key, hashes = f"{series}-{number}", list[str]()
            content = pieces(path.rpartition("/")[2], above, seen, hashes.append)
            store.write(start.job_id, start.generation, start.node_rank, key, content)
            entry = seen.entry().model_copy(update={"key": key, "sha256": hashes[0], "changed": is_new})
            known.files[path] = written[path] = seen, entry
        if listed(folder, owner) != before:
            raise ChangedError("it changed while it was copied")
        entries: dict[str, Entry] = {}
        for path, seen in before.items():
            if seen.kind != "link" or leads_inside(path, seen.target):
                is_new = seen.kind != "file"  # a file without a key is what this gang found, and node 0 has it
                found = seen.entry().model_copy(update={"changed": is_new})
                entries[path] = written[path][1] if path in written else found
        manifest = Manifest(nodes=start.nnodes, entries=entries)
        store.keep(start.job_id, start.generation, start.node_rank, manifest)
        known.copied = before
        with suppress(StoreError):
            store.forget(start.job_id, start.generation, start.node_rank, manifest)
        log.info("checkpoint.copied", allocation_id=start.allocation_id, size_bytes=size)

    # --- what they share

    def clean(self, in_use: Iterable[str], older_than_s: float) -> None:
        """Remove the folders of jobs that have not run here for long and are in the store."""
        used = set(in_use)
        for note in self._folder.glob(".*.json") if self._store is not None else ():
            lock = self._lock(job := note.name[1 : -len(".json")])
            if job in used or not lock.acquire(blocking=False):  # what is being copied may take hours
                continue
            try:
                with suppress(OSError):
                    is_old = time.time() - note.stat().st_mtime > older_than_s
                    if is_old and files.read(note, lambda written: written["copied"]):
                        trees.remove(self._folder / job)
                        note.unlink(missing_ok=True)
            finally:
                lock.release()

    def _lock(self, job: str) -> threading.Lock:
        """Return the lock of a job's folder, which is there for as long as somebody has it."""
        with self._finding:
            return self._locks.setdefault(job, threading.Lock())

    def _is_shared(self) -> bool:
        """Return whether all nodes share a folder; nothing has to be copied then."""
        return self._settings.checkpoints == "shared"

    def _store_for(self, start: StartGang) -> Store | None:
        return None if start.spec.checkpoint_dir is not None else self._store

    def _note(self, job: str) -> Path:
        return self._folder / f".{job}.json"

    def _write_note(self, start: StartGang, base: Mapping[str, Sequence[int]], *, copied: bool = False) -> None:
        facts = {"generation": start.generation, "nodes": start.nnodes, "base": base, "copied": copied}
        files.replace(self._note(start.job_id), orjson.dumps(facts))

    def _used_last(self, job: str) -> tuple[int, int, dict[str, list[int]]]:
        """Return the generation that used a job's folder last (-1 for none), its number of nodes, and what it found."""
        found = files.read(
            self._note(job), lambda note: (int(note["generation"]), int(note["nodes"]), dict(note["base"]))
        )
        return found or (-1, 0, {})


def _read_outcome(rank: RankFolder) -> str | None:
    return files.read(rank.path / OUTCOME, lambda written: str(written["detail"]))
