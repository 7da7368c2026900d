"""SQL stands in repositories and in ``services/db``, and its rows have types."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from tests.architecture.rules import nodes_of
from tests.architecture.test_imports import ROOT, modules

STATEMENT = re.compile(
    r"""\s*(
        SELECT\s.+\sFROM\s
        | INSERT\s+INTO\s
        | UPDATE\s+\w+(\s+(AS\s+)?\w+)?\s+SET\s
        | DELETE\s+FROM\s
        | WITH\s+(RECURSIVE\s+)?\w+\s*(\([^)]*\)\s*)?AS\s*((NOT\s+)?MATERIALIZED\s*)?\(
    )""",
    re.DOTALL | re.VERBOSE,
)
BUILDERS = {"select", "insert", "update", "delete", "text", "tuple_"}
ANYTHING = re.compile(r"(?<!Row\[)\bAny\b")
ROW = re.compile(r"(\w+_)?rows?")
STRICT = {f"services/{room}" for room in ("core", "contracts", "kit", "db", "scheduler", "serving", "learning")}
TYPED = (
    *("services.scheduler", "services.serving", "services.telemetry", "services.admission"),
    *("services.kit", "services.simulator", "optimizer_service"),
)


def has_place(module: str) -> bool:
    """Whether SQL may stand in a module."""
    return module.startswith(("services.db.", "migrations")) or "repository" in module.split(".")


def sql_in(source: str, module: str) -> list[str]:
    """Return the statements, and the imports that build some, of a module that is no place for them."""
    if has_place(module):
        return []
    found: list[str] = []
    for node in nodes_of(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and STATEMENT.match(node.value):
            found.append(f"{module}:{node.lineno}: {' '.join(node.value.split())[:60]}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sqlalchemy":
            found += [f"{module}:{node.lineno}: {name.name}" for name in node.names if name.name in BUILDERS]
    return found


def untyped_rows_in(source: str, module: str) -> list[str]:
    """Return the parameters called row or rows that are ``Any``, or not annotated, in the rooms that type theirs.

    SQLAlchemy's own ``Row[Any]`` may be what a repository makes a record from.
    """
    if not module.startswith(TYPED):
        return []
    functions = [node for node in nodes_of(source) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        f"{module}:{argument.lineno}: {argument.arg}"
        for function in functions
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if ROW.fullmatch(argument.arg)
        and (
            argument.annotation is None
            or re.search(r"\bAny\b", ast.unparse(argument.annotation).replace("Row[Any]", ""))
        )
    ]


def sources() -> list[tuple[str, str]]:
    return [(module, path.read_text(encoding="utf-8")) for module, path in modules()]


def test_sql_stands_in_repositories() -> None:
    assert [line for module, source in sources() for line in sql_in(source, module)] == []


def test_rows_have_types() -> None:
    assert [line for module, source in sources() for line in untyped_rows_in(source, module)] == []


@pytest.mark.parametrize(
    "source",
    [
        'QUERY = """\nSELECT id\nFROM jobs"""',
        'f("INSERT INTO jobs VALUES ($1)")',
        'f("UPDATE jobs j SET state = $1")',
        'f("WITH gone AS (DELETE FROM jobs RETURNING id) SELECT 1")',
        'f(f"DELETE FROM {table}")',
        "from sqlalchemy import select",
    ],
)
def test_sql_in_a_service_is_seen(source: str) -> None:
    assert len(sql_in(source, "services.scheduler.loop")) == 1
    assert sql_in(source, "services.scheduler.repository.jobs") == []
    assert sql_in(source, "services.db.lengths") == []


@pytest.mark.parametrize(
    "source", ['f("Select a job from the list")', '"""Update the set of jobs."""', 'f("with a ()")']
)
def test_prose_is_no_sql(source: str) -> None:
    assert sql_in(source, "services.scheduler.loop") == []


def test_an_untyped_row_is_seen() -> None:
    assert len(untyped_rows_in("def f(row: Any, old_rows: list[Any], *, rows): ...", "services.scheduler.loop")) == 3
    assert untyped_rows_in("def f(row: JobRow, narrow: Any): ...", "services.scheduler.loop") == []


def test_every_room_that_should_be_is_strict() -> None:
    strict = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]["strict"])

    assert strict >= STRICT


def strict_reads_in(source: str, module: str) -> list[str]:
    """Return where a column's document is read so that a field of a later release would be refused."""
    if module.startswith(("services.contracts", "services.cli")):
        return []
    return [
        f"{module}:{node.lineno}: {ast.unparse(node)[:60]}"
        for node in nodes_of(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "model_validate"
        and node.args
        and isinstance(node.args[0], ast.Attribute)
    ]


def test_documents_that_are_stored_are_read_as_some_release_has_stored_them() -> None:
    """Who goes back to this release has rows of a later one; ``Message.as_stored`` leaves out what is not known."""
    assert strict_reads_in("Spec.model_validate(row.spec)", "services.serving.x") != []
    assert strict_reads_in("Spec.as_stored(row.spec); Spec.model_validate({'a': 1})", "services.serving.x") == []
    assert [line for module, source in sources() for line in strict_reads_in(source, module)] == []
