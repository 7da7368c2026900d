"""The bundled fits of PowerFlow's recipes: there for every job that is drawn, and what a fit made here finds."""

from __future__ import annotations

import numpy as np
import pytest

from lab.bundles import json_of
from lab.recipes.green import PHILLY_SIZES
from lab.recipes.measured import batches_of
from lab.recipes.powerflow import BOARD, FITS, SIZES, TABLE_1, fit_now, fitted_profile, seen_of
from lab.reproductions.powerflow_fits import row_of

COLUMNS = ("speed", "power_w", "limited_speed", "limited_power_w", "power_error")


def test_every_kind_that_users_have_is_bundled() -> None:
    kinds = {(model, batch, gang) for model in TABLE_1 for batch in batches_of(model) for gang in (None, *PHILLY_SIZES)}

    assert {(row["model"], row["batch"], row["gang"]) for row in json_of(FITS)} == kinds


@pytest.mark.parametrize(("model", "batch", "gang"), [("deepspeech2", 20, None), ("bert", 8, 2)])
def test_a_fit_made_here_is_the_bundled_one(model: str, batch: int, gang: int | None) -> None:
    (bundled,) = (row for row in json_of(FITS) if (row["model"], row["batch"], row["gang"]) == (model, batch, gang))
    made = row_of(model, batch, gang)

    assert made.keys() == bundled.keys()
    for column in COLUMNS:
        assert made[column] == pytest.approx(bundled[column], rel=2e-3), column


def test_policies_see_the_bundled_fit() -> None:
    (bundled,) = (row for row in json_of(FITS) if (row["model"], row["batch"], row["gang"]) == ("bert", 12, None))
    seen = fitted_profile("bert", 12).predicted[BOARD]

    assert seen.speed_at(SIZES).tolist() == bundled["speed"]
    assert seen.power_w_at(SIZES).tolist() == bundled["power_w"]
    assert seen.power_error == bundled["power_error"]


def test_a_gang_that_no_user_of_the_bundle_has_is_fitted() -> None:
    seen, made = seen_of("deepspeech2", 20, 3), fit_now("deepspeech2", 20, 3)

    np.testing.assert_array_equal(seen.speed, made.speed)
    assert (np.diff(seen.speed) > 0).any()
