"""A code has the statuses that docs/api.md gives it, wherever it is raised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.rules import nodes_of, tree_of
from tests.architecture.test_imports import ROOT, modules

ROW = re.compile(r"^\| ((?:\d{3}(?:, )?)+) \|(.*)\|$", re.MULTILINE)


def raised(source: str) -> Iterator[tuple[int, str]]:
    """Yield status and code of each problem whose call names both."""
    for node in nodes_of(source):
        match node:
            case ast.Call(args=[ast.Constant(value=int(status)), ast.Attribute(value=of, attr=code), *_]):
                if ast.unparse(of).endswith("ProblemCode"):
                    yield status, code.lower()
            case _:
                pass


def documented(page: str) -> set[tuple[int, str]]:
    return {
        (int(status), code)
        for statuses, said in ROW.findall(page)
        for status in statuses.split(", ")
        for code in re.findall(r"`(\w+)`", said)
    }


def test_codes_have_their_documented_statuses() -> None:
    known = documented((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    found = {pair: name for name, path in modules() for pair in raised(path.read_text(encoding="utf-8"))}

    assert len(found) > 15
    assert {pair: name for pair, name in found.items() if pair not in known} == {}


def test_a_code_with_another_status_is_found() -> None:
    source = "raise ProblemError(409, ProblemCode.IDEMPOTENCY_KEY_REUSED, detail)"
    assert set(raised(source)) - documented("| 422 | `idempotency_key_reused` |\n") == {(409, "idempotency_key_reused")}


def kept_errors(source: str) -> Iterator[str]:
    """Yield the names that a module or a class gives to errors made when it is loaded."""
    for scope in (tree_of(source), *(node for node in nodes_of(source) if isinstance(node, ast.ClassDef))):
        for node in scope.body:
            match node:
                case ast.Assign(targets=[target], value=ast.Call(func=made)) if ast.unparse(made).endswith("Error"):
                    yield ast.unparse(target)
                case _:
                    pass


def test_an_error_is_made_anew_each_time_it_is_raised() -> None:
    """One that is raised again keeps the frames of all times before: whoever is refused fills the memory."""
    assert [*kept_errors("A = ProblemError(401)\nclass B:\n    C = my.KeyError()\n    D = E()\n")] == ["A", "C"]
    assert [(name, each) for name, path in modules() for each in kept_errors(path.read_text(encoding="utf-8"))] == []
