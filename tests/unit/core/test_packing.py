"""Instances on whole nodes, against every way there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.domain.packing import divide_each_other, pack, patterns


def fits(sizes: list[int], allowed: np.ndarray, free: list[int]) -> bool:
    """Look at every way to place the instances."""
    for nodes in itertools.product(range(len(free)), repeat=len(sizes)):
        taken = [0] * len(free)
        for item, node in enumerate(nodes):
            taken[node] += sizes[item]
        is_allowed = all(allowed[item, node] for item, node in enumerate(nodes))
        if is_allowed and all(used <= room for used, room in zip(taken, free, strict=True)):
            return True
    return False


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    free=st.lists(st.integers(0, 8), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_way_is_found_wherever_there_is_one(sizes: list[int], free: list[int], seed: int) -> None:
    allowed = np.random.default_rng(seed).random((len(sizes), len(free))) < 0.8
    found = pack(sizes, allowed, free)
    assert (found is not None) == fits(sizes, allowed, free)
    if found is not None:
        taken = np.bincount(found, weights=sizes, minlength=len(free))
        assert (taken <= free).all()
        assert all(allowed[item, node] for item, node in enumerate(found))


def test_what_the_largest_first_would_leave_out_is_placed() -> None:
    sizes = [4, 3, 3, 2, 2, 2]
    found = pack(sizes, np.ones((6, 2), np.bool_), [8, 8])
    assert found is not None
    assert np.bincount(found, weights=sizes).tolist() == [8, 8]


def test_thousands_are_packed_too() -> None:
    sizes = [4, 2, *[1] * 4_994]

    found = pack(sizes, np.ones((len(sizes), 2), dtype=np.bool_), [2_500, 2_500])

    assert found is not None
    assert sorted(sum(size for size, on in zip(sizes, found, strict=True) if on == node) for node in (0, 1)) == [
        2_500,
        2_500,
    ]


def test_a_search_that_takes_too_long_is_given_up() -> None:
    sizes = [4, 3, 3, 2, 2, 2]
    assert pack(sizes, np.ones((6, 2), np.bool_), [8, 8], most_steps=3) is None


@settings(max_examples=60, deadline=None)
@given(sizes=st.sets(st.integers(1, 6), min_size=1, max_size=3), room=st.integers(0, 12))
def test_patterns_are_the_ways_to_fill_a_node_and_no_other(sizes: set[int], room: int) -> None:
    named = sorted(sizes)
    every = {
        counts
        for counts in itertools.product(*(range(room // size + 1) for size in named))
        if room - min(named) < sum(n * size for n, size in zip(counts, named, strict=True)) <= room
    }
    found = patterns(named, room)
    assert set(found) == every
    assert len(found) == len(every)


@pytest.mark.parametrize(("sizes", "expected"), [([1, 2, 4, 8], True), ([2, 3], False), ([4, 4], True), ([3], True)])
def test_sizes_that_divide_each_other(sizes: list[int], expected: bool) -> None:
    assert divide_each_other(sizes) == expected
