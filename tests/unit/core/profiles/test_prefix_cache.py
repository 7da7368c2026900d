"""Beginnings of prompts that are not read again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.errors import DomainError
from services.core.profiles.prefix_cache import PrefixCache


def read(cache: PrefixCache, blocks: list[int]) -> int:
    """Have a prompt read; return how many of its blocks were known."""
    known = cache.shared(blocks)
    cache.keep(blocks)
    return known


def test_a_shared_beginning_is_read_once() -> None:
    cache = PrefixCache(100, 10)

    assert read(cache, [1, 2, 3]) == 0
    assert read(cache, [1, 2, 4]) == 2
    assert cache.shared([1, 2, 3, 9]) == 3
    assert cache.shared([8, 9]) == 0
    assert read(cache, []) == 0


def test_of_the_prompt_used_least_recently_the_end_goes_first() -> None:
    cache = PrefixCache(40, 10)
    cache.keep([1, 2, 3])
    cache.keep([7, 8])

    assert cache.shared([1, 2, 3]) == 2
    assert cache.shared([7, 8]) == 2


def test_a_prompt_longer_than_the_cache_leaves_its_beginning() -> None:
    cache = PrefixCache(25, 10)
    cache.keep([1, 2, 3, 4])

    assert cache.shared([1, 2, 3, 4]) == 2
    for small in (PrefixCache(9, 10), PrefixCache(0, 10)):
        small.keep([1])
        assert small.shared([1]) == 0


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=20), st.integers(0, 60))
def test_a_cache_never_keeps_more_than_it_may(prompts: list[list[int]], tokens: int) -> None:
    """Prompts are paths in a tree; an id stands for a path."""
    cache, seen = PrefixCache(tokens, 10), set[int]()
    for prompt in prompts:
        path, blocks = 1, list[int]()
        for step in prompt:
            path = 4 * path + step
            blocks.append(path)
        hit = read(cache, blocks)
        assert 0 <= hit <= min(len(blocks), tokens // 10)
        assert hit <= len(seen & set(blocks))
        seen |= set(blocks)
        kept = sum(cache.shared(blocks[:at]) >= at for at in range(1, len(blocks) + 1))
        assert kept == min(len(blocks), tokens // 10)


@pytest.mark.parametrize(("tokens", "block"), [(-1, 10), (10, 0)])
def test_sizes_that_cannot_be_are_refused(tokens: int, block: int) -> None:
    with pytest.raises(DomainError):
        PrefixCache(tokens, block)
