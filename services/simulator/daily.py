"""What the levers saved each day: a run from the queue, whose figures are stored alongside the ledger's."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any

from prometheus_client.metrics_core import Metric

from services.contracts.background import WorkState
from services.contracts.identity import Identity, Role
from services.contracts.live import LiveState
from services.contracts.nodes import NodeList
from services.contracts.reports import FootprintReport
from services.contracts.savings import DaySavings, LeverSaving, SavingsReport, SavingsTotals
from services.contracts.simulations import HISTORY, TrainingRequest
from services.core.domain.gpus import likeliest_gpu_model
from services.core.domain.signal import Signal
from services.core.domain.units import J_PER_KWH
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.metrics import Read, gauge, single
from services.kit.problems import ProblemError
from services.simulator.live import ANY_BOARD
from services.simulator.repository import SAVINGS_TENANT, SimulationRepository
from services.simulator.service import SimulatorService
from services.simulator.sources import Sources

log = Log(__name__)


def savings_of(repository: SimulationRepository) -> Read:
    """Return a function that reads the newest day's savings."""

    async def read() -> Iterable[Metric]:
        figures = await repository.newest_savings()
        return [] if figures is None else savings_figures(DaySavings.as_stored(figures))

    return read


def savings_figures(day: DaySavings) -> list[Metric]:
    return [
        gauge(
            "wattshift_saved_carbon_grams",
            "What each lever saved on the newest day that was replayed, grams of CO2 equivalent, with PUE; below zero: "
            "it cost that much.",
            ["lever"],
            [((each.lever,), each.saved_gco2) for each in day.levers if each.known],
        ),
        gauge(
            "wattshift_savings_bound_grams",
            "Between what the savings of that day, over all levers, lie at 90 %.",
            ["bound"],
            [(("low",), day.low_gco2), (("high",), day.high_gco2)],
        ),
        single("wattshift_savings_later_seconds", "How much later jobs ended for it, on average.", day.later_s),
        single(
            "wattshift_savings_day_seconds",
            "When that day began, seconds since 1970.",
            datetime(day.day.year, day.day.month, day.day.day, tzinfo=UTC).timestamp(),
        ),
    ]


OWNER = Identity(tenant_id=SAVINGS_TENANT, role=Role.OPERATOR, key_id="simulator")
LOOK_S = 600.0
SETTLED = timedelta(hours=6)
"""After its end a day's jobs have mostly ended, and nodes have delivered their energy."""
DAYS_BACK = 7
ATTEMPTS = 3
Z_90 = 1.645  #: Standard deviations to either side between which a normal variable lies at 90 %
UNANSWERED = ("width", "batch", "power_limit")
"""Levers to which jobs of a history answer not at all: it has each at the one width and power that it ran at."""
ZONE = "zone"
NOTHING = {"policy": "", "jobs": 0, "steps": [], "spread_gco2": 0.0, "slack": None, "slack_in_force_s": 0.0}
"""The document of a day of which nothing was replayed."""
AMOUNTS = ("saved_gco2", "low_gco2", "high_gco2")
WORDS = {Signal.AVERAGE_DIRECT: "direct", Signal.AVERAGE_LIFECYCLE: "lifecycle", Signal.MARGINAL: "marginal"}


class DailySavings:
    """Replays each day once, stores the savings and reports them."""

    def __init__(
        self, repository: SimulationRepository, service: SimulatorService, sources: Sources, telemetry: ServiceClient
    ) -> None:
        self._repository, self._service = repository, service
        self._sources, self._telemetry = sources, telemetry

    async def look(self) -> None:
        """Take the next step for the newest day without stored savings: start its replay, or store the outcome."""
        newest = (datetime.now(UTC) - SETTLED).date() - timedelta(days=1)
        stored = await self._repository.days_of_savings(newest - timedelta(days=DAYS_BACK), newest)
        for back in range(DAYS_BACK):
            if (day := newest - timedelta(days=back)) not in stored:
                await self._replay(day)
                return

    async def report(self, start_at: datetime | None, end_at: datetime | None) -> SavingsReport:
        """Return the stored savings of the days that lie wholly within a period."""
        first = start_at and (start_at.astimezone(UTC) + timedelta(days=1, microseconds=-1)).date()
        found = await self._repository.savings(first, end_at and end_at.astimezone(UTC).date())
        days = [DaySavings.as_stored(figures) for figures in found]
        return SavingsReport(days=days, total=total_of(days))

    async def _replay(self, day: date) -> None:
        newest = await self._repository.page(SAVINGS_TENANT, (), None, ATTEMPTS)
        runs = [await self._repository.find(each.id, SAVINGS_TENANT) for each in newest]
        mine = [run for run in runs if run is not None and run.problem["start"] == str(day)]
        if any(run.state in (WorkState.QUEUED, WorkState.RUNNING) for run in mine):
            return
        done = next((run for run in mine if run.state is WorkState.SUCCEEDED), None)
        if done is not None and isinstance(done.result, dict):
            await self._store(day, done.id, done.result)
            return
        if len(mine) == ATTEMPTS:
            failure = mine[0].failure
            await self._store(day, None, None, "The replay was cancelled." if failure is None else failure.detail)
            return
        state = LiveState.model_validate_json((await self._sources.live(OWNER)).data)
        if not state.nodes:
            return  # until some node is up: nobody knows what cluster the jobs had
        try:
            await self._service.submit(request_of(state, day), OWNER, None)
        except ProblemError as error:
            if error.status != 422:
                raise
            await self._store(day, None, None, error.detail)

    async def _store(
        self, day: date, simulation_id: str | None, document: Mapping[str, Any] | None, problem: str = ""
    ) -> None:
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        period = {"start": start.isoformat(), "end": (start + timedelta(days=1)).isoformat(), "group_by": ZONE}
        path = "/v1/reports/footprint"
        ledger = await self._telemetry.call("GET", path, FootprintReport, params=period, identity=OWNER)
        nodes = await self._telemetry.call("GET", "/v1/nodes", NodeList, params={"clocks": "false"}, identity=OWNER)
        gpus = Counter(node.zone for node in nodes.items for _ in range(node.gpus))
        found = day_of(day, simulation_id, document, ledger, gpus)
        found = found.model_copy(update={"why": problem or found.why})
        await self._repository.add_savings(day, simulation_id, found.model_dump(mode="json"))
        log.info("savings.stored", day=str(day), saved_gco2=found.saved_gco2)


def request_of(state: LiveState, day: date) -> TrainingRequest:
    """Return a replay of the jobs submitted on a day, on the present nodes and under the present policy."""
    cut = {each.node: 0 for each in state.slices}
    for each in state.slices:
        cut[each.node] = max(cut[each.node], each.gpu + 1)
    groups: Counter[str] = Counter()
    for at, node in enumerate(state.nodes):
        model = likeliest_gpu_model(state.kinds[node.kind].gpu_model)
        if gpus := node.gpus + cut.get(at, 0):
            groups[f"{gpus}:{ANY_BOARD if model is None else model.name}"] += 1
    return TrainingRequest(
        policy=state.policy,
        params=state.parameters,
        cluster=",".join(f"{count}x{group}" for group, count in sorted(groups.items())),
        jobs=HISTORY,
        start=str(day),
        days=1,
        carbon=state.zone,
        signal=WORDS[state.signal],
        forecast="persistence",
        round_minutes=state.round_interval_s / 60.0,
        levers=True,
    )


def day_of(
    day: date,
    simulation_id: str | None,
    document: Mapping[str, Any] | None,
    ledger: FootprintReport,
    gpus: Mapping[str, int],
) -> DaySavings:
    """Return the figures of a day from its replays and the ledger.

    Args:
        document: From ``services.simulator.savings``; None: nothing was replayed.
        ledger: The day's footprint, by zone.
        gpus: GPUs of all nodes, by zone.
    """
    document = document or NOTHING
    energy_j = ledger.total.energy_j
    pue = ledger.total_accounts.facility_energy_j / energy_j if energy_j > 0 else 1.0
    steps: Sequence[Mapping[str, Any]] = document["steps"]
    emitted = pue * steps[-1]["gco2"] if steps else 0.0
    measured = ledger.total.carbon_gco2
    off = min(abs(emitted - measured) / measured, 1.0) if measured > 0 and steps else 0.0

    def between(saved: float, spread: float) -> tuple[float, float]:
        half = math.hypot(Z_90 * pue * spread, off * saved)
        return saved - half, saved + half

    levers: list[LeverSaving] = []
    for before, step in pairwise(steps):
        saved = pue * (before["gco2"] - step["gco2"])
        low, high = between(saved, step["spread_gco2"])
        levers.append(
            LeverSaving(
                lever=step["lever"],
                known=step["lever"] not in UNANSWERED or step["gco2"] != before["gco2"],
                saved_gco2=saved,
                low_gco2=low,
                high_gco2=high,
                saved_energy_j=before["energy_j"] - step["energy_j"],
                later_s=_less(step["mean_s"], before["mean_s"]),
            )
        )
    if steps and (placed := placement_saving(ledger, gpus)) is not None:
        low, high = between(placed, 0.0)
        levers.append(
            LeverSaving(lever=ZONE, saved_gco2=placed, low_gco2=low, high_gco2=high, saved_energy_j=0.0, later_s=0.0)
        )
    saved = sum(each.saved_gco2 for each in levers)
    low, high = between(saved, document["spread_gco2"])
    slack = document["slack"]
    return DaySavings(
        day=day,
        made_at=datetime.now(UTC),
        simulation_id=simulation_id,
        policy=document["policy"],
        ledger_gco2=measured,
        jobs=document["jobs"],
        baseline_gco2=emitted + saved,
        emitted_gco2=emitted,
        saved_gco2=saved,
        low_gco2=low,
        high_gco2=high,
        later_s=_less(steps[-1]["mean_s"], steps[0]["mean_s"]) if steps else None,
        levers=levers,
        why=why(saved, levers, document["slack_in_force_s"]) if steps else "No job ran.",
        slack_s=slack["slack_s"] if slack else None,
        slack_saved_gco2=pue * (steps[-1]["gco2"] - slack["gco2"]) if slack else None,
        slack_later_s=_less(slack["mean_s"], steps[-1]["mean_s"]) if slack else None,
    )


def placement_saving(ledger: FootprintReport, gpus: Mapping[str, int]) -> float | None:
    """Return what jobs saved compared with spreading their energy over all zones in proportion to their GPUs, gCO2.

    None: there is only one zone, or the mean intensity of one is unknown.
    """
    means = {zone.zone: zone.mean_gco2_per_kwh for zone in ledger.zones}
    kwh = {line.group: line.accounts.facility_energy_j / J_PER_KWH for line in ledger.lines}
    known = {zone: mean for zone, mean in means.items() if mean is not None}
    weight = sum(gpus.get(zone, 0) for zone in known)
    if len(known) < 2 or len(known) < len(means) or not weight:
        return None
    spread = sum(gpus.get(zone, 0) * mean for zone, mean in known.items()) / weight
    return sum(used * (spread - known[zone]) for zone, used in kwh.items())


def why(saved: float, levers: Sequence[LeverSaving], slack_s: float) -> str:
    """Return why nothing was saved, in a sentence; empty if something was."""
    if saved > 0:
        return ""
    reason = "the hours that jobs waited for were no greener" if slack_s else "no job had time to wait"
    costs = [each for each in levers if each.saved_gco2 < 0]
    worst = min(costs, key=lambda each: each.saved_gco2, default=None)
    most = f"; {worst.lever.replace('_', ' ')} cost most" if worst else ""
    return f"{'More was emitted' if saved < 0 else 'Nothing was saved'}: {reason}{most}."


def total_of(days: Sequence[DaySavings]) -> SavingsTotals | None:
    """Return the totals over days; times are means over all jobs.

    The bounds of intervals are added up, because the errors of different days may be correlated.
    """
    if not days:
        return None

    def mean(of: Sequence[tuple[int, float | None]]) -> float | None:
        known = [(count, value) for count, value in of if value is not None and count]
        weight = sum(count for count, _ in known)
        return sum(count * value for count, value in known) / weight if weight else None

    def sums(of: Sequence[DaySavings | LeverSaving], *names: str) -> dict[str, Any]:
        return {name: sum(getattr(each, name) for each in of) for name in names}

    levers: list[LeverSaving] = []
    for name in dict.fromkeys(lever.lever for day in days for lever in day.levers):
        mine = [(day.jobs, lever) for day in days for lever in day.levers if lever.lever == name]
        of = [lever for _, lever in mine]
        later_s, known = mean([(count, each.later_s) for count, each in mine]), any(each.known for each in of)
        amounts = sums(of, *AMOUNTS, "saved_energy_j")
        levers.append(LeverSaving(lever=name, known=known, later_s=later_s, **amounts))
    slacks = [day for day in days if day.slack_saved_gco2 is not None]
    whys = [day.why for day in days if day.jobs and day.why] or ["No job ran on the days that were replayed so far."]
    amounts = sums(days, *AMOUNTS, "jobs", "baseline_gco2", "emitted_gco2")
    return SavingsTotals(
        **amounts,
        later_s=mean([(day.jobs, day.later_s) for day in days]),
        levers=levers,
        why="" if amounts["saved_gco2"] > 0 else Counter(whys).most_common(1)[0][0],
        slack_s=slacks[-1].slack_s if slacks else None,
        slack_saved_gco2=sum(day.slack_saved_gco2 or 0.0 for day in slacks) if slacks else None,
        slack_later_s=mean([(day.jobs, day.slack_later_s) for day in slacks]),
    )


def _less(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
