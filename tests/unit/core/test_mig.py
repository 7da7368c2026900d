"""Slices of one GPU: where they are, and which of them fit together."""

from itertools import combinations_with_replacement

import pytest

from services.core.domain.errors import DomainError
from services.core.domain.gpus import SLICE_SEVENTHS
from services.core.domain.mig import MEMORY_SLOTS, SlicePlace, parent_of, placed, slice_index
from services.core.policies.clover.layouts import can_be_cut, counts_of

MULTISETS = [sizes for count in range(9) for sizes in combinations_with_replacement(SLICE_SEVENTHS, count)]


def test_the_driver_and_the_nineteen_layouts_agree_on_what_fits() -> None:
    for sizes in MULTISETS:
        if can_be_cut(counts_of(sizes), 1):
            assert sorted(place.sevenths for place in placed(sizes)) == list(sizes)
        else:
            with pytest.raises(DomainError, match="do not fit"):
                placed(sizes)


@pytest.mark.parametrize("sizes", [[3, 2, 2], [2, 3, 2], [2, 2, 3]])
def test_the_order_in_which_slices_are_named_makes_no_difference(sizes: list[int]) -> None:
    assert placed(sizes) == (SlicePlace(2, 0), SlicePlace(2, 2), SlicePlace(3, 4))


def test_units_of_one_node_have_numbers_of_their_own() -> None:
    numbers = [slice_index(gpu, start) for gpu in (0, 1, 1_023) for start in range(MEMORY_SLOTS)]

    assert (numbers[0], numbers[8], numbers[-1]) == (1_024, 1_032, 9_215)
    assert [parent_of(number) for number in numbers] == [gpu for gpu in (0, 1, 1_023) for _ in range(MEMORY_SLOTS)]
    assert parent_of(1_023) is None


def test_a_size_that_is_no_slice_is_refused_by_name() -> None:
    with pytest.raises(DomainError, match="no slice of 5 sevenths; slices are 1g, 2g, 3g, 4g, 7g"):
        placed([5])
