"""Lengths of answers, learned as they come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.errors import DomainError
from services.core.profiles import answer_lengths
from services.core.profiles.answer_lengths import EDGES, MEMORY, PRIOR_LENGTH, AnswerLengths, input_bucket


def test_without_answers_the_prior_is_predicted() -> None:
    predicted = AnswerLengths().predict(["model"], 400)
    assert (predicted.tokens, predicted.answers) == (PRIOR_LENGTH, 0)
    assert 0 < predicted.long_share < 0.5


def test_the_median_is_predicted_within_a_bin() -> None:
    lengths = AnswerLengths()
    for tokens in [10] * 6 + [1_000] * 5:
        lengths.observe(["model"], tokens)
    assert lengths.predict(["model"]).tokens == pytest.approx(10)


def test_a_context_of_its_own_is_learned_within_a_few_answers() -> None:
    lengths = AnswerLengths()
    for _ in range(1_000):
        lengths.observe(["model"], 500)
    for _ in range(30):
        lengths.observe(["model", "summaries"], 20)
    assert lengths.predict(["model", "summaries"], 400).tokens == pytest.approx(20, rel=0.1)
    assert lengths.predict(["model", "unknown"], 400).tokens == pytest.approx(500, rel=0.1)
    assert lengths.predict(["model", "summaries"], 400).long_share < 0.5 < lengths.predict(["model"], 400).long_share


def test_one_answer_does_not_outweigh_what_the_model_is_known_for() -> None:
    lengths = AnswerLengths()
    for _ in range(100):
        lengths.observe(["model"], 500)
    lengths.observe(["model", "new"], 3)
    assert lengths.predict(["model", "new"], 400).long_share > 0.5


def test_old_answers_count_less() -> None:
    lengths = AnswerLengths()
    for tokens in [1_000] * int(2 * MEMORY) + [10] * int(2 * MEMORY):
        lengths.observe(["model"], tokens)
    assert lengths.predict(["model"], 500).long_share < 0.15


def test_the_contexts_used_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_lengths, "MOST_CONTEXTS", 3)
    lengths = AnswerLengths()
    for name in ("a", "b", "a", "c", "d"):
        lengths.observe([name], 7)
    assert len(lengths) == 3
    assert lengths.predict(["b"]).answers == 0
    assert lengths.predict(["a"]).answers == 2


def test_a_negative_length_is_refused_and_an_empty_answer_teaches_nothing() -> None:
    lengths = AnswerLengths()
    with pytest.raises(DomainError, match="at least 0 tokens, not -1"):
        lengths.observe(["model"], -1)
    lengths.observe(["model"], 0)
    assert len(lengths) == 0


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=60), st.integers(1, 5_000))
def test_shares_and_medians_stay_within_what_was_seen(observed: list[int], long_from: int) -> None:
    lengths = AnswerLengths()
    for tokens in observed:
        lengths.observe(["model", tokens % 3], tokens)
    predicted = lengths.predict(["model", observed[0] % 3], long_from)
    assert 0 <= predicted.long_share <= 1
    assert min(1, min(observed)) <= predicted.tokens <= max(*observed, EDGES[0]) * 1.15 + 1


def test_lengths_that_follow_the_prompts_are_found_and_noise_is_not() -> None:
    rng = np.random.default_rng(1)
    lengths, errors, constant = AnswerLengths(), [], []
    for prompt in rng.integers(1, 4_000, 4_000).tolist():
        answer = int(rng.gamma(4.0, (50 if prompt < 1_000 else 300) / 4.0)) + 1
        contexts = ["model", ("model", input_bucket(prompt))]
        errors.append(abs(lengths.predict(contexts).tokens - answer))
        constant.append(abs(lengths.predict(["model"]).tokens - answer))
        lengths.observe(contexts, answer)
    assert np.mean(errors[500:]) < 0.9 * np.mean(constant[500:])
