"""The GPU catalogue: one row a board, one board a name."""

from __future__ import annotations

import pytest

from services.core.domain.errors import DomainError
from services.core.domain.gpus import GPU_MODELS, GpuModel, IdleSource, find_gpu_model, gpu_model, likeliest_gpu_model
from services.simulator.workload import ClusterSpec


@pytest.mark.parametrize(
    ("name", "board"),
    [
        ("A100", "A100-SXM4-40GB"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("H100-80GB-HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("simulated A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("V100", "V100-SXM2-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE-16GB"),
        ("Tesla P100-PCIE-16GB", "P100-PCIE-16GB"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti"),
        ("Tesla T4", "T4"),
    ],
)
def test_a_board_goes_by_its_short_name_and_by_what_the_driver_calls_it(name: str, board: str) -> None:
    assert gpu_model(name).name == board


def test_no_name_means_two_boards() -> None:
    names = [name for board in GPU_MODELS.values() for name in (board.name, *board.aliases)]

    assert {name: find_gpu_model(name) for name in names} == {
        name: board for board in GPU_MODELS.values() for name in (board.name, *board.aliases)
    }


def test_an_unknown_board_gets_one_line_that_names_the_known_ones() -> None:
    with pytest.raises(DomainError, match=r"^unknown GPU model 'B9000'; known: K80, .*A100-SXM4-80GB.*H200-SXM-141GB$"):
        gpu_model("B9000")


@pytest.mark.parametrize("board", GPU_MODELS.values(), ids=list(GPU_MODELS))
def test_the_figures_of_a_board_hold_together(board: GpuModel) -> None:
    assert 0 < board.idle_w < board.lowest_limit_w < board.peak_w
    assert 0 < board.lowest_clock_mhz < board.highest_clock_mhz
    assert board.memory_gib > 0
    assert board.chip in board.name.upper().replace("-", "")


def test_boards_of_one_chip_differ_by_their_form() -> None:
    sxm, pcie = gpu_model("V100-SXM2-32GB"), gpu_model("V100-PCIE-32GB")

    assert (sxm.peak_w, pcie.peak_w) == (300, 250)
    assert (gpu_model("H200").idle_w, gpu_model("H200").idle_source) == (83.8, IdleSource.MEASURED)


@pytest.mark.parametrize(
    ("name", "board"),
    [
        ("NVIDIA A100-SXM-64GB", "A100-SXM4-40GB"),
        ("NVIDIA H100 NVL", "H100-SXM5-80GB"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA L40S", None),
        ("NVIDIA RTX A4000", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_a_board_that_is_not_listed_is_taken_for_the_usual_one_of_its_chip(name: str, board: str | None) -> None:
    likeliest = likeliest_gpu_model(name)

    assert (likeliest.name if likeliest else None) == board


def test_clusters_are_written_with_any_name_of_a_board() -> None:
    spec = ClusterSpec.parse("50x8:A100-SXM4-80GB,2x4:A100")

    assert [(group.count, group.gpus, group.model.name) for group in spec.groups] == [
        (50, 8, "A100-SXM4-80GB"),
        (2, 4, "A100-SXM4-40GB"),
    ]
    with pytest.raises(DomainError, match="unknown GPU model 'B9000'"):
        ClusterSpec.parse("2x4:B9000")
