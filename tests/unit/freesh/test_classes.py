"""Requests told apart by length, with the thresholds that FREESH prints."""

import numpy as np
import pytest

from services.core.domain.errors import DomainError
from services.core.domain.serving import CLASSES
from services.core.policies.freesh.classes import PARTITIONS, Thresholds


@pytest.mark.parametrize(
    ("partition", "input_tokens", "output_tokens", "name"),
    [  # the four corners of Table 4, on both sides of each threshold
        ("a", 183, 443, "SS"),
        ("a", 183, 444, "SL"),
        ("a", 184, 443, "LS"),
        ("a", 184, 444, "LL"),
        ("b", 24, 231, "SS"),
        ("b", 24, 232, "SL"),
        ("b", 25, 231, "LS"),
        ("b", 4096, 4096, "LL"),
        ("b", 0, 5_000, "SL"),
    ],
)
def test_table_four(partition: str, input_tokens: int, output_tokens: int, name: str) -> None:
    assert CLASSES[PARTITIONS[partition].class_of([input_tokens], [output_tokens])[0]] == name


@pytest.mark.parametrize(("inputs", "outputs"), [([-1], [1]), ([1, 2], [1]), ([np.nan], [1]), ([[1]], [[1]])])
def test_nonsense_is_refused(inputs: list[float], outputs: list[float]) -> None:
    with pytest.raises(DomainError):
        PARTITIONS["a"].class_of(inputs, outputs)


def test_a_threshold_is_a_token_or_more() -> None:
    with pytest.raises(DomainError):
        Thresholds(0, 5)
