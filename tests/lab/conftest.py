"""All that is tested here may name the lab's policies."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _with_the_lab(the_lab: None) -> None:
    pass
