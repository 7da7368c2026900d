"""The carbon service's ``/metrics``: intensities, their age, and the errors of forecasts.

Intensities are in grams of CO2 equivalent per kilowatt-hour, as is usual in the field, and not per joule.
"""

from collections.abc import Iterable
from contextlib import suppress

from prometheus_client.metrics_core import Metric

from carbon_service.service import CarbonService
from carbon_service.zones import Source, Zones
from services.contracts.carbon import CurrentIntensity
from services.kit.metrics import Labels, Metrics, gauge
from services.kit.problems import ProblemError

BY_SOURCE = ("zone", "signal", "provider")


def show_figures(metrics: Metrics, zones: Zones, service: CarbonService) -> None:

    async def read_intensities() -> Iterable[Metric]:
        found: list[tuple[Labels, CurrentIntensity]] = []
        for source in zones.sources:
            with suppress(ProblemError):  # nothing was fetched yet
                found.append((_labels(source), await service.current(source.key.zone, source.key.signal)))
        return [
            gauge(
                "wattshift_carbon_intensity_grams_per_kwh",
                "Carbon intensity in force, grams of CO2 equivalent per kilowatt-hour.",
                BY_SOURCE,
                [(labels, now.point.gco2_per_kwh) for labels, now in found],
            ),
            gauge(
                "wattshift_carbon_intensity_age_seconds",
                "Time since the beginning of the newest interval that was measured.",
                BY_SOURCE,
                [(labels, now.age_s) for labels, now in found],
            ),
            gauge(
                "wattshift_carbon_intensity_stale",
                "1 while the newest measured value is older than it may be; the last or a forecast one is used then.",
                BY_SOURCE,
                [(labels, float(now.is_stale)) for labels, now in found],
            ),
        ]

    async def read_sources() -> Iterable[Metric]:
        sources, now_s = zones.sources, service.now_s()
        return [
            gauge(
                "wattshift_carbon_source_failing",
                "1 while the last attempt to fetch from a provider failed.",
                BY_SOURCE,
                [(_labels(source), float(source.last_error is not None)) for source in sources],
            ),
            gauge(
                "wattshift_carbon_source_age_seconds",
                "Time since a provider last answered; none before its first answer.",
                BY_SOURCE,
                [(_labels(each), None if (at_s := each.last_success_s) is None else now_s - at_s) for each in sources],
            ),
            gauge(
                "wattshift_carbon_source_skipped_values",
                "Values of a provider that were refused since the process started.",
                BY_SOURCE,
                [(_labels(source), source.skipped_values) for source in sources],
            ),
        ]

    async def read_errors() -> Iterable[Metric]:
        errors: list[tuple[Labels, float]] = []
        coverage: list[tuple[Labels, float | None]] = []
        for source in zones.sources:
            zone, signal = source.key.zone, source.key.signal
            try:
                tested = await service.backtest(zone, signal)
            except ProblemError:  # nothing was learned yet
                continue
            for each in tested.errors:
                for day, error in enumerate(each.mean_absolute_error_gco2_per_kwh, start=1):
                    errors.append(((zone, signal.value, each.method, str(day)), error))
            coverage.append(((zone, signal.value), tested.coverage))
        return [
            gauge(
                "wattshift_carbon_forecast_absolute_error_grams_per_kwh",
                "Mean absolute error of forecasts over the last part of a zone's history, by how many days ahead.",
                ["zone", "signal", "method", "day"],
                errors,
            ),
            gauge(
                "wattshift_carbon_forecast_band_coverage_ratio",
                "Share of what was measured that lay within the forecast's band from p10 to p90; 0.8 is right.",
                ["zone", "signal"],
                coverage,
            ),
        ]

    metrics.add("intensities", read_intensities)
    metrics.add("sources", read_sources)
    metrics.add("forecasts", read_errors)


def _labels(source: Source) -> Labels:
    return source.key.zone, source.key.signal.value, source.key.provider
