"""`./test --simulate`: search on, with other seeds, until the time is over; or repeat what a token says."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time

from tests.simulation.scenarios import ALL
from tests.simulation.search import Found, Tally, play_once, search, unpack

ROUND_SEEDS, ROUND_CPU_S = 500, 20.0


def main(arguments: list[str]) -> int:
    """Search, or repeat; return the exit status."""
    parser = argparse.ArgumentParser(prog="test --simulate", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of CPU time, shared by the scenarios (1)")
    parser.add_argument("--seed", type=int, default=None, help="of the first schedule (drawn if not given)")
    parser.add_argument("--only", choices=sorted(ALL), help="search one scenario")
    parser.add_argument("--token", help="repeat one schedule, as a failure printed it")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if asked.token:
        return _repeat(parser, asked.token)
    first = random.SystemRandom().randrange(1 << 40) if asked.seed is None else asked.seed
    names = [asked.only] if asked.only else sorted(ALL)
    tallies = {name: Tally() for name in names}
    found: list[Found] = []
    end_s, round_ = time.process_time() + 60 * asked.minutes, 0
    while not found and time.process_time() < end_s:
        for name in names:
            at = first + round_ * ROUND_SEEDS
            left_s = min(end_s - time.process_time(), ROUND_CPU_S)
            result = search(name, ALL[name], range(at, at + ROUND_SEEDS), tallies[name], cpu_s=left_s)
            found += [result] if result else []
        round_ += 1
    for name, tally in tallies.items():
        rate = tally.steps / tally.cpu_s if tally.cpu_s else 0.0
        print(f"{name}: {tally.runs:,} schedules, {tally.steps:,} steps, {rate:,.0f} steps per CPU second")
    for each in found:
        print(f"BREACH after {each.steps} steps: {each.breach}\n  ./test --simulate --token {each.token}")
    total = sum(tally.steps for tally in tallies.values())
    print(f"simulate: {total:,} steps, {len(found)} breaches, seed {first}")
    return 1 if found else 0


def _repeat(parser: argparse.ArgumentParser, token: str) -> int:
    name, _, packed = token.partition(":")
    if name not in ALL:
        parser.error(f"a token begins with one of {', '.join(sorted(ALL))} and a colon")
    try:
        choices = unpack(packed)
    except ValueError as error:
        parser.error(str(error))
    simulation, breach = play_once(ALL[name], choices)
    print(f"{name}: {simulation.loop.steps} steps, {breach or 'no breach'}")
    return 1 if breach else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
