"""Which tests a change reaches."""

from __future__ import annotations

import pytest

from tests.changed import reached

TEXTS = {
    "services/__init__.py": "",
    "services/kit/__init__.py": "",
    "services/kit/ids.py": "",
    "services/kit/clock.py": "from services.kit import ids",
    "services/router/__init__.py": "",
    "services/router/app.py": "def f():\n    from services.kit.clock import now",
    "clients/python/src/wattshift/jobs.py": "from . import peers",
    "clients/python/src/wattshift/peers.py": "",
    "tests/conftest.py": 'pytest_plugins = ["tests.support.order"]',
    "tests/support/order.py": "import services.router.app",
    "tests/kit/conftest.py": "",
    "tests/kit/test_ids.py": "from services.kit.ids import new",
    "tests/router/test_app.py": 'START = ["-m", "services.router.app"]',
    "tests/clients/test_jobs.py": "import wattshift.jobs",
    "tests/clients/helper.py": "import wattshift.jobs",
}
ALL = {"tests/kit/test_ids.py", "tests/router/test_app.py", "tests/clients/test_jobs.py"}


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ("services/kit/ids.py", {"tests/kit/test_ids.py", "tests/router/test_app.py"}),
        ("services/kit/clock.py", {"tests/router/test_app.py"}),
        ("services/kit/__init__.py", {"tests/kit/test_ids.py", "tests/router/test_app.py"}),
        ("services/kit/table.json", {"tests/kit/test_ids.py", "tests/router/test_app.py"}),
        ("clients/python/src/wattshift/peers.py", {"tests/clients/test_jobs.py"}),
        ("tests/kit/conftest.py", {"tests/kit/test_ids.py"}),
        ("tests/conftest.py", ALL),
        ("tests/support/order.py", ALL),
        ("tests/router/test_app.py", {"tests/router/test_app.py"}),
        ("services/kit/gone.py", set()),
        ("docs/start.md", set()),
    ],
)
def test_a_change_reaches_what_uses_it(changed: str, wanted: set[str]) -> None:
    assert reached(TEXTS, [changed]) == wanted


def test_what_imports_a_module_that_is_gone_is_reached() -> None:
    texts = TEXTS | {"tests/kit/test_gone.py": "from services.kit.gone import x"}
    assert reached(texts, ["services/kit/gone.py"]) == {"tests/kit/test_gone.py"}
