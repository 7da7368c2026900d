"""A default or a range of the scheduler's settings that moves is a change for its operators: it shows here."""

from __future__ import annotations

import json

import pytest

from tests.golden.settings import FILE, settings

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(GOLDEN | settings()))
def test_a_setting_has_the_default_and_the_range_that_are_checked_in(name: str) -> None:
    assert settings().get(name) == GOLDEN.get(name)
