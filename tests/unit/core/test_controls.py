"""Curves of speed and power by setting, and how snapshots keep them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from lab.recording import plan_to_json, snapshot_to_json
from lab.replay import snapshot_from_json
from services.core.cycle.plan import Plan, ProfileControls, set_to
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from tests.support.builders import a_job, a_snapshot


def a_curve(*, values: tuple[float, ...] = (100.0, 200.0)) -> ControlCurve:
    return ControlCurve(np.array(values), np.array([0.5, 1.0]), np.array([90.0, 180.0]))


def test_a_curve_is_linear_between_its_values_and_the_nearest_outside() -> None:
    curve = a_curve()

    assert curve.at(150.0) == (0.75, 135.0)
    assert curve.at(10.0) == (0.5, 90.0)
    assert curve.at(900.0) == curve.at(None) == (1.0, 180.0)


@pytest.mark.parametrize("values", [(200.0, 100.0), (0.0, 100.0), (100.0,), (100.0, float("inf"))])
def test_an_impossible_curve_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(DomainError):
        a_curve(values=values)


def test_a_snapshot_keeps_settings_and_curves_through_json() -> None:
    snapshot = a_snapshot([a_job("a"), a_job("b")])
    jobs = replace(snapshot.jobs, power_limit_w=np.array([150.0, np.nan]), control_curve=np.array([0, -1]))
    curves = {(0, ControlKind.POWER_LIMIT): a_curve()}
    settable = (frozenset([ControlKind.POWER_LIMIT]),)
    written = replace(snapshot, jobs=jobs, control_curves=(curves,), settable=settable, measures=True)

    read = snapshot_from_json(json.loads(json.dumps(snapshot_to_json(written))))

    found = read.control_curve(0, 0, ControlKind.POWER_LIMIT)
    assert found is not None
    assert found.at(150.0) == (0.75, 135.0)
    assert read.control_curve(1, 0, ControlKind.POWER_LIMIT) is None
    assert read.control_curve(0, 0, ControlKind.CLOCK) is None
    assert read.measures
    assert read.takes(0, ControlKind.POWER_LIMIT)
    assert not read.takes(0, ControlKind.CLOCK)
    assert read.jobs.control_value(ControlKind.POWER_LIMIT)[0] == 150.0
    assert np.isnan(read.jobs.control_value(ControlKind.CLOCK)).all()


def test_records_say_what_a_setting_is() -> None:
    job = JobId("a")
    actions = (
        set_to(job, ControlKind.POWER_LIMIT, 150.0, Reason.LEAST_COST),
        set_to(job, ControlKind.CLOCK, 1_200.0, Reason.LEAST_COST),
        ProfileControls(job, ControlKind.CLOCK, 5.0),
    )

    assert plan_to_json(Plan(7, actions)) == [
        {"action": "set_power_limit", "job_id": "a", "reason": "least_cost", "power_limit_w": 150.0},
        {"action": "set_clock", "job_id": "a", "reason": "least_cost", "clock_mhz": 1_200},
        {"action": "profile_settings", "job_id": "a", "reason": "profiling", "kind": "clock", "window_s": 5.0},
    ]
