"""Metrics over the processes that share a port: whichever is asked answers for all.

Each process writes its counts to a file of its own once a second, and before it answers. Only what is in a file is
shown, so that no counter goes back when a process is killed: its file stays until the supervising process adds it to
those of others that have ended. When all of them end, counting begins anew.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson

from services.router.metrics import Gauge, Labels, Metrics

ENDED = "ended.json"


class MetricsFolder:
    """The files of the processes that share a port."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        """Forget what earlier processes counted."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(parents=True)

    def write(self, process: str, metrics: Metrics, gauges: Sequence[Gauge]) -> None:
        """Write what a process has counted."""
        document = {
            "counts": {name: found.amounts() for name, found in metrics.all().items()},
            "gauges": {gauge.name: list(gauge.values.items()) for gauge in gauges},
        }
        self._replace(f"{process}.json", document)

    def read(self, gauges: Iterable[Gauge]) -> tuple[Metrics, list[Gauge]]:
        """Return the counts of all processes together; gauges' names and help texts are taken from those given."""
        files = {path.name: _read(path) for path in sorted(self._path.glob("*.json")) if path.name != ENDED}
        ended = _read(self._path / ENDED)  # after the others: what was added to it meanwhile is counted once
        names = set(ended.get("processes", ()))
        live = [document for name, document in files.items() if document and name not in names]
        total = Metrics()
        for document in (ended, *live):
            _add(total, document)
        return total, [_together(gauge, live) for gauge in gauges]

    def end(self, process: str) -> None:
        """Add the counts of a process that has ended to those of others that have."""
        path = self._path / f"{process}.json"
        ended, document = _read(self._path / ENDED), _read(path)
        if not document:
            return
        total = Metrics()
        _add(total, ended)
        _add(total, document)
        self._replace(
            ENDED,
            {
                "counts": {name: found.amounts() for name, found in total.all().items()},
                "processes": [*ended.get("processes", ()), path.name],
            },
        )
        path.unlink()

    def _replace(self, name: str, document: dict[str, Any]) -> None:
        path = self._path / name
        temporary = path.with_name(f"{name}.{os.getpid()}")
        temporary.write_bytes(orjson.dumps(document))
        temporary.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}


def _add(total: Metrics, document: dict[str, Any]) -> None:
    known = total.all()
    counts: dict[str, list[Any]] = document.get("counts", {})
    for name, rows in counts.items():
        for labels, amounts in rows if name in known else ():  # an older release had others
            known[name].merge(tuple(labels), amounts)


def _together(gauge: Gauge, documents: Iterable[dict[str, Any]]) -> Gauge:
    values: dict[Labels, float] = {}
    for document in documents:
        for given, value in cast("list[tuple[list[str], float]]", document["gauges"].get(gauge.name, ())):
            labels = tuple(given)
            before = values.get(labels, 0.0)
            values[labels] = before + value if gauge.is_summed else max(before, value)
    return replace(gauge, values=values)
