"""Which schedules come to a planted fault: those in which the code without it does what the fault would change.

The sources of the files with faults are compiled with a note at each place that a fault would change: of a guard, that
it said what the fault keeps it from saying; of a question, that it was answered with yes; of a ``finally``, that it was
left by an exception or a jump; of everything else, that it ran. Up to its first note a schedule is the same with the
fault and without it.
"""

from __future__ import annotations

import ast
import asyncio
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.mutation.mutants import Mutant
from tests.simulation.search import Play, play_once
from tests.support.servers import ROOT

MOST_SCHEDULES = 2_000
"""Of a scenario, before faults are planted."""
_NOTE, _RAISED = "__note_reached__", "__raised__"
_JUMPS = ast.Return | ast.Continue | ast.Break | ast.Raise


@dataclass
class Reached:
    """The schedules of one scenario that come to each fault.

    Attributes:
        seeds: How many were run: those of all seeds below.
        cpu_s: That took.
        places: By fault the seeds, each with how many choices were made before the fault was reached.
    """

    seeds: int = 0
    cpu_s: float = 0.0
    places: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list[tuple[int, int]]))


class Notes(ast.NodeTransformer):
    """Have a source say which of the faults of its file would have changed something.

    Attributes:
        placed: Faults that have a note.
    """

    def __init__(self, faults: Mapping[int, tuple[Mutant, int]], begins: Sequence[int]) -> None:
        """Take faults by number, the first line that each changes, and where statements begin, in order."""
        self.placed: set[int] = set()
        self._by_kind: dict[tuple[str, int], list[tuple[int, Mutant]]] = defaultdict(list)
        for number, (mutant, line) in faults.items():
            if mutant.operator in ("guard", "question", "finally"):
                self._by_kind[mutant.operator, mutant.line].append((number, mutant))
            else:  # a comment may stand before it
                self._by_kind["", begins[bisect_left(begins, line)]].append((number, mutant))

    def visit_If(self, node: ast.If) -> ast.AST:
        """Note what a guard says."""
        self.generic_visit(node)
        numbers = [number for number, _ in self._by_kind.get(("guard", node.lineno), ())]
        if numbers:
            always, never = (numbers, []) if isinstance(node.body[-1], _JUMPS) else ([], numbers)
            node.test = self._note(always, never, node.test)
        return self._statement(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Note that a question is answered with yes."""
        asked = self._by_kind.get(("question", node.lineno), ())
        numbers = [number for number, each in asked if _words(each.before) == ast.unparse(node)]
        self.generic_visit(node)
        return self._note(numbers, [], node) if numbers else node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Note that a block with a ``finally`` is left by an exception or a jump."""
        self.generic_visit(node)
        numbers = [number for number, _ in self._by_kind.get(("finally", node.lineno), ())]
        if numbers and node.finalbody:
            body = ast.walk(ast.Module([*node.body, *node.handlers], []))  # type: ignore[list-item]
            jumps = numbers if any(isinstance(each, _JUMPS) for each in body) else []
            raised = ast.Call(ast.Name(_RAISED, ast.Load()), [], [])
            node.finalbody.insert(0, ast.Expr(self._note(numbers, jumps, raised)))
        return self._statement(node)

    def generic_visit(self, node: ast.AST) -> Any:
        """As of the base; statements that hold no other kind of fault are noted when they run."""
        super().generic_visit(node)
        plain = isinstance(node, ast.stmt) and not isinstance(node, ast.If | ast.Try | ast.FunctionDef | ast.ClassDef)
        return self._statement(node) if plain else node

    def _statement(self, node: Any) -> Any:
        numbers = [number for number, _ in self._by_kind.get(("", node.lineno), ())]
        if not numbers:
            return node
        return [ast.Expr(self._note(numbers, [], ast.Constant(True))), node]

    def _note(self, when_true: Sequence[int], when_false: Sequence[int], value: ast.expr) -> ast.expr:
        self.placed |= {*when_true, *when_false}
        sides = [ast.Tuple([ast.Constant(one) for one in each], ast.Load()) for each in (when_true, when_false)]
        return ast.Call(ast.Name(_NOTE, ast.Load()), [*sides, value], [])


def _words(code: str) -> str:
    return ast.unparse(ast.parse(code.strip(), mode="eval"))


def noted(path: str, faults: Mapping[int, tuple[Mutant, int]]) -> tuple[ast.Module, set[int]]:
    """Return a file's source with notes, and which faults have one."""
    source = ast.parse((ROOT / path).read_text())
    notes = Notes(faults, sorted(each.lineno for each in ast.walk(source) if isinstance(each, ast.stmt)))
    tree = ast.fix_missing_locations(notes.visit(source))
    return tree, notes.placed


def run(play: Play, modules: Sequence[Any], cpu_s: float, *, first: int = 0, enough: int = MOST_SCHEDULES) -> Reached:
    """Run schedules of a scenario for so long, with sources that have notes in place.

    Args:
        first: The seed to begin with.
        enough: How many that come to a fault are enough.
    """
    found, here, some = Reached(first), dict[int, int](), 0

    def note(when_true: Sequence[int], when_false: Sequence[int], value: Any) -> Any:
        numbers = when_true if value else when_false
        if numbers:
            loop: Any = asyncio._get_running_loop()
            for number in numbers:
                here.setdefault(number, len(loop._choices.made) if loop is not None else 0)
        return value

    _name(modules, note)
    began_s = time.process_time()
    while found.seeds < first + MOST_SCHEDULES and some < enough and time.process_time() < began_s + cpu_s:
        here.clear()
        play_once(play, found.seeds)
        for number, at in here.items():
            found.places[number].append((found.seeds, at))
        some += bool(here)
        found.seeds += 1
    found.cpu_s = time.process_time() - began_s
    return found


def _name(modules: Sequence[Any], note: Callable[..., Any]) -> None:
    for module in modules:
        setattr(module, _NOTE, note)
        setattr(module, _RAISED, lambda: sys.exception() is not None)
