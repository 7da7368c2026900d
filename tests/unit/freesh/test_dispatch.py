"""The choice of an instance."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.errors import DomainError
from services.core.policies.freesh.dispatch import InstanceLoad, WeightedRoundRobin


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_round_robin_gives_each_its_weight_in_every_round(weights: list[int]) -> None:
    instances = [InstanceLoad(f"i{at}", capacity=1, weight=float(weight)) for at, weight in enumerate(weights)]
    turns = WeightedRoundRobin()

    chosen = [turns.choose(instances) for _ in range(2 * sum(weights))]

    counts = Counter(each.id for each in chosen if each is not None)
    assert counts == {f"i{at}": 2 * weight for at, weight in enumerate(weights)}


def test_round_robin_passes_over_the_full_and_takes_in_the_new() -> None:
    turns = WeightedRoundRobin()
    full = InstanceLoad("full", capacity=1, held=1, weight=100.0)
    free = InstanceLoad("free", capacity=9, weight=1.0)

    assert [turns.choose([full, free]) for _ in range(3)] == [free] * 3
    assert turns.choose([full]) is None
    assert turns.choose([InstanceLoad("new", capacity=1)]) is not None
    with pytest.raises(DomainError):
        turns.choose([InstanceLoad("light", capacity=1, weight=0.0)])
