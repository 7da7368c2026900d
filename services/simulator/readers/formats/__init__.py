"""The job trace formats that can be read, one module each, behind one protocol.

``matches`` looks only at a file's first lines; ``read`` streams it into a collector, which checks and counts. To add a
format, write a module with a class like the others and list it in ``OURS``. Those of papers are in ``lab/readers``.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from services.simulator.raw import Collector
from services.simulator.readers.formats.history import History
from services.simulator.readers.formats.sacct import Sacct


class JobFormat(Protocol):
    """One kind of trace file."""

    name: str

    def matches(self, head: Sequence[str]) -> bool:
        """Return whether the first lines of a file are in this format."""
        ...

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Hand every row to the collector, or drop it with a reason; ``TraceFormatError`` for another format."""
        ...


OURS: tuple[JobFormat, ...] = (Sacct(), History())
