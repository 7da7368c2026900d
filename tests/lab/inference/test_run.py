"""Inference services through past hours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.inference.run import InferenceRun, Scheme
from services.core.domain.errors import DomainError

SHORT = InferenceRun("ciso-march", gpus=2, hours=4)


def figures(**changes: Any) -> dict[str, Any]:
    return replace(SHORT, **changes).simulate()


def test_base_is_what_everything_is_compared_with() -> None:
    found = figures(scheme=Scheme.BASE)

    assert found["carbon_saving_pct"] == pytest.approx(0)
    assert found["accuracy_loss_pct"] == pytest.approx(0)
    assert found["p95_over_sla"] == pytest.approx(1)
    assert found["evaluations"] == 0
    assert found["sla_ok_share"] is None


def test_clover_saves_carbon_within_the_sla_and_under_the_bound() -> None:
    found = figures(bound=True)

    assert found["carbon_saving_pct"] > 30
    assert 0 < found["accuracy_loss_pct"] < 7.4
    assert all(each["p95_over_sla"] <= 1 for each in found["timeline"] if not each["evaluations"])
    assert found["objective_mean"] <= found["bound_mean"] + 0.1
    assert found["objective_mean"] >= 0.99 * found["optimum_mean"]
    nodes = {node["id"] for node in found["last_graph"]["nodes"]}
    assert nodes == {"b1", "b3", "b5", "b7", "1g", "2g", "3g", "4g", "7g"}
    assert found["timeline"][0]["edit_distance"] > 0
    assert found["objective_mean"] >= 0.95 * figures(scheme=Scheme.ORACLE)["objective_mean"]


def test_equal_seeds_give_equal_figures() -> None:
    first, second = (figures(screen=False) for _ in range(2))

    assert {**first, "wall_s": 0} == {**second, "wall_s": 0}


def test_evaluations_take_traffic() -> None:
    found = figures(screen=False, evaluation_s=20.0)

    assert found["optimisation_time_share"] == pytest.approx(found["evaluations"] * 20 / (4 * 3_600))
    assert 0 <= found["sla_ok_share"] <= 1
    assert all(each["evaluations"] <= 15 for each in found["timeline"])


def test_an_accuracy_floor_holds() -> None:
    found = figures(max_accuracy_loss_pct=0.5, carbon_weight=0.9)

    assert found["accuracy_loss_pct"] <= 0.5
    assert found["carbon_saving_pct"] > 0


def test_fewer_gpus_carry_the_load_of_more() -> None:
    found = figures(reference_gpus=4)
    base = figures(reference_gpus=4, scheme=Scheme.BASE)

    assert base["p95_over_sla"] > 1
    assert found["timeline"][-1]["p95_over_sla"] <= 1
    assert found["carbon_saving_pct"] > figures()["carbon_saving_pct"]


def test_a_higher_weight_of_carbon_saves_more() -> None:
    least, most = (figures(carbon_weight=weight) for weight in (0.1, 0.9))

    assert most["carbon_saving_pct"] > least["carbon_saving_pct"]
    assert most["accuracy_loss_pct"] > least["accuracy_loss_pct"]


def test_the_search_runs_again_only_when_the_intensity_changed(tmp_path: Path) -> None:
    trace = tmp_path / "hours.csv"
    trace.write_text("zone\n100\n104\n100\n104\n")

    found = figures(carbon=str(trace), screen=False)

    assert [each["evaluations"] > 0 for each in found["timeline"]] == [True, False, False, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "--gpus"),
        ({"hours": 50}, "has 49 hours"),
        ({"hours": 0}, "--hours"),
        ({"carbon_weight": 2.0}, "lambda"),
        ({"load": 1.0}, "--load"),
        ({"evaluation_s": 0.0}, "--evaluation-s"),
        ({"max_accuracy_loss_pct": -1.0}, "accuracy loss"),
        ({"family": "albert"}, "no family 'albert'"),
        ({"carbon": "nowhere.csv"}, "no file 'nowhere.csv'"),
    ],
)
def test_bad_input_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DomainError, match=message) as raised:
        figures(**changes)

    assert "\n" not in str(raised.value)


def test_a_gpu_that_is_cut_serves_nothing_for_so_long() -> None:
    quick, slow = (figures(screen=False, recut_s=seconds) for seconds in (0.0, 120.0))

    assert quick["recut_time_share"] == 0
    assert slow["recut_time_share"] == pytest.approx(slow["gpus_recut"] * 120 / (4 * 3600))
    assert slow["gpus_recut"] == quick["gpus_recut"] > 2
    assert slow["p95_over_sla"] > quick["p95_over_sla"]
    assert slow["evaluations"] == quick["evaluations"]


def test_requests_of_a_single_gpu_wait_while_it_is_cut() -> None:
    quick, slow = (figures(gpus=1, hours=1, recut_s=seconds)["timeline"][0] for seconds in (0.0, 300.0))

    assert quick["configuration"] == slow["configuration"]
    assert slow["p95_over_sla"] > 1_000 > quick["p95_over_sla"]


@pytest.mark.parametrize("recut_s", [-1.0, 301.0, float("nan")])
def test_a_cut_takes_no_time_or_minutes(recut_s: float) -> None:
    with pytest.raises(DomainError, match="--recut-s is between 0 and 300"):
        figures(recut_s=recut_s)
