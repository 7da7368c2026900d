"""What must hold of two curves of time over energy, whatever their points."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lab.reproductions.equal_energy import Curve, compared

points = st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(1.0, 100.0)), min_size=1, max_size=6)


@given(points)
def test_no_point_beats_one_of_the_front_in_both(given_points: list[tuple[float, float]]) -> None:
    curve = Curve.of(given_points)
    front = list(zip(curve.energy_kwh.tolist(), curve.jct_s.tolist(), strict=True))

    assert set(front) <= set(given_points)
    for energy, jct in front:
        others = [each for each in given_points if each != (energy, jct)]
        assert not any(other_e <= energy and other_j <= jct for other_e, other_j in others)
    for energy, jct in given_points:
        assert any(e <= energy and j <= jct for e, j in front)


@given(points, points, st.floats(0.0, 1.0))
def test_extremes_bound_the_ratio_everywhere_both_reach(
    ours: list[tuple[float, float]], theirs: list[tuple[float, float]], where: float
) -> None:
    mine, other = Curve.of(ours), Curve.of(theirs)
    found = compared(mine, other)
    if found is None:
        assert mine.energy_kwh[-1] < other.energy_kwh[0] or other.energy_kwh[-1] < mine.energy_kwh[0]
        return
    energy = found.low + where * (found.high - found.low)
    ratio = other.at(energy) / mine.at(energy)

    assert found.least * (1 - 1e-9) <= ratio <= found.most * (1 + 1e-9)
    back = compared(other, mine)
    assert back is not None
    np.testing.assert_allclose(back.most, 1 / found.least)


@given(points)
def test_a_curve_turned_twice_is_itself_and_equals_itself(given_points: list[tuple[float, float]]) -> None:
    curve = Curve.of(given_points)
    again = curve.turned().turned()
    found = compared(curve, curve)

    assert np.array_equal(again.energy_kwh, curve.energy_kwh)
    assert found is not None
    assert found.least == found.most == 1.0
    for energy, jct in zip(curve.energy_kwh.tolist(), curve.jct_s.tolist(), strict=True):
        assert curve.at(energy) == jct
        assert curve.turned().at(jct) == energy
