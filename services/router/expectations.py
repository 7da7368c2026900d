"""What is expected of a request before it is served: its tokens, the length of its answer, its class."""

from __future__ import annotations

from services.core.profiles.answer_lengths import AnswerLengths, input_bucket
from services.router.fleet import Pool
from services.router.openai import Asked
from services.router.tokens import TokenCounter
from services.router.turn import Expected

PREFIX_CHARACTERS = 512
"""So much of a prompt's first text stands for its beginning."""


class Expectations:
    """Learns from answers, and predicts from what it learned.

    Attributes:
        lengths: Of answers, as they were lately.
    """

    def __init__(self) -> None:
        self.lengths = AnswerLengths()
        self._counters: dict[str, TokenCounter] = {}

    def of(self, kind: str, asked: Asked, pool: Pool, model: str, key_id: str) -> Expected:
        """Return what is expected of a request: its length, that of its answer, its class."""
        counter = self._counters.get(pool.spec.name)
        if counter is None or counter.path != pool.spec.tokenizer:
            counter = self._counters[pool.spec.name] = TokenCounter(pool.spec.tokenizer)
        tokens, n_bytes, first = counter.count(asked.fields)
        prefix = hash((model, first[:PREFIX_CHARACTERS])) if len(first) >= 64 else None
        contexts = (model, (model, input_bucket(tokens)), (key_id, hash(first[:64]), input_bucket(tokens)))
        if kind == "embedding":
            return Expected(tokens, 0.0, pool.class_of(tokens, False), (), n_bytes, prefix)
        long_from = pool.spec.output_tokens
        predicted = self.lengths.predict(contexts, long_from)
        output, is_long = predicted.tokens, predicted.long_share >= 0.5
        if asked.most_tokens is not None and asked.most_tokens < output:
            output = float(asked.most_tokens)
        if long_from is not None and asked.most_tokens is not None and asked.most_tokens < long_from:
            is_long = False
        return Expected(tokens, output, pool.class_of(tokens, is_long), contexts, n_bytes, prefix)

    def learn(self, pool: str, expected: Expected, input_tokens: int | None, answer_tokens: int) -> None:
        """Learn from a complete answer.

        Args:
            pool: That answered.
            expected: What was expected of the request.
            input_tokens: As the server stated them; None if it did not.
            answer_tokens: Of one of the answers that were asked for; 0 teaches nothing.
        """
        if input_tokens is not None:
            self._counters[pool].observe(expected.n_bytes, input_tokens)
        if expected.contexts and answer_tokens:
            self.lengths.observe(expected.contexts, answer_tokens)
