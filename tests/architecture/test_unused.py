"""No public definition of the product is there for its tests alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.unused import unused

ROOT = Path(__file__).parents[2]
PRODUCT = ("services", "gateway", "carbon_service", "optimizer_service", "gpu_agent")
CALLERS = ("lab", "migrations")

ALLOWED = {
    "gateway/dashboard/pages.py:VersionedFiles.file_response": "Starlette calls it",
    "gpu_agent/archives.py:_Bounded.seekable": "io calls it",
    "services/cli/main.py:Commands.get_command": "click calls it",
    "services/cli/main.py:Commands.list_commands": "click calls it",
    "services/cli/output.py:_Console.render_str": "rich calls it",
    "services/db/database.py:_Shared.get_reset_query": "asyncpg calls it",
    "services/kit/heads.py:Server.handle_exit": "uvicorn calls it",
    "services/kit/heads.py:Server.main_loop": "uvicorn calls it",
    "services/kit/otel.py:PartsOnly.get_description": "OpenTelemetry calls it",
    "services/kit/otel.py:PartsOnly.should_sample": "OpenTelemetry calls it",
    "services/kit/otel.py:Sending.force_flush": "OpenTelemetry calls it",
    "services/kit/worker_pulse.py:PatientConsumer.call_soon_ack": "kombu calls it",
    "services/kit/worker_pulse.py:PatientConsumer.ensure_connected": "kombu calls it",
    "services/kit/heads.py:_Connection.on_body": "uvicorn, or httptools, calls it",
    "services/kit/heads.py:_Connection.on_headers_complete": "uvicorn, or httptools, calls it",
    "services/kit/heads.py:_Connection.on_message_complete": "uvicorn, or httptools, calls it",
    "services/kit/heads.py:_Connection.on_response_complete": "uvicorn, or httptools, calls it",
    "services/router/upstream.py:Connection.on_header": "httptools calls it",
    "services/router/upstream.py:Connection.on_message_begin": "httptools calls it",
}
"""``path:name`` of what nothing here calls, and why it stays."""


def sources(*folders: str) -> dict[str, str]:
    """Return the Python sources of folders by path."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def test_the_product_has_no_public_definition_that_only_tests_use() -> None:
    assert unused(sources(*PRODUCT), sources(*CALLERS).values()) == set(ALLOWED)


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
        ("@router.get('/a')\ndef a(): ...", "", set[str]()),
        ("@cache\ndef a(): ...", "", {"a"}),
    ],
)
def test_only_a_call_from_elsewhere_is_a_use(source: str, caller: str, found: set[str]) -> None:
    assert unused({"m": source}, [caller]) == {f"m:{name}" for name in found}
