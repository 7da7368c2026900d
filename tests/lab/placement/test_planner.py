"""The planner's models have the sizes their authors published, and its layouts use every GPU and every parameter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.placement.architectures import ARCHITECTURES, architecture
from lab.placement.planner import MAX_GPUS, plan_layout
from services.core.domain.errors import DomainError
from services.core.parallel.graph import JobGraph, Stage, data_parallel


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vgg19", 143_667_240),
        ("resnet152", 60_192_808),
        ("inception-v3", 23_834_568),
        ("bert-large", 335_141_888),
        ("xlnet-large", 360_268_800),
        ("t5-11b", 11_307_321_344),
        ("gpt-6.7b", pytest.approx(6.7e9, rel=0.01)),
        ("gpt-13b", pytest.approx(13.0e9, rel=0.02)),
        ("gpt-175b", pytest.approx(175e9, rel=0.01)),
    ],
)
def test_a_model_has_the_parameters_its_authors_count(name: str, parameters: float) -> None:
    assert architecture(name).parameters == parameters


@pytest.mark.parametrize(("name", "multiply_adds"), [("vgg19", 19.6e9), ("resnet152", 11.5e9), ("inception-v3", 5.7e9)])
def test_a_picture_costs_what_is_published(name: str, multiply_adds: float) -> None:
    assert sum(layer.forward_flops for layer in architecture(name).layers) / 2 == pytest.approx(multiply_adds, rel=0.02)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(ARCHITECTURES), st.integers(1, 130), st.integers(4, 64))
def test_a_layout_has_every_gpu_and_every_parameter(name: str, gpus: int, batch: int) -> None:
    graph, shape = plan_layout(name, gpus, batch), architecture(name)

    assert graph.gpus == gpus
    assert sum(stage.parameter_bytes for stage in graph.stages) == shape.bytes_per_value * shape.parameters
    assert graph.stages[-1].output_bytes == 0
    assert all(stage.forward_s > 0 for stage in graph.stages)


def test_vgg_is_cut_as_pipedream_cuts_it() -> None:
    """Replicated convolutions, and the fully connected layers, nine tenths of the parameters, on one GPU."""
    graph = plan_layout("vgg19", 8)

    assert graph.stages[-1].replicas == 1
    assert graph.stages[-1].parameter_bytes > 0.85 * sum(stage.parameter_bytes for stage in graph.stages)
    assert sum(stage.replicas for stage in graph.stages[:-1]) == 7


@pytest.mark.parametrize(
    ("name", "gpus", "shape"), [("gpt-175b", 96, (12, 8, 1)), ("gpt-175b", 8, (1, 8, 1)), ("gpt-6.7b", 4, (1, 4, 1))]
)
def test_large_models_take_the_published_layout(name: str, gpus: int, shape: tuple[int, int, int]) -> None:
    stages = plan_layout(name, gpus).stages

    assert (len(stages), stages[0].tensor_parallel, stages[0].replicas) == shape


@pytest.mark.parametrize(("gpus", "replicas"), [(4, 1), (MAX_GPUS, MAX_GPUS // 4)])
def test_a_stage_takes_its_layers_time_and_memory(gpus: int, replicas: int) -> None:
    """Each tensor group of four has a mini-batch of 16; backward takes twice as long as forward."""
    model = architecture("gpt-6.7b")
    (stage,) = plan_layout(model, gpus, 16).stages

    assert (stage.replicas, stage.tensor_parallel, stage.output_bytes) == (replicas, 4, 0)
    flops = sum(layer.forward_flops for layer in model.layers)
    assert stage.forward_s == pytest.approx(flops * 16 / 4 / 50e12)
    assert stage.backward_s == pytest.approx(2 * stage.forward_s)
    assert stage.parameter_bytes == 2 * model.parameters
    assert stage.tensor_bytes == 2 * 16 * replicas * sum(layer.tensor_sums for layer in model.layers)


def test_stages_send_their_last_layers_outputs_on() -> None:
    model = architecture("gpt-175b")
    *sending, last = plan_layout(model, 96).stages

    assert {stage.output_bytes for stage in sending} == {2 * 16 * 512 * 12_288}
    assert last.output_bytes == 0
    assert sum(stage.parameter_bytes for stage in (*sending, last)) == 2 * model.parameters
    assert plan_layout("vgg19", 1).stages[0].tensor_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("gpt-5", 8), "no model"),
        (("vgg19", 0), "1 to"),
        (("gpt-6.7b", MAX_GPUS + 1), "1 to"),
        (("vgg19", 8, 0), "at least one sample"),
        (("resnet152", 16, None, 3), "tensor groups of 3"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[str, int], complaint: str) -> None:
    name, gpus, *rest = arguments
    with pytest.raises(DomainError, match=complaint):
        plan_layout(name, gpus, rest[0] if rest else None, tensor_parallel=rest[1] if len(rest) > 1 else None)


def test_a_job_grows_by_whole_layouts_and_else_is_data_parallel() -> None:
    graph = JobGraph((Stage(2, 0.1, 0.2, 5e6, 2e6), Stage(1, 0.1, 0.2, 3e6)))

    assert graph.sized(3) is graph
    assert [stage.replicas for stage in graph.sized(9).stages] == [6, 3]
    assert graph.sized(9).stages[0].output_bytes == 6e6
    assert graph.sized(4) == data_parallel(4, 8e6, 0.1 + 0.2 + 0.1 + 0.2)


@pytest.mark.parametrize(
    "wrong", [{"replicas": 0}, {"replicas": 3, "expert_parallel": 2}, {"replicas": 1, "forward_s": -1}]
)
def test_a_stage_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(DomainError):
        Stage(**wrong)  # type: ignore[arg-type]
