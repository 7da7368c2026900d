"""A day's savings: from its replays, and from what the ledger has of it."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from services.contracts.background import WorkState
from services.contracts.codes import ProblemCode
from services.contracts.jobs import JobFootprint
from services.contracts.live import LiveKind, LiveNode, LiveSlice, LiveState
from services.contracts.nodes import NodeList
from services.contracts.reports import CarbonAccounts, FootprintLine, FootprintReport, ZoneIntensity
from services.contracts.savings import DaySavings
from services.core.domain.signal import Signal
from services.db.engine import create_engine
from services.db.tables import simulations
from services.kit.problems import ProblemError
from services.simulator.daily import ATTEMPTS, DailySavings, day_of, request_of, savings_figures, total_of
from services.simulator.repository import SimulationRepository

DAY = date(2026, 11, 3)


def a_ledger(carbon_gco2: float = 1_200.0, pue: float = 1.2, **means: float | None) -> FootprintReport:
    """Return a day's report, in which every zone used 10 kWh with PUE."""
    total = JobFootprint(energy_j=36e6, carbon_gco2=carbon_gco2)
    return FootprintReport(
        start_at=datetime(2026, 11, 3, tzinfo=UTC),
        end_at=datetime(2026, 11, 4, tzinfo=UTC),
        group_by="zone",
        lines=[
            FootprintLine(group=zone, footprint=JobFootprint(), jobs=1, accounts=CarbonAccounts(facility_energy_j=36e6))
            for zone in means
        ],
        idle=JobFootprint(),
        total=total,
        total_accounts=CarbonAccounts(facility_energy_j=36e6 * pue),
        metered_gpu_energy_j=0,
        zones=[
            ZoneIntensity(zone=zone, mean_gco2_per_kwh=mean, market_gco2_per_kwh=None) for zone, mean in means.items()
        ],
    )


def a_document(*grams: float, slack_gco2: float | None = 600.0, slack_in_force_s: float = 0.0) -> dict[str, Any]:
    """Return replays with these emissions: the baseline's, then with order, hours and sleep."""
    levers = [None, "order", "hours", "sleep"]
    return {
        "policy": "joint",
        "jobs": 4,
        "slack_in_force_s": slack_in_force_s,
        "steps": [
            {"lever": lever, "gco2": value, "energy_j": 10 * value, "mean_s": 60.0 * at, "spread_gco2": 10.0 * at}
            for at, (lever, value) in enumerate(zip(levers, grams, strict=False))
        ],
        "spread_gco2": 40.0,
        "slack": None if slack_gco2 is None else {"slack_s": 43_200.0, "gco2": slack_gco2, "mean_s": 7_380.0},
    }


def a_day(*grams: float, **options: Any) -> DaySavings:
    return day_of(DAY, "simulation_1", a_document(*grams, **options), a_ledger(), {})


def test_what_no_history_tells_is_not_known_rather_than_nothing() -> None:
    document = a_document(1_500.0, 1_400.0, 1_400.0, 1_400.0)
    for step, lever in zip(document["steps"], (None, "order", "width", "sleep"), strict=True):
        step["lever"] = lever
    day = day_of(DAY, "simulation_1", document, a_ledger(), {})
    assert [(each.lever, each.known) for each in day.levers] == [("order", True), ("width", False), ("sleep", True)]
    total = total_of([day, day])
    assert total is not None
    assert [each.known for each in total.levers] == [True, False, True]
    document["steps"][2]["gco2"] = 1_300.0
    assert all(each.known for each in day_of(DAY, "simulation_1", document, a_ledger(), {}).levers)


def test_a_days_savings_have_pue_and_add_up() -> None:
    day = a_day(1_500.0, 1_400.0, 1_100.0, 1_000.0)
    assert [(each.lever, round(each.saved_gco2, 9), each.later_s) for each in day.levers] == [
        ("order", 120.0, 60.0),
        ("hours", 360.0, 60.0),
        ("sleep", 120.0, 60.0),
    ]
    assert day.emitted_gco2 == day.ledger_gco2 == 1_200.0
    assert day.saved_gco2 == pytest.approx(sum(each.saved_gco2 for each in day.levers))
    assert day.baseline_gco2 == pytest.approx(1.2 * 1_500.0)
    assert (day.later_s, day.why) == (180.0, "")
    assert day.slack_saved_gco2 == pytest.approx(1.2 * 400.0)
    assert day.slack_later_s == 7_200.0
    assert day.high_gco2 - day.saved_gco2 == pytest.approx(1.645 * 1.2 * 40.0)


def test_a_replay_that_is_off_the_ledger_makes_the_interval_wider() -> None:
    off = day_of(DAY, "s", a_document(1_500.0, 1_000.0), a_ledger(carbon_gco2=2_400.0), {})
    assert off.high_gco2 - off.saved_gco2 == pytest.approx(((1.645 * 1.2 * 40.0) ** 2 + (0.5 * 600.0) ** 2) ** 0.5)


def test_a_day_on_which_more_was_emitted_says_so_and_why() -> None:
    day = a_day(1_000.0, 1_050.0, 1_050.0, 1_040.0)
    assert day.saved_gco2 < 0
    assert day.why == "More was emitted: no job had time to wait; order cost most."
    assert "no greener" in a_day(1_000.0, 1_000.0, 1_050.0, slack_in_force_s=3_600.0).why
    assert total_of([day, day]).why == day.why  # type: ignore[union-attr]


def test_placement_is_saved_against_zones_used_as_they_have_gpus() -> None:
    ledger = a_ledger(A=100.0, B=300.0)
    day = day_of(DAY, "s", a_document(1_500.0, 1_000.0), ledger, {"A": 1, "B": 3})
    (order, zone) = day.levers
    assert zone.lever == "zone"
    assert zone.saved_gco2 == pytest.approx(10 * (250 - 100) + 10 * (250 - 300))
    assert day.saved_gco2 == pytest.approx(order.saved_gco2 + zone.saved_gco2)
    unknown = day_of(DAY, "s", a_document(1_500.0, 1_000.0), a_ledger(A=100.0, B=None), {"A": 1, "B": 3})
    assert [each.lever for each in unknown.levers] == ["order"]


def test_days_add_up_and_days_without_jobs_count_for_nothing() -> None:
    empty = day_of(DAY, None, None, a_ledger(), {})
    assert (empty.jobs, empty.saved_gco2, empty.why) == (0, 0.0, "No job ran.")
    days = [a_day(1_500.0, 1_400.0, 1_100.0, 1_000.0), empty, a_day(1_000.0, 900.0, slack_gco2=None)]
    total = total_of(days)
    assert total is not None
    assert total.saved_gco2 == pytest.approx(sum(each.saved_gco2 for each in total.levers)) == pytest.approx(720.0)
    assert total.baseline_gco2 - total.emitted_gco2 == pytest.approx(total.saved_gco2)
    assert (total.jobs, total.later_s) == (8, 120.0)
    assert total_of([]) is None
    none = total_of([empty])
    assert none is not None
    assert "on the days that were replayed" in none.why, "jobs of today may have run"


def a_state() -> LiveState:
    return LiveState(
        at_s=0,
        next_active_s=0,
        round_interval_s=300,
        policy="joint",
        parameters={"slack_s": 60.0},
        zone="DE",
        signal=Signal.AVERAGE_LIFECYCLE,
        stale=False,
        times_s=[0],
        intensity_gco2_per_kwh=[1],
        end_s=1,
        kinds=[LiveKind(gpu_model="NVIDIA A100-SXM4-40GB", idle_w=50), LiveKind(gpu_model="what is this", idle_w=5)],
        nodes=[LiveNode(kind=0, gpus=8, takes_work=True)] * 2 + [LiveNode(kind=1, gpus=2, takes_work=True)],
        slices=[LiveSlice(node=2, gpu=1, sevenths=3, start=0, memory_gib=20)],
        profiles=[],
        jobs=[],
        notes=[],
    )


def test_the_replay_has_the_cluster_and_the_policy_of_now() -> None:
    request = request_of(a_state(), DAY)
    assert request.cluster == "1x4:A100-SXM4-40GB,2x8:A100-SXM4-40GB"
    assert (request.policies, request.params, request.levers) == (["joint"], {"slack_s": 60.0}, True)
    assert (request.start, request.days, request.carbon, request.signal) == ("2026-11-03", 1, "DE", "lifecycle")
    assert request.round_minutes == 5.0


def test_metrics_show_the_newest_days_savings() -> None:
    figures = {each.name: each.samples for each in savings_figures(a_day(1_500.0, 1_400.0, 1_100.0, 1_000.0))}
    saved = {sample.labels["lever"]: sample.value for sample in figures["wattshift_saved_carbon_grams"]}
    assert saved == pytest.approx({"order": 120.0, "hours": 360.0, "sleep": 120.0})
    assert figures["wattshift_savings_day_seconds"][0].value == datetime(2026, 11, 3, tzinfo=UTC).timestamp()


class Site:
    """Everything around: keeps what is submitted and stored, and answers as the queue would."""

    def __init__(self, state: WorkState = WorkState.QUEUED, refuses: ProblemError | None = None) -> None:
        self.state, self.refuses = state, refuses
        self.submitted: list[Any] = []
        self.stored: dict[date, dict[str, Any]] = {}

    async def days_of_savings(self, first: date, last: date) -> set[date]:
        return {day for day in self.stored if first <= day <= last}

    async def page(self, tenant_id: str, states: Any, before: Any, limit: int) -> list[Any]:
        return [SimpleNamespace(id=str(at)) for at in reversed(range(len(self.submitted)))][:limit]

    async def find(self, work_id: str, tenant_id: str) -> Any:
        request = self.submitted[int(work_id)]
        result = a_document(1_500.0, 1_000.0) if self.state is WorkState.SUCCEEDED else None
        failure = SimpleNamespace(detail="it took too long")
        problem = {"start": request.start}
        return SimpleNamespace(id=f"run {work_id}", problem=problem, state=self.state, result=result, failure=failure)

    async def submit(self, request: Any, caller: Any, key: None) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.submitted.append(request)

    async def live(self, caller: Any) -> Any:
        return SimpleNamespace(data=a_state().model_dump_json().encode())

    async def call(self, method: str, path: str, answer: Any, **_: Any) -> Any:
        return a_ledger() if "footprint" in path else NodeList(items=[])

    async def add_savings(self, day: date, simulation_id: str | None, figures: dict[str, Any]) -> None:
        assert day not in self.stored
        self.stored[day] = figures

    @property
    def daily(self) -> DailySavings:
        return DailySavings(self, self, self, self)  # type: ignore[arg-type]


async def test_a_day_is_replayed_once_and_then_stored_with_its_run() -> None:
    site = Site()
    for _ in range(3):
        await site.daily.look()
    assert len(site.submitted) == 1  # it is under way: it is not begun again
    site.state = WorkState.SUCCEEDED
    await site.daily.look()
    ((day, figures),) = site.stored.items()
    assert (str(day), figures["simulation_id"]) == (site.submitted[0].start, "run 0")
    assert figures["saved_gco2"] == pytest.approx(600.0)
    await site.daily.look()
    assert site.submitted[-1].start < site.submitted[0].start  # the day before it


async def test_a_replay_that_fails_is_tried_again_and_given_up_with_its_reason() -> None:
    site = Site(WorkState.FAILED)
    for _ in range(ATTEMPTS + 1):
        await site.daily.look()
    assert len(site.submitted) == ATTEMPTS
    assert [figures["why"] for figures in site.stored.values()] == ["it took too long"]


async def test_a_day_without_jobs_is_stored_as_one_and_a_source_that_is_away_is_asked_again() -> None:
    nothing = Site(refuses=ProblemError(422, ProblemCode.INVALID_REQUEST, "no job was submitted here"))
    await nothing.daily.look()
    assert [figures["why"] for figures in nothing.stored.values()] == ["no job was submitted here"]
    away = Site(refuses=ProblemError(503, ProblemCode.UNAVAILABLE, "away"))
    with pytest.raises(ProblemError):
        await away.daily.look()
    assert away.stored == {}


async def test_savings_are_kept_with_their_runs(database_url: str) -> None:
    engine = create_engine(database_url, application_name="test")
    repository = SimulationRepository(engine)
    days = [DAY, DAY + timedelta(days=1), DAY + timedelta(days=2)]
    for day in days:
        await repository.add_savings(day, None, {"day": str(day)})
    await repository.add_savings(DAY, None, {"day": "again"})
    assert await repository.days_of_savings(DAY, days[1]) == {DAY, days[1]}
    assert await repository.savings(days[1], None) == [{"day": str(day)} for day in days[1:]]
    assert await repository.savings(None, days[1]) == [{"day": str(DAY)}]
    assert await repository.newest_savings() == {"day": str(days[2])}
    async with engine.begin() as connection:
        for number, tenant in enumerate(("_savings", "t")):
            await connection.execute(
                simulations.insert().values(
                    id=f"simulation_{number}",
                    tenant_id=tenant,
                    state="succeeded",
                    key_id="k",
                    problem={"policy": []},
                    problem_sha256=bytes([number]),
                    inputs=[],
                    total=1,
                    ended_at=datetime(2020, 1, 1, tzinfo=UTC),
                )
            )
    assert await repository.forget_ended(30.0) == 1
    assert [work.tenant_id for work in await repository.page(None, (), None, 9)] == ["_savings"]
    await engine.dispose()
