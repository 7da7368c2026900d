"""The pairs of workload and cluster that ``joint`` is judged on: what each asks for, and which goals are missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.reproductions import joint_pairs
from lab.reproductions.joint_pairs import CHOSE, JOINT, JUDGES, LAS, NO_LIMITS, POLLUX, ROWS, ZEUS, Pair, missed
from services.simulator.workload import ClusterSpec

PAIR = Pair(*joint_pairs.GREEN, 80, "4x4:RTX3090", 0.6, "GB", "2023-05-01")  #: Needs no data that are not bundled
NOWHERE = Path("nowhere")


def row(carbon_kg: float, jct_s: float = 100.0, p99_jct_s: float = 1_000.0) -> dict[str, float]:
    return {"carbon_kg": carbon_kg, "avg_jct_s": jct_s, "p99_jct_s": p99_jct_s}


def test_there_are_twenty_and_none_both_chooses_and_judges() -> None:
    assert len({*CHOSE, *JUDGES}) == len(CHOSE) + len(JUDGES) == 20


def test_jobs_ask_for_as_much_of_the_cluster_as_the_load_says() -> None:
    """An RTX 3090 is the board of the recipe's unit, and all jobs ask for one GPU."""
    jobs = joint_pairs.workload_of(PAIR, NOWHERE)

    assert len(jobs.ids) == joint_pairs.JOBS
    assert set(jobs.requested_gpus.tolist()) == {1}
    offered_s = ClusterSpec.parse(PAIR.cluster).gpus * (jobs.submitted_s[-1] - jobs.submitted_s[0])
    assert jobs.work_s.sum() / offered_s == pytest.approx(0.6)


def test_goals_are_missed_by_name() -> None:
    met = {LAS: row(10.0), ZEUS: row(9.0), POLLUX: row(8.0), JOINT: row(7.0, 100.0, 1_200.0)}
    assert missed(met) == []

    worse = met | {JOINT: row(9.0, 101.0, 1_201.0)}
    assert missed(worse) == ["carbon +12.5 % against Pollux", "mean JCT +1.0 %", "p99 +20.1 %"]


def test_without_limits_zeus_is_no_rival() -> None:
    figures = {LAS: row(10.0), ZEUS: row(5.0), POLLUX: row(8.0), JOINT + NO_LIMITS: row(7.0)}

    assert missed(figures, JOINT + NO_LIMITS) == []


@pytest.mark.usefixtures("the_lab")
def test_the_default_meets_its_goals_and_what_has_run_does_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_pairs, "JOBS", 120)
    monkeypatch.setattr(joint_pairs, "ROWS", {label: ROWS[label] for label in (LAS, ZEUS, POLLUX, JOINT)})

    found = joint_pairs.figures((PAIR,), NOWHERE, tmp_path)

    assert missed(found[PAIR]) == []
    assert found[PAIR][JOINT]["carbon_kg"] < 0.9 * found[PAIR][LAS]["carbon_kg"]
    monkeypatch.setattr(joint_pairs, "run", None)
    assert joint_pairs.figures((PAIR,), NOWHERE, tmp_path) == found
    assert {json.loads(file.read_text())["carbon_kg"] for file in tmp_path.iterdir()} == {
        each["carbon_kg"] for each in found[PAIR].values()
    }
