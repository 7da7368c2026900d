"""What each folder of tests costs, against what it cost when that was written down: `./test` fails on one that grew.

A cost is CPU seconds of the tests of a folder, as ``tests/support/folder_times.py`` counts them, divided by those that
ten million turns of ``total += i * i`` took in the same run and the same processes, so that it says much the same on
any machine. `python -m tests.costs` writes down what the last whole run found, where a folder is meant to cost more.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

KEPT = Path(__file__).parent / "costs.toml"
LAST = Path(".pytest_cache", "v", "wattshift-costs.json")
MOST_GROWTH = 1.5
LEAST = 20.0
"""Below this cost a folder may grow as it likes: what several tests share moves between folders with their order."""

_HEAD = "# CPU seconds by folder of tests, in those of ten million turns of a loop; made by `python -m tests.costs`.\n"


def grown(found: Mapping[str, float], kept: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each folder that costs half as much again as it did, or that nobody has written down."""
    for folder, cost in sorted(found.items()):
        if cost > LEAST and cost > MOST_GROWTH * max(kept.get(folder, 0.0), LEAST / MOST_GROWTH):
            before = f"{kept[folder]:.0f}" if folder in kept else "nothing"
            yield f"{folder} costs {cost:.0f} times the reference loop, and is written down with {before}"


def failed() -> bool:
    """Say which folders have grown by the last run; return whether any has."""
    if not LAST.is_file():
        return False
    found = list(grown(json.loads(LAST.read_text()), tomllib.loads(KEPT.read_text())))
    for each in found:
        print(f"test: {each}: make it cheaper, or say why in a commit of `python -m tests.costs`", file=sys.stderr)
    return bool(found)


def main() -> None:
    """Write down what the last run found."""
    costs = json.loads(LAST.read_text())
    KEPT.write_text(_HEAD + "".join(f'"{folder}" = {cost:.1f}\n' for folder, cost in sorted(costs.items())))


if __name__ == "__main__":
    main()
