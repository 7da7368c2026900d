"""Count what was killed: the share with its interval, by folder and by operator, and what survived."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutation.mutants import Mutant

Z_95 = 1.959964


@dataclass(frozen=True)
class Result:
    """What became of one mutant.

    Attributes:
        mutant: It.
        n_tests: How many tests could have noticed it, as far as the budget goes.
        killed_by: The first test that failed, or how else it failed; None if it survived.
        seconds: How long that took.
    """

    mutant: Mutant
    n_tests: int
    killed_by: str | None
    seconds: float


def wilson(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Return Wilson's score interval of a share, at 95 % unless `z` says otherwise; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share, square = successes / trials, z * z / trials
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def share(results: Sequence[Result]) -> float:
    """Return the share that was killed, 0 to 1; 0 of none."""
    return sum(result.killed_by is not None for result in results) / max(len(results), 1)


def folder_of(result: Result) -> str:
    """Return the folder a mutant counts for: `services/core/policies`, `services/scheduler`, ..."""
    parts = Path(result.mutant.path).parts
    return "/".join(parts[: 3 if parts[1:2] == ("core",) else 2])


def family_of(result: Result) -> str:
    """Return the kind of change a mutant is."""
    return "SQL" if result.mutant.operator.startswith("SQL") else result.mutant.operator


def table(results: Sequence[Result]) -> str:
    """Return Markdown: killed of how many, by folder, by kind of change, and in all."""
    rows = ["| | mutants | killed | share | 95 % interval |", "|---|---:|---:|---:|---:|"]
    for key in (folder_of, family_of):
        rows += [_row(name, group) for name, group in _grouped(results, key)]
    rows.append(_row("without argument removal", [one for one in results if one.mutant.operator != "arg removal"]))
    rows.append(_row("**all**", results))
    return "\n".join(rows)


def survivors(results: Iterable[Result]) -> str:
    """Return one line for each mutant that survived."""
    lines: list[str] = []
    for result in sorted(results, key=lambda one: (one.mutant.path, one.mutant.line)):
        mutant = result.mutant
        if result.killed_by is None:
            before, after = (" ".join(text.split()) for text in (mutant.before, mutant.after))
            where = f"{mutant.path}:{mutant.line} {mutant.within}"
            lines.append(f"{where} [{mutant.operator}, {result.n_tests} tests]\n    {before}\n -> {after}")
    return "\n".join(lines)


def write(path: Path, results: Sequence[Result]) -> None:
    """Write results as JSON."""
    path.write_text(json.dumps([asdict(result) for result in results], indent=1))


def read(path: Path) -> list[Result]:
    """Read what `write` wrote."""
    found: list[Result] = []
    for each in json.loads(path.read_text()):
        mutant = each.pop("mutant")
        mutant["lines"], mutant["names"] = tuple(mutant["lines"]), tuple(mutant["names"])
        found.append(Result(mutant=Mutant(**mutant), **each))
    return found


def _grouped(results: Sequence[Result], key: Callable[[Result], str]) -> list[tuple[str, list[Result]]]:
    return [(name, [one for one in results if key(one) == name]) for name in sorted({key(one) for one in results})]


def _row(name: str, results: Sequence[Result]) -> str:
    killed = sum(result.killed_by is not None for result in results)
    low, high = wilson(killed, len(results))
    return (
        f"| {name} | {len(results)} | {killed} | {100 * share(results):.1f} % | {100 * low:.1f} to {100 * high:.1f} % |"
    )
