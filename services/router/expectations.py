"""What is expected of a request before it is served: its tokens, the length of its answer, its class."""

from collections.abc import Callable, Collection
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from services.core.policies.freesh.server_choice import BLOCK_TOKENS
from services.core.profiles.answer_lengths import AnswerLengths, input_bucket
from services.kit.logging import Log
from services.router.fleet import Pool
from services.router.kinds import Kind
from services.router.openai import Asked, extra_length, prompt_of, token_ids
from services.router.turn import Expected

log = Log(__name__)

USUAL_BYTES_PER_TOKEN = 4.0
NEW_SHARE = 0.02
LONGEST_ENCODED = 32_768
"""Bytes of a prompt that is encoded; a longer one is estimated, so that it does not hold up the others."""


class TokenCounter:
    """Counts a pool's prompts: by its model's own tokenizer if the pool names its file, else by an estimate.

    That divides the prompt's bytes by the bytes per token that the model's servers have recently stated in `usage`.
    """

    def __init__(self, tokenizer: str | None) -> None:
        self.path = tokenizer
        self.bytes_per_token = USUAL_BYTES_PER_TOKEN
        self._encode = _load(tokenizer) if tokenizer else None

    def count(self, fields: dict[str, Any]) -> tuple[int, int, list[str]]:
        """Return a prompt's tokens, its bytes (0 for token ids, which teach nothing) and its texts."""
        if ids := token_ids(fields):
            return ids, 0, []
        texts = prompt_of(fields)
        text = texts[0] if len(texts) == 1 else "\n".join(texts)
        n_bytes = (len(text) if text.isascii() else len(text.encode(errors="replace"))) + extra_length(fields)
        if self._encode is not None and n_bytes <= LONGEST_ENCODED:
            return self._encode(text), n_bytes, texts
        return max(1, round(n_bytes / self.bytes_per_token)), n_bytes, texts

    def observe(self, n_bytes: int, tokens: int) -> None:
        """Learn from what a server stated about a prompt."""
        if n_bytes > 0 and tokens > 0:
            found = min(50.0, max(0.2, n_bytes / tokens))
            self.bytes_per_token += NEW_SHARE * (found - self.bytes_per_token)


def _load(path: str) -> Callable[[str], int] | None:
    if find_spec("tokenizers") is None:
        log.warning("tokenizer.not_installed", path=path, install="pip install 'wattshift-control-plane[tokenizers]'")
        return None
    try:
        tokenizer: Any = import_module("tokenizers").Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare exceptions
        log.warning("tokenizer.not_read", path=path, error=str(error))
        return None

    def count(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    return count


BLOCK_CHARACTERS = round(BLOCK_TOKENS * USUAL_BYTES_PER_TOKEN)
MOST_BLOCKS = 1_024  #: Beginnings of a prompt are told apart by whole blocks, as many as this: some 131,000 tokens


class Expectations:
    """Learns from answers, and predicts from what it has learned."""

    def __init__(self) -> None:
        self.lengths = AnswerLengths()  #: Recent lengths of answers
        self._counters: dict[str, TokenCounter] = {}

    def keep(self, pools: Collection[str]) -> None:
        """Forget the tokens of all pools but these."""
        self._counters = {name: each for name, each in self._counters.items() if name in pools}

    def of(self, kind: Kind, asked: Asked, pool: Pool, model: str, key_id: str) -> Expected:
        """Return what is expected of a request: its length, its answer's length, and its class."""
        counter = self._counters.get(pool.spec.name)
        if counter is None or counter.path != pool.spec.tokenizer:
            counter = self._counters[pool.spec.name] = TokenCounter(pool.spec.tokenizer)
        tokens, n_bytes, texts = counter.count(asked.fields)
        first = texts[0] if texts else ""
        blocks = _beginnings(model, texts)
        block_tokens = tokens * BLOCK_CHARACTERS / max(sum(map(len, texts)), 1)
        bucket = input_bucket(tokens)
        contexts = (model, (model, bucket), (key_id, hash(first[:64]), bucket))
        if not kind.is_answer:
            return Expected(tokens, 0.0, pool.class_of(tokens, False), (), n_bytes, blocks, block_tokens)
        long_from = pool.spec.output_tokens
        predicted = self.lengths.predict(contexts, long_from)
        output, is_long = predicted.tokens, predicted.long_share >= 0.5
        if asked.most_tokens is not None and asked.most_tokens < output:
            output = float(asked.most_tokens)
        if long_from is not None and asked.most_tokens is not None and asked.most_tokens < long_from:
            is_long = False
        return Expected(tokens, output, pool.class_of(tokens, is_long), contexts, n_bytes, blocks, block_tokens)

    def learn(self, pool: str, expected: Expected, input_tokens: int | None, answer_tokens: int) -> None:
        """Learn from a complete answer.

        Args:
            input_tokens: As the server stated them; None if it did not.
            answer_tokens: Length of one of the requested answers; 0 teaches nothing.
        """
        if input_tokens is not None and pool in self._counters:
            self._counters[pool].observe(expected.n_bytes, input_tokens)
        if expected.contexts and answer_tokens:
            self.lengths.observe(expected.contexts, answer_tokens)


def _beginnings(model: str, texts: list[str]) -> tuple[int, ...]:
    """Return hashes of a prompt's beginnings, one for each whole number of blocks, shortest first.

    Prompts with a common beginning share its hashes: two conversations those of their system prompt, the next turn of a
    conversation those of all that was said before.
    """
    text = "\n".join(texts)
    known = hash(model)
    found: list[int] = []
    for end in range(BLOCK_CHARACTERS, min(len(text), BLOCK_CHARACTERS * MOST_BLOCKS) + 1, BLOCK_CHARACTERS):
        known = hash((known, text[end - BLOCK_CHARACTERS : end]))
        found.append(known)
    return tuple(found)
