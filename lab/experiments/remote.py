"""Run an experiment's cells by Celery workers, on any number of machines; client and workers share only Valkey.

A group of cells (``runner.together``) is a task, named by its first cell's key. In Valkey, under ``PREFIX``, for
``KEPT_S``: ``task:`` what to run, ``file:`` the files it reads by their content, ``result:`` of each cell, ``lease:``
who runs it now. A message carries the name of a task. One that arrives twice finds results or a lease and does nothing;
one that was lost is sent again by the client; a worker that dies loses its lease, and another takes over the task. A
client that dies finds the finished results when it is started again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from celery import Celery
from redis import Redis
from redis.exceptions import RedisError
from redis.sentinel import Sentinel

from lab.experiments.cell import run_cells
from lab.experiments.plan import Cell, Choice, Trace, file_names
from lab.experiments.runner import Ended, write_json
from services.kit import sentinel
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.queue_keys import queue_key
from services.kit.settings import SharedSettings

log = Log(__name__)

QUEUE = "experiments"
TASK = "experiments.cells"
PREFIX = "wattshift:experiments:"
KEPT_S = 86_400
MAX_ATTEMPTS = 3
LONGEST_S = 86_400.0

# Only the holder of a lease may renew it, or write results under it.
_RENEW = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('pexpire', KEYS[1], ARGV[2])"
_WRITE = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #KEYS do redis.call('set', KEYS[i], ARGV[i + 1], 'EX', ARGV[2], 'NX') end
redis.call('del', KEYS[1])
return 1
"""


def connect_blocking(settings: SharedSettings) -> Redis:
    """Return a client for programs without an event loop."""
    tls: dict[str, Any] = settings.tls.redis(settings.redis_url)
    if (found := sentinel.watched(settings.redis_url)) is not None:
        sentinels = Sentinel(found.sentinels, sentinel_kwargs=found.sentinel_options(tls))
        return sentinels.master_for(found.master, **found.user, **found.tls_options(tls))  # pyright: ignore[reportUnknownMemberType]
    return Redis.from_url(settings.redis_url, **tls)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True)
class Task:
    """A group of cells that one simulation serves; results are kept under ``keys``."""

    cells: list[Cell]
    keys: list[str]

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.keys[0]


class Client:
    """Sends cells and collects results."""

    def __init__(self, redis: Redis, celery: Celery, *, poll_s: float = 0.2, resend_s: float = 5.0) -> None:
        self._redis = redis
        self._celery = celery
        self._poll_s = poll_s
        self._resend_s = resend_s

    def run(self, groups: Sequence[list[Cell]], folder: Path) -> Iterator[Ended]:
        """Yield each group once its results are in ``folder``, or why there are none."""
        tasks = {task.name: task for task in (Task(group, [cell.key() for cell in group]) for group in groups)}
        for task in tasks.values():
            self._store(task)
        sent_s = -self._resend_s
        while tasks:
            for task in list(tasks.values()):
                found = self._results(task)
                if found is not None:
                    del tasks[task.name]
                    yield task.cells, self._collect(task, found, folder)
            if tasks and time.monotonic() - sent_s >= self._resend_s:
                self._send_lost(list(tasks))
                sent_s = time.monotonic()
            if tasks:
                time.sleep(self._poll_s)

    def _store(self, task: Task) -> None:
        files: dict[str, str] = {}
        for path in {name for cell in task.cells for name in file_names(cell)}:
            content = Path(path).read_bytes()
            files[path] = hashlib.sha256(content).hexdigest()
            self._redis.set(f"{PREFIX}file:{files[path]}", zlib.compress(content), ex=KEPT_S)
        document = {"cells": [asdict(cell) for cell in task.cells], "keys": task.keys, "files": files}
        self._redis.set(f"{PREFIX}task:{task.name}", json.dumps(document), ex=KEPT_S)

    def _results(self, task: Task) -> list[Any] | None:
        found: Any = self._redis.mget([f"{PREFIX}result:{key}" for key in task.keys])
        return None if None in found else [json.loads(zlib.decompress(each)) for each in found]

    def _collect(self, task: Task, found: list[Any], folder: Path) -> Exception | None:
        failed = next((each["error"] for each in found if "error" in each), None)
        if failed is not None:  # another attempt may do better: a result of that kind is not kept
            self._redis.delete(*(f"{PREFIX}result:{key}" for key in task.keys), f"{PREFIX}attempts:{task.name}")
            return RuntimeError(failed)
        for cell, key, result in zip(task.cells, task.keys, found, strict=True):
            write_json(folder / f"{key}.json", {**result, "inputs": asdict(cell)})
        return None

    def _send_lost(self, names: list[str]) -> None:
        """Send messages for as many tasks as wait without one."""
        held: Any = self._redis.mget([f"{PREFIX}lease:{name}" for name in names])
        idle = [name for name, lease in zip(names, held, strict=True) if lease is None]
        waiting: Any = self._redis.llen(queue_key(QUEUE))
        for name in idle[: max(len(idle) - int(waiting), 0)]:
            self._celery.send_task(TASK, args=[name], queue=QUEUE)


class CellWorker:
    """Runs tasks, one at a time."""

    def __init__(self, redis: Redis, *, lease_s: float) -> None:
        self._redis = redis
        self._lease_ms = int(lease_s * 1_000)
        self._folder = tempfile.TemporaryDirectory(prefix="wattshift-experiments-")

    def run(self, name: str) -> None:
        """Run a task, unless it has its results, another worker runs it, or it is no longer stored."""
        stored: Any = self._redis.get(f"{PREFIX}task:{name}")
        if stored is None:
            return
        document = json.loads(stored)
        keys = [f"{PREFIX}result:{key}" for key in document["keys"]]
        lease, token = f"{PREFIX}lease:{name}", new_id("lease")
        if not self._redis.set(lease, token, px=self._lease_ms, nx=True):
            return
        if self._redis.exists(*keys) == len(keys):
            self._redis.delete(lease)
            return
        attempts: Any = self._redis.incr(f"{PREFIX}attempts:{name}")
        self._redis.expire(f"{PREFIX}attempts:{name}", KEPT_S)
        began_s = time.monotonic()
        with self._kept(lease, token):
            if attempts > MAX_ATTEMPTS:
                results = [{"error": f"{MAX_ATTEMPTS} workers were lost while they ran it"}] * len(keys)
            else:
                results = self._answer(document)
        packed = [zlib.compress(json.dumps(result).encode()) for result in results]
        written = self._redis.eval(_WRITE, 1 + len(keys), lease, *keys, token, KEPT_S, *packed)
        log.info("cells.ended", task=name, cells=len(keys), s=round(time.monotonic() - began_s, 3), written=written)

    def _answer(self, document: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            places = {path: str(self._place(Path(path).name, sha256)) for path, sha256 in document["files"].items()}
            return run_cells([_cell(each, places) for each in document["cells"]])
        except Exception as error:
            log.exception("cells.broke")
            return [{"error": f"{type(error).__name__}: {error}"}] * len(document["cells"])

    def _place(self, name: str, sha256: str) -> Path:
        """Return a file with a content; it keeps its name, which is in reports."""
        path = Path(self._folder.name) / sha256 / name
        if not path.exists():
            content: Any = self._redis.get(f"{PREFIX}file:{sha256}")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(zlib.decompress(content))
        return path

    @contextmanager
    def _kept(self, lease: str, token: str) -> Iterator[None]:
        """Renew the lease until the end of the block."""
        over = threading.Event()

        def keep() -> None:
            while not over.wait(self._lease_ms / 5_000):
                try:
                    self._redis.eval(_RENEW, 1, lease, token, self._lease_ms)
                except RedisError as error:  # results are written only if the lease still stands by then
                    log.warning("lease.not_renewed", error=str(error) or type(error).__name__)

        thread = threading.Thread(target=keep, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _cell(stored: Mapping[str, Any], places: Mapping[str, str]) -> Cell:
    """Return a received cell, with the local paths of its files."""
    choice, trace = Choice(**stored["choice"]), Trace(**stored["trace"])
    forecast = choice.forecast.format(zone=stored["zone"])
    return Cell(
        **{
            **stored,
            "choice": replace(choice, forecast=places.get(forecast, choice.forecast)),
            "trace": replace(trace, jobs=places.get(trace.jobs, trace.jobs)),
            "zone": places.get(stored["zone"], stored["zone"]),
        }
    )
