"""Which tests are live; which worker runs which file, and when: long files first, and what shares an installation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import pytest

SHARED = {
    **dict.fromkeys(
        [f"tests/browser/test_{name}.py" for name in ("agreement", "jobs", "pages", "policies", "sign_in")], "browser"
    ),
    **dict.fromkeys(
        [
            f"tests/architecture/test_{name}.py"
            for name in (
                *("citations", "docstrings", "imports", "problems", "repetitions", "routes"),
                *("sql", "tables", "unused", "words"),
            )
        ],
        "syntax trees",
    ),
    "tests/attacks/test_hostile_job.py": "attacked installation",
    "tests/attacks/test_ports_kept.py": "attacked installation",
    "tests/integration/test_export.py": "installation",
    "tests/integration/test_kills.py": "installation",
    "tests/integration/test_services.py": "installation",
    "tests/integration/test_submission_to_footprint.py": "installation",
    "tests/integration/test_asrpt.py": "installation with rare rounds",
    "tests/integration/test_power.py": "installation with rare rounds",
}
"""To start an installation takes some 25 CPU seconds: files that share a fixture of the session, or the syntax trees of
all modules, stay together."""
LIVE = ("integration", "browser", "fuzz")
"""Folders whose tests start whole installations: they run with `./test --live`, and where they are named. In
`tests/attacks`, a file says by itself whether its tests are live, and to name the folder is not enough."""
FIRST = (
    *("integration", "attacks", "browser", "fuzz", "serving", "optimizer", "architecture"),
    *("standalone", "agent", "simulator", "scheduler"),
)
"""Folders whose files take long; a worker that starts one last would be left alone with it."""


def together(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Return the numbers of the tests that one process is to run: those of a file, or of what files share."""
    found: dict[str, list[int]] = {}
    for at, item in enumerate(items):
        file = item.nodeid.partition("::")[0]
        found.setdefault(SHARED.get(file, file), []).append(at)
    return [*found.values()]


@pytest.hookimpl(tryfirst=True)  # before those that are marked are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the live ones, and put the longest first; the rest stays in the order of its names."""
    for item in items:
        if _folder(item) in LIVE:
            item.add_marker("live")
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> tuple[int, str]:
    folder = _folder(item)
    return FIRST.index(folder) if folder in FIRST else len(FIRST), SHARED.get(item.nodeid.partition("::")[0], "")


def _folder(item: pytest.Item) -> str:
    parts = PurePath(item.nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 1 else ""
