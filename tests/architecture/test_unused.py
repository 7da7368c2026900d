"""No public definition of the core is there for its tests alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.unused import unused

ROOT = Path(__file__).parents[2]
CORE = ROOT / "services/core"
CALLERS = (
    *("services", "gateway", "carbon_service", "optimizer_service", "gpu_agent", "migrations"),
    "lab",
)

ALLOWED: dict[str, str] = {}
"""``path:name`` of what nothing calls, and why it stays."""


def the_core() -> dict[str, str]:
    """Return the sources of the core by path."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(CORE.rglob("*.py"))}


def test_the_core_has_no_public_definition_that_only_tests_use() -> None:
    others = [
        path.read_text() for folder in CALLERS for path in (ROOT / folder).rglob("*.py") if CORE not in path.parents
    ]

    assert unused(the_core(), others) == set(ALLOWED)


@pytest.mark.parametrize(
    ("source", "caller", "found"),
    [
        ("def a(): ...", "", {"a"}),
        ("def a(): return a()", "", {"a"}),
        ("def a(): ...", "from m import a", {"a"}),
        ("def a(): ...", "a()", set[str]()),
        ("def a(): ...\nb = a()", "", set[str]()),
        ("class A:\n    def b(self): ...", "A()", {"A.b"}),
        ("class A:\n    def b(self): ...", "A().b()", set[str]()),
        ("class A:\n    b = property(lambda self: 1)", "A", set[str]()),
        ("class A:\n    def b(self): ...", "getattr(A, 'b')", set[str]()),
        ("def _a(): ...", "", set[str]()),
    ],
)
def test_only_a_call_from_elsewhere_is_a_use(source: str, caller: str, found: set[str]) -> None:
    assert unused({"m": source}, [caller]) == {f"m:{name}" for name in found}
