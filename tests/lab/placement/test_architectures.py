"""The planner's models are cut, sized and run as their authors and A-SRPT's Table I print them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lab.placement.architectures import ARCHITECTURES, architecture


@pytest.mark.parametrize(
    ("name", "batch", "bytes_per_value", "layout"),
    [
        ("vgg19", 32, 4, (1, 1)),
        ("resnet152", 4, 4, (1, 1)),
        ("inception-v3", 32, 4, (1, 1)),
        ("bert-large", 4, 4, (1, 1)),
        ("xlnet-large", 4, 4, (1, 1)),
        ("t5-11b", 8, 2, (8, 1)),
        ("gpt-6.7b", 32, 2, (4, 1)),
        ("gpt-13b", 32, 2, (8, 1)),
        ("gpt-175b", 16, 2, (8, 12)),
    ],
)
def test_a_model_runs_with_the_batch_and_layout_that_are_published(
    name: str, batch: int, bytes_per_value: int, layout: tuple[int, int]
) -> None:
    """Mini-batches: A-SRPT, Table I. Tensor groups and pipelines: Narayanan et al., SC'21, Tables 1 and 2."""
    model = architecture(name)

    assert (model.name, model.batch, model.bytes_per_value) == (name, batch, bytes_per_value)
    assert (model.tensor_parallel, model.pipeline) == layout
    # Half of a V100's 15.7 TFLOP/s in four bytes, 40 % of its 125 TFLOP/s in two.
    assert model.flops_per_s == pytest.approx(7.85e12 if bytes_per_value == 4 else 50e12)


VGG_19 = [
    *(64 * 224**2, 64 * 112**2),
    *(128 * 112**2, 128 * 56**2),
    *(256 * 56**2, 256 * 56**2, 256 * 56**2, 256 * 28**2),
    *(512 * 28**2, 512 * 28**2, 512 * 28**2, 512 * 14**2),
    *(512 * 14**2, 512 * 14**2, 512 * 14**2, 512 * 7**2),
    *(4096, 4096, 1000),
]
RESNET_152 = [64 * 56**2, *[256 * 56**2] * 3, *[512 * 28**2] * 8, *[1024 * 14**2] * 36, *[2048 * 7**2] * 3, 1000]
INCEPTION_V3 = [
    *(32 * 149**2, 32 * 147**2, 64 * 73**2, 80 * 73**2, 192 * 35**2),
    *(256 * 35**2, 288 * 35**2, 288 * 35**2),
    *[768 * 17**2] * 5,
    *(1280 * 8**2, 2048 * 8**2, 2048),
    1000,
]


@pytest.mark.parametrize(
    ("name", "values"), [("vgg19", VGG_19), ("resnet152", RESNET_152), ("inception-v3", INCEPTION_V3)]
)
def test_each_layer_of_a_network_for_pictures_sends_on_its_feature_maps(name: str, values: Sequence[int]) -> None:
    """Channels x height x width behind each layer or block, pooling included, as the papers' tables print them."""
    assert [layer.outputs for layer in architecture(name).layers] == list(values)


def test_layers_are_called_as_their_sources_call_them() -> None:
    def names(name: str) -> list[str]:
        return [layer.name for layer in architecture(name).layers]

    assert names("vgg19") == [*(f"conv{at}" for at in range(1, 17)), "fc1", "fc2", "fc3"]
    groups = [f"conv{group}_{at}" for group, n in ((2, 3), (3, 8), (4, 36), (5, 3)) for at in range(1, n + 1)]
    assert names("resnet152") == ["conv1", *groups, "fc"]
    stem, mixed = [f"stem{at}" for at in range(1, 6)], ["mixed5"] * 3 + ["mixed6a"] + ["mixed6"] * 4 + ["mixed7a"]
    assert names("inception-v3") == [*stem, *mixed, "mixed7", "mixed7", "fc"]
    assert names("bert-large") == ["embedding", *(f"layer{at}" for at in range(1, 25)), "pooler"]
    assert names("xlnet-large") == ["embedding", *["layer"] * 24]
    assert names("t5-11b") == ["embedding", *["encoder"] * 24, *["decoder"] * 24]
    assert names("gpt-6.7b") == ["embedding", *["layer"] * 32]


@pytest.mark.parametrize(
    ("name", "width", "layers"),
    [
        ("bert-large", 1024, 24),
        ("xlnet-large", 1024, 24),
        ("gpt-6.7b", 4096, 32),
        ("gpt-13b", 5120, 40),
        ("gpt-175b", 12_288, 96),
    ],
)
def test_a_language_model_sends_on_one_hidden_state_per_token(name: str, width: int, layers: int) -> None:
    """512 tokens; a tensor group sums it behind attention and behind the feed-forward block, in both directions."""
    embedding, *body = architecture(name).layers
    rows = {"bert-large": 30_522 + 512 + 2 + 2, "xlnet-large": 32_000 + 1}.get(name, 50_257 + 2_048 + 2)

    assert embedding.parameters == rows * width  # vocabulary, positions where they are learnt, segments, norms
    assert (embedding.outputs, embedding.forward_flops, embedding.tensor_sums) == (512 * width, 0, 0)
    assert {(layer.outputs, layer.tensor_sums) for layer in body[:layers]} == {(512 * width, 4 * 512 * width)}
    assert len(body) - layers == (name == "bert-large")  # its pooler, which reads the first token only


def test_a_decoder_of_t5_passes_the_encoders_hidden_state_on() -> None:
    layers = architecture("t5-11b").layers
    hidden = 512 * 1024

    assert [layer.outputs for layer in layers] == [hidden] * 25 + [2 * hidden] * 24
    assert [layer.tensor_sums for layer in layers] == [0] + [4 * hidden] * 24 + [6 * hidden] * 24


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name.startswith(("bert", "xlnet", "gpt"))])
def test_a_token_costs_two_operations_per_weight_and_its_attention(name: str) -> None:
    """2 per weight, and 4 x tokens x width for the scores and their use (Narayanan et al., SC'21, appendix)."""
    layer = architecture(name).layers[1]
    width = layer.outputs / 512

    assert layer.forward_flops == pytest.approx(512 * (2 * layer.parameters + 4 * 512 * width))


def test_attention_of_t5_is_as_wide_as_its_heads_and_its_decoder_has_two() -> None:
    _, encoder, *_, decoder = architecture("t5-11b").layers
    scores = 4 * 512 * 512 * 16_384

    assert encoder.forward_flops == pytest.approx(2 * 512 * encoder.parameters + scores)
    assert decoder.forward_flops == pytest.approx(2 * 512 * decoder.parameters + 2 * scores)
