"""Which tests are live; which worker runs which file, and when: long files first, and what shares an installation."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

SHARED = {
    **dict.fromkeys(
        [f"tests/browser/test_{name}.py" for name in ("agreement", "jobs", "pages", "policies", "sign_in")], "browser"
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
"""To start an installation takes some 25 CPU seconds: files that share a fixture of the session stay together."""
LIVE = ("integration", "browser", "fuzz")
"""Folders whose tests start whole installations: they run with `./test --live`, and where they are named. In
`tests/attacks`, a file says by itself whether its tests are live, and to name the folder is not enough."""
FIRST = (
    *("integration", "attacks", "browser", "fuzz", "serving", "optimizer"),
    *("standalone", "agent", "simulator", "scheduler"),
)
"""Folders whose files take long; a worker that starts one last would be left alone with it."""


class _Together(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return SHARED.get(file, file)

    def remove_node(self, node: WorkerController) -> str | None:
        """Give no other worker the test that ended its own: it would wait as long, and again, a dozen times.

        Nor any file that is over: xdist would assign it, and wait for ever for the end of a test in it.
        """
        open_, crashed = dict[str, dict[str, bool]](), None
        for file, tests in self.assigned_work[node].items():
            for test, is_over in tests.items():
                if not is_over and crashed is None:
                    crashed, tests[test] = test, True
            if not all(tests.values()):
                open_[file] = tests
        self.assigned_work[node] = open_
        super().remove_node(node)
        if crashed is not None:
            self.config.get_terminal_writer().line(f"\n{crashed} ended its worker")
        return crashed

    def schedule(self) -> None:
        """Give each worker two tests at least: it begins one when it knows the next."""
        super().schedule()
        for node in self.nodes:
            while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    """Distribute by file, or by what files share."""
    return _Together(config, log) if config.getoption("dist") == "loadfile" else None


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
