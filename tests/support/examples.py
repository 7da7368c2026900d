"""How many examples properties are tried on: 25 each, 400 with ``./test --slow``; no deadline on shared machines.

The 25 follow from the test itself, so that a change is not refused for what another one broke, one time in a thousand;
the 400 differ from run to run, and are where such a fault is looked for.
"""

import pytest
from hypothesis import settings

settings.register_profile("usual", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("slow", max_examples=400, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Pick the profile."""
    markers = config.getoption("-m") or "not slow"
    settings.load_profile("usual" if "not slow" in markers else "slow")
