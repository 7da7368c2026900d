"""`python -m tests.simulation.faults`: which of the faults that a program plants does the search find, and how soon.

A fault is one thing that is easily forgotten: a guard, the question whether a future is done or a task cancelled, a
lock, a transaction, a ``finally``, a ``shield``, the order of two effects. All of a file are made from its source by
``plants``; a seeded sample of them, in which each room has its share, is planted, each in a process of its own, and
searched for with the scenarios that run the file. A schedule is the same up to the first line that a fault changes, so
that only those that come to it are run. What ``equivalent.toml`` lists changes nothing that could be seen, for the
reason that stands there.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
import tomllib
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from tests.mutation.mutants import Mutant, MutatedFile
from tests.mutation.results import wilson
from tests.simulation.loop import BreachError
from tests.simulation.plants import PLANTS
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.search import play_once
from tests.support.servers import ROOT

ROOMS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "router": {
        "services/router/lanes.py": ("router",),
        "services/router/dispatch.py": ("router",),
        "services/router/answers.py": ("router",),
        "services/router/upstream.py": ("router",),
        "services/router/breaker.py": ("router", "apps"),
        "services/router/gate.py": ("router",),
    },
    "apps": {
        "services/router/apps/queue.py": ("apps",),
        "services/router/apps/assignment.py": ("apps",),
        "services/router/apps/coordination.py": ("apps",),
        "services/router/apps/remote.py": ("apps",),
    },
    "edge": {
        "services/kit/edge/exchange.py": ("router", "edge"),
        "services/kit/edge/bodies.py": ("router",),
        "services/kit/edge/keys.py": ("keys", "edge"),
        "services/kit/edge/limits.py": ("edge", "router"),
        "services/kit/edge/shared_limits.py": ("edge",),
    },
    "admission": {
        "gateway/gather.py": ("submissions",),
        "services/admission/commits.py": ("submissions",),
        "services/admission/webhooks/sending.py": ("webhooks",),
    },
    "telemetry": {"services/telemetry/batches.py": ("reports",)},
    "scheduler": {"services/scheduler/relay.py": ("node",)},
    "serving": {"services/serving/controller/server_jobs.py": ("serving",)},
    "agent": {
        "services/kit/command_stream.py": ("node",),
        "services/kit/control_plane.py": ("node",),
        "services/kit/tasks.py": ("node", "apps"),
        "gpu_agent/inbox.py": ("node",),
        "gpu_agent/spool.py": ("node",),
        "gpu_agent/gangs.py": ("node",),
        "gpu_agent/ranks.py": ("node",),
        "gpu_agent/reporting.py": ("node",),
        "gpu_agent/controls.py": ("node",),
        "gpu_agent/meter.py": ("node",),
    },
}
"""The files with faults by room, and the scenarios that run each."""
SCENARIOS_OF = {path: names for files in ROOMS.values() for path, names in files.items()}
ROOM_OF = {path: room for room, files in ROOMS.items() for path in files}
KNOWN = (
    (
        "services/router/dispatch.py",
        'may_repeat = failure.may_repeat or (received.asked.may_repeat and failure.reason == "closed")',
        "may_repeat = True",
    ),
    (
        "services/serving/controller/server_jobs.py",
        "idempotency_key=each.id",
        'idempotency_key=__import__("secrets").token_hex()',
    ),
)
"""Faults that no campaign of chaos found (docs/reliability.md): a file, what stands there, what takes its place."""
JUDGED = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())["equivalent"]
ROUND = 25
"""Schedules of a scenario before the next one's turn."""
MOST_SCHEDULES, MOST_TRACING_CPU_S = 400, 20.0
"""Of a scenario, whose lines are noted before faults are planted."""


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: by what it was found, after how many schedules, steps and CPU seconds; or it was not."""

    breach: str | None
    runs: int
    steps: int
    cpu_s: float


@dataclass
class Lines:
    """Which schedules of a scenario come to which lines of the files with faults.

    Attributes:
        seeds: Of all schedules whose lines were noted: those below this one.
        by_line: Seeds by file and line.
    """

    seeds: int = 0
    by_line: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list[int]))

    def seeds_of(self, path: str, changed: Iterable[int]) -> Iterator[int]:
        """Yield seeds that may come to a changed line: those that are known to first, then all that nobody tried."""
        known = {seed for line in changed for seed in self.by_line.get((path, line), ())}
        yield from sorted(known)
        yield from itertools.count(self.seeds)


def lines_of(name: str, cpu_s: float) -> Lines:
    """Run schedules of a scenario for so long, and note the lines."""
    lines = Lines()
    wanted = {str(ROOT / path): path for path in SCENARIOS_OF}
    seen: set[tuple[str, int]] = set()

    def in_file(frame: FrameType, event: str, _: Any) -> Any:
        seen.add((wanted[frame.f_code.co_filename], frame.f_lineno))
        return in_file

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        return in_file(frame, event, _) if frame.f_code.co_filename in wanted else None

    end_s = time.process_time() + cpu_s
    while lines.seeds < MOST_SCHEDULES and time.process_time() < end_s:
        seen.clear()
        sys.settrace(at_call)
        try:
            play_once(SCENARIOS[name], lines.seeds)
        finally:
            sys.settrace(None)
        for each in seen:
            lines.by_line[each].append(lines.seeds)
        lines.seeds += 1
    return lines


def in_order(root: Path, only: str, seed: int) -> Iterator[tuple[Mutant, str]]:
    """Yield all faults with their sources, drawn so that any number one after the other has each room's share."""
    files = [MutatedFile(root, path, PLANTS) for path in SCENARIOS_OF if path.startswith(only.partition(":")[0])]
    by_room: dict[str, list[tuple[MutatedFile, int]]] = defaultdict(list)
    for file in files:
        for index, each in enumerate(file.mutants):
            if place(each).startswith(only):
                by_room[ROOM_OF[each.path]].append((file, index))
    drawn = random.Random(seed)
    placed: list[tuple[float, str, MutatedFile, int]] = []
    for room, faults in by_room.items():
        drawn.shuffle(faults)
        first = drawn.random()
        placed += [((at + first) / len(faults), room, *each) for at, each in enumerate(faults)]
    for *_, file, index in sorted(placed, key=lambda each: each[:2]):
        if (source := file.source_of(index)) is not None:
            yield file.mutants[index], source


def known(root: Path) -> Iterator[tuple[Mutant, str]]:
    """Yield the faults of ``KNOWN`` with the sources that have them."""
    for path, before, after in KNOWN:
        text = (root / path).read_text()
        assert before in text, f"{path} has no longer {before}"
        line = 1 + text[: text.index(before)].count("\n")
        mutant = Mutant(path, -1, "known", "", line, (line, line), False, (), before, after)
        yield mutant, text.replace(before, after)


def look_for(mutant: Mutant, source: str, lines: Mapping[str, Lines], cpu_s: float) -> Outcome:
    """Plant a fault in a process of its own, and search for it for so long."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(here)
            plant(mutant, source)
            changed = _changed(mutant.path, source)
            seeds = {name: lines[name].seeds_of(mutant.path, changed) for name in SCENARIOS_OF[mutant.path]}
            outcome = _search(seeds, cpu_s)
            os.write(there, json.dumps([outcome.breach, outcome.runs, outcome.steps, outcome.cpu_s]).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here) as file:
        told = file.read()
    os.waitpid(child, 0)
    return Outcome(*json.loads(told))


def _changed(path: str, source: str) -> range:
    """Return the numbers of the lines that a fault changes, as they were."""
    before, after = (ROOT / path).read_text().splitlines(), source.splitlines()
    pairs = list(zip(before, after, strict=False))
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    backwards = zip(reversed(before), reversed(after), strict=False)
    last = len(before) - next(at for at, (one, other) in enumerate(backwards) if one != other)
    return range(same + 1, max(last, same + 1) + 1)


def plant(mutant: Mutant, source: str) -> None:
    """Give the functions of a module that is loaded the code of another source."""
    module = importlib.import_module(mutant.path.removesuffix(".py").replace("/", "."))
    made = {each.co_qualname: each for each in _codes(compile(source, mutant.path, "exec"))}
    planted: set[str] = set()
    for function in _functions(module):
        if (code := made.get(function.__code__.co_qualname)) is not None:
            function.__code__ = code
            planted.add(code.co_qualname)
    assert not mutant.within or any(f"{mutant.within}.".startswith(f"{each}.") for each in planted), mutant


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _functions(module: Any) -> Iterator[FunctionType]:
    """Yield the functions and methods of a module, also those behind properties and decorators."""
    owners = [module, *(each for each in vars(module).values() if inspect.isclass(each))]
    for owner in owners:
        for each in list(vars(owner).values()):
            each = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
            each = inspect.unwrap(each) if callable(each) else None
            if isinstance(each, FunctionType) and each.__module__ == module.__name__:
                yield each


def _search(seeds: Mapping[str, Iterator[int]], cpu_s: float) -> Outcome:
    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise BreachError("every step ends", "one takes too long")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s * 1.5 + 10)
    began_s, runs, steps = time.process_time(), 0, 0
    for name in itertools.cycle(seeds):
        for seed in itertools.islice(seeds[name], ROUND):
            simulation, breach = play_once(SCENARIOS[name], seed)
            runs, steps = runs + 1, steps + simulation.loop.steps
            took_s = time.process_time() - began_s
            if breach is not None or took_s > cpu_s:
                return Outcome(breach and f"{name}: {breach.name}", runs, steps, took_s)
    raise AssertionError("there are always more seeds")


def judged(mutant: Mutant, what: str) -> str | None:
    """Return why a fault changes nothing that could be seen; None if that was not said of it."""
    this = {"path": mutant.path, "within": mutant.within, "operator": mutant.operator, "what": what}
    return next((each["why"] for each in JUDGED if this == {name: each[name] for name in this}), None)


def main(arguments: Sequence[str]) -> int:
    """Plant and search; 1 if a smaller share is found than should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.faults", description=__doc__)
    parser.add_argument("--sample", type=int, default=10_000, metavar="N", help="faults, drawn from all (all)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first of what is drawn (0)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--cpu", type=float, default=60.0, metavar="S", help="CPU seconds for each (60)")
    parser.add_argument("--only", default="", metavar="PATH:LINE", help="those whose place begins so")
    parser.add_argument("--least", type=float, default=0.95, metavar="SHARE", help="fail below this share (0.95)")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    drawn = itertools.islice(in_order(ROOT, asked.only, asked.seed), asked.skip, asked.skip + asked.sample)
    wanted = [*(each for each in known(ROOT) if place(each[0]).startswith(asked.only)), *drawn]
    names = {name for mutant, _ in wanted for name in SCENARIOS_OF[mutant.path]}
    lines = {name: lines_of(name, min(MOST_TRACING_CPU_S, asked.cpu * len(wanted) / 30)) for name in sorted(names)}
    gc.freeze()
    tallies: dict[str, list[int]] = {room: [0, 0, 0] for room in ROOMS}  # found, not found, equivalent
    for mutant, source in wanted:
        what = (ROOT / mutant.path).read_text().splitlines()[_changed(mutant.path, source)[0] - 1].strip()
        where = f"{place(mutant)} {mutant.within} [{mutant.operator}] {what}"
        if (why := judged(mutant, what)) is not None:
            tallies[ROOM_OF[mutant.path]][2] += 1
            print(f"equivalent | {where} | {why}", flush=True)
            continue
        outcome = look_for(mutant, source, lines, asked.cpu)
        tallies[ROOM_OF[mutant.path]][outcome.breach is None] += 1
        took = f"{outcome.cpu_s:.1f} CPU s, {outcome.runs} schedules, {outcome.steps:,} steps"
        print(f"{outcome.breach or 'NOT FOUND'} | {took} | {where}", flush=True)
    for room, (found, missed, equivalent) in tallies.items():
        print(f"{room}: {found} found, {missed} not found, {equivalent} equivalent")
    found, missed, equivalent = (sum(each) for each in zip(*tallies.values(), strict=True))
    share = found / max(found + missed, 1)
    low, high = wilson(found, found + missed)
    cpu_s = sum(os.times()[:4])
    print(
        f"{found + missed + equivalent} faults drawn with seed {asked.seed}, {equivalent} of them judged equivalent; "
        f"{found} of the other {found + missed} found within {asked.cpu:g} CPU seconds each: "
        f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f} %); {cpu_s:,.0f} CPU seconds"
    )
    return int(share < asked.least)


def place(mutant: Mutant) -> str:
    """Return where a fault is."""
    return f"{mutant.path}:{mutant.line}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
