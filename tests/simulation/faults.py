"""`python -m tests.simulation.faults`: which of the faults that a program plants does the search find, and how soon.

A fault is one thing that is easily forgotten: a guard, the question whether a future is done or a task cancelled, a
lock, a transaction, a ``finally``, a ``shield``, the order of two effects. All of a file are made from its source by
``plants``; a seeded sample of them, in which each room has its share, is planted, each in a process of its own, and
searched for with the scenarios that run the file: first with schedules that come to it (``reach``), then with others,
and with such as begin like one that comes to it. What ``equivalent.toml`` lists changes nothing that could be seen, for
the reason that stands there; what is marked ``proposed`` nobody has judged yet but whoever wrote it, and is counted
apart.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import functools
import gc
import importlib
import inspect
import itertools
import logging
import os
import pickle
import random
import signal
import sys
import time
import tomllib
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

from tests.mutation.mutants import Mutant, MutatedFile
from tests.mutation.results import wilson
from tests.simulation import reach
from tests.simulation.loop import BreachError, Choices, Simulation
from tests.simulation.plants import PLANTS
from tests.simulation.reach import Reached
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.search import Play, pack, play_once
from tests.support.servers import ROOT

ROOMS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "router": {
        "services/router/lanes.py": ("router", "crowd", "limits", "picking"),
        "services/router/dispatch.py": ("router", "crowd", "limits", "picking"),
        "services/router/answers.py": ("router", "limits", "picking"),
        "services/router/upstream.py": ("router",),
        "services/router/breaker.py": ("router", "crowd", "apps"),
        "services/router/gate.py": ("router", "limits", "budgets"),
        "services/router/picking/picker.py": ("picking",),
        "services/router/picking/protocol.py": ("picking",),
    },
    "apps": {
        "services/router/apps/queue.py": ("apps",),
        "services/router/apps/coordination.py": ("apps",),
        "services/router/apps/remote.py": ("apps",),
    },
    "kueue": {
        "services/engines/kueue/servers.py": ("registrar",),
        "services/engines/kueue/inference.py": ("registrar",),
    },
    "edge": {
        "services/kit/edge/edge.py": ("router", "edge"),
        "services/kit/edge/bodies.py": ("router",),
        "services/kit/edge/keys.py": ("keys", "edge"),
        "services/kit/edge/limits.py": ("edge", "limits"),
        "services/kit/edge/shared_limits.py": ("edge",),
    },
    "admission": {
        "gateway/gather.py": ("submissions",),
        "services/admission/service.py": ("submissions",),
        "services/admission/webhooks/sending.py": ("webhooks",),
    },
    "telemetry": {"services/telemetry/batches.py": ("reports",)},
    "work": {
        "services/kit/worker_pulse.py": ("work",),
        "services/kit/background/queue.py": ("work",),
        "services/kit/background/work_queue.py": ("work",),
        "services/kit/background/worker.py": ("work",),
    },
    "scheduler": {"services/scheduler/loop.py": ("rounds", "node")},
    "serving": {
        "services/serving/controller/server_jobs.py": ("serving",),
        "services/serving/controller/controller.py": ("serving", "pods"),
        "services/serving/controller/advance.py": ("serving", "pods"),
        "services/serving/controller/pods.py": ("pods",),
        "services/serving/clusters.py": ("pods",),
        "services/serving/controller/probes.py": ("serving",),
    },
    "agent": {
        "services/kit/command_stream.py": ("node",),
        "services/kit/control_plane.py": ("node",),
        "services/kit/tasks.py": ("tasks", "node", "apps"),
        "gpu_agent/inbox.py": ("node",),
        "gpu_agent/spool.py": ("node", "measuring"),
        "gpu_agent/gangs.py": ("node",),
        "gpu_agent/ranks.py": ("node",),
        "gpu_agent/reporting.py": ("node", "measuring"),
        "gpu_agent/controls.py": ("node",),
        "gpu_agent/meter.py": ("node", "measuring"),
    },
}
"""The files with faults by room, and the scenarios that run each."""
SCENARIOS_OF = {path: names for files in ROOMS.values() for path, names in files.items()}
ROOM_OF = {path: room for room, files in ROOMS.items() for path in files}
KNOWN = (
    (
        "services/router/dispatch.py",
        'may_repeat = failure.may_repeat or (received.asked.may_repeat and failure.reason in ("closed", "hung"))',
        "may_repeat = True",
    ),
    (
        "services/serving/controller/server_jobs.py",
        "idempotency_key=each.id",
        'idempotency_key=__import__("secrets").token_hex()',
    ),
)
"""Faults that no campaign of chaos found (docs/reliability.md): a file, what stands there, what takes its place."""
JUDGED: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    tuple(fault): judgement
    for judgement in tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())["equivalent"]
    for fault in judgement["faults"]
}
"""By file, function, kind and first changed line."""
ROUND = 25
"""Schedules of a scenario before the next one's turn."""
MOST_KNOWN = 200
"""Schedules that are known to come to a fault, before others are made of them."""
FEW_KNOWN = 8
"""If fewer are known, it is looked for others first, for up to half of the time: others can be made of them."""
LEAST_NEW = 0.1
"""The least share of new schedules among those that are made of others."""
MOST_REACHING_CPU_S = 30.0
"""Of a scenario, to know which of its schedules come to which fault."""

T = TypeVar("T")


_PR_SET_PDEATHSIG = 1


class Verdict(StrEnum):
    """What is said of a fault."""

    FOUND = "found"
    NOT_FOUND = "not found"
    EQUIVALENT = "equivalent"
    PROPOSED = "proposed as equivalent"


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: by what it was found, after how many schedules, steps and CPU seconds; or it was not.

    Attributes:
        made, sizes: The choices of the schedule that found it, and of how many each was one.
    """

    breach: str | None
    runs: int
    steps: int
    cpu_s: float
    made: Sequence[int] = ()
    sizes: Sequence[int] = ()


def reached(wanted: Sequence[tuple[Mutant, str]], cpu_s: float) -> dict[str, Reached]:
    """Run schedules of each scenario for so long; return which come to which of the faults, by their numbers."""
    by_path: dict[str, dict[int, tuple[Mutant, int]]] = defaultdict(dict)
    for number, (mutant, source) in enumerate(wanted):
        by_path[mutant.path][number] = mutant, changed_lines(mutant.path, source)[0]

    def run_all() -> dict[str, Reached]:
        for path, faults in by_path.items():
            tree, placed = reach.noted(path, faults)
            missing = [
                place(mutant) for number, (mutant, _) in faults.items() if number not in placed and mutant.within
            ]
            assert not missing, missing
            _replace(path, tree)
        modules = [_module(path) for path in by_path]
        names = {name for path in by_path for name in SCENARIOS_OF[path]}
        return {name: reach.run(SCENARIOS[name], modules, cpu_s) for name in sorted(names)}

    return apart(run_all)


def apart(work: Callable[[], T]) -> T:
    """Return what work returns that is done in a process of its own.

    Raises:
        RuntimeError: It failed there.
    """
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a time limit ends the tests, and it with them
            os.close(here)
            answer = pickle.dumps(work())
            with os.fdopen(there, "wb") as file:
                file.write(answer)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as file:
        answer = file.read()
    os.waitpid(child, 0)
    if not answer:
        raise RuntimeError("a process of its own failed")
    return pickle.loads(answer)


def in_order(root: Path, only: str, seed: int) -> Iterator[tuple[Mutant, str]]:
    """Yield all faults with their sources, drawn so that any number one after the other has each room's share."""
    files = [_file(root, path) for path in SCENARIOS_OF if path.startswith(only.partition(":")[0])]
    by_room: dict[str, list[tuple[MutatedFile, int]]] = defaultdict(list)
    for file in files:
        for index, each in enumerate(file.mutants):
            if each.within and place(each).startswith(only):  # what is outside functions has run when it is planted
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


@functools.cache
def _file(root: Path, path: str) -> MutatedFile:
    return MutatedFile(root, path, PLANTS)


def known(root: Path) -> Iterator[tuple[Mutant, str]]:
    """Yield the faults of ``KNOWN`` with the sources that have them."""
    for path, before, after in KNOWN:
        yield by_hand(root, path, before, after)


def by_hand(root: Path, path: str, before: str, after: str) -> tuple[Mutant, str]:
    """Return a fault that was thought of, with the source that has it."""
    text = (root / path).read_text()
    assert before in text, f"{path} has no longer {before}"
    line = 1 + text[: text.index(before)].count("\n")
    mutant = Mutant(path, -1, "known", "", line, (line, line), False, (), before, after)
    return mutant, text.replace(before, after)


def look_for(mutant: Mutant, source: str, number: int, known: Mapping[str, Reached], cpu_s: float) -> Outcome:
    """Plant a fault in a process of its own, and search for it for so long."""

    def work() -> Outcome:
        began_s = time.process_time()
        come = come_to(mutant, source, number, known, cpu_s / 2)
        plant(mutant, source)
        turns = [_Turns(name, number, each) for name, each in come.items()]
        spent_s = time.process_time() - began_s
        outcome = _search(turns, cpu_s - spent_s)
        return replace(outcome, cpu_s=outcome.cpu_s + spent_s)

    outcome = apart(work)
    name, _, breach = (outcome.breach or "").partition(": ")
    if breach and apart(lambda: is_breached_by(SCENARIOS[name], outcome, breach)):
        print(f"WITHOUT THE FAULT, TOO: {name}:{pack(outcome.made)} {breach}", file=sys.stderr, flush=True)
        return replace(outcome, breach=None)
    return outcome


def come_to(mutant: Mutant, source: str, number: int, known: Mapping[str, Reached], cpu_s: float) -> dict[str, Reached]:
    """Return the schedules that come to a fault, by scenario; of one to which few are known to come, look for more."""
    come = {name: known.get(name, Reached()) for name in SCENARIOS_OF[mutant.path]}
    if sum(len(each.places.get(number, ())) for each in come.values()) >= FEW_KNOWN or not mutant.within:
        return come
    tree, placed = reach.noted(mutant.path, {number: (mutant, changed_lines(mutant.path, source)[0])})
    if number not in placed:
        return come
    _replace(mutant.path, tree)
    for name, each in come.items():
        share_s = cpu_s / len(come)
        more = reach.run(SCENARIOS[name], [_module(mutant.path)], share_s, first=each.seeds, enough=FEW_KNOWN)
        more.places[number] = [*each.places.get(number, ()), *more.places.get(number, ())]
        come[name] = more
    return come


def is_breached_by(play: Play, outcome: Outcome, breach: str) -> bool:
    """Whether the code as it is breaches the same in a schedule, so that this says nothing of a fault."""
    _, found = play_once(play, Choices(outcome.made, then=0, sizes=outcome.sizes))
    return found is not None and found.name == breach


def changed_lines(path: str, source: str) -> range:
    """Return the numbers of the lines that a fault changes, as they were."""
    before, after = (ROOT / path).read_text().splitlines(), source.splitlines()
    pairs = list(zip(before, after, strict=False))
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    backwards = zip(reversed(before), reversed(after), strict=False)
    last = len(before) - next(at for at, (one, other) in enumerate(backwards) if one != other)
    return range(same + 1, max(last, same + 1) + 1)


def plant(mutant: Mutant, source: str) -> None:
    """Give the functions of a module that is loaded the code of another source."""
    planted = _replace(mutant.path, source)
    assert not mutant.within or any(f"{mutant.within}.".startswith(f"{each}.") for each in planted), mutant


def _replace(path: str, source: str | ast.Module) -> set[str]:
    """Give the functions of a module the code of another source; return which have it."""
    made = {each.co_qualname: each for each in _codes(compile(source, path, "exec"))}
    planted: set[str] = set()
    for function in _functions(_module(path)):
        if (code := made.get(function.__code__.co_qualname)) is not None:
            function.__code__ = code
            planted.add(code.co_qualname)
    return planted


def _module(path: str) -> Any:
    return importlib.import_module(path.removesuffix(".py").replace("/", "."))


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


class _Turns:
    """The schedules of one scenario in which a fault is searched for.

    First those that are known to come to it. Then new ones, in the share in which they come to it, between such as are
    the same as one of those up to the fault, or to a place before it, and go on in another way.
    """

    def __init__(self, name: str, number: int, known: Reached) -> None:
        self.name = name
        self.known = known.places.get(number, [])
        self.share = len(self.known) / max(known.seeds, 1)
        self._first = known.seeds
        self._made: dict[int, tuple[list[int], int]] = {}

    def schedules(self) -> Iterator[tuple[Simulation, BreachError | None]]:
        """Run one after the other."""
        play, drawn = SCENARIOS[self.name], random.Random(0)
        for seed, at in self.known[:MOST_KNOWN]:
            simulation, breach = play_once(play, seed)
            self._made[seed] = simulation.choices.made, at
            yield simulation, breach
        for number in itertools.count():
            if self._made and drawn.random() >= max(self.share, LEAST_NEW):
                made, at = self._made[drawn.choice(list(self._made))]
                begin = made[: at if drawn.random() < 0.5 else int(at * drawn.random())]
                yield play_once(play, Choices(begin, then=number))
            else:
                yield play_once(play, self._first + number)


def _search(turns: Sequence[_Turns], cpu_s: float) -> Outcome:
    """Search in rounds, in which a scenario has more schedules the more of them come to the fault."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise BreachError("every step ends", "one takes too long")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s * 1.5 + 10)
    began_s, runs, steps = time.process_time(), 0, 0
    most = max(each.share for each in turns)
    running = [(each, each.schedules()) for each in sorted(turns, key=lambda each: -each.share)]
    while True:
        for each, schedules in running:
            share = each.share / most if most else 1.0
            for simulation, breach in itertools.islice(schedules, max(1, round(ROUND * share))):
                runs, steps = runs + 1, steps + simulation.loop.steps
                took_s = time.process_time() - began_s
                if breach is not None or took_s > cpu_s:
                    found = breach and f"{each.name}: {breach.name}"
                    choices = simulation.choices
                    return Outcome(found, runs, steps, took_s, choices.made, choices.sizes)


def judged(mutant: Mutant, what: str) -> Mapping[str, Any] | None:
    """Return the judgement that a fault changes nothing that could be seen; None if there is none."""
    return JUDGED.get((mutant.path, mutant.within, mutant.operator, what))


def main(arguments: Sequence[str]) -> int:
    """Plant and search; 1 if a smaller share is found than should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.faults", description=__doc__)
    parser.add_argument("--sample", type=int, default=10_000, metavar="N", help="faults, drawn from all (all)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first of what is drawn (0)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--cpu", type=float, default=60.0, metavar="S", help="CPU seconds for each (60)")
    parser.add_argument("--only", default="", metavar="PATH:LINE", help="those whose place begins so")
    parser.add_argument("--judged", action="store_true", help="search also for those that are judged equivalent")
    parser.add_argument("--least", type=float, default=0.95, metavar="SHARE", help="fail below this share (0.95)")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    began_s = _all_cpu_s()
    drawn = itertools.islice(in_order(ROOT, asked.only, asked.seed), asked.skip, asked.skip + asked.sample)
    wanted = [*(each for each in known(ROOT) if place(each[0]).startswith(asked.only)), *drawn]
    print(f"{len(wanted)} faults, {_all_cpu_s() - began_s:,.0f} CPU seconds", flush=True)
    come = reached(wanted, min(MOST_REACHING_CPU_S, max(1.0, asked.cpu * len(wanted) / 30)))
    print(f"{sum(each.seeds for each in come.values())} schedules to know who comes to them", flush=True)
    gc.freeze()
    tallies: dict[str, list[int]] = {room: [0] * len(Verdict) for room in ROOMS}
    for number, (mutant, source) in enumerate(wanted):
        what = (ROOT / mutant.path).read_text().splitlines()[changed_lines(mutant.path, source)[0] - 1].strip()
        where = f"{place(mutant)} {mutant.within} [{mutant.operator}] {what}"
        shares = [(name, come[name]) for name in SCENARIOS_OF[mutant.path]]
        says = " ".join(f"{name} {len(each.places.get(number, ()))}/{each.seeds}" for name, each in shares)
        judgement = judged(mutant, what)
        if judgement is not None and not asked.judged:
            verdict = Verdict.PROPOSED if judgement.get("proposed") else Verdict.EQUIVALENT
            print(f"{verdict.value} | reached by {says} | {where} | {judgement['why']}", flush=True)
        else:
            outcome = look_for(mutant, source, number, come, asked.cpu)
            verdict = Verdict.NOT_FOUND if outcome.breach is None else Verdict.FOUND
            took = f"{outcome.cpu_s:.1f} CPU s, {outcome.runs} schedules, {outcome.steps:,} steps, reached by {says}"
            print(f"{outcome.breach or 'NOT FOUND'} | {took} | {where}", flush=True)
        tallies[ROOM_OF[mutant.path]][list(Verdict).index(verdict)] += 1
    for room, counts in tallies.items():
        print(f"{room}: " + ", ".join(f"{n} {each.value}" for n, each in zip(counts, Verdict, strict=True)))
    found, missed, equivalent, proposed = (sum(each) for each in zip(*tallies.values(), strict=True))
    print(
        f"{len(wanted)} faults drawn with seed {asked.seed}, {equivalent} judged equivalent, {proposed} "
        f"proposed as equivalent; within {asked.cpu:g} CPU seconds each {_share(found, missed)}, or, "
        f"if all that is proposed counts as not found, {_share(found, missed + proposed)}; "
        f"{_all_cpu_s() - began_s:,.0f} CPU seconds"
    )
    return int(found < asked.least * (found + missed))


def _all_cpu_s() -> float:
    return sum(os.times()[:4])


def _share(found: int, missed: int) -> str:
    low, high = wilson(found, found + missed)
    share = found / max(found + missed, 1)
    return f"{found} of {found + missed} were found, {100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f} %)"


def place(mutant: Mutant) -> str:
    """Return where a fault is."""
    return f"{mutant.path}:{mutant.line}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
