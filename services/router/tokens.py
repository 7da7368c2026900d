"""How many tokens a prompt has: by the model's own tokenizer if the pool names its file, else by an estimate.

The estimate divides the prompt's bytes by the bytes per token that the model's servers have recently stated in `usage`.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from services.kit.logging import Log
from services.router.openai import extra_length, prompt_of, token_ids

log = Log(__name__)

USUAL_BYTES_PER_TOKEN = 4.0
NEW_SHARE = 0.02
LONGEST_ENCODED = 32_768
"""Bytes of a prompt that is encoded; a longer one is estimated, so that it does not hold up the others."""


class TokenCounter:
    """Counts prompts' tokens; there is one for each pool."""

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
