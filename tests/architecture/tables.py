"""Which tables a process's SQL names, in texts and in SQLAlchemy's expressions, as functions of source text.

A text names a table where one may stand: behind FROM, JOIN, UPDATE, INTO and USING, and in the comma lists of FROM.
Keywords are those in capitals, so prose is none. A text that is put together is read with its parts.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.architecture.rules import nodes_of, tree_of, within

PROCESSES = {
    "services.admission": "admission",
    "services.scheduler": "scheduler",
    "services.router": "router",
    "services.serving": "serving",
    "services.telemetry": "telemetry",
    "services.simulator": "simulator",
    "services.engines": "engines",
    "carbon_service": "carbon",
    "optimizer_service": "optimizer",
    "gateway": "gateway",
    "gpu_agent": "agent",
}
"""Who a module belongs to; a worker belongs to its process."""

PLACE = r"\b(?:FROM|JOIN|UPDATE|INTO|USING)\s+(?:ONLY\s+)?"
AFTER = r"(?![\w.(])"
TABLE = re.compile(rf"{PLACE}(\w+){AFTER}")
LIST = re.compile(r"\bFROM\s+((?:[\w ]+,\s*)+(?:\w+))")
UNKNOWN = "_built_"
"""Stands in a text for a part of it that only running the code shows."""
BUILT = re.compile(rf"{PLACE}{UNKNOWN}")
COMMON = re.compile(
    r"(?:\bWITH\s+(?:RECURSIVE\s+)?|\)\s*,\s*)(\w+)\s*(?:\([^()]*\)\s*)?AS\s*(?:(?:NOT\s+)?MATERIALIZED\s*)?\("
)
WHOLE = re.compile(r"\s*(?:SELECT|WITH|UPDATE|DELETE|INSERT)\b")
INSERTED = re.compile(r"\bINTO\s+\w+")
INSERTS = {"insert", "upsert", "returning"}
ASKS = re.compile(
    r"""tenant_id\s*(?:=|IN\b)                  # a column compared
    | =\s*(?:\w+\.)?tenant_id                # with a column
    | \bUSING\s*\([^)]*\btenant_id\b
    """,
    re.VERBOSE,
)
LOCK = re.compile(r"\bFOR\s+(?:NO\s+KEY\s+UPDATE|KEY\s+SHARE|UPDATE|SHARE)\b(?:\s+OF\s+(\w+))?")
COMMENT = re.compile(r"--[^\n]*")


@dataclass(frozen=True)
class Statement:
    """A text of SQL, or the body that makes an expression, where it stands.

    Attributes:
        place: Module and name: of the constant that the text is, or of the function that it stands in.
        text: With the parts that stand in the same module.
        own: Without them.
    """

    place: str
    text: str
    own: str


def process_of(module: str) -> str | None:
    """Return the process that a module belongs to, None of libraries."""
    return next((name for room, name in PROCESSES.items() if within(module, room)), None)


def tables_in(text: str) -> set[str]:
    """Return the names that stand for tables in a text of SQL, but for those that it defines itself."""
    text = COMMENT.sub(" ", text)
    found = set(TABLE.findall(text))
    for listed in LIST.findall(text):
        found |= {part.split()[0] for part in listed.split(",") if part.strip()}
    return found - set(COMMON.findall(text))


@functools.cache
def statements_in(source: str, module: str) -> list[Statement]:
    """Return the texts of a module, docstrings left out; those of one constant or function are one statement each."""
    tree = tree_of(source)
    parts = {target.id: node.value for node in tree.body for target in _targets(node)}
    docs = set(_docstrings(tree))
    found: list[Statement] = []
    for name, body in _places(tree):
        for node in _texts(body):
            if node in docs:
                continue
            own, text = _text(node, {}), _text(node, parts)
            found.append(Statement(f"{module}.{name}", text, own))
    return found


def named_tables(source: str, module: str, known: set[str]) -> dict[str, set[str]]:
    """Return the tables that a module names, by place; ``known`` are all that there are."""
    found: dict[str, set[str]] = {}
    statements = statements_in(source, module)
    builds = any(BUILT.search(COMMENT.sub(" ", each.own)) for each in statements)
    for each in statements:
        names = tables_in(each.own)
        if builds and each.own in known:  # put into a text elsewhere in the module
            names.add(each.own)
        found.setdefault(each.place, set()).update(names & known)
    for place, table in expressions_in(source, module):
        found.setdefault(place, set()).update({table} & known)
    return {place: names for place, names in found.items() if names}


def expressions_in(source: str, module: str) -> list[tuple[str, str]]:
    """Return where SQLAlchemy's expressions name tables, and which."""
    imported = _imported(source)
    return [
        (f"{module}.{name}", table)
        for name, body in _places(tree_of(source))
        for _, table in _tables_named(body, imported)
    ]


def without_tenant(source: str, module: str, of_tenants: set[str], scopes: set[str]) -> list[str]:
    """Return the places that read or change rows of tenants and name no tenant to do so.

    Args:
        source: The module's.
        module: Its dotted name.
        of_tenants: The tables and views with a column ``tenant_id``.
        scopes: Functions that add the condition to an expression.
    """
    found = [
        each.place
        for each in statements_in(source, module)
        if WHOLE.match(each.text)
        and tables_in(INSERTED.sub(" ", each.text)) & of_tenants
        and not ASKS.search(each.text)
    ]
    bodies = dict(_places(tree_of(source)))
    for place in dict(expressions_in(source, module)):
        body = bodies[place.removeprefix(f"{module}.")]
        if not isinstance(body, ast.FunctionDef | ast.AsyncFunctionDef):
            continue  # only a part, which a function puts into a whole
        named = [node for node, table in _tables_named(body, _imported(source)) if table in of_tenants]
        inserted = {id(call.args[0]) for call in _calls(body) if _called(call) in INSERTS and call.args}
        read = any(id(node) not in inserted for node in named)
        asks = {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute)}
        asks |= {keyword.arg for call in _calls(body) for keyword in call.keywords if keyword.arg}
        if read and not ({"tenant_id"} & asks or scopes & {_called(call) for call in _calls(body)}):
            found.append(place)
    return sorted(set(found))


def locked_views(text: str, views: set[str]) -> list[str]:
    """Return the shared views whose rows a text locks: those belong to a neighbour."""
    text = COMMENT.sub(" ", text)
    alias = {short or name: name for name, short in re.findall(rf"{PLACE}(\w+)(?:\s+(?:AS\s+)?([a-z]\w*))?", text)}
    named = {name for name in alias.values() if name in views}
    found: list[str] = []
    for of in LOCK.findall(text):
        found += [alias[of]] if alias.get(of) in views else [] if of else sorted(named)
    return found


def _imported(source: str) -> dict[str, str]:
    return {
        alias.asname or alias.name: alias.name
        for node in nodes_of(source)
        if isinstance(node, ast.ImportFrom) and within(node.module or "", "services.db.tables")
        for alias in node.names
    }


def _tables_named(body: ast.AST, imported: Mapping[str, str]) -> list[tuple[ast.Name, str]]:
    return [(node, imported[node.id]) for node in ast.walk(body) if isinstance(node, ast.Name) and node.id in imported]


def _calls(body: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(body) if isinstance(node, ast.Call)]


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _targets(node: ast.stmt) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target for target in targets if isinstance(target, ast.Name)]


def _places(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield names and bodies: of constants, functions and methods."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                yield f"{node.name}.{_name(inner)}", inner
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            yield _name(node), node


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    names = [target.id for target in _targets(node)]
    names += [
        each.id
        for target in getattr(node, "targets", [])
        if isinstance(target, ast.Tuple)
        for each in target.elts
        if isinstance(each, ast.Name)
    ]
    return names[0] if names else "?"


def _docstrings(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        for inner in getattr(node, "body", None) or [] if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
                yield inner.value


def _texts(body: ast.AST) -> Iterator[ast.expr]:
    """Yield the outermost texts in a body."""
    if isinstance(body, ast.JoinedStr) or (isinstance(body, ast.Constant) and isinstance(body.value, str)):
        yield body
        return
    for inner in body.values if isinstance(body, ast.Dict) else ast.iter_child_nodes(body):
        yield from _texts(inner)


def _text(node: ast.AST, parts: Mapping[str, ast.expr | None], depth: int = 8) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value, parts, depth) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        part = parts.get(node.value.id) if isinstance(node.value, ast.Name) and depth else None
        return UNKNOWN if part is None else _text(part, parts, depth - 1)
    found = [_text(each, parts, depth - 1) for each in _texts(node)] if depth else []
    return " ".join(found) or UNKNOWN
