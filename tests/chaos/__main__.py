"""``python -m tests.chaos``: the campaign, which ends with one line of faults, breaches and seed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.campaign import STORM_S, Outcome, campaign
from tests.support.forked import forked_by_the_supervisor
from tests.support.servers import scratch_folder


def main(arguments: Sequence[str]) -> int:
    """Run a campaign; 0 if nothing was breached, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="test --chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="of a campaign to be seen again; by default a new one")
    parser.add_argument("--minutes", type=float, default=10.0, help="no storm begins later (default 10)")
    parser.add_argument("--storm-seconds", type=float, default=STORM_S, help=f"length of a storm (default {STORM_S:g})")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    with scratch_folder() as folder, forked_by_the_supervisor():
        outcome = asyncio.run(
            campaign(
                folder, seed, options.minutes, storm_s=options.storm_seconds, tell=lambda line: print(line, flush=True)
            )
        )
        if outcome.breaches:
            kept = _keep_logs(folder)
            print(*outcome.breaches, f"the processes' logs are in {kept}", sep="\n")
    print(summary(outcome, seed))
    return int(bool(outcome.breaches))


def summary(outcome: Outcome, seed: int) -> str:
    """Return the line that a campaign ends with."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in outcome.faults.most_common())
    return (
        f"chaos: {outcome.faults.total()} faults ({kinds}) while {outcome.jobs} jobs ran and "
        f"{outcome.requests.total()} requests were made, {len(outcome.breaches)} breaches, seed {seed}"
    )


def _keep_logs(folder: Path) -> Path:
    kept = Path(tempfile.mkdtemp(prefix="wattshift-chaos-"))
    for log in folder.rglob("*.log"):
        with contextlib.suppress(OSError):
            shutil.copyfile(log, kept / f"{log.parent.name}-{log.name}")
    return kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
