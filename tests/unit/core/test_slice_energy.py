"""The split of a GPU's energy among its slices."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.accounting.slices import SliceUse, split_slice_energy
from services.core.domain.errors import DomainError
from services.core.domain.gpus import SLICE_SEVENTHS

uses = st.builds(
    SliceUse, st.sampled_from(SLICE_SEVENTHS), st.booleans(), st.none() | st.floats(0, 1, allow_subnormal=False)
)
joules = st.floats(0, 1e9, allow_subnormal=False)


@given(joules, joules, st.dictionaries(st.integers(0, 6), uses, min_size=1))
def test_the_parts_are_the_whole(energy_j: float, idle_j: float, slices: dict[int, SliceUse]) -> None:
    parts = split_slice_energy(energy_j, idle_j, slices)
    assert parts.keys() == slices.keys()
    assert min(parts.values()) >= 0
    assert math.fsum(parts.values()) == pytest.approx(energy_j, rel=1e-9, abs=1e-9)


def test_measured_activity_splits_what_is_above_idle() -> None:
    slices = {0: SliceUse(2, True, 1.0), 1: SliceUse(2, True, 0.5), 2: SliceUse(3, False, None)}
    assert split_slice_energy(370, 70, slices) == pytest.approx({0: 20 + 200, 1: 20 + 100, 2: 30})


def test_without_a_measure_size_splits_among_slices_in_use() -> None:
    slices = {0: SliceUse(2, True, 1.0), 1: SliceUse(1, True, None), 2: SliceUse(4, False, None)}
    assert split_slice_energy(370, 70, slices) == pytest.approx({0: 20 + 200, 1: 10 + 100, 2: 40})


def test_slices_in_use_that_were_not_active_share_by_size() -> None:
    slices = {0: SliceUse(4, True, 0.0), 1: SliceUse(3, True, 0.0)}
    assert split_slice_energy(140, 70, slices) == pytest.approx({0: 80, 1: 60})


def test_a_gpu_that_nobody_uses_is_split_by_size() -> None:
    slices = {0: SliceUse(4, False), 1: SliceUse(3, False)}
    assert split_slice_energy(70, 0, slices) == pytest.approx({0: 40, 1: 30})


@pytest.mark.parametrize(
    ("energy_j", "idle_j", "slices"),
    [
        (math.nan, 0.0, {0: SliceUse(1, True)}),
        (1.0, -1.0, {0: SliceUse(1, True)}),
        (1.0, 0.0, {}),
        (1.0, 0.0, {0: SliceUse(1, True, math.nan)}),
    ],
)
def test_nonsense_is_refused(energy_j: float, idle_j: float, slices: dict[int, SliceUse]) -> None:
    with pytest.raises(DomainError):
        split_slice_energy(energy_j, idle_j, slices)
