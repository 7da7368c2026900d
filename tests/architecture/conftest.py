"""Syntax trees of all modules are shared by the tests of this folder, and then let go: they are millions of objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.architecture import rules, tables


@pytest.fixture(scope="package", autouse=True)
def _trees_let_go() -> Iterator[None]:
    yield
    for function in (rules.tree_of, rules.nodes_of, rules.imports_of, tables.statements_in):
        function.cache_clear()
