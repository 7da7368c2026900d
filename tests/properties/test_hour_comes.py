"""When a job's hour comes, as it is predicted and as it is found once it is there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.carbon import CarbonCurve
from services.core.policies.greener_hours import hour_comes_s, hour_has_come
from tests.support.builders import NOON_S, hourly_curve

INTENSITIES = st.lists(st.sampled_from([100, 200, 300, 400]), min_size=1, max_size=30)
JOBS = st.lists(st.tuples(st.integers(1, 40_000), st.integers(-3_600, 120_000)), min_size=1, max_size=6)
"""What jobs need, and when after noon they must be done, seconds."""


def followed_by(curve: CarbonCurve, intensities: list[int]) -> CarbonCurve:
    """Return a curve that goes on by the hour."""
    times_s = curve.end_s + 3_600.0 * np.arange(len(intensities), dtype=np.float64)
    values = np.concatenate((curve.intensity_gco2_per_kwh, intensities))
    return CarbonCurve(np.append(curve.times_s, times_s), values, float(times_s[-1]) + 3_600.0)


@given(hours=INTENSITIES, more=INTENSITIES, jobs=JOBS, ago_s=st.integers(0, 7_200))
def test_the_hour_comes_when_it_was_predicted_and_not_before(
    hours: list[int], more: list[int], jobs: list[tuple[int, int]], ago_s: int
) -> None:
    curve = hourly_curve(hours, start_s=NOON_S - ago_s)
    left_s = np.array([left for left, _ in jobs], dtype=np.float64)
    deadline_s = NOON_S + np.array([due for _, due in jobs], dtype=np.float64)
    comes_s = hour_comes_s(curve, NOON_S, left_s, deadline_s)
    known = np.isfinite(comes_s)

    assert known[deadline_s <= curve.end_s].all()
    looks_s = np.arange(NOON_S, curve.end_s, 900.0)
    for at_s in {NOON_S, *looks_s, *curve.times_s[curve.times_s > NOON_S]}:
        came = hour_has_come(curve, at_s, left_s, deadline_s)
        assert not came[known & (at_s < comes_s)].any()
        assert came[known & (at_s == comes_s)].all()
    longer = hour_comes_s(followed_by(curve, more), NOON_S, left_s, deadline_s)
    assert (longer[known] == comes_s[known]).all(), "whatever follows"
