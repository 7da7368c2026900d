"""Layers as a planner sees them: parameters, operations, and how much goes on to the next one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A layer, or a block that is never cut. Everything but the parameters is per sample.

    Attributes:
        name: As the source calls it.
        parameters: Trainable ones.
        forward_flops: Operations of the forward pass (a multiply-add is two); backward takes twice as many.
        outputs: Values sent on.
        tensor_sums: Values that a tensor group sums, forward and backward together.
    """

    name: str
    parameters: int
    forward_flops: float
    outputs: int
    tensor_sums: int = 0


def convolution(
    name: str, channels: tuple[int, int], kernel: tuple[int, int], side: int, *, normalised: bool = True
) -> Layer:
    """Return a convolution from so many channels to so many, on an output of ``side`` x ``side``.

    Normalised: batch norm (two parameters a channel) instead of a bias.
    """
    into, out = channels
    weights = into * out * kernel[0] * kernel[1]
    parameters = weights + (2 * out if normalised else out)
    return Layer(name, parameters, 2.0 * weights * side * side, out * side * side)


def dense(name: str, into: int, out: int) -> Layer:
    """Return a fully connected layer with bias."""
    return Layer(name, into * out + out, 2.0 * into * out, out)


def block(name: str, parts: list[Layer], outputs: int) -> Layer:
    """Return layers that are never cut as one, with so many outputs together."""
    return Layer(name, sum(part.parameters for part in parts), sum(part.forward_flops for part in parts), outputs)


def pooled(layer: Layer, outputs: int) -> Layer:
    """Return the layer with pooling behind it."""
    return Layer(layer.name, layer.parameters, layer.forward_flops, outputs)


def transformer(
    name: str, parameters: int, width: int, tokens: int, *, inner: int | None = None, attentions: int = 1, sent: int = 1
) -> Layer:
    """Return a transformer layer on a sequence of so many tokens.

    Args:
        name: As the source calls it.
        parameters: Of the layer; all but a few are weights that each token meets once.
        width: Of the hidden state.
        tokens: In a sample.
        inner: Width of all attention heads together; the hidden state's unless given.
        attentions: Attention blocks; a tensor group sums once behind each and behind the feed-forward block.
        sent: Hidden states sent on: two where a decoder passes the encoder's on.
    """
    scores = 4.0 * tokens * tokens * (width if inner is None else inner) * attentions
    values = tokens * width
    return Layer(name, parameters, 2.0 * parameters * tokens + scores, sent * values, 2 * (attentions + 1) * values)
