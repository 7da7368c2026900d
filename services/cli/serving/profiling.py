"""What profiling jobs have in common: their program's text, and the readings of their GPUs meanwhile."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from services.cli.serving import own_server
from services.core.accounting.meters import UNKNOWN_HOST_W, Bound, Counter, advance, board_most_w


@dataclass(frozen=True)
class Reading:
    """An agent's reading of a GPU."""

    at_s: float  #: When, by the node's clock, UTC seconds
    power_w: float
    energy_j: float | None
    clock_mhz: int | None


def program(module: ModuleType) -> str:
    """Return the text of a job's program: that of ``own_server`` before a module's own, which then imports nothing."""
    parts = [Path(str(each.__file__)).read_text(encoding="utf-8") for each in (own_server, module)]
    lines = [line for part in parts for line in part.splitlines()]
    ours = ("from __future__", f"from {own_server.__name__}")
    return "\n".join(["from __future__ import annotations", *(line for line in lines if not line.startswith(ours))])


def reading_of(node: dict[str, Any], gpu: int) -> Reading | None:
    """Return the newest reading of a GPU from what the API says about its node; None if there is none."""
    found = next((each for each in node["readings"] if each["index"] == gpu), None)
    if found is None or found.get("read_at") is None:
        return None
    at_s = datetime.fromisoformat(found["read_at"]).timestamp()
    return Reading(at_s, found["power_w"], found.get("energy_j"), found.get("clock_mhz"))


def mean_power_w(readings: Sequence[Reading], gpu: str) -> float:
    """Return the mean power between the first and the last reading, by the energy counter where there is one.

    Where the counter shows more than the board can have drawn, the sampled power is used instead.
    """
    elapsed_s = readings[-1].at_s - readings[0].at_s
    counters = [each.energy_j for each in readings if each.energy_j is not None]
    if len(counters) == len(readings) and elapsed_s > 0:
        bound = Bound(board_most_w(gpu, [None]) or UNKNOWN_HOST_W)  # of an unknown board, what no whole host draws
        counter, energy_j = Counter.first(counters[0], readings[0].at_s), 0.0
        for (before, after), shown_j in zip(pairwise(readings), counters[1:], strict=True):
            counter, booked = advance(counter, bound, shown_j, after.at_s, (before.power_w + after.power_w) / 2)
            energy_j += booked.energy_j
        return energy_j / elapsed_s
    return sum(each.power_w for each in readings) / len(readings)


def printed(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects that a program printed, a line each; what is none is left out."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            each = json.loads(line)
        except ValueError:
            continue
        if isinstance(each, dict):
            found.append(each)
    return found
