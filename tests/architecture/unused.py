"""Which public definitions of some files other code never names."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.architecture.rules import tree_of

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yield the qualified name and the node of every public function, class and method of a module.

    Left out is what a decorator with arguments hands to somebody: routes, commands, tasks.
    """
    for node in tree.body:
        if isinstance(node, (*FUNCTION, ast.ClassDef)) and not node.name.startswith("_") and not is_registered(node):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, FUNCTION) and not member.name.startswith("_") and not is_registered(member):
                    yield f"{node.name}.{member.name}", member


def is_registered(node: Definition) -> bool:
    """Whether a definition is given to a router, a group of commands or the like: ``@router.get("/v1/...")``."""
    return any(isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) for each in node.decorator_list)


def names_in(node: ast.AST) -> Counter[str]:
    """Return how often code names what: variables, attributes, and what ``getattr`` is asked for by a literal."""
    found: Counter[str] = Counter()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found[each.id] += 1
        elif isinstance(each, ast.Attribute):
            found[each.attr] += 1
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "getattr":
            found.update(str(given.value) for given in each.args[1:2] if isinstance(given, ast.Constant))
    return found


def unused(sources: dict[str, str], callers: Iterable[str]) -> set[str]:
    """Return ``path:name`` of each public definition that neither the sources themselves nor the callers name.

    What a definition says of itself does not count, nor do imports.

    Args:
        sources: The files whose definitions are looked for, by path.
        callers: Source text of all other code that counts.
    """
    trees = {path: tree_of(source) for path, source in sources.items()}
    named: Counter[str] = Counter()
    for tree in trees.values():
        named.update(names_in(tree))
    for source in callers:
        named.update(names_in(tree_of(source)))
    return {
        f"{path}:{name}"
        for path, tree in trees.items()
        for name, node in public_definitions(tree)
        if named[node.name] <= names_in(node)[node.name]
    }
