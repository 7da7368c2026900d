"""The hour's metrics are the ones checked in."""

from __future__ import annotations

import json

import pytest

from tests.lab.golden.recurring import FILE, VARIANTS, metrics_of

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_hour_comes_out_as_before(name: str) -> None:
    assert metrics_of(*VARIANTS[name]) == GOLDEN[name]
