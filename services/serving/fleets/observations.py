"""What routers saw of applications' requests: stored, kept for some days, added up, and compared with BASE."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import numpy as np

from services.contracts.apps import (
    LATENCY_BOUNDS_MS,
    AppEvaluations,
    AppMix,
    AppObservation,
    AppObservations,
    AppReport,
    FleetEvaluation,
)
from services.core.accounting.carbon import carbon_gco2 as emissions_gco2
from services.core.accounting.carbon import relative_change
from services.core.policies.clover.objective import delta_accuracy_pct, delta_carbon_pct
from services.kit.problems import invalid
from services.serving.fleets.problem import idle_w_of
from services.serving.repository import ServingRepository
from services.serving.repository.apps import AppRecord, StepSeen
from services.serving.repository.fleets import FleetRecord
from services.serving.traffic import EARLY_S


def percentile_ms(latency: Mapping[int, int], share: float) -> float | None:
    """Return a percentile of latency, at most 5 % off; None without answers.

    Args:
        latency: Numbers of answers by the index of their bucket of ``LATENCY_BOUNDS_MS``.
        share: The share of answers that are no slower, 0 to 1.
    """
    total = sum(latency.values())
    if not total:
        return None
    seen = 0
    for bucket in sorted(latency):
        seen += latency[bucket]
        if seen >= share * total:
            if bucket >= len(LATENCY_BOUNDS_MS):
                return LATENCY_BOUNDS_MS[-1]
            lower = LATENCY_BOUNDS_MS[bucket - 1] if bucket else 0.0
            return (lower + LATENCY_BOUNDS_MS[bucket]) / 2
    return None


def bucket_of(latency_ms: float) -> int:
    return bisect_left(LATENCY_BOUNDS_MS, latency_ms)


async def observe(repository: ServingRepository, report: AppObservations) -> None:
    """Write what a router saw; applications that are gone are left out, and a window that is sent again is replaced.

    Raises:
        ProblemError: 422 for a window in the future, which would count as the present until it has passed.
    """
    ids = {server.server for each in report.apps for server in each.servers}
    async with repository.writing() as queries:
        if report.start_at > await queries.now() + timedelta(seconds=EARLY_S):
            raise invalid("/start_at", "Not yet.")
        known = {app.name: app for app in await queries.apps.routed()}
        modes = await queries.apps.modes_of(ids)
        found: list[tuple[AppObservation, dict[str, int], float]] = []
        for each in sorted(report.apps, key=lambda each: each.app):
            if (app := known.get(each.app)) is None:
                continue
            accuracy = {variant.name: variant.accuracy_pct for variant in app.spec.variants}
            variants, accuracy_sum = Counter[str](), 0.0
            for server in each.servers:
                owner, variant = modes.get(server.server, ("", ""))
                if owner == app.name and variant in accuracy and server.answered:
                    variants[variant] += server.answered
                    accuracy_sum += server.answered * accuracy[variant]
            found.append((each, variants, accuracy_sum))
        if found:
            await queries.apps.observe(report, found)


def report_of(
    app: AppRecord,
    fleet: FleetRecord,
    start_at: datetime,
    end_at: datetime,
    step_s: float,
    steps: Mapping[int, StepSeen],
    evaluations: Sequence[FleetEvaluation],
) -> AppReport:
    """Return the report of an application; ``evaluations`` are those of its fleet in the period.

    BASE is what the same requests would have drawn if the most accurate variant had answered them on whole GPUs
    (Clover, section 4.1), held for as many GPU seconds as the application held them: their idle power, a request's
    service time times the power above it, and the hosts' energy, at the step's intensity and PUE by the ledger.
    """
    best = app.spec.most_accurate
    whole = next(profile for profile in best.profiles if profile.slice == "7g")
    idle_w = idle_w_of(fleet.spec) or 0.0
    mix: list[AppMix] = []
    base_gco2, own_gco2, compared = 0.0, 0.0, 0
    for at in sorted(steps):
        step = steps[at]
        mix.append(
            AppMix.of(
                step,
                start_at=start_at + timedelta(seconds=at * step_s),
                requests=step.answered,
                by_variant=step.variants,
                accuracy_pct=step.accuracy_sum / step.answered if step.answered else None,
                p95_ms=percentile_ms(step.latency, 0.95),
            )
        )
        if step.gco2_per_kwh is not None:
            busy_s = whole.service_ms / 1_000 * step.answered
            base_j = idle_w * max(step.gpu_s, busy_s) + whole.busy_w * busy_s + step.host_j
            base_gco2 += emissions_gco2(base_j, step.gco2_per_kwh, step.pue)
            own_gco2 += step.carbon_gco2
            compared += step.answered
    answered = sum(step.answered for step in steps.values())
    carbon_gco2 = sum(step.carbon_gco2 for step in steps.values())
    accuracy = sum(step.accuracy_sum for step in steps.values()) / answered if answered else None
    total = sum((Counter(step.latency) for step in steps.values()), Counter[int]())
    in_time = sum(count for bucket, count in total.items() if bucket <= bucket_of(app.spec.sla_p95_ms))
    per_1000 = 1_000 * carbon_gco2 / answered if answered else None
    base_per_1000 = 1_000 * base_gco2 / compared if compared else None
    return AppReport(
        app=app.name,
        start_at=start_at,
        end_at=end_at,
        requests=answered,
        failed=sum(step.failed for step in steps.values()),
        accuracy_pct=accuracy,
        accuracy_loss_pct=None if accuracy is None else -delta_accuracy_pct(accuracy, best.accuracy_pct),
        p95_ms=percentile_ms(total, 0.95),
        sla_p95_ms=app.spec.sla_p95_ms,
        sla_ok_share=in_time / total.total() if total else None,
        energy_j=sum(step.energy_j for step in steps.values()),
        carbon_gco2=carbon_gco2,
        gco2_per_1000=per_1000,
        base_gco2_per_1000=base_per_1000,
        carbon_saving_pct=delta_carbon_pct(own_gco2, base_gco2) if compared and base_gco2 > 0 else None,
        evaluations=evaluations_of(app.name, evaluations),
        mix=mix,
    )


def evaluations_of(name: str, evaluations: Sequence[FleetEvaluation]) -> AppEvaluations | None:
    """Return a summary of an application's evaluations; None without any."""
    found = [(each, app) for each in evaluations for app in each.applications if app.name == name]
    if not found:
        return None
    pairs = [(app.predicted, app.measured) for _, app in found if app.predicted and app.measured]

    def error_pct(figure: str) -> float | None:
        """Return the mean error of the predictions, per cent of the measured value."""
        errors = [relative_change(getattr(model, figure), getattr(own, figure)) for model, own in pairs]
        known = [error for error in errors if error is not None]
        return 100 * float(np.mean(known)) if known else None

    def seconds(spans: Sequence[tuple[datetime | None, datetime | None]]) -> float:
        return sum((end - start).total_seconds() for start, end in spans if start is not None and end is not None)

    return AppEvaluations(
        evaluations=sum(app.measured is not None for _, app in found),
        unmeasured=sum(app.measured is None for _, app in found),
        bringing_up_s=seconds([(each.begun_at, each.measured_from) for each, app in found if app.is_tried]),
        measuring_s=seconds([(each.measured_from, each.measured_to) for each, _ in found]),
        answered=sum(app.answered for _, app in found),
        late=sum(app.late for _, app in found),
        failed=sum(app.failed for _, app in found),
        p95_error_pct=error_pct("p95_ms"),
        energy_error_pct=error_pct("energy_j_per_request"),
        accuracy_error_pct=error_pct("accuracy_pct"),
    )
