"""Slices of one GPU: where they are, and which of them fit together."""

from itertools import combinations_with_replacement

import pytest

from services.core.domain.errors import DomainError
from services.core.domain.gpus import SLICE_SEVENTHS, gpu_model
from services.core.domain.mig import MEMORY_SLOTS, SlicePlace, parent_of, placed, profile_name, slice_index
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


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("A100-SXM4-40GB", ["1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"]),
        ("H100-SXM5-80GB", ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]),
        ("H200", ["1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"]),
    ],
)
def test_profiles_have_the_names_of_the_driver(model: str, names: list[str]) -> None:
    assert [profile_name(gpu_model(model), size) for size in SLICE_SEVENTHS] == names


def test_a_board_without_mig_has_no_profiles() -> None:
    with pytest.raises(DomainError, match="V100-SXM2-32GB has no slice"):
        profile_name(gpu_model("V100"), 1)
