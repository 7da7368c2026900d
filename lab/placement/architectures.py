"""The shapes of common models, as published.

=============== =================================================================================== ==============
name            shape                                                                                 parameters
=============== =================================================================================== ==============
vgg19           Simonyan and Zisserman, arXiv 1409.1556, Table 1 column E; 224 x 224                  143,667,240
resnet152       He et al., CVPR'16, Table 1: bottlenecks 3, 8, 36, 3; 224 x 224; batch norm           60,192,808
inception-v3    Szegedy et al., CVPR'16, as in torchvision, without the auxiliary head; 299 x 299     23,834,568
bert-large      Devlin et al., arXiv 1810.04805: 24 layers of 1024, 30,522 word pieces                335,141,888
xlnet-large     Yang et al., NeurIPS'19: 24 layers of 1024, 32,000 word pieces                        360,268,800
t5-11b          Raffel et al., JMLR 21(140): 24 + 24 layers of 1024, heads of 16,384, inner 65,536 11,307,321,344
gpt-6.7b        Brown et al., arXiv 2005.14165, Table 2.1: 32 layers of 4096                             6.66 10^9
gpt-13b         the same: 40 layers of 5140 as printed; 5120 is used, as 40 heads of 128 give            12.85 10^9
gpt-175b        the same: 96 layers of 12,288                                                          174.60 10^9
=============== =================================================================================== ==============

A-SRPT's Table I has these nine, with mini-batches of 32, 4, 32, 4, 4, 8, 32, 32 and 16 (the defaults) and 550 M
parameters for XLNet-large, more than its authors' model has. As there, language models take sequences of 512 tokens.

Numbers are four bytes wide, but two in models that fit no single GPU. A V100 is taken to reach half of its 15.7 TFLOP/s
with the former, and 40 % of its 125 TFLOP/s (tensor cores) with the latter, about what Megatron-LM reports. Both
shares are our choice. Layouts of the large models (tensor groups, least pipeline depth) are those that Narayanan et al.
(SC'21, Table 1) ran at the nearest size: 7.5 B on 4 x 1, 18.4 B on 8 x 1, 174.6 B on 8 x 12 (Table 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lab.placement.layers import Layer, block, convolution, dense, pooled, transformer
from services.core.domain.errors import DomainError

TOKENS = 512
SINGLE_FLOPS_PER_S = 0.5 * 15.7e12
MIXED_FLOPS_PER_S = 0.4 * 125e12


@dataclass(frozen=True)
class Architecture:
    """A model to plan for.

    Attributes:
        tensor_parallel, pipeline: Width of tensor groups and least number of stages of a published layout; 1 and 1 if
            the model fits on one GPU, and the planner may cut it freely.
    """

    name: str  #: The name that users type
    layers: tuple[Layer, ...]  #: In order
    batch: int  #: Mini-batch in A-SRPT's Table I
    bytes_per_value: int = 4  #: Width of parameters, gradients and activations
    flops_per_s: float = SINGLE_FLOPS_PER_S  #: What one GPU achieves
    tensor_parallel: int = 1
    pipeline: int = 1

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(layer.parameters for layer in self.layers)


def _vgg19() -> Architecture:
    layers: list[Layer] = []
    channels, side = 3, 224
    for out, repeats in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(repeats):
            layers.append(convolution(f"conv{len(layers) + 1}", (channels, out), (3, 3), side, normalised=False))
            channels = out
        side //= 2
        layers[-1] = pooled(layers[-1], channels * side * side)
    heads = (dense("fc1", 512 * 7 * 7, 4096), dense("fc2", 4096, 4096), dense("fc3", 4096, 1000))
    return Architecture("vgg19", (*layers, *heads), batch=32)


def _resnet152() -> Architecture:
    layers = [pooled(convolution("conv1", (3, 64), (7, 7), 112), 64 * 56 * 56)]
    channels, side = 64, 56
    for group, (width, repeats) in enumerate(((64, 3), (128, 8), (256, 36), (512, 3)), start=2):
        for at in range(repeats):
            before = side
            if at == 0 and group > 2:
                side //= 2
            parts = [
                convolution("reduce", (channels, width), (1, 1), before),
                convolution("middle", (width, width), (3, 3), side),
                convolution("expand", (width, 4 * width), (1, 1), side),
            ]
            if at == 0:
                parts.append(convolution("shortcut", (channels, 4 * width), (1, 1), side))
            channels = 4 * width
            layers.append(block(f"conv{group}_{at + 1}", parts, channels * side * side))
    return Architecture("resnet152", (*layers, dense("fc", 2048, 1000)), batch=4)


Branches = tuple[tuple[tuple[int, int, int], ...], ...]
"""Branches of an inception block: convolutions (output channels, kernel height, kernel width), one after another."""


def _inception(name: str, into: int, side: int, branches: Branches, *, before: int | None = None) -> Layer:
    """Return a block whose outputs are ``side`` wide.

    If ``before`` is given, it is the width up to the last convolution of each branch, and a pooled branch is added.
    """
    parts: list[Layer] = []
    for branch in branches:
        channels = into
        for at, (out, height, width) in enumerate(branch):
            on = side if before is None or at == len(branch) - 1 else before
            parts.append(convolution(name, (channels, out), (height, width), on))
            channels = out
    out = sum(branch[-1][0] for branch in branches) + (0 if before is None else into)
    return block(name, parts, out * side * side)


def _inception_v3() -> Architecture:
    stem = [
        convolution("stem1", (3, 32), (3, 3), 149),
        convolution("stem2", (32, 32), (3, 3), 147),
        pooled(convolution("stem3", (32, 64), (3, 3), 147), 64 * 73 * 73),
        convolution("stem4", (64, 80), (1, 1), 73),
        pooled(convolution("stem5", (80, 192), (3, 3), 71), 192 * 35 * 35),
    ]
    mixed: list[Layer] = []
    into = 192
    for pool in (32, 64, 64):
        branches = ((64, 1, 1),), ((48, 1, 1), (64, 5, 5)), ((64, 1, 1), (96, 3, 3), (96, 3, 3)), ((pool, 1, 1),)
        mixed.append(_inception("mixed5", into, 35, branches))
        into = 224 + pool
    reduction: Branches = ((384, 3, 3),), ((64, 1, 1), (96, 3, 3), (96, 3, 3))
    mixed.append(_inception("mixed6a", 288, 17, reduction, before=35))
    for c in (128, 160, 160, 192):
        twice = (c, 1, 1), (c, 7, 1), (c, 1, 7), (c, 7, 1), (192, 1, 7)
        mixed.append(
            _inception("mixed6", 768, 17, (((192, 1, 1),), ((c, 1, 1), (c, 1, 7), (192, 7, 1)), twice, ((192, 1, 1),)))
        )
    reduction = ((192, 1, 1), (320, 3, 3)), ((192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3))
    mixed.append(_inception("mixed7a", 768, 8, reduction, before=17))
    for into in (1280, 2048):
        parts = [
            _inception("1x1", into, 8, (((320, 1, 1),), ((192, 1, 1),))),
            _inception("3x3", into, 8, (((384, 1, 1),), ((448, 1, 1), (384, 3, 3)))),
            *(convolution("split", (384, 384), shape, 8) for shape in ((1, 3), (3, 1), (1, 3), (3, 1))),
        ]
        mixed.append(block("mixed7", parts, 2048 * 8 * 8))
    mixed[-1] = pooled(mixed[-1], 2048)
    return Architecture("inception-v3", (*stem, *mixed, dense("fc", 2048, 1000)), batch=32)


def _bert_large() -> Architecture:
    d, inner = 1024, 4096
    each = 4 * (d * d + d) + 2 * d * inner + inner + d + 4 * d
    embedding = Layer("embedding", (30_522 + 512 + 2) * d + 2 * d, 0.0, TOKENS * d)
    layers = [transformer(f"layer{at + 1}", each, d, TOKENS) for at in range(24)]
    return Architecture("bert-large", (embedding, *layers, dense("pooler", d, d)), batch=4)


def _xlnet_large() -> Architecture:
    d, inner = 1024, 4096
    attention = 5 * d * d + 3 * d + 2 * d + 2 * d  # q, k, v, o and positions; their biases; segments; norm
    each = attention + 2 * d * inner + inner + d + 2 * d
    embedding = Layer("embedding", 32_000 * d + d, 0.0, TOKENS * d)
    return Architecture("xlnet-large", (embedding, *(transformer("layer", each, d, TOKENS) for _ in range(24))), 4)


def _t5_11b() -> Architecture:
    d, heads, inner = 1024, 16_384, 65_536
    attention, forward = 4 * d * heads + d, 2 * d * inner + d
    embedding = Layer("embedding", 32_128 * d + 2 * (32 * 128) + 2 * d, 0.0, TOKENS * d)  # and position biases, norms
    encoder = transformer("encoder", attention + forward, d, TOKENS, inner=heads)
    decoder = transformer("decoder", 2 * attention + forward, d, TOKENS, inner=heads, attentions=2, sent=2)
    return Architecture("t5-11b", (embedding, *[encoder] * 24, *[decoder] * 24), 8, 2, MIXED_FLOPS_PER_S, 8, 1)


def _gpt(name: str, depth: int, d: int, batch: int, tensor_parallel: int, pipeline: int) -> Architecture:
    embedding = Layer("embedding", (50_257 + 2_048) * d + 2 * d, 0.0, TOKENS * d)  # and the last norm
    each = transformer("layer", 12 * d * d + 13 * d, d, TOKENS)
    layers = (embedding, *[each] * depth)
    return Architecture(name, layers, batch, 2, MIXED_FLOPS_PER_S, tensor_parallel, pipeline)


_MAKERS: dict[str, Callable[[], Architecture]] = {
    "vgg19": _vgg19,
    "resnet152": _resnet152,
    "inception-v3": _inception_v3,
    "bert-large": _bert_large,
    "xlnet-large": _xlnet_large,
    "t5-11b": _t5_11b,
    "gpt-6.7b": lambda: _gpt("gpt-6.7b", 32, 4_096, 32, 4, 1),
    "gpt-13b": lambda: _gpt("gpt-13b", 40, 5_120, 32, 8, 1),
    "gpt-175b": lambda: _gpt("gpt-175b", 96, 12_288, 16, 8, 12),
}

ARCHITECTURES = tuple(_MAKERS)


@cache
def architecture(name: str) -> Architecture:
    """Return a model by name.

    Raises:
        DomainError: there is no model of that name.
    """
    if name not in _MAKERS:
        raise DomainError(f"there is no model {name!r}; known: {', '.join(_MAKERS)}")
    return _MAKERS[name]()
