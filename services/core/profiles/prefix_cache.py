"""What a model server has read of prompts and need not read again."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from services.core.domain.errors import DomainError


class PrefixCache:
    """The blocks of the most recently read prompts; of the least recently used, the end of a prompt is evicted first.

    A prompt is cut into blocks. A block's id stands for its tokens and all that come before them, as in vLLM and in the
    hash ids of Mooncake's traces, so two prompts share a prefix as far as their first ids are equal.

    Args:
        tokens: How many it keeps; if less than a block, it keeps none.
        block_tokens: Tokens of a block, >= 1.

    Raises:
        DomainError: an argument is out of range.
    """

    def __init__(self, tokens: int, block_tokens: int) -> None:
        if tokens < 0 or block_tokens < 1:
            raise DomainError(
                f"a prefix cache keeps at least 0 tokens in blocks of at least 1: {tokens} {block_tokens}"
            )
        self._most = tokens // block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def shared(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's leading blocks are cached."""
        # whoever reads a block reads all before it, so that none of those is dropped earlier
        if not blocks or blocks[-1] in self._blocks:
            return len(blocks)
        if blocks[0] not in self._blocks:
            return 0
        return bisect_left(blocks, True, key=lambda block: block not in self._blocks)

    def keep(self, blocks: Sequence[int]) -> None:
        """Cache a prompt that is read."""
        for block in reversed(blocks[: self._most]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
