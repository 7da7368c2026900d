"""What is planted: one thing removed, or two effects in another order; ``tests.mutation.mutants`` makes the sources."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from tests.mutation.mutants import Operators

_JUMPS = cst.Return | cst.Continue | cst.Break | cst.Raise
_QUESTIONS = frozenset({"done", "cancelled", "is_set", "is_closing", "locked"})
_LOCKS = re.compile(r"lock|saving|registering|turns|semaphore", re.IGNORECASE)
_TRANSACTIONS = re.compile(r"transaction\(|\.begin\(")
TRUE, FALSE = cst.Name("True"), cst.Name("False")


def operator_guard(node: cst.If) -> Iterator[cst.CSTNode]:
    """Never leave where a guard says so, or always do what it keeps from being done."""
    if node.orelse is not None or not isinstance(node.body, cst.IndentedBlock):
        return
    last = node.body.body[-1]
    jumps = isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], _JUMPS)
    yield node.with_changes(test=FALSE if jumps else TRUE)


def operator_question(node: cst.Call) -> Iterator[cst.CSTNode]:
    """Take a future, task or event for one that is not done."""
    if isinstance(node.func, cst.Attribute) and node.func.attr.value in _QUESTIONS and not node.args:
        yield FALSE


def operator_shield(node: cst.Call) -> Iterator[cst.CSTNode]:
    """Let what is awaited be cancelled with those who wait."""
    if isinstance(node.func, cst.Attribute) and node.func.attr.value == "shield":
        yield node.args[0].value


def operator_lock(node: cst.With) -> Iterator[cst.CSTNode]:
    """Do without a lock."""
    yield from _without(node, _LOCKS)


def operator_transaction(node: cst.With) -> Iterator[cst.CSTNode]:
    """Do without a transaction's boundary."""
    yield from _without(node, _TRANSACTIONS)


def _without(node: cst.With, held: re.Pattern[str]) -> Iterator[cst.CSTNode]:
    words = [cst.Module([]).code_for_node(each.item) for each in node.items]
    if len(words) == 1 and node.items[0].asname is None and held.search(words[0]):
        yield cst.If(test=TRUE, body=node.body)


def operator_finally(node: cst.Try) -> Iterator[cst.CSTNode]:
    """Do what a ``finally`` has only where nothing is raised, and nothing returns before."""
    if node.finalbody is None:
        return
    final = node.finalbody.body.body
    body = [node.with_changes(finalbody=None), *final] if node.handlers else [*node.body.body, *final]
    yield cst.If(test=TRUE, body=cst.IndentedBlock(body=body))  # type: ignore[arg-type]


def operator_order(node: cst.IndentedBlock) -> Iterator[cst.CSTNode]:
    """Have two effects, one after the other, the other way round."""
    for at, (first, second) in enumerate(zip(node.body, node.body[1:], strict=False)):
        if _is_effect(first) and _is_effect(second):
            body = [*node.body[:at], second, first, *node.body[at + 2 :]]
            yield node.with_changes(body=body)


def _is_effect(statement: cst.CSTNode) -> bool:
    """Whether a statement asks for something, and keeps no name of its own."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1 or not _asks(statement):
        return False
    part = statement.body[0]
    if isinstance(part, cst.Assign):
        return all(isinstance(each.target, cst.Attribute | cst.Subscript) for each in part.targets)
    if isinstance(part, cst.AugAssign):
        return isinstance(part.target, cst.Attribute | cst.Subscript)
    return isinstance(part, cst.Expr) and isinstance(part.value, cst.Call | cst.Await)


def _asks(statement: cst.CSTNode) -> bool:
    code = cst.Module([]).code_for_node(statement).strip()
    return "(" in code and not code.startswith("log.")


PLANTS: Operators = (
    (cst.If, operator_guard),
    (cst.Call, operator_question),
    (cst.Call, operator_shield),
    (cst.With, operator_lock),
    (cst.With, operator_transaction),
    (cst.Try, operator_finally),
    (cst.IndentedBlock, operator_order),
)
