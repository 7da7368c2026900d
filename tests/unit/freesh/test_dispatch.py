"""The choice of an instance."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.errors import DomainError
from services.core.policies.freesh.dispatch import InstanceLoad, WeightedRoundRobin, least_work, with_affinity


def test_the_least_work_for_its_capacity_is_chosen_among_those_with_room() -> None:
    small = InstanceLoad("small", capacity=4, held=1, work_s=4.0)
    large = InstanceLoad("large", capacity=16, held=3, work_s=12.0)
    full = InstanceLoad("full", capacity=1, held=1, work_s=0.1)

    assert least_work([small, large, full]) is large
    assert least_work([full]) is None


def test_a_cached_prompt_attracts_where_laxity_allows() -> None:
    idle = InstanceLoad("idle", capacity=4)
    warm = InstanceLoad("warm", capacity=4, held=4, work_s=2.0, cached_tokens=4_000)
    cold_copy = InstanceLoad("warmer", capacity=4, held=1, work_s=1.0, cached_tokens=500)

    assert with_affinity([idle, warm], laxity_s=1.0, prefill_s_per_token=0.001) is warm  # saves 4 s, waits 0.5 s
    assert with_affinity([idle, warm], laxity_s=0.4, prefill_s_per_token=0.001) is idle
    assert with_affinity([idle, warm], laxity_s=-1.0, prefill_s_per_token=0.001) is idle
    assert with_affinity([idle, warm], laxity_s=9.0, prefill_s_per_token=0.0001) is idle  # saves 0.4 s, waits 0.5 s
    assert with_affinity([idle, cold_copy], laxity_s=-1.0, prefill_s_per_token=0.001) is cold_copy
    assert with_affinity([idle, warm], laxity_s=9.0, prefill_s_per_token=0.0) is idle
    assert with_affinity([warm], laxity_s=0.0, prefill_s_per_token=0.001) is None


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
