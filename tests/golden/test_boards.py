"""Simulations, priors and simulated devices read one catalogue: a figure that moves in it shows here."""

from __future__ import annotations

import json

import pytest

from tests.golden.boards import FILE, boards

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(GOLDEN | boards()))
def test_a_board_has_the_figures_that_are_checked_in(name: str) -> None:
    assert boards().get(name) == GOLDEN.get(name)
