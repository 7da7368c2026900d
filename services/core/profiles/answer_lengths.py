"""How many tokens an answer will have, learned online from the answers seen so far.

Each *context* that a request belongs to, such as its model, the length of its prompt, or the beginning of its prompt,
has a histogram of the lengths of its answers. Contexts are given from the most general to the most specific; the
distribution of each is its own counts with that of the more general one as prior, so that a context that was never seen
predicts as its parent does. Older answers count less. The prediction is the median, which has the least mean absolute
error.

FREESH fine-tunes an encoder on pairs of prompts and answers (appendix D.5). Here neither such weights nor any text is
needed: a router sees who asks, with which prompt, and how long the answers were.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from services.core.domain.errors import DomainError

GROWTH = 1.15  #: Each bin of the histogram begins at this multiple of the length of the one before
LONGEST = 131_072
EDGES = tuple(sorted({round(GROWTH**n) for n in range(math.ceil(math.log(LONGEST) / math.log(GROWTH)) + 1)}))
"""Where bins begin, tokens; the first is 1."""
PRIOR_LENGTH = 200.0  #: Predicted before the first answer, tokens; about the mean of conversations in the Azure traces
PRIOR_WEIGHT = 8.0  #: How many answers the more general context counts for
MEMORY = 2_000.0  #: Answers after which one counts for 1/e of a new one, in its context
REFRESH_SHARE = 0.02
"""A context's distribution is computed again once it has this share more answers."""
MOST_CONTEXTS = 20_000


_NOTHING = array("d", bytes(8 * len(EDGES)))
"""Bins are arrays: with lists, each full collection of garbage looked at every bin of every context, for 0.1 s."""


@dataclass(slots=True)
class _Context:
    counts: array[float] = field(default_factory=lambda: _NOTHING[:])
    sums: array[float] = field(default_factory=lambda: _NOTHING[:])
    total: float = 0.0
    unit: float = 1.0
    seen: int = 0
    shares: array[float] | None = None
    shares_at: int = -1


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """The predicted length of an answer."""

    tokens: float  #: Median of the distribution
    long_share: float  #: Probability that the answer has at least the threshold's tokens
    answers: int  #: How many answers in the most specific known context it rests on


class AnswerLengths:
    """Learns the lengths of answers by context; not thread-safe."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[Hashable, _Context | int] = OrderedDict()
        """Of one with a single answer, as of most beginnings of prompts, only that answer's length."""

    def __len__(self) -> int:
        return len(self._contexts)

    def observe(self, contexts: Sequence[Hashable], tokens: int) -> None:
        """Learn from an answer.

        Args:
            contexts: The contexts of its request, the most general first.
            tokens: Its length, >= 0; an answer without tokens teaches nothing.

        Raises:
            DomainError: the length is negative.
        """
        if tokens < 0:
            raise DomainError(f"an answer has at least 0 tokens, not {tokens}")
        if not tokens:
            return
        for key in contexts:
            context = self._known(key)
            if context is None:
                self._contexts[key] = tokens
                if len(self._contexts) > MOST_CONTEXTS:
                    self._contexts.popitem(last=False)
            else:
                self._contexts.move_to_end(key)
                _learn(context, tokens)

    def predict(self, contexts: Sequence[Hashable], long_from: int | None = None) -> LengthPrediction:
        """Return the predicted length of the answer to a request; from ``long_from`` tokens on it is long."""
        shares, known, answers = None, None, 0
        for key in contexts:
            context = self._known(key)
            if context is None:
                continue
            if context.shares is None or context.seen >= context.shares_at * (1 + REFRESH_SHARE) + 1:
                context.shares = _shares(context, shares)
                context.shares_at = context.seen
            shares, known, answers = context.shares, context, context.seen
        if shares is None or known is None:
            long_share = 0.0 if long_from is None else 0.5 ** (long_from / PRIOR_LENGTH)
            return LengthPrediction(PRIOR_LENGTH, long_share, 0)
        tokens = _quantile(shares, known, 0.5)
        return LengthPrediction(tokens, 0.0 if long_from is None else _above(shares, long_from), answers)

    def _known(self, key: Hashable) -> _Context | None:
        """Return a context, with a histogram from its second answer on; None if it had none."""
        context = self._contexts.get(key)
        if isinstance(context, int):
            tokens, context = context, _Context()
            self._contexts[key] = context
            _learn(context, tokens)
        return context


def _learn(context: _Context, tokens: int) -> None:
    at = bisect_right(EDGES, tokens) - 1
    # The unit grows instead of all counts shrinking: the same shares, at a constant cost.
    context.unit *= 1.0 + 1.0 / MEMORY
    context.counts[at] += context.unit
    context.sums[at] += context.unit * tokens
    context.total += context.unit
    context.seen += 1
    if context.unit > 1e100:
        _rescale(context)


def input_bucket(input_tokens: int) -> int:
    """Return a number that prompts of similar length share: buckets grow by a quarter."""
    return int(math.log(max(1, input_tokens)) / math.log(1.25))


def _shares(context: _Context, parent: array[float] | None) -> array[float]:
    """Return the cumulative shares of a context's bins, with those of the more general context as prior."""
    weight = PRIOR_WEIGHT * context.unit if parent is not None else 0.0
    scale, counts = 1.0 / (context.total + weight), context.counts
    if parent is not None:
        bins = zip(counts, parent, chain((0.0,), parent), strict=False)
        counts = [count + weight * (here - before) for count, here, before in bins]
    return array("d", accumulate([count * scale for count in counts]))


def _quantile(shares: array[float], context: _Context, share: float) -> float:
    at = min(bisect_right(shares, share), len(EDGES) - 1)
    if context.counts[at]:
        return context.sums[at] / context.counts[at]
    return float(EDGES[at])


def _above(shares: array[float], tokens: int) -> float:
    """Return the share of answers with at least this many tokens; within a bin they are assumed evenly spread."""
    at = bisect_right(EDGES, max(1, tokens)) - 1
    low, high = EDGES[at], EDGES[at + 1] if at + 1 < len(EDGES) else EDGES[at] * GROWTH
    below = shares[at - 1] if at else 0.0
    inside = shares[at] - below
    return max(0.0, 1.0 - below - inside * (tokens - low) / (high - low))


def _rescale(context: _Context) -> None:
    factor = 1.0 / context.unit
    context.counts = array("d", [count * factor for count in context.counts])
    context.sums = array("d", [total * factor for total in context.sums])
    context.total *= factor
    context.unit = 1.0
