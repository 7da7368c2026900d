"""Tokens of prompts: by the model's tokenizer, or by what its servers say of prompts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from services.router import expectations
from services.router.expectations import LONGEST_ENCODED, TokenCounter
from tests.router.conftest import Stage
from tests.support.routers import Running, chat


def test_an_estimate_follows_what_servers_state() -> None:
    counter = TokenCounter(None)
    assert counter.count(chat("x" * 400))[0] == 100
    for _ in range(300):
        counter.observe(400, 200)
    assert counter.count(chat("x" * 400))[0] == pytest.approx(200, rel=0.01)
    counter.observe(0, 5)
    counter.observe(400, 0)
    assert counter.bytes_per_token == pytest.approx(2, rel=0.01)


async def test_what_is_learned_of_pools_that_are_gone_does_not_stay(router: Running, stage: Stage) -> None:
    await router.ask()
    counters = router.router.expectations._counters
    assert set(counters) == {"chat"}
    stage.one.gate = asyncio.Event()
    late = asyncio.create_task(router.ask())
    await stage.one.until(lambda: stage.one.held == 1)
    stage.plane.pools = []
    await router.adopted()
    assert not router.router.expectations._counters
    stage.one.gate.set()
    assert (await late).status_code == 200


def test_a_lie_about_tokens_moves_the_estimate_only_within_bounds() -> None:
    counter = TokenCounter(None)
    for _ in range(10_000):
        counter.observe(1_000_000, 1)
    assert counter.bytes_per_token <= 50


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 40}]}]}, 10),
        ({"prompt": ["x" * 20, "y" * 19]}, 10),
        ({"prompt": [1, 2, 3]}, 3),
        ({"input": [[1, 2], [3]]}, 3),
        ({"messages": "not a list", "prompt": {"odd": 1}}, 1),
        ({"messages": [None, 7, {"content": None}]}, 1),
    ],
)
def test_prompts_of_every_form_are_counted_and_odd_ones_do_no_harm(fields: dict[str, Any], expected: int) -> None:
    assert TokenCounter(None).count(fields)[0] == expected


def test_tools_are_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "x" * 400}}]
    assert TokenCounter(None).count(chat("Hi", tools=tools))[0] > 100


def test_a_pools_tokenizer_counts_exactly_but_for_very_long_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = ModuleType("tokenizers")
    words = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=text.split()))
    fake.Tokenizer = SimpleNamespace(from_file=lambda path: words)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", fake)
    monkeypatch.setattr(expectations, "find_spec", lambda name: object())
    counter = TokenCounter(str(tmp_path / "tokenizer.json"))
    assert counter.count(chat("three short words"))[0] == 3
    assert TokenCounter(None).count(chat("three short words"))[0] != 3, "an estimate would count otherwise"
    assert counter.count(chat("a" * (LONGEST_ENCODED + 4)))[0] == (LONGEST_ENCODED + 4) // 4


def test_the_real_library_reads_a_models_file_and_counts_by_it(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")
    words = {"[UNK]": 0, "three": 1, "short": 2, "words": 3, "!": 4}
    made = library.Tokenizer(library.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    counter = TokenCounter(str(tmp_path / "tokenizer.json"))
    assert counter.count(chat("three short words!"))[0] == 4


def test_a_tokenizer_that_cannot_be_read_is_logged_and_estimated(caplog: pytest.LogCaptureFixture) -> None:
    counter = TokenCounter("/no/such/tokenizer.json")
    assert counter.count(chat("x" * 40))[0] == 10
    assert any(record.getMessage().startswith("tokenizer.not_") for record in caplog.records)
