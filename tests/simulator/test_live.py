"""Runs that go on from a cluster at work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.contracts.jobs import Share
from services.contracts.live import LiveJob, LiveKind, LiveNode, LiveProfile, LiveRates, LiveState, LiveWindow
from services.core.domain.errors import DomainError
from services.core.domain.placement import Placement
from services.core.domain.signal import Signal
from services.core.policies.registry import POLICIES
from services.simulator import live
from services.simulator.engine.cluster import Nodes
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
        "profiles": [LiveProfile(gpus=[1, 2], rates={0: LiveRates(speed=[1.0, 2.0], power_w=[100.0, 100.0])})],
    }
    cluster = nodes or (LiveNode(kind=0, gpus=2, takes_work=True),)
    return LiveState(nodes=list(cluster), jobs=list(jobs), **ordinary | fields)


def outcomes(tmp_path: Path, state: LiveState, *policies: str) -> dict[str, Any]:
    path = tmp_path / "live"
    path.write_text(state.model_dump_json())
    run = read_live(path)
    chosen = parameters_of(run, {name: {} for name in policies or ("fifo",)})
    return live_document(run, chosen, lambda *_: None)


@pytest.fixture
def on_nodes(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The nodes of each gang that starts."""
    seen, take = list[set[int]](), Nodes.take

    def noting(self: Nodes, placement: Placement, *rest: Any) -> Any:
        seen.append({int(share.node_id[1:]) for share in placement.shares})
        return take(self, placement, *rest)

    monkeypatch.setattr(Nodes, "take", noting)
    return seen


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


def started_at(document: dict[str, Any]) -> dict[str, float | None]:
    (outcome,) = document["policies"]
    return dict(zip(document["job_ids"], outcome["jobs"]["starts_at_s"], strict=True))


@pytest.mark.parametrize("policy", [*POLICIES])
def test_gangs_lie_within_the_domains_that_they_ask_for(policy: str, tmp_path: Path, on_nodes: list[set[int]]) -> None:
    """Two racks of two nodes with two GPUs each; on the first node of each, a gang holds a GPU that it keeps."""
    nodes = tuple(LiveNode(kind=0, gpus=2, takes_work=True, domains=[at, at // 2]) for at in range(4))
    stays = [
        a_job(
            f"stays{at}", at_s=float(at), preemptible=False, gang=[Share(node_id=str(at), devices=[0])], within=within
        )
        for at, within in ((0, 1), (2, -1))
    ]
    waits = [a_job("rack", gpus=4, at_s=10.0, within=1), a_job("any", gpus=3, at_s=20.0)]
    waits += [a_job("none", at_s=30.0, within=-1), a_job("large", gpus=5, at_s=40.0, within=1)]
    sizes = LiveProfile(gpus=[1, 8], rates={0: LiveRates(speed=[1.0, 8.0], power_w=[100.0, 100.0])})
    state = a_state(*stays, *waits, nodes=nodes, levels=["node", "rack"], profiles=[sizes])

    starts = started_at(outcomes(tmp_path, state, policy))

    assert starts["none"] is starts["large"] is None
    assert starts["rack"] is not None
    assert starts["rack"] > state.at_s + HOUR_S / 2, "six GPUs are free, but no rack has four of them"
    assert starts["stays2"] == state.at_s, "a gang that runs stays, though its level is gone"
    assert all(len({at // 2 for at in nodes}) == 1 for nodes in on_nodes)


@pytest.mark.parametrize("policy", [*POLICIES])
def test_gpus_that_are_reserved_or_out_of_service_are_not_there(policy: str, tmp_path: Path) -> None:
    times = {"start_s": START_S, "end_s": START_S + 4 * HOUR_S}
    mine, theirs = a_job("mine", gpus=2, tenant="t"), a_job("theirs", gpus=2, tenant="other", at_s=1.0)
    kept = LiveWindow(id="w", gpus={0: 2}, holder="other", **times)

    reserved = started_at(outcomes(tmp_path, a_state(mine, theirs, windows=[kept]), policy))
    closed = started_at(outcomes(tmp_path, a_state(mine, windows=[kept.model_copy(update={"holder": None})]), policy))

    assert reserved["theirs"] == START_S + HOUR_S
    assert reserved["mine"] is not None
    assert reserved["mine"] > START_S + HOUR_S
    assert closed["mine"] is not None
    assert closed["mine"] >= START_S + 4 * HOUR_S


@pytest.mark.parametrize("policy", [*POLICIES])
def test_tenants_hold_no_more_than_they_may_and_no_less_than_they_are_guaranteed(policy: str, tmp_path: Path) -> None:
    both = [a_job(f"mine{at}", at_s=float(at)) for at in range(2)]

    free, limited = (
        started_at(outcomes(tmp_path, a_state(*both, tenant_gpu_quota=quota), policy)) for quota in ({}, {"t": 1})
    )
    owner = a_job("owner", at_s=30.0, tenant="other", gpus=2)
    borrows = RUNS.model_copy(update={"work_s": 20 * HOUR_S})
    guaranteed = started_at(outcomes(tmp_path, a_state(borrows, owner, tenant_guarantees={"other": 2}), policy))

    assert free["mine0"] == free["mine1"]
    assert limited["mine0"] != limited["mine1"]
    assert guaranteed["owner"] is not None
    assert guaranteed["owner"] < START_S + 2 * HOUR_S, "long before the gang that borrows would end"
