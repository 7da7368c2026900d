"""`python -m tests.simulation.faults`: which of the faults that a program plants does the search find, and how soon.

A fault is one thing that is easily forgotten: a guard, the question whether a future is done or a task cancelled, a
lock, a transaction, a ``finally``, a ``shield``, the order of two effects. All of a file are made from its source by
``plants``; a seeded sample of them is planted, each in a process of its own, and searched for with the scenarios that
run the file. What ``equivalent.toml`` lists changes nothing that could be seen, for the reason that stands there.
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
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from tests.mutation.mutants import Mutant, MutatedFile, sample
from tests.mutation.results import wilson
from tests.simulation.loop import BreachError
from tests.simulation.plants import PLANTS
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.search import play_once
from tests.support.servers import ROOT

FILES: Mapping[str, Sequence[str]] = {
    "services/router/lanes.py": ("router",),
    "services/router/dispatch.py": ("router",),
    "services/router/answers.py": ("router",),
    "services/router/upstream.py": ("router",),
    "services/router/breaker.py": ("router", "apps"),
    "services/router/gate.py": ("router",),
    "services/router/apps/queue.py": ("apps",),
    "services/router/apps/assignment.py": ("apps",),
    "services/router/apps/coordination.py": ("apps",),
    "services/router/apps/remote.py": ("apps",),
    "services/kit/edge/exchange.py": ("router", "edge"),
    "services/kit/edge/bodies.py": ("router",),
    "services/kit/edge/keys.py": ("keys", "edge"),
    "services/kit/edge/limits.py": ("edge", "router"),
    "services/kit/edge/shared_limits.py": ("edge",),
    "gateway/gather.py": ("submissions",),
    "services/admission/commits.py": ("submissions",),
    "services/telemetry/batches.py": ("reports",),
    "services/kit/command_stream.py": ("node",),
    "services/kit/control_plane.py": ("node",),
    "services/kit/tasks.py": ("node", "apps"),
    "services/scheduler/relay.py": ("node",),
    "services/serving/controller/server_jobs.py": ("serving",),
    "gpu_agent/inbox.py": ("node",),
    "gpu_agent/spool.py": ("node",),
    "gpu_agent/gangs.py": ("node",),
    "gpu_agent/ranks.py": ("node",),
    "gpu_agent/reporting.py": ("node",),
    "gpu_agent/controls.py": ("node",),
    "gpu_agent/meter.py": ("node",),
}
"""The files with faults, and the scenarios that run each."""
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
ROUND = 25
"""Schedules of a scenario before the next one's turn."""


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: by what it was found, after how many schedules and steps; or it was not."""

    breach: str | None
    runs: int
    steps: int


def everything(root: Path) -> list[MutatedFile]:
    """Return all files with all faults that can be planted in them."""
    return [MutatedFile(root, path, PLANTS) for path in FILES]


def known(root: Path) -> Iterator[tuple[Mutant, str]]:
    """Yield the faults of ``KNOWN`` with the sources that have them."""
    for path, before, after in KNOWN:
        text = (root / path).read_text()
        assert before in text, f"{path} has no longer {before}"
        line = 1 + text[: text.index(before)].count("\n")
        mutant = Mutant(path, -1, "known", "", line, (line, line), False, (), before, after)
        yield mutant, text.replace(before, after)


def look_for(mutant: Mutant, source: str, cpu_s: float) -> Outcome:
    """Plant a fault in a process of its own, and search for it for so long."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(here)
            plant(mutant, source)
            outcome = _search(FILES[mutant.path], cpu_s)
            os.write(there, json.dumps([outcome.breach, outcome.runs, outcome.steps]).encode())
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here) as file:
        told = file.read()
    os.waitpid(child, 0)
    return Outcome(*json.loads(told)) if told else Outcome("the process ended", 0, 0)


def plant(mutant: Mutant, source: str) -> None:
    """Give the functions of a module that is loaded the code of another source."""
    module = importlib.import_module(mutant.path.removesuffix(".py").replace("/", "."))
    made = {each.co_qualname: each for each in _codes(compile(source, mutant.path, "exec"))}
    for function in _functions(module):
        if (code := made.get(function.__code__.co_qualname)) is not None:
            function.__code__ = code


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
            if isinstance(each, property):
                each = each.fget
            each = (
                inspect.unwrap(getattr(each, "__func__", each)) if callable(getattr(each, "__func__", each)) else None
            )
            if isinstance(each, FunctionType) and each.__module__ == module.__name__:
                yield each


def _search(names: Sequence[str], cpu_s: float) -> Outcome:
    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise BreachError("every step ends", "one takes too long")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s * 1.5 + 10)
    began_s, runs, steps = time.process_time(), 0, 0
    while time.process_time() - began_s < cpu_s:
        for name in names:
            for seed in range(runs, runs + ROUND):
                simulation, breach = play_once(SCENARIOS[name], seed)
                runs, steps = runs + 1, steps + simulation.loop.steps
                if breach is not None:
                    return Outcome(f"{name}: {breach.name}", runs, steps)
                if time.process_time() - began_s > cpu_s:
                    return Outcome(None, runs, steps)
    return Outcome(None, runs, steps)


def judged(mutant: Mutant) -> str | None:
    """Return why a fault changes nothing that could be seen; None if that was not said of it."""
    known = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text()).get("equivalent", [])
    for each in known:
        is_here = all(getattr(mutant, name) == each[name] for name in ("path", "within", "operator"))
        if is_here and _first_line(mutant.before) == each["before"]:
            return each["why"]
    return None


def _first_line(text: str) -> str:
    return text.partition("\n")[0].strip()


def main(arguments: Sequence[str]) -> int:
    """Plant and search; 1 if a smaller share is found than should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.faults", description=__doc__)
    parser.add_argument("--sample", type=int, default=10_000, metavar="N", help="faults, drawn from all (all)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--cpu", type=float, default=60.0, metavar="S", help="CPU seconds for each (60)")
    parser.add_argument("--only", default="", metavar="PATH", help="those of files whose path begins so")
    parser.add_argument("--least", type=float, default=0.95, metavar="SHARE", help="fail below this share (0.95)")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    files = [each for each in everything(ROOT) if each.mutants and each.mutants[0].path.startswith(asked.only)]
    gc.freeze()
    found = missed = equivalent = 0
    wanted = [each for each in known(ROOT) if each[0].path.startswith(asked.only)]
    for mutant, source in itertools.chain(wanted, sample(files, asked.sample, asked.seed)):
        where = f"{mutant.path}:{mutant.line} {mutant.within} [{mutant.operator}] {_first_line(mutant.before)}"
        if (why := judged(mutant)) is not None:
            equivalent += 1
            print(f"equivalent | {where} | {why}", flush=True)
            continue
        outcome = look_for(mutant, source, asked.cpu)
        found, missed = found + (outcome.breach is not None), missed + (outcome.breach is None)
        took = f"{outcome.runs} schedules, {outcome.steps:,} steps"
        print(f"{outcome.breach or 'NOT FOUND'} | {took} | {where}", flush=True)
    share = found / max(found + missed, 1)
    low, high = wilson(found, found + missed)
    total = sum(len(each.mutants) for each in files)
    print(
        f"{total} faults; {found + missed + equivalent} drawn with seed {asked.seed}, {equivalent} of them judged "
        f"equivalent; {found} of the other {found + missed} found within {asked.cpu:g} CPU seconds each: "
        f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f} %)"
    )
    return int(share < asked.least)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
