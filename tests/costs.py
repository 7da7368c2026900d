"""What each folder of tests costs, against what it cost when that was written down: `./test` fails on one that grew.

A cost is CPU seconds in user mode of the tests of a folder, as ``tests/support/folder_times.py`` counts them, in those
that ten million turns of ``total += i * i`` took in the same run and the same processes. Machines differ in more than
that loop: by how much is the median of all folders' growth, and a folder has grown if it did by half more than that.
All together may cost twice as much. `python -m tests.costs` writes down what the last whole run found, where a folder
is meant to cost more.
"""

from __future__ import annotations

import json
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

KEPT = Path(__file__).parent / "costs.toml"
LAST = Path(".pytest_cache", "v", "wattshift-costs.json")
MOST_GROWTH, MOST_OF_ALL = 1.5, 2.0
LEAST = 20.0
"""Below this cost a folder may grow as it likes: what several tests share moves between folders with their order."""

_HEAD = "# User seconds by folder of tests, in those of ten million turns of a loop; made by `python -m tests.costs`.\n"


def grown(found: Mapping[str, float], kept: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each folder that has grown, or that nobody has written down, and one if all have."""
    known = [cost / kept[folder] for folder, cost in found.items() if min(cost, kept.get(folder, 0.0)) > LEAST]
    all_s = statistics.median(known) if known else 1.0
    if all_s > MOST_OF_ALL:
        yield f"folders cost {all_s:.1f} times what is written down, in the median"
    for folder, cost in sorted(found.items()):
        before = max(kept.get(folder, 0.0), LEAST / MOST_GROWTH)
        if cost > LEAST and cost > MOST_GROWTH * max(all_s, 1.0) * before:
            said = f"{kept[folder]:.0f}" if folder in kept else "nothing"
            yield f"{folder} costs {cost:.0f} times the reference loop, and is written down with {said}"


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
    known = tomllib.loads(KEPT.read_text()) if KEPT.exists() else {}
    costs = {folder: cost for folder, cost in known.items() if Path(folder).is_dir()} | json.loads(LAST.read_text())
    KEPT.write_text(_HEAD + "".join(f'"{folder}" = {cost:.1f}\n' for folder, cost in sorted(costs.items())))


if __name__ == "__main__":
    main()
