"""The day's metrics are the ones checked in."""

from __future__ import annotations

import json

import pytest

from tests.golden.day import DAYS, HERE, metrics_of, run

GOLDEN = json.loads((HERE / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DAYS)
def test_the_day_comes_out_as_before(name: str) -> None:
    assert metrics_of(run(*DAYS[name])) == GOLDEN[name]
