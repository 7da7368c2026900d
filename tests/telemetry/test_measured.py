"""Energy that an agent measures on an engine's node, and whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.engines import EngineJob, EngineMode, EngineNode, EngineReport
from services.contracts.nodes import EnergyInterval
from services.kit.ids import utc_now
from services.telemetry.measured import Hold, by_holder
from services.telemetry.repository.credentials import sha256
from services.telemetry.repository.engines import mirror
from tests.support.control_plane import OPERATOR, accept_job, service_headers, usage
from tests.telemetry.test_ledger import invariants, lines, row


def an_interval(start_s: float, end_s: float, *energies_j: float) -> EnergyInterval:
    usages = [usage(None, joules, static_energy_j=6.0) | {"devices": [at]} for at, joules in enumerate(energies_j)]
    return EnergyInterval(
        boot_id="b",
        sequence=1,
        start_at=datetime.fromtimestamp(start_s, UTC),
        end_at=datetime.fromtimestamp(end_s, UTC),
        metered_gpu_energy_j=sum(energies_j),
        usages=usages,
    )


def shares(interval: EnergyInterval) -> dict[tuple[str | None, tuple[int, ...]], float]:
    return {(each.allocation_id, tuple(each.devices)): pytest.approx(each.gpu_energy_j) for each in interval.usages}


def test_a_device_is_its_holders_for_as_long_as_they_held_it() -> None:
    holds = [Hold("a", 0, 90, 104), Hold("b", 0, 104, float("inf")), Hold("c", 1, 105, 107), Hold("d", 5, 0, 1e9)]
    assert shares(by_holder(an_interval(100, 110, 50, 100), holds)) == {
        ("a", ()): 20,
        ("b", (0,)): 30,
        ("c", ()): 20,
        (None, (1,)): 80,
    }


def test_what_two_hold_at_once_is_theirs_in_equal_parts() -> None:
    holds = [Hold("a", 0, 0, 1e9), Hold("b", 0, 105, 1e9)]
    assert shares(by_holder(an_interval(100, 110, 100), holds)) == {("a", (0,)): 75, ("b", ()): 25}


@given(
    st.lists(
        st.builds(
            Hold,
            st.sampled_from("abc"),
            st.integers(0, 1),
            st.floats(0, 200),
            st.floats(0, 200) | st.just(float("inf")),
        ),
        max_size=6,
    )
)
def test_the_sum_stays_as_it_was_measured(holds: list[Hold]) -> None:
    split = by_holder(an_interval(100, 110, 50, 100), holds).usages
    assert sum(each.gpu_energy_j for each in split) == pytest.approx(150)
    assert sum(each.static_energy_j for each in split) == pytest.approx(12)
    assert all(each.gpu_energy_j >= 0 for each in split)


async def an_engine(plane: Any, *jobs: EngineJob, names: Sequence[str] = ("gpu-1",)) -> None:
    """Have a bridge named slurm report its nodes, and jobs."""
    async with plane.database.connection() as connection:
        await connection.execute(
            "INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices) "
            "VALUES ('slurm', $1, '', '', 'Z', 'engine', false, 'modelled', '[]') ON CONFLICT DO NOTHING",
            sha256("token"),
        )
    nodes = [EngineNode(name=name, gpus=2, gpu_model="A100", memory_gib=80, queues=["batch"]) for name in names]
    report = EngineReport(boot_id="b", kind="slurm", mode=EngineMode.CONTROL, nodes=nodes, jobs=list(jobs))
    assert await mirror(plane.database, "slurm", "token", report, 60, "Z")


async def a_run(plane: Any, name: str, device: int, began_s: float, heard_s: float) -> str:
    """Store a job of the engine that has run since a moment, of which was heard later; return its allocation."""
    fields = {"number": name, "name": name, "user": "u", "steered": True, "gpus": 1, "submitted_at": utc_now()}
    began = datetime.fromtimestamp(began_s, UTC)
    await an_engine(plane, EngineJob(external_id=name, state="running", started_at=began, **fields))
    job = await accept_job(plane.database, state="running")
    share = [{"node_id": "slurm.gpu-1", "devices": [device]}]
    async with plane.database.connection() as connection:
        await connection.execute(
            "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, started_at, "
            "running_at) VALUES ($1, $1, 1, 'running', 1, $2, 0, $3, $4)",
            job,
            share,
            began,
            datetime.fromtimestamp(heard_s, UTC),
        )
        await connection.execute("UPDATE engine_jobs SET job_id = $1 WHERE external_id = $2", job, name)
    return job


async def test_what_an_agent_measures_is_the_engines_jobs_and_is_booked_once(plane: Any) -> None:
    agent = await plane.agent("gpu-1", gpus=2, measures_only=True, engine_node="slurm.gpu-1")
    t = utc_now().timestamp()
    job = await a_run(plane, "7", 1, t - 15, t - 2)
    measured = agent.interval(
        t - 20, t - 10, usage(None, 40) | {"devices": [0]}, usage(None, 60, static_energy_j=10) | {"devices": [1]}
    )
    assert (await agent.report(measured)).json() == {"accepted": 1, "duplicates": 0}
    assert (await agent.report(measured)).json() == {"accepted": 0, "duplicates": 1}
    idle, used = await lines(plane)
    assert (idle["owner"], idle["gpu_energy_j"], idle["static_energy_j"]) == ("", 70, 5)
    assert (used["job_id"], used["node_id"], used["gpu_energy_j"]) == (job, "gpu-1", 30), "from when it really began"
    assert (await row(plane, "SELECT * FROM job_footprints WHERE job_id = $1", job))["energy_j"] == pytest.approx(35)

    modelled = agent.interval(t - 10, t, usage("7", 500))
    body = {"node": "gpu-1", "intervals": [modelled]}
    answer = await agent.post("/v1/nodes/slurm/engine-energy", body, token="token")
    assert answer.json() == {"accepted": 0, "duplicates": 1}, "the bridge's model of a node that is measured"
    assert len(await lines(plane)) == 2
    rules = await invariants(plane)
    assert all(rules[name] for name in ("ledger_adds_up", "footprints_match_ledger", "carbon_recomputes"))


async def test_a_host_that_the_engine_does_not_have_is_idle(plane: Any) -> None:
    agent = await plane.agent("gpu-2", gpus=1, measures_only=True, engine_node="slurm.gpu-2")
    t = utc_now().timestamp()
    await a_run(plane, "8", 0, t - 100, t - 90)
    await agent.report(agent.interval(t - 20, t - 10, usage(None, 40) | {"devices": [0]}))
    assert [(each["owner"], each["gpu_energy_j"]) for each in await lines(plane)] == [("", 40)]


async def test_a_node_is_shown_as_one_that_only_measures(plane: Any) -> None:
    await plane.agent("gpu-3", gpus=1, measures_only=True, engine_node="slurm.gpu-3")
    await plane.agent("n4", gpus=1)
    answer = await plane.http.get("/v1/nodes", headers=service_headers(OPERATOR))
    shown = {each["id"]: (each["measures_only"], each["engine_node"]) for each in answer.json()["items"]}
    assert (shown["gpu-3"], shown["n4"]) == ((True, "slurm.gpu-3"), (False, None))


async def alive(plane: Any) -> set[str]:
    async with plane.database.connection() as connection:
        found = await connection.fetch("SELECT id FROM nodes WHERE engine = 'slurm' AND lease_until > now()")
    return {record["id"] for record in found}


async def test_a_node_that_its_engine_has_no_more_is_not_kept_by_reports_of_nothing_new(plane: Any) -> None:
    await an_engine(plane, names=["gpu-1", "gpu-2"])
    assert await alive(plane) == {"slurm.gpu-1", "slurm.gpu-2"}
    await an_engine(plane, names=["gpu-1"])
    nothing_new = EngineReport(boot_id="b", kind="slurm", mode=EngineMode.CONTROL)
    assert await mirror(plane.database, "slurm", "token", nothing_new, 60, "Z")
    assert await alive(plane) == {"slurm.gpu-1"}
    await an_engine(plane, names=["gpu-1", "gpu-2"])
    assert await alive(plane) == {"slurm.gpu-1", "slurm.gpu-2"}


async def test_nodes_whose_long_names_begin_alike_are_nodes_of_their_own(plane: Any) -> None:
    names = [f"gke-{'a' * 53}-{number}" for number in range(3)]
    await an_engine(plane, names=names)
    known = await alive(plane)
    assert len(known) == 3
    assert all(len(name) <= 63 and name.startswith("slurm.gke-aaa") for name in known)
