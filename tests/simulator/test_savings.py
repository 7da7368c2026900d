"""What each lever saved: replays with one lever more at a time, whose differences add up."""

from __future__ import annotations

from typing import Any

import pytest

from services.contracts.simulations import TrainingOptions
from services.core.policies.levers import Lever
from services.simulator.engine import EngineOptions
from services.simulator.savings import BASELINE, steps_of
from services.simulator.training import Inputs, OptionError, prepare

ENGINE = EngineOptions(batch_tuning="all")


def answer(**options: Any) -> Any:
    """Return what a run of the bundled day answers, cut to its first hours."""
    given = {"policy": "joint", "cluster": "8x2:RTX3090", "start": "2023-08-08", "days": 0.1, "levers": True, **options}
    run = prepare(TrainingOptions.model_validate(given), Inputs("green-day", "GB", "persistence"))
    reports: list[tuple[str, int, int]] = []
    found = run.answer(lambda *report: reports.append(report))
    assert reports[-1][1] == reports[-1][2]
    return found


def test_each_step_has_one_lever_more_and_the_last_is_the_policy_in_force() -> None:
    steps = steps_of("joint", {"slack_s": 3_600.0, "hour_share": 0.3}, ENGINE)
    assert [step.lever for step in steps] == [
        None,
        *(Lever.ORDER, Lever.WIDTH, Lever.BATCH, Lever.POWER_LIMIT, Lever.HOURS, Lever.SLEEP),
    ]
    first, order, width, batch, limit, hours, sleep = steps
    assert (first.policy, first.parameters, first.engine.rigid) == (BASELINE, {}, True)
    assert order.parameters == {"hour_share": 0.3, "limits": False, "slack_s": 0.0}
    assert order.engine == first.engine
    assert (width.engine.rigid, batch.engine.batch_tuning) == (False, "all")
    assert limit.parameters == {"hour_share": 0.3, "slack_s": 0.0}
    assert hours.parameters == {"hour_share": 0.3, "slack_s": 3_600.0}
    assert hours.engine.power_down_after_s is None
    assert sleep.engine.power_down_after_s == 60.0
    assert (sleep.policy, sleep.parameters) == ("joint", hours.parameters)


def test_a_policy_without_a_lever_has_no_step_of_it() -> None:
    assert [step.lever for step in steps_of("las", {}, ENGINE)] == [None, Lever.ORDER]
    no_sleep = steps_of("joint", {"sleep_after_s": None, "limits": False}, ENGINE)
    assert no_sleep[-1].engine.power_down_after_s is None
    assert no_sleep[-1].parameters == {"sleep_after_s": None, "limits": False}


def test_savings_add_up_to_the_difference_and_the_levers_that_save_do() -> None:
    found = answer()
    grams = [step["gco2"] for step in found["steps"]]
    saved = {step["lever"]: before - step["gco2"] for before, step in zip(grams, found["steps"][1:], strict=False)}

    assert sum(saved.values()) == pytest.approx(grams[0] - grams[-1])
    assert {step["completed"] for step in found["steps"]} == {found["jobs"]}
    assert saved["power_limit"] > 0
    assert saved["sleep"] > 0
    assert found["slack_in_force_s"] == saved["hours"] == 0.0  # no job has time to wait, and slack would have helped
    assert found["slack"]["gco2"] < grams[-1]
    assert found["slack"]["mean_s"] > found["steps"][-1]["mean_s"]
    assert found["steps"][1]["spread_gco2"] > 0


def test_a_cluster_that_is_done_earlier_goes_on_drawing_its_idle_power() -> None:
    """Otherwise whoever ends first would save the idle power of the hours after."""
    found = answer(policy="las", days=0.02)
    fifo, las = found["steps"]
    assert fifo["energy_j"] > 0
    assert abs(fifo["energy_j"] - las["energy_j"]) < 0.2 * fifo["energy_j"]


@pytest.mark.parametrize("options", [{"policy": "joint,las"}, {"predictor": "forest"}])
def test_levers_are_those_of_one_policy(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="levers are those of one policy"):
        answer(**options)
