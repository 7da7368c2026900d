"""Layers as a planner sees them: parameters, operations, and how much is sent on to the next layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A layer, or a block that is never cut. Everything but the parameters is per sample."""

    name: str  #: The source's name for it
    parameters: int  #: Number of trainable parameters
    forward_flops: float  #: Operations of the forward pass (a multiply-add is two); backward takes twice as many
    outputs: int  #: Values sent on
    tensor_sums: int = 0  #: Values that a tensor group sums, forward and backward together


def convolution(
    name: str, channels: tuple[int, int], kernel: tuple[int, int], side: int, *, normalised: bool = True
) -> Layer:
    """Return a convolution between these numbers of channels, with an output of ``side`` x ``side``.

    With ``normalised``, it has batch norm (two parameters per channel) instead of a bias.
    """
    into, out = channels
    weights = into * out * kernel[0] * kernel[1]
    parameters = weights + (2 * out if normalised else out)
    return Layer(name, parameters, 2.0 * weights * side * side, out * side * side)


def dense(name: str, into: int, out: int) -> Layer:
    """Return a fully connected layer with bias."""
    return Layer(name, into * out + out, 2.0 * into * out, out)


def block(name: str, parts: list[Layer], outputs: int) -> Layer:
    """Return several layers as one that is never cut, with ``outputs`` values sent on."""
    return Layer(name, sum(part.parameters for part in parts), sum(part.forward_flops for part in parts), outputs)


def pooled(layer: Layer, outputs: int) -> Layer:
    """Return the layer followed by pooling to ``outputs`` values."""
    return Layer(layer.name, layer.parameters, layer.forward_flops, outputs)


def transformer(
    name: str, parameters: int, width: int, tokens: int, *, inner: int | None = None, attentions: int = 1, sent: int = 1
) -> Layer:
    """Return a transformer layer for a sequence of this many tokens.

    Args:
        name: The source's name for it.
        parameters: The layer's; all but a few are weights that each token meets once.
        inner: Total width of the attention heads; that of the hidden state unless given.
        attentions: Attention blocks; a tensor group sums once after each and after the feed-forward block.
        sent: Hidden states sent on: two where a decoder passes the encoder's on.
    """
    scores = 4.0 * tokens * tokens * (width if inner is None else inner) * attentions
    values = tokens * width
    return Layer(name, parameters, 2.0 * parameters * tokens + scores, sent * values, 2 * (attentions + 1) * values)
