"""`./test --mutants`: a seeded sample of mutants, the share that the tests kill, and what survived."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutation import results
from tests.mutation.mutants import MutatedFile, files_of, sample
from tests.mutation.results import Result
from tests.mutation.running import copy_of, run
from tests.mutation.selection import CoverageMap

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ("services/telemetry/ledger.py", "services/telemetry/repository/energy.py")
SCOPE = ("services/core", "services/scheduler", *LEDGER)
SOURCES = ("services/core", "services/scheduler", "services/telemetry")
FOLDERS = ("unit", "properties", "parity", "golden", "agreement", "scheduler", "telemetry", "simulator")
TESTS = tuple(f"tests/{folder}" for folder in FOLDERS)
"""Tests of these rooms that run in their own process; those of whole installations start others, and are not asked."""
MAP_OPTIONS = ("--dist", "loadfile", "-m", "not slow")


def main(arguments: Sequence[str]) -> int:
    """Run; 1 if the share that is killed is below `--least`."""
    parser = argparse.ArgumentParser(prog="test --mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--sample", type=int, default=450, metavar="N", help="mutants, uniformly from the scope (450)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="not the sample's first N")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="at a time (2)")
    parser.add_argument("--budget", type=float, default=60.0, metavar="S", help="seconds of tests per mutant (60)")
    parser.add_argument("--least", type=float, default=0.85, metavar="SHARE", help="fail below this share (0.85)")
    parser.add_argument("--survivors", action="store_true", help="only what survived the last time")
    parser.add_argument("--data", type=Path, default=ROOT / ".mutation", help="where map and results lie (.mutation)")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="tests that may kill")
    parser.add_argument("scope", nargs="*", default=SCOPE, help=f"files and folders ({' '.join(SCOPE)})")
    options = parser.parse_args(arguments)
    options.data.mkdir(parents=True, exist_ok=True)
    with copy_of(ROOT) as root:  # as it stands now, whatever is edited while this runs
        return _run(root, options)


def _run(root: Path, options: argparse.Namespace) -> int:
    started_s = time.monotonic()
    tests = CoverageMap(root, options.data, SOURCES, [path for path in options.tests if (root / path).exists()])
    tests.bring_up_to_date([*MAP_OPTIONS, "-n", str(options.workers)])
    print(f"{len(tests.names)} tests mapped in {time.monotonic() - started_s:.0f} s", flush=True)

    files = [MutatedFile(root, path) for path in files_of(root, options.scope)]
    everything = sum(len(file.mutants) for file in files)
    wanted = list(sample(files, options.sample, options.seed))[options.skip :]
    kept: list[Result] = []
    last = options.data / "results.json"
    if options.survivors:
        earlier = {result.mutant: result for result in results.read(last)}
        kept = [earlier[mutant] for mutant, _ in wanted if mutant in earlier and earlier[mutant].killed_by]
        wanted = [(mutant, source) for mutant, source in wanted if mutant not in {one.mutant for one in kept}]

    def report(result: Result) -> None:
        mutant = result.mutant
        outcome = f"killed by {result.killed_by}" if result.killed_by else f"SURVIVED {result.n_tests} tests"
        print(f"{mutant.path}:{mutant.line} [{mutant.operator}] {outcome} ({result.seconds:.1f} s)", flush=True)

    found = kept + run(root, wanted, tests, workers=options.workers, budget_s=options.budget, report=report)
    results.write(last, found)
    print(f"\n{results.survivors(found)}\n\n{results.table(found)}\n")
    print(f"seed {options.seed}: {len(found)} of {everything} mutants, {time.monotonic() - started_s:.0f} s in all")
    return int(results.share(found) < options.least)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
