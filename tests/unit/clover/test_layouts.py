"""What can be cut from GPUs."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.domain.errors import DomainError
from services.core.domain.gpus import gpu_model, slice_memory_gib
from services.core.policies.clover.layouts import LAYOUT_COUNTS, LAYOUTS, SliceCounts, can_be_cut, counts_of, realise


@cache
def held_by(gpus: int) -> frozenset[SliceCounts]:
    """Return every multiset of slices that so many GPUs can hold, by trying all layouts."""
    if gpus == 0:
        return frozenset({(0, 0, 0, 0, 0)})
    found: set[SliceCounts] = set()
    one_gpu = {part for counts in LAYOUT_COUNTS for part in product(*(range(count + 1) for count in counts))}
    for rest in held_by(gpus - 1):
        found |= {tuple(a + b for a, b in zip(rest, part, strict=True)) for part in one_gpu}  # type: ignore[misc]
    return frozenset(found)


def test_the_layouts_are_the_papers() -> None:
    assert len(LAYOUTS) == 19
    assert LAYOUTS[0] == (7,)
    assert sorted(LAYOUTS[9]) == [1, 1, 2, 3]  # "configuration number 10 is {1g, 1g, 2g, 3g}"
    assert LAYOUTS[18] == (1,) * 7


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_what_can_be_cut_is_what_the_layouts_hold(gpus: int) -> None:
    most = 7 * gpus + 1
    for slices in product(range(most + 1), range(3 * gpus + 2), range(2 * gpus + 2), range(gpus + 2), range(gpus + 2)):
        assert can_be_cut(slices, gpus) == (slices in held_by(gpus)), slices


@pytest.mark.parametrize(
    ("slices", "can"),
    [((7,), True), ((3, 4), True), ((4, 4), False), ((3, 3, 1), False), ((4, 2, 2), False), ((2, 2, 2, 1), True)],
)
def test_one_gpu(slices: tuple[int, ...], can: bool) -> None:
    assert can_be_cut(counts_of(slices), 1) is can


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 18), min_size=1, max_size=4), st.lists(st.integers(0, 18), min_size=1, max_size=4))
def test_layouts_that_realise_slices_hold_them_with_the_fewest_gpus_cut(now: list[int], then: list[int]) -> None:
    slices = counts_of([size for layout in (then * 4)[: len(now)] for size in LAYOUTS[layout]])

    found = realise(slices, now)

    held = counts_of([size for layout in found.layouts for size in LAYOUTS[layout]])
    assert all(there >= needed for there, needed in zip(held, slices, strict=True))
    assert found.recut == tuple(gpu for gpu in range(len(now)) if found.layouts[gpu] != now[gpu])
    fewer = len(found.recut) - 1
    for recut in combinations(range(len(now)), max(fewer, 0)) if fewer >= 0 else ():
        kept = counts_of([size for gpu, layout in enumerate(now) if gpu not in recut for size in LAYOUTS[layout]])
        rest = tuple(max(needed - there, 0) for needed, there in zip(slices, kept, strict=True))
        assert not can_be_cut(rest, fewer)  # type: ignore[arg-type]


def test_a_configuration_that_is_there_already_disturbs_nothing() -> None:
    assert realise(counts_of([4, 2, 1, 7]), (2, 0)).recut == ()


@pytest.mark.parametrize("slices", [(0, 0, 0, 2, 0), (8, 0, 0, 0, 0)])
def test_slices_that_do_not_fit_are_refused(slices: SliceCounts) -> None:
    with pytest.raises(DomainError, match="cannot be cut from 1 GPUs"):
        realise(slices, [0])


def test_an_unknown_slice_or_layout_is_named() -> None:
    with pytest.raises(DomainError, match="no slice of 5g"):
        counts_of([5])
    with pytest.raises(DomainError, match="from 0 to 18"):
        realise((0, 0, 0, 0, 1), [19])


@pytest.mark.parametrize(
    ("board", "memory_gib"),
    [
        ("A100", (5, 10, 20, 20, 40)),
        ("A100-80GB", (10, 20, 40, 40, 80)),
        ("H100", (10, 20, 40, 40, 80)),
        ("H200", (18, 35, 71, 71, 141)),
        ("L4", tuple(pytest.approx(24 * size / 7) for size in (1, 2, 3, 4, 7))),
    ],
)
def test_memory_of_slices(board: str, memory_gib: tuple[float, ...]) -> None:
    assert slice_memory_gib(gpu_model(board)) == memory_gib


def test_gpus_that_cost_little_are_cut_rather_than_others() -> None:
    found = realise((0, 3, 0, 0, 0), (0, 0, 18), [5.0, 1.0, 5.0])
    assert found.recut == (1,)
    assert [counts_of(LAYOUTS[layout]) for layout in found.layouts][1][1] >= 3
    assert realise((0, 3, 0, 0, 0), (0, 0, 18), [5.0, 9.0, 1.0]).recut == (2,)
