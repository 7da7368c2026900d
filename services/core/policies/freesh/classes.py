"""The classes of requests, by short or long input and output; two ways to say where long begins."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.core.domain.errors import DomainError


@dataclass(frozen=True)
class Thresholds:
    """Where long begins, in tokens: a length equal to the threshold is long."""

    input_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if min(self.input_tokens, self.output_tokens) < 1:
            raise DomainError(f"a threshold is at least one token, not {self.input_tokens} and {self.output_tokens}")

    def class_of(self, input_tokens: ArrayLike, output_tokens: ArrayLike) -> NDArray[np.int64]:
        """Return the classes of requests as indices into ``CLASSES``; (n_requests,).

        Args:
            input_tokens, output_tokens: (n_requests,) lengths, >= 0.

        Raises:
            DomainError: a length is negative or not finite, or the arrays differ in length.
        """
        lengths = [np.asarray(each, dtype=np.float64) for each in (input_tokens, output_tokens)]
        if lengths[0].ndim != 1 or lengths[0].shape != lengths[1].shape:
            raise DomainError(f"lengths of inputs {lengths[0].shape} and outputs {lengths[1].shape} do not match")
        if not all(np.all(np.isfinite(each) & (each >= 0)) for each in lengths):
            raise DomainError("lengths of requests are finite and not negative")
        return (2 * (lengths[0] >= self.input_tokens) + (lengths[1] >= self.output_tokens)).astype(np.int64)


PARTITIONS = {"a": Thresholds(184, 444), "b": Thresholds(25, 232)}
"""The two that FREESH chooses from (its Partition 1 and 2); 4,096 tokens, where its table ends, is no limit here.

Source: FREESH appendix A.3, Table 4; the letters are those of the authors' published inputs.
"""
