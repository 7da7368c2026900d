"""`python -m tests.simulation.statements`: which faults in what uses the database does the search of the system find.

A program makes them: a guard, a `finally`, a condition of a statement or a row's lock removed, a transaction whose
statements each stand alone, two writes in another order. A seeded sample, in which each room has its share, is planted,
each in a process of its own, and searched for with the scenario `system`; what has to do with batches of requests is
searched for with `batches`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import logging
import random
import re
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

from sqlalchemy import TextClause

from tests.mutation.mutants import Mutant, MutatedFile
from tests.mutation.results import wilson
from tests.simulation import batches, system
from tests.simulation.faults import Outcome, Verdict, apart, changed_lines, is_breached_by, judged, place, plant
from tests.simulation.loop import BreachError
from tests.simulation.plants import PLANTS
from tests.simulation.search import Play, pack, play_once
from tests.support.servers import ROOT

ROOMS: Mapping[str, Sequence[str]] = {
    "scheduler": (
        "services/db/nodes.py",
        "services/db/leadership.py",
        "services/scheduler/ingest/gangs.py",
        "services/scheduler/ingest/reports.py",
        "services/scheduler/planning/apply.py",
        "services/scheduler/planning/snapshot.py",
        "services/scheduler/repository/gangs.py",
        "services/scheduler/repository/jobs.py",
        "services/scheduler/repository/outbox.py",
        "services/scheduler/repository/rounds.py",
        "services/scheduler/repository/snapshots.py",
    ),
    "telemetry": (
        "services/telemetry/ledger.py",
        "services/telemetry/service.py",
        "services/telemetry/repository/corrections.py",
        "services/telemetry/repository/energy.py",
        "services/telemetry/repository/heartbeats.py",
        "services/telemetry/repository/lines.py",
        "services/telemetry/repository/nodes.py",
    ),
    "admission": (
        "services/admission/budgets.py",
        "services/admission/jobs.py",
        "services/admission/steering.py",
        "services/admission/repository/accounts.py",
        "services/admission/repository/budgets.py",
        "services/admission/repository/jobs.py",
        "services/admission/repository/submissions.py",
    ),
    "serving": (
        "services/db/background.py",
        "services/serving/service.py",
        "services/serving/controller/advance.py",
        "services/serving/controller/controller.py",
        "services/serving/planning/plans.py",
        "services/serving/repository/__init__.py",
        "services/serving/repository/instances.py",
        "services/serving/repository/plans.py",
        "services/serving/repository/pools.py",
    ),
    "batches": (
        "services/serving/batches/sending.py",
        "services/serving/batches/service.py",
        "services/serving/batches/worker.py",
        "services/serving/repository/batch_work.py",
        "services/serving/repository/batches.py",
    ),
}
"""The files with faults, by room."""
PLANTED = frozenset(
    {"guard", "order", "finally", "transaction", "lock", "question", "shield", "SQL: condition removed"}
)
TEXTS: Sequence[tuple[str, str, str]] = (
    ("row lock", r"\s+FOR (?:NO KEY )?(?:UPDATE|SHARE)(?: OF \w+)?(?: SKIP LOCKED)?(?=[\s\")])", ""),
    ("row lock", r"\.with_for_update\([^()]*\)", ""),
    ("advisory lock", r"pg_advisory_xact_lock\(", "abs("),
    ("transaction", r"(?<=async with )([\w.]+)\.transaction\(\)(?= as )", r"\1.connection()"),
    (
        "transaction",
        r"(?<=async with )([\w.]+)\.begin\(\)(?= as )",
        r'\1.execution_options(isolation_level="AUTOCOMMIT").begin()',
    ),
)
"""What is taken out of a file's text, where the syntax does not tell: its name, what it looks like, what is left."""

T = TypeVar("T")


def of_file(root: Path, path: str) -> Iterator[tuple[Mutant, str]]:
    """Yield all faults of a file with their sources."""
    file = MutatedFile(root, path, PLANTS)
    for index, mutant in enumerate(file.mutants):
        if mutant.operator in PLANTED and (source := file.source_of(index)) is not None:
            yield mutant, source
    text = (root / path).read_text()
    for name, pattern, left in TEXTS:
        for found in re.finditer(pattern, text):
            line = 1 + text[: found.start()].count("\n") + found.group().startswith("\n")
            source = text[: found.start()] + found.expand(left) + text[found.end() :]
            yield (
                Mutant(path, -1, name, "", line, (line, line), False, (), found.group().strip(), found.expand(left)),
                source,
            )


def drawn(root: Path, only: str, seed: int) -> Iterator[tuple[str, Mutant, str]]:
    """Yield all faults, with their rooms and sources, so that any number one after the other has each room's share."""
    draw = random.Random(seed)
    placed: list[tuple[float, str, Mutant, str]] = []
    for room, paths in ROOMS.items():
        wanted = [path for path in paths if path.startswith(only.partition(":")[0])]
        faults = [each for path in wanted for each in of_file(root, path) if place(each[0]).startswith(only)]
        draw.shuffle(faults)
        first = draw.random()
        placed += [((at + first) / len(faults), room, *each) for at, each in enumerate(faults)]
    for _, room, mutant, source in sorted(placed, key=lambda each: each[:2]):
        yield room, mutant, source


def plant_all(mutant: Mutant, source: str) -> None:
    """Give a module that is loaded the functions and the texts of another source, wherever they are known."""
    module = importlib.import_module(mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    other = ModuleType(module.__name__)
    other.__dict__.update(__file__=module.__file__, __package__=module.__package__)
    exec(compile(source, mutant.path, "exec"), other.__dict__)
    plant(mutant, source)
    for name, old in list(vars(module).items()):
        new = vars(other).get(name)
        if (said := _words(old)) is not None and said != _words(new):
            for each in [*sys.modules.values()]:
                for known, value in list(vars(each).items()) if each.__name__.startswith("services") else ():
                    if value is old:
                        setattr(each, known, new)


def _words(value: Any) -> Any:
    """Return what SQL a constant has; None for anything else."""
    match value:
        case str():
            return value
        case TextClause():
            return value.text
        case tuple() | list():
            return tuple(_words(each) for each in value)  # type: ignore[reportUnknownVariableType]
        case _:
            return None


def look_for(mutant: Mutant, source: str, cpu_s: float) -> Outcome:
    """Plant a fault in a process of its own, and search for it for so long."""

    def with_a_server(work: Callable[[], T]) -> T:
        mine = system.server().again()
        system.server = lambda: mine  # type: ignore[assignment]
        return work()

    def work() -> Outcome:
        plant_all(mutant, source)
        return _search(play, cpu_s)

    play = batches.play if mutant.path in ROOMS["batches"] else system.play

    try:
        outcome = apart(lambda: with_a_server(work))
    except RuntimeError:
        return Outcome("it does not run", 0, 0, 0.0)
    breach = (outcome.breach or "").partition(": ")[0]
    if breach and apart(lambda: with_a_server(lambda: is_breached_by(play, outcome, breach))):
        print(f"WITHOUT THE FAULT, TOO: {mutant.path}:{pack(outcome.made)} {breach}", file=sys.stderr, flush=True)
        return replace(outcome, breach=None)
    return outcome


def _search(play: Play, cpu_s: float) -> Outcome:
    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise BreachError("every step ends", "one takes too long")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s * 1.5 + 10)
    began_s, steps = time.process_time(), 0
    for seed in itertools.count():
        simulation, breach = play_once(play, seed)
        steps += simulation.loop.steps
        took_s = time.process_time() - began_s
        if breach is not None or took_s > cpu_s:
            found = breach and str(breach)[:160]
            choices = simulation.choices
            return Outcome(found, seed + 1, steps, took_s, choices.made, choices.sizes)
    raise AssertionError("there are always more seeds")


def main(arguments: Sequence[str]) -> int:
    """Plant and search; 1 if a smaller share is found than should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.statements", description=__doc__)
    parser.add_argument("--sample", type=int, default=10_000, metavar="N", help="faults, drawn from all (all)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first of what is drawn (0)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--cpu", type=float, default=60.0, metavar="S", help="CPU seconds for each (60)")
    parser.add_argument("--only", default="", metavar="PATH:LINE", help="those whose place begins so")
    parser.add_argument("--least", type=float, default=0.5, metavar="SHARE", help="fail below this share (0.5)")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None  # what processes that were killed have left ends in any order
    everything = list(drawn(ROOT, asked.only, asked.seed))
    wanted = everything[asked.skip : asked.skip + asked.sample]
    play_once(system.play, 0)  # what all processes share is there from now on
    gc.freeze()
    tallies: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])  # found, not found, equivalent
    for room, mutant, source in wanted:
        changed = (ROOT / mutant.path).read_text().splitlines()[changed_lines(mutant.path, source)[0] - 1].strip()
        what = f"{mutant.before} -> {mutant.after}".replace("\n", " ")[:110]
        where = f"{place(mutant)} {mutant.within} [{mutant.operator}] {what}"
        if (judgement := judged(mutant, changed)) is not None:
            tallies[room][2] += 1
            print(f"{Verdict.EQUIVALENT} | {where} | {judgement['why']}", flush=True)
            continue
        outcome = look_for(mutant, source, asked.cpu)
        tallies[room][outcome.breach is None] += 1
        took = f"{outcome.cpu_s:.1f} CPU s, {outcome.runs} schedules, {outcome.steps:,} steps"
        print(f"{outcome.breach or 'NOT FOUND'} | {took} | {where}", flush=True)
    for room, (found, missed, equivalent) in tallies.items():
        print(f"{room}: {found} found, {missed} not found, {equivalent} equivalent")
    found, missed, equivalent = (sum(each) for each in zip(*tallies.values(), strict=True))
    share = found / max(found + missed, 1)
    low, high = wilson(found, found + missed)
    print(
        f"{found + missed + equivalent} of {len(everything)} faults drawn with seed {asked.seed}, {equivalent} of them "
        f"judged equivalent; {found} of the other {found + missed} found within {asked.cpu:g} CPU seconds each: "
        f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f} %)"
    )
    return int(share < asked.least)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
