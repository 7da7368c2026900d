"""The job traces that can be read, one module each, behind one protocol.

``matches`` looks at a file's first lines only; ``read`` streams it into a collector, which checks and counts. To add
one: a module with a class like the others, and a place in ``OURS``. Those of papers are in ``lab/readers``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from services.simulator.raw import Collector
from services.simulator.readers.formats.history import History
from services.simulator.readers.formats.sacct import Sacct
from services.simulator.readers.formats.swf import Swf


class JobFormat(Protocol):
    """One kind of trace file."""

    name: str

    def matches(self, head: Sequence[str]) -> bool:
        """Whether the first lines of a file are of this format."""
        ...

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Hand every row to the collector, or drop it with a reason.

        Raises:
            TraceFormatError: the file is of another format.
        """
        ...


OURS: tuple[JobFormat, ...] = (Swf(), Sacct(), History())
