"""Beginnings of prompts that are not read again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.errors import DomainError
from services.core.profiles.model_server import PrefixCache


def test_a_shared_beginning_is_read_once() -> None:
    cache = PrefixCache(100, 10)

    assert cache.read([1, 2, 3], 35) == 0
    assert cache.read([1, 2, 4], 35) == 20
    assert cache.cached_tokens([1, 2, 3, 9], 45) == 30
    assert cache.cached_tokens([8, 9], 20) == 0


def test_one_token_is_always_read() -> None:
    cache = PrefixCache(100, 10)
    cache.read([1, 2], 20)

    assert cache.read([1, 2], 20) == 19
    assert cache.read([], 0) == 0


def test_of_the_prompt_used_least_recently_the_end_goes_first() -> None:
    cache = PrefixCache(40, 10)
    cache.read([1, 2, 3], 30)
    cache.read([7, 8], 20)

    assert cache.cached_tokens([1, 2, 3], 31) == 20
    assert cache.cached_tokens([7, 8], 21) == 20


def test_a_prompt_longer_than_the_cache_leaves_its_beginning() -> None:
    cache = PrefixCache(25, 10)
    cache.read([1, 2, 3, 4], 40)

    assert cache.cached_tokens([1, 2, 3, 4], 40) == 20
    assert PrefixCache(9, 10).read([1], 10) == PrefixCache(0, 10).read([1], 10) == 0


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=20), st.integers(0, 60))
def test_a_cache_never_keeps_more_than_it_may(prompts: list[list[int]], tokens: int) -> None:
    """Prompts are paths in a tree; an id stands for a path."""
    cache, seen = PrefixCache(tokens, 10), set[int]()
    for prompt in prompts:
        path, blocks = 1, list[int]()
        for step in prompt:
            path = 4 * path + step
            blocks.append(path)
        length = 10 * len(blocks)
        hit = cache.read(blocks, length)
        assert 0 <= hit <= min(max(length - 1, 0), tokens)
        assert hit <= 10 * len(seen & set(blocks))
        seen |= set(blocks)
        kept = sum(cache.cached_tokens([*blocks[:at]], length + 1) >= 10 * at for at in range(1, len(blocks) + 1))
        assert kept == min(len(blocks), tokens // 10)


@pytest.mark.parametrize(("tokens", "block"), [(-1, 10), (10, 0)])
def test_sizes_that_cannot_be_are_refused(tokens: int, block: int) -> None:
    with pytest.raises(DomainError):
        PrefixCache(tokens, block)
