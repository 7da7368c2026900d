"""The policies of the lab, for tests whose subject needs one; the product's registry knows nothing of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.policies.entries import ENTRIES
from services.core.policies.registry import POLICIES


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    """What a test loads, as commands that simulate do, is gone after it: the lab is installed where tests run."""
    known = dict(POLICIES)
    yield
    if POLICIES.keys() != known.keys():
        POLICIES.clear()
        POLICIES.update(known)


@pytest.fixture
def the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry has the lab's policies too, as in a process that found the package installed."""
    for name, entry in ENTRIES.items():
        monkeypatch.setitem(POLICIES, name, entry)
