"""Runs that go on from a cluster at work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.contracts.jobs import Share
from services.contracts.live import LiveJob, LiveKind, LiveNode, LiveProfile, LiveRates, LiveState
from services.core.domain.errors import DomainError
from services.core.domain.signal import Signal
from services.core.policies.registry import POLICIES
from services.simulator import live
from services.simulator.live import live_document, parameters_of, read_live
from tests.support.workloads import START_S

HOUR_S = 3_600.0


def a_job(name: str, *, at_s: float = 0.0, gpus: int = 1, **fields: Any) -> LiveJob:
    ordinary: dict[str, Any] = {
        **{"tenant": "t", "submitted_s": START_S + at_s, "since_s": START_S + at_s, "profile": 0},
        **{"min_gpus": gpus, "max_gpus": gpus, "step_gpus": 1, "priority": 0, "preemptible": True},
        **{"deadline_s": None, "work_s": HOUR_S, "progress": 0.0, "length_from": "prediction"},
        **{"attained_gpu_s": 0.0, "energy_j": 0.0, "carbon_gco2": 0.0, "gang": None},
    }
    return LiveJob(id=name, **ordinary | fields)


def a_state(*jobs: LiveJob, nodes: tuple[LiveNode, ...] | None = None, **fields: Any) -> LiveState:
    """Return a state an hour after ``START_S``: one node of two GPUs, and 100 W for each GPU that works."""
    ordinary: dict[str, Any] = {
        **{"at_s": START_S + HOUR_S, "next_active_s": START_S + 1.5 * HOUR_S, "round_interval_s": 1_800.0},
        **{"policy": "fifo", "parameters": {}, "zone": "DE", "signal": Signal.AVERAGE_DIRECT, "stale": False},
        **{"times_s": [START_S], "intensity_gco2_per_kwh": [500.0], "end_s": START_S + 48 * HOUR_S},
        **{"kinds": [LiveKind(gpu_model="A100", idle_w=50.0)], "notes": []},
        "profiles": [
            LiveProfile(gpus=[1, 2], rates={0: LiveRates(speed=[1.0, 2.0], power_w=[100.0, 100.0])}),
        ],
    }
    cluster = nodes or (LiveNode(kind=0, gpus=2, takes_work=True),)
    return LiveState(nodes=list(cluster), jobs=list(jobs), **ordinary | fields)


def outcomes(tmp_path: Path, state: LiveState, *policies: str) -> dict[str, Any]:
    path = tmp_path / "live"
    path.write_text(state.model_dump_json())
    run = read_live(path)
    chosen = parameters_of(run, {name: {} for name in policies or ("fifo",)})
    return live_document(run, chosen, lambda *_: None)


RUNS = a_job("runs", gpus=2, work_s=2 * HOUR_S, progress=0.5, gang=[Share(node_id="0", devices=[0, 1])])


def test_a_gang_that_runs_goes_on_and_the_queue_waits_for_it(tmp_path: Path) -> None:
    document = outcomes(tmp_path, a_state(RUNS, a_job("later", at_s=20.0), a_job("sooner", at_s=10.0, gpus=2)))

    assert document["job_ids"] == ["runs", "sooner", "later"]
    jobs = document["policies"][0]["jobs"]
    began_s, freed_s = START_S + HOUR_S, START_S + HOUR_S + HOUR_S / 2
    assert jobs["starts_at_s"] == [began_s, freed_s, freed_s + 30 + HOUR_S / 2]
    assert jobs["ends_at_s"][0] == freed_s  # two GPUs do the hour that is left in half an hour, without a new start
    # From the beginning on: 2 x 100 W for half an hour at 500 g/kWh.
    assert jobs["carbon_gco2"][0] == pytest.approx(0.1 * 500)


def test_a_drained_node_keeps_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    nodes = (LiveNode(kind=0, gpus=2, takes_work=False), LiveNode(kind=0, gpus=1, takes_work=True))

    document = outcomes(tmp_path, a_state(RUNS, a_job("a"), a_job("b", at_s=1.0), nodes=nodes))

    starts = dict(zip(document["job_ids"], document["policies"][0]["jobs"]["starts_at_s"], strict=True))
    assert starts["a"] == START_S + HOUR_S
    assert starts["b"] == START_S + HOUR_S + HOUR_S + 30.0, "after a, though the drained node was free before"


def test_what_jobs_have_had_counts_in_the_order(tmp_path: Path) -> None:
    lucky = a_job("lucky", attained_gpu_s=1e6, gpus=2)
    document = outcomes(tmp_path, a_state(RUNS, lucky, a_job("new", at_s=5.0, gpus=2)), "las")

    starts = dict(zip(document["job_ids"], document["policies"][0]["jobs"]["starts_at_s"], strict=True))
    assert starts["new"] < starts["lucky"]


def test_jobs_run_only_on_the_kinds_of_nodes_that_suit_them(tmp_path: Path) -> None:
    kinds = [LiveKind(gpu_model="A100", idle_w=50.0), LiveKind(gpu_model="A100", idle_w=50.0)]
    nodes = (LiveNode(kind=0, gpus=2, takes_work=True), LiveNode(kind=1, gpus=2, takes_work=True))
    rates = LiveRates(speed=[1.0], power_w=[100.0])
    profiles = [LiveProfile(gpus=[1], rates={0: rates}), LiveProfile(gpus=[1], rates={1: rates})]
    waits = [a_job("first", profile=0), a_job("second", profile=1)]

    document = outcomes(tmp_path, a_state(RUNS, *waits, nodes=nodes, kinds=kinds, profiles=profiles))

    starts = dict(zip(document["job_ids"], document["policies"][0]["jobs"]["starts_at_s"], strict=True))
    assert starts["second"] == START_S + HOUR_S
    assert starts["first"] > starts["second"]


def test_every_policy_answers_and_the_one_in_force_has_its_parameters(tmp_path: Path) -> None:
    state = a_state(RUNS, a_job("a"), a_job("b"), policy="green", parameters={"mu": 3.0})
    document = outcomes(tmp_path, state, *POLICIES)

    assert [each["policy"] for each in document["policies"]] == [*POLICIES]
    assert not [each for each in document["policies"] if "failure" in each]
    green = next(each for each in document["policies"] if each["policy"] == "green")
    assert green["summary"]["parameters"] == {"mu": 3.0}


def test_a_policy_that_takes_too_long_costs_only_its_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LONGEST_S", -1.0)

    document = outcomes(tmp_path, a_state(RUNS, a_job("a", gpus=2)), "las")

    assert document["policies"] == [{"policy": "las", "failure": "it took longer than -1 s"}]


def test_what_lies_beyond_the_horizon_is_open(tmp_path: Path) -> None:
    long = a_job("long", gpus=2, work_s=60 * 86_400.0, gang=[Share(node_id="0", devices=[0, 1])])

    jobs = outcomes(tmp_path, a_state(long, a_job("waits", at_s=1.0)))["policies"][0]["jobs"]

    assert jobs["starts_at_s"] == [START_S + HOUR_S, None]
    assert jobs["ends_at_s"] == jobs["carbon_gco2"] == [None, None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "not a live state"),
        (a_state().model_dump_json(), "no job waits or runs"),
        (a_state(a_job("a")).model_copy(update={"nodes": []}).model_dump_json(), "no node is up"),
    ],
)
def test_a_state_of_which_nothing_can_be_made_says_why(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "live"
    path.write_text(text)

    with pytest.raises(DomainError, match=words):
        read_live(path)


def test_a_live_run_is_the_same_twice(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    waits = [a_job(f"w{at}", at_s=float(at), work_s=float(rng.uniform(60, 9_000))) for at in range(40)]

    first, second = (outcomes(tmp_path, a_state(RUNS, *waits), "green", "las") for _ in range(2))

    assert first == second


def test_a_policy_of_fixed_gangs_has_the_smallest_and_joint_knows_what_was_asked_for(tmp_path: Path) -> None:
    """As on the cluster, where a policy that scales no job starts it at its smallest gang."""
    job = a_job("a", max_gpus=2, asked_gpus=2, work_s=2 * HOUR_S)
    state = a_state(job)
    documents = {each["policy"]: each for each in outcomes(tmp_path, state, "fifo", "joint")["policies"]}
    ends_s = {name: document["jobs"]["ends_at_s"][0] - state.at_s for name, document in documents.items()}
    assert ends_s["fifo"] == pytest.approx(2 * HOUR_S, abs=60.0)
    assert ends_s["joint"] < ends_s["fifo"]
