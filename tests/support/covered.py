"""How much of each folder the tests ran, from what pytest-cov has just written: `python -m tests.support.covered`."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).resolve().parents[2]
UNDER_SERVICES = 2
"""Parts of a path that name a room beneath `services`; elsewhere it is the first alone."""


def main() -> None:
    """Print a line per room and one for all."""
    coverage = Coverage()
    coverage.load()
    rooms: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file in coverage.get_data().measured_files():
        parts = Path(file).relative_to(ROOT).parts
        _, statements, _, missing, _ = coverage.analysis2(file)
        for room in ("/".join(parts[: UNDER_SERVICES if parts[0] == "services" else 1]), "all"):
            rooms[room][0] += len(statements)
            rooms[room][1] += len(statements) - len(missing)
    print("lines that the tests ran, in their own process and in those they started in good order")
    for room, (lines, ran) in sorted(rooms.items(), key=lambda each: (each[0] == "all", each[0])):
        print(f"{100 * ran / max(lines, 1):6.1f} % of {lines:6}  {room}")


if __name__ == "__main__":
    sys.exit(main())
