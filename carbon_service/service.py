"""The carbon service's answers, made only from the store. Times are UTC seconds until they are sent."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from carbon_service.curve import Kind, Step
from carbon_service.forecast import is_stale, merged
from carbon_service.providers.protocol import Feed, ForecastIssue, Point
from carbon_service.repository import LearnedForecast, Repository, at
from carbon_service.zones import Source, Zones
from services.contracts.carbon import (
    Clock,
    CurrentIntensity,
    ForecastBacktest,
    ForecastPoint,
    HourlyPrices,
    IntensityForecast,
    IntensityHistory,
    IntensityOutlook,
    IntensityPoint,
    MethodErrors,
    OutlookPoint,
    Zone,
    ZoneList,
    ZoneSource,
)
from services.contracts.codes import ProblemCode
from services.core.domain.carbon import Signal
from services.core.domain.prices import PriceCurve
from services.kit.problems import ProblemError, invalid

MOST_STEPS = 20_000  #: The longest curve of one answer; a longer one is refused
PERSISTENCE_DAYS = 2  #: Days of the grid behind a persistence forecast: the last one, and the one before for its gaps


@dataclass(frozen=True)
class Knowledge:
    """The data of a source at an instant: the measured points of the last two days of its grid, and a forecast."""

    now_s: float
    source: Source
    feed: Feed
    points: tuple[Point, ...]
    issue: ForecastIssue | None
    learned: LearnedForecast | None = None

    @property
    def stale(self) -> bool:
        """Whether the newest measured value is past its maximum age."""
        return is_stale(self.points, self.feed, self.now_s)

    def steps(self, start_s: float, end_s: float) -> list[Step]:
        """Return the curve over ``[start_s, end_s)``; persistence is better than what was learned a day ago."""
        is_fresh = self.learned is not None and self.now_s - self.learned.generated_s <= self.feed.day_s
        learned = self.learned.points if self.learned is not None and is_fresh else ()
        return merged(self.points, self.issue, self.feed, self.now_s, start_s, end_s, learned)


class CarbonService:
    """Answers about the configured zones.

    Every method raises ``ProblemError``: 404 ``unknown_zone``, 404 ``no_data`` for a signal the zone lacks or before
    anything was fetched, 422 ``invalid_request`` for a range that is too large.
    """

    def __init__(
        self, zones: Zones, repository: Repository, now_s: Callable[[], float], aliases: Mapping[str, str], priced: bool
    ) -> None:
        self._zones, self._repository = zones, repository
        self.now_s = now_s  #: The real clock, UTC seconds
        self.aliases = aliases  #: Other names of zones
        self._priced = priced  # whether prices of electricity are kept

    def zones(self) -> ZoneList:
        """Return the configured zones, and whether the values of their signals are up to date."""
        return ZoneList(items=[_zone(zone, list(by.values())) for zone, by in self._zones.by_zone.items()])

    def zone_of(self, location: str) -> str:
        return self.aliases.get(location, location)

    def feed(self, zone: str) -> Feed:
        """Return the feed of the zone's provider for the default signal."""
        return self._zones.find(zone, None).feed

    async def current(self, zone: str, signal: Signal | None) -> CurrentIntensity:
        """Return the intensity in force now: measured, else the last value while it holds, else a forecast."""
        source = self._zones.find(zone, signal)
        now_s = self.now_s()
        known = await self.known(source, now_s)
        steps = known.steps(now_s - known.feed.step_s, now_s + known.feed.step_s)
        step = next((step for step in steps if step.start_s <= now_s < step.end_s), None)
        if step is None:
            raise _nothing_yet(source)
        freshest = known.points[-1] if known.points else None
        if freshest and step.kind is Kind.MEASURED:
            step = Step(freshest.start_s, freshest.end_s, step.gco2_per_kwh, step.kind, step.is_estimated)
        fetched_s = freshest.fetched_s if freshest else None
        return CurrentIntensity(
            **vars(source.key),
            point=_point(step),
            fetched_at=at(now_s if fetched_s is None else fetched_s),
            age_s=max(0.0, now_s - (freshest.start_s if freshest else step.start_s)),
            is_stale=known.stale,
            time_scale=known.feed.time_scale,
            grid_now=at(source.provider.grid_s(zone, now_s)),
        )

    async def history(
        self,
        zone: str,
        signal: Signal | None,
        start_s: float | None,
        end_s: float | None,
        limit: int,
        after_s: float | None = None,
    ) -> tuple[IntensityHistory, float | None]:
        """Return a page of measured intervals that overlap ``[start_s, end_s)`` from ``after_s`` on, and its end."""
        source = self._zones.find(zone, signal)
        now_s = self.now_s()
        end_s = now_s + 1e-6 if end_s is None else end_s  # what begins right now is history, too
        start_s = end_s - source.feed.day_s if start_s is None else start_s
        if after_s is not None:
            start_s = max(start_s, after_s)
        # One more shows whether there is a next page; the interval that ended the last page is read again, too.
        found = await self._repository.points(source.key, start_s, end_s, limit=limit + 2, begins_by_s=now_s)
        points = [point for point in found if after_s is None or point.start_s > after_s]
        page, more = points[:limit], len(points) > limit
        return IntensityHistory(**vars(source.key), points=[*map(_point, page)]), page[-1].start_s if more else None

    async def forecast(
        self, zone: str, signal: Signal | None, horizon_s: float | None, clock: Clock
    ) -> IntensityForecast:
        """Return intensities from now on: the measured value of the current interval, the provider's forecast as far as
        it reaches, the learned one, and persistence.
        """
        source = self._zones.find(zone, signal)
        now_s, feed = self.now_s(), source.feed
        length_s = real_length_s(horizon_s, clock, feed)
        _check_size(length_s, feed, "?horizon_s")
        known = await self.known(source, now_s)
        steps = known.steps(now_s, now_s + length_s)
        if not steps:
            raise _nothing_yet(source)
        has_issue = any(step.kind is Kind.PROVIDER for step in steps)
        learned_from_s, own_from_s = (
            next((step.start_s for step in steps if step.kind is kind), None)
            for kind in (Kind.LEARNED, Kind.PERSISTENCE)
        )
        learned = None if learned_from_s is None else known.learned
        issue = known.issue if has_issue else learned
        method = "provider" if has_issue else "persistence" if learned is None else learned.method
        max_age_s = feed.forecast_max_age_s if has_issue else feed.day_s
        return IntensityForecast(
            **vars(source.key),
            method=method,
            generated_at=at(issue.generated_s if issue else now_s),
            is_stale=known.stale or bool(issue and now_s - issue.generated_s > max_age_s),
            time_scale=feed.time_scale,
            learned_from=at(learned_from_s) if has_issue and learned_from_s is not None else None,
            persistence_from=at(own_from_s) if method != "persistence" and own_from_s is not None else None,
            points=[ForecastPoint(**_held(step), p10=step.p10, p90=step.p90) for step in steps],
        )

    async def backtest(self, zone: str, signal: Signal | None) -> ForecastBacktest:
        """Return the errors of our own forecasts of a zone, as last tested."""
        source = self._zones.find(zone, signal)
        learned = await self._repository.learned(source.key, self.now_s())
        if learned is None:
            detail = f"No forecast of {zone}'s {source.key.signal} has been learned yet; ask again in a minute."
            raise ProblemError(404, ProblemCode.NO_DATA, detail)
        tested = learned.backtest or {}
        first_s, last_s = tested.get("first_s"), tested.get("last_s")
        return ForecastBacktest(
            **vars(source.key),
            method=learned.method,
            note=learned.note,
            generated_at=at(learned.generated_s),
            first_at=None if first_s is None else at(first_s),
            last_at=None if last_s is None else at(last_s),
            forecasts=tested.get("forecasts", 0),
            errors=[
                MethodErrors(method=method, mean_absolute_error_gco2_per_kwh=list(errors))
                for method, errors in tested.get("mae", {}).items()
            ],
            coverage=tested.get("coverage"),
            greenest_regret=tested.get("greenest_regret"),
        )

    async def outlook(
        self, zone: str, signal: Signal | None, past_s: float | None, ahead_s: float | None, clock: Clock
    ) -> IntensityOutlook:
        source = self._zones.find(zone, signal)
        now_s, feed = self.now_s(), source.feed
        past_s = real_length_s(past_s, clock, feed)
        ahead_s = real_length_s(ahead_s, clock, feed)
        _check_size(past_s + ahead_s, feed, "?past_s")
        known = await self.known(source, now_s, now_s - past_s)
        # A step more than asked for, so that the curve holds the present even where nothing ahead was asked for.
        steps = known.steps(now_s - past_s, now_s + max(ahead_s, feed.step_s))
        if not steps:
            raise _nothing_yet(source)
        measured = [step.end_s for step in steps if step.kind is Kind.MEASURED]
        end_s = now_s + max(ahead_s, feed.step_s)
        priced = await self._repository.prices(zone, now_s - past_s, end_s) if self._priced else None
        return IntensityOutlook(
            **vars(source.key),
            now=at(now_s),
            grid_now=at(source.provider.grid_s(zone, now_s)),
            time_scale=feed.time_scale,
            is_stale=known.stale,
            measured_until=at(measured[-1]) if measured else None,
            forecast_generated_at=at(known.issue.generated_s) if known.issue else None,
            points=[
                OutlookPoint(**_held(step), **_fetched(step), kind=step.kind.value, p10=step.p10, p90=step.p90)
                for step in steps
            ],
            prices=priced and _hourly(*priced),
        )

    async def measured(self, zone: str, start_s: float, end_s: float) -> tuple[Point, ...]:
        """Return the measured intervals of the default signal that overlap ``[start_s, end_s)`` until now."""
        source = self._zones.find(zone, None)
        most = MOST_STEPS + 1
        found = await self._repository.points(source.key, start_s, end_s, limit=most, begins_by_s=self.now_s())
        if len(found) == most:
            detail = f"The range holds more than {MOST_STEPS} values of {zone}; ask for less."
            raise ProblemError(422, ProblemCode.INVALID_REQUEST, detail)
        return found

    async def mean(self, zone: str, start_s: float, end_s: float) -> float | None:
        """Return the time-weighted mean of what was measured in ``[start_s, end_s)``, gCO2/kWh; ``None`` if empty."""
        total_s = total = 0.0
        for point in await self.measured(zone, start_s, end_s):
            overlap_s = min(point.end_s, end_s) - max(point.start_s, start_s)
            total_s += overlap_s
            total += overlap_s * point.gco2_per_kwh
        return total / total_s if total_s else None

    async def known_at(self, zone: str, as_of_s: float) -> Knowledge:
        """Return the data of the default signal as known at an instant; for a future instant, as known now."""
        return await self.known(self._zones.find(zone, None), min(as_of_s, self.now_s()))

    async def known(self, source: Source, now_s: float, since_s: float | None = None) -> Knowledge:
        """Return the data known at ``now_s``, with history since ``since_s`` or two days of the grid."""
        feed = source.feed
        basis_s = now_s - PERSISTENCE_DAYS * feed.day_s
        since_s = basis_s if since_s is None else min(since_s, basis_s)
        points = await self._points_until(source, since_s, now_s)
        issue = await self._repository.forecast(source.key, now_s)
        return Knowledge(now_s, source, feed, points, issue, await self._repository.learned(source.key, now_s))

    async def _points_until(self, source: Source, since_s: float, now_s: float) -> tuple[Point, ...]:
        """Return the points since ``since_s``; after a long outage, the last two days of points that exist."""
        feed, key = source.feed, source.key
        basis_s = PERSISTENCE_DAYS * feed.day_s
        limit = MOST_STEPS + math.ceil(basis_s / feed.step_s)
        found = await self._repository.points(key, since_s, now_s + 1e-6, limit=limit, begins_by_s=now_s, newest=True)
        if found or (last_s := await self._repository.known_until_s(key)) is None:
            return found
        return await self._repository.points(key, last_s - basis_s, last_s, limit=limit, begins_by_s=now_s, newest=True)


def real_length_s(length_s: float | None, clock: Clock, feed: Feed) -> float:
    """Return in real seconds a duration given in seconds of ``clock``; ``None`` is a day of the grid."""
    if length_s is None:
        return feed.day_s
    return length_s / feed.time_scale if clock == "grid" else length_s


def _check_size(length_s: float, feed: Feed, pointer: str) -> None:
    if math.ceil(length_s / feed.step_s) > MOST_STEPS:
        most = f"ask for at most {MOST_STEPS * feed.step_s:g} real seconds"
        raise invalid(pointer, f"This would be more than {MOST_STEPS} steps; {most}.")


def _nothing_yet(source: Source) -> ProblemError:
    key = source.key
    why = f": {source.last_error}" if source.last_error else "."
    detail = f"Nothing is known of {key.zone}'s {key.signal} yet; {key.provider} has not answered{why}"
    return ProblemError(404, ProblemCode.NO_DATA, detail)


def _hourly(currency: str, hours: Mapping[float, float]) -> HourlyPrices | None:
    curve = PriceCurve.of(hours)
    return curve and HourlyPrices(currency=currency, start_at=at(curve.start_s), per_kwh=curve.per_kwh.tolist())


def _held(step: Point | Step) -> dict[str, Any]:
    times = {"start_at": at(step.start_s), "end_at": at(step.end_s)}
    return {**times, "gco2_per_kwh": step.gco2_per_kwh, "is_estimated": step.is_estimated}


def _fetched(step: Point | Step) -> dict[str, Any]:
    return {"fetched_at": None if step.fetched_s is None else at(step.fetched_s)}


def _point(step: Point | Step) -> IntensityPoint:
    return IntensityPoint(**_held(step), **_fetched(step))


def _zone(zone: str, sources: list[Source]) -> Zone:
    first = sources[0]
    attributions = dict.fromkeys(source.feed.attribution for source in sources)
    return Zone(
        zone=zone,
        name=first.feed.zone_name,
        provider=first.key.provider,
        signals=[source.key.signal for source in sources],
        has_provider_forecast=any(source.feed.has_forecast for source in sources),
        attribution="; ".join(attributions),
        sources=[_source(source) for source in sources],
    )


def _source(source: Source) -> ZoneSource:
    return ZoneSource.of(
        source.feed,
        signal=source.key.signal,
        provider=source.key.provider,
        has_provider_forecast=source.feed.has_forecast,
        last_success_at=None if source.last_success_s is None else at(source.last_success_s),
        last_error=source.last_error,
        skipped_values=source.skipped_values,
    )
