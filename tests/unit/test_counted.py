"""Sentences count in the singular and in the plural."""

import pytest

from services.core.domain.counted import counted


@pytest.mark.parametrize(
    ("count", "noun", "plural", "said"),
    [
        (0, "GPU", "", "0 GPUs"),
        (1, "GPU", "", "1 GPU"),
        (1.0, "day", "", "1 day"),
        (0.5, "day", "", "0.5 days"),
        (1_234_567, "job", "", "1234567 jobs"),
        (1, "GPU is", "GPUs are", "1 GPU is"),
        (2, "entry", "entries", "2 entries"),
    ],
)
def test_a_count_agrees_with_its_noun(count: float, noun: str, plural: str, said: str) -> None:
    assert counted(count, noun, plural) == said
