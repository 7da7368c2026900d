"""Every query of the repository gives the columns that its row declares, of the types that it declares."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pkgutil
import types
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import asyncpg
import pytest

from services.db.database import plain_url
from services.scheduler import repository
from services.scheduler.repository.documents import Json
from tests.support.servers import fresh_database

TYPES: dict[str, type] = {
    "bool": bool,
    "bytea": bytes,
    "float8": float,
    "int4": int,
    "int8": int,
    "text": str,
    "timestamptz": datetime,
}


def pairs() -> Iterator[Any]:
    """Yield every row type with its query, as the calls of ``fetch_rows`` and ``fetch_row`` name them."""
    for found in pkgutil.iter_modules(repository.__path__):
        module = importlib.import_module(f"{repository.__name__}.{found.name}")
        for function in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(function, ast.AsyncFunctionDef):
                for row_type, query in _calls(function, vars(module)):
                    yield pytest.param(row_type, query, id=f"{found.name}.{function.name}")


class _Nothing(dict[str, Any]):
    """Parts of a query that an argument decides: without them."""

    def __missing__(self, name: str) -> str:
        if hasattr(builtins, name):
            raise KeyError(name)
        return ""


def _calls(function: ast.AsyncFunctionDef, names: dict[str, Any]) -> Iterator[tuple[type, str]]:
    known = _Nothing(names)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.JoinedStr, ast.Constant)):
            exec(compile(ast.Module([node], []), "repository", "exec"), {}, known)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("fetch_rows", "fetch_row"):
            row_type, query = (
                eval(compile(ast.Expression(each), "repository", "eval"), {}, known) for each in node.args[1:3]
            )
            yield row_type, query


QUERIES = list(pairs())


def test_the_queries_are_found() -> None:
    assert len(QUERIES) > 30
    assert len({each.id for each in QUERIES}) > 25


@pytest.fixture(scope="module")
async def connection(postgres_url: str) -> Any:
    made = await asyncpg.connect(plain_url(fresh_database(postgres_url)))
    yield made
    await made.close()


@pytest.mark.parametrize(("row_type", "query"), QUERIES)
async def test_a_query_fits_its_row(connection: Any, row_type: Any, query: str) -> None:
    attributes = (await connection.prepare(query)).get_attributes()
    declared = get_type_hints(row_type)

    assert [each.name for each in attributes] == list(row_type._fields)
    wrong = {each.name: each.type.name for each in attributes if not _takes(declared[each.name], each.type.name)}
    assert wrong == {}, f"{row_type.__name__} declares other types"


def _takes(declared: Any, sql_type: str) -> bool:
    if get_origin(declared) in (Union, types.UnionType):
        return any(_takes(each, sql_type) for each in get_args(declared) if each is not type(None))
    if sql_type.endswith("[]"):
        return get_origin(declared) is list and _takes(*get_args(declared), sql_type.removesuffix("[]"))
    if sql_type == "jsonb":
        return declared == Json or is_typeddict(declared) or get_origin(declared) in (list, dict)
    return TYPES.get(sql_type) is declared
