"""Reports beside the location-based sums: other groups, the baseline, market-based and embodied emissions, SCI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from services.db.database import Database
from services.kit.ids import utc_now
from services.telemetry.repository import reports as ledger_sums
from tests.support.carbon import FakeCarbon
from tests.support.control_plane import (
    OPERATOR,
    USER,
    accept_job,
    allocate,
    running_telemetry,
    service_headers,
    telemetry_settings,
    usage,
)
from tests.support.ledger import fold_now
from tests.telemetry.conftest import Plane

KWH_J = 3.6e6
LIFETIME_S = 1_000_000.0


@pytest.fixture(scope="module")
async def module_plane(database_url: str, redis_url: str) -> AsyncIterator[Plane]:
    """A telemetry with stated inputs: one market factor, embodied emissions of one model, PUE 1.5."""
    async with FakeCarbon().serve() as carbon:
        settings = telemetry_settings(
            database_url,
            redis_url,
            carbon_url=carbon.url,
            lease_ttl_s=0.3,
            pue=1.5,
            market_gco2_per_kwh={"DE": 10.0},
            embodied_kgco2={"A100": 200.0},
            device_lifetime_s=LIFETIME_S,
        )
        database = await Database.open(database_url, size=4)
        async with running_telemetry(settings) as http:
            yield Plane(http, database, carbon)
        await database.close()


async def report(plane: Plane, identity: Any = OPERATOR, **params: Any) -> dict[str, Any]:
    answer = await plane.http.get("/v1/reports/footprint", params=params, headers=service_headers(identity))
    assert answer.status_code == 200, answer.text
    return answer.json()


def now_s() -> float:
    return utc_now().timestamp()


async def test_market_embodied_and_baseline_beside_the_location_based_sum(plane: Plane) -> None:
    """10 s at 100 and 30 s at 300 gCO2/kWh are 250 in the mean; the job used its energy in the clean part."""
    agent = await plane.agent(zone="DE")
    job = await accept_job(plane.database, name="resnet")
    gang = await allocate(plane.database, job, {"n0": [0, 1]})
    t = now_s()
    plane.carbon.steps = [(t - 1e6, t - 30, 100, "measured"), (t - 30, t + 1e6, 300, "measured")]
    await agent.report(
        agent.interval(t - 40, t - 30, usage(gang, KWH_J, gpus=2), usage(None, 0.0, gpus=2)),
        agent.interval(t - 30, t, usage(None, KWH_J, gpus=4)),
    )

    found = await report(plane, group_by="job")

    (line,) = found["lines"]
    assert (line["group"], line["name"]) == (job, "resnet")
    assert line["footprint"]["carbon_gco2"] == pytest.approx(150)
    accounts = line["accounts"]
    assert accounts["facility_energy_j"] == pytest.approx(1.5 * KWH_J)
    assert accounts["market_gco2"] == pytest.approx(15)
    assert accounts["baseline_gco2"] == pytest.approx(1.5 * 250)
    assert accounts["embodied_gco2"] == pytest.approx(20 / LIFETIME_S * 200_000)
    assert accounts["unknown"] == []
    assert found["zones"] == [{"zone": "DE", "mean_gco2_per_kwh": pytest.approx(250), "market_gco2_per_kwh": 10}]
    assert found["idle_accounts"]["baseline_gco2"] == pytest.approx(1.5 * 250)
    assert found["total_accounts"]["market_gco2"] == pytest.approx(30)
    assert (await report(plane, USER, group_by="job"))["total_accounts"]["market_gco2"] == pytest.approx(15)


async def test_what_is_not_known_is_unknown_and_named(plane: Plane) -> None:
    agent = await plane.agent(zone="SE", model="H100")
    t = now_s()
    await agent.report(agent.interval(t - 10, t, usage(None, KWH_J)))

    accounts = (await report(plane))["total_accounts"]

    assert (accounts["market_gco2"], accounts["embodied_gco2"]) == (None, None)
    assert accounts["unknown"] == ["embodied emissions of H100", "market factor of SE"]
    assert accounts["baseline_gco2"] == pytest.approx(1.5 * 360)


async def test_slices_are_not_charged_as_so_many_boards(plane: Plane) -> None:
    """Seven jobs on slices of one GPU emit no seven times what it took to make it."""
    agent = await plane.agent(gpus=1, zone="DE")
    agent.can_partition()
    agent.cut(0, [1] * 7)
    await agent.register()
    t = now_s()
    slices = [device["index"] for device in agent.registration["devices"][1:]]
    await agent.report(agent.interval(t - 10, t, usage(None, KWH_J, devices=slices)))

    accounts = (await report(plane))["total_accounts"]

    assert accounts["embodied_gco2"] is None
    assert accounts["unknown"] == ["embodied emissions of boards of an unknown model or cut into slices"]


async def test_daily_sums_have_no_mean_intensity(plane: Plane) -> None:
    agent = await plane.agent(zone="DE")
    t = now_s() - 4 * 86_400
    await agent.report(agent.interval(t - 10, t, usage(None, KWH_J)))
    assert await fold_now(plane.database, 2 * 86_400) == 2

    accounts = (await report(plane))["total_accounts"]

    assert accounts["baseline_gco2"] is None
    assert accounts["unknown"] == ["mean intensity of DE"]
    assert accounts["market_gco2"] == pytest.approx(15)


async def test_sci_counts_only_work_that_is_known_to_lie_in_the_period(plane: Plane) -> None:
    agent = await plane.agent(zone="DE")
    t = now_s()
    specs: list[dict[str, Any]] = [
        {"state": "succeeded", "work": {"total": 5_000, "unit": "tokens"}},
        {"state": "succeeded"},
        {"state": "failed", "work": {"total": 5, "unit": "epochs"}},
        {"state": "succeeded", "work": {"total": 4, "unit": "epochs"}},
    ]
    jobs = [await accept_job(plane.database, **spec) for spec in specs]
    gangs = [await allocate(plane.database, job, {"n0": [at]}) for at, job in enumerate(jobs)]
    stored = await agent.report(
        agent.interval(t - 1_000, t - 990, usage(gangs[3], KWH_J)),  # before the period
        agent.interval(t - 10, t, *(usage(gang, KWH_J) for gang in gangs)),
    )
    assert stored.status_code == 200, stored.text
    async with plane.database.connection() as connection:
        for job, spec in zip(jobs, specs, strict=True):
            await connection.execute("UPDATE jobs SET state = $2 WHERE id = $1", job, spec["state"])
        for job, done in ((jobs[0], 5_000), (jobs[2], 5), (jobs[3], 4)):
            await connection.execute("INSERT INTO job_progress (job_id, done) VALUES ($1, $2)", job, float(done))
    start = datetime.fromtimestamp(t - 100, UTC).isoformat()

    units = {unit["unit"]: unit for unit in (await report(plane, start=start))["units"]}

    assert units.keys() == {"job", "1000 tokens"}
    embodied = 10 / LIFETIME_S * 200_000
    assert (units["job"]["amount"], units["job"]["operational_gco2"]) == (2, pytest.approx(2 * 540))
    assert units["1000 tokens"]["amount"] == 5
    assert units["1000 tokens"]["sci_gco2_per_unit"] == pytest.approx((540 + embodied) / 5)
    assert {unit["unit"] for unit in (await report(plane))["units"]} == {"job", "1000 tokens", "epoch"}


@pytest.mark.parametrize(
    ("group_by", "groups"),
    [
        ("zone", ["DE"]),
        ("model", ["A100"]),
        ("user", ["(unknown)", "ada"]),
        ("day", ["2026-01-01"]),
        ("week", ["2026-W01"]),
        ("month", ["2026-01"]),
    ],
)
async def test_a_report_is_grouped_by(plane: Plane, group_by: str, groups: list[str]) -> None:
    agent = await plane.agent(zone="DE")
    jobs = [await accept_job(plane.database, labels={"user": "ada"}), await accept_job(plane.database)]
    gangs = [await allocate(plane.database, job, {"n0": [at]}) for at, job in enumerate(jobs)]
    t = datetime(2026, 1, 1, 23, 59, tzinfo=UTC).timestamp()
    await agent.report(agent.interval(t, t + 10, *(usage(gang, KWH_J) for gang in gangs)))

    found = await report(plane, group_by=group_by)

    assert [line["group"] for line in found["lines"]] == groups
    assert sum(line["accounts"]["facility_energy_j"] for line in found["lines"]) == pytest.approx(3 * KWH_J)
    assert sum(line["jobs"] for line in found["lines"]) == 2


async def test_all_tables_of_a_report_are_of_one_moment_while_the_ledger_grows(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await plane.agent(zone="DE")
    gang = await allocate(plane.database, await accept_job(plane.database), {"n0": [0]})
    t, sent = now_s(), 0

    async def use(joules: float) -> None:
        nonlocal sent
        sent += 1
        await agent.report(agent.interval(t - 100 + sent, t - 99 + sent, usage(gang, joules), usage(None, joules / 3)))

    await use(KWH_J / 7)
    rows = ledger_sums.group_rows

    async def meanwhile(*arguments: Any, **options: Any) -> Any:
        await use(KWH_J / 11)
        return await rows(*arguments, **options)

    monkeypatch.setattr(ledger_sums, "group_rows", meanwhile)
    found = await report(plane, group_by="job", also=["day", "project", "user", "zone", "model", "node"])
    monkeypatch.undo()

    assert sent == 8
    assert [table["group_by"] for table in found["also"]] == ["day", "project", "user", "zone", "model", "node"]
    for name, whole in (("energy_j", KWH_J / 7), ("carbon_gco2", None)):
        sums = [sum(line["footprint"][name] for line in table["lines"]) for table in [found, *found["also"]]]
        assert sums == [sums[0]] * 7
        assert found["total"][name] == sums[0] + found["idle"][name]
        assert whole is None or sums[0] == whole
    assert (await report(plane, end=found["end_at"]))["total"]["energy_j"] > found["total"]["energy_j"]


async def test_a_period_ends_at_the_moment_of_its_report_at_the_latest(plane: Plane) -> None:
    before = utc_now()
    for params in ({}, {"end": "2999-01-01T00:00:00Z"}):
        found = await report(plane, **params)
        assert before <= datetime.fromisoformat(found["end_at"]) <= utc_now()
        answer = await plane.http.get("/v1/reports/requests", params=params, headers=service_headers(OPERATOR))
        assert before <= datetime.fromisoformat(answer.json()["end_at"]) <= utc_now()
    past = await report(plane, start="2026-01-01T00:00:00Z", end="2026-02-01T00:00:00Z")
    assert past["end_at"] == "2026-02-01T00:00:00Z"
    coming = await report(plane, start="2998-01-01T00:00:00Z")
    assert (coming["end_at"], coming["total"]["energy_j"]) == ("2998-01-01T00:00:00Z", 0)


async def test_what_cells_used_adds_up_with_what_was_used_here(plane: Plane) -> None:
    agent = await plane.agent(zone="DE")
    here, away = await accept_job(plane.database, name="here"), await accept_job(plane.database, name="away")
    gang = await allocate(plane.database, here, {"n0": [0]})
    t = now_s()
    await agent.report(agent.interval(t - 10, t, usage(gang, KWH_J, gpus=1)))
    async with plane.database.connection() as connection:
        await connection.execute(
            "INSERT INTO cell_energy (job_id, attempt, cell, hour, zone, signal, pue, energy_j, gpu_energy_j, "
            "estimated_energy_j, carbon_gco2, gpu_s) "
            "VALUES ($1, 1, 'north', date_trunc('hour', now()), 'SE', 'average_direct', 1.2, 500, 400, 0, 7, 9)",
            away,
        )
    for group in ("node", "job", "zone", "project"):
        found = await report(plane, group_by=group)
        parts = [*(each["footprint"] for each in found["lines"]), found["idle"]]
        for name in ("energy_j", "gpu_energy_j", "carbon_gco2", "gpu_s"):
            assert sum(each[name] for each in parts) == pytest.approx(found["total"][name])
    by_node = {each["group"]: each for each in (await report(plane, group_by="node"))["lines"]}
    assert (by_node["cell:north"]["footprint"]["carbon_gco2"], by_node["cell:north"]["jobs"]) == (7, 1)
    assert {each["group"]: each["footprint"]["energy_j"] for each in (await report(plane, group_by="job"))["lines"]}[
        away
    ] == 500
