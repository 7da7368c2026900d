"""The clusters and workloads that are drawn by chance: what they are, what is compared, and what the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.reproductions import joint_anywhere
from lab.reproductions.joint_anywhere import (
    JOINT,
    JOINT_BOOT,
    JUDGES,
    LAS,
    LAS_AWAKE,
    LOOKED_AT,
    MOST_GPUS,
    a_case,
    figures_of,
    made,
    rows_of,
    table,
)

NAMES = ("carbon_kg", "avg_jct_s", "p99_jct_s")


def test_no_seed_both_shows_and_judges() -> None:
    assert not {*LOOKED_AT} & {*JUDGES}


@pytest.mark.parametrize("seed", range(40))
def test_every_case_fits_its_cluster_and_gives_all_the_same_means(seed: int) -> None:
    case = a_case(seed)

    assert 1 <= case.cluster.gpus <= MOST_GPUS
    fewest = min(group.count * group.gpus for group in case.cluster.groups)
    assert int(case.jobs.max_gpus.max()) <= fewest
    rows = rows_of(case)
    assert {JOINT, LAS} <= rows.keys()
    assert (JOINT_BOOT in rows) is (LAS_AWAKE in rows) is case.sleeps
    assert ("Zeus + LAS" in rows) is case.limits
    assert (rows[JOINT][1].get("sleep_after_s", 60.0) is None) is not case.sleeps
    assert (rows[LAS][2].power_down_after_s is not None) is case.sleeps
    assert rows[JOINT][1].get("limits", True) is case.limits


def test_a_case_is_run_once_and_what_never_sleeps_draws_power_to_one_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 2's nodes never sleep: a row that is done sooner is charged for as long as the others."""
    found = made(2, tmp_path)

    monkeypatch.setattr(joint_anywhere, "figures_of", None)
    assert made(2, tmp_path) == found
    monkeypatch.undo()
    monkeypatch.setattr(joint_anywhere, "rows_of", lambda case: {LAS: rows_of(case)[LAS]})
    alone = figures_of(a_case(2))[LAS]
    longest_s = max(each["makespan_s"] for each in found["rows"].values())
    assert found["rows"][LAS]["makespan_s"] == alone["makespan_s"]
    assert (found["rows"][LAS]["carbon_kg"] > alone["carbon_kg"]) is (longest_s > alone["makespan_s"])


def test_a_row_counts_how_often_it_is_worse() -> None:
    def case(joint: tuple[float, ...], boot: tuple[float, ...]) -> dict[str, object]:
        rows = {JOINT: joint, JOINT_BOOT: boot, LAS: (10.0, 100.0, 1_000.0)}
        named = {label: dict(zip(NAMES, figures, strict=True)) for label, figures in rows.items()}
        traits = {"deadlines": 0.0, "sleeps": True, "limits": True, "batches": "all", "usual_s": 60.0}
        return {"traits": traits | {"lengths": "known"}, "rows": named}

    found = [case((11.0, 110.0, 900.0), (9.0, 90.0, 900.0)), case((9.0, 100.4, 1_100.0), (8.0, 80.0, 1_010.0))]

    lines = table(found).splitlines()
    assert lines[2] == "| all | 2 | 60 s | +0.0 % | +5.2 % | +0.0 % | 1 | 1 | 1 | 1 | 1 |"
    assert lines[3] == "| all | 2 | a boot's 180 s | -15.0 % | -15.0 % | -4.5 % | 0 | 0 | 1 | 0 | 0 |"
