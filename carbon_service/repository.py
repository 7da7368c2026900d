"""The store of intensities and forecasts in Postgres."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import ColumnElement, Select, TableClause, and_, delete, func, not_, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from carbon_service.curve import Kind, Step
from carbon_service.providers.protocol import ForecastIssue, Point
from carbon_service.replay import Replay, next_replay
from services.contracts.carbon import LearnedMethod
from services.core.domain.carbon import Signal
from services.core.domain.units import S_PER_HOUR
from services.db import locks
from services.db.tables import carbon_expected as expected
from services.db.tables import carbon_forecasts as forecasts
from services.db.tables import carbon_learned_forecasts as learned
from services.db.tables import carbon_points as points
from services.db.tables import carbon_prices as prices
from services.db.tables import carbon_replays as replays

ROWS_PER_STATEMENT = 1000
REPLAY = "replay"
RECORDED = "recorded"
SOURCE = ("zone", "signal", "provider")


@dataclass(frozen=True)
class SourceKey:
    """One signal of one zone from one provider."""

    zone: str
    signal: Signal
    provider: str


@dataclass(frozen=True)
class LearnedForecast:
    """The forecast of a source that was learned at ``generated_s``."""

    generated_s: float
    method: LearnedMethod  #: The last of them, ``persistence``, has no points of its own
    note: str  #: Why persistence is used
    points: tuple[Step, ...]  #: What is predicted, in chronological order
    backtest: dict[str, Any] | None  #: ``services.learning.carbon.Backtest`` as a document; ``None`` without one


def at(time_s: float) -> datetime:
    """Return UTC seconds as the datetime that the database and the API use."""
    return datetime.fromtimestamp(time_s, UTC)


class Repository:
    """Queries. Times are UTC seconds."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def start_replay(self, speed: float, requested_start_s: float | None, now_s: float) -> Replay:
        """Store and return the replay to continue with.

        If the replay has changed, the values that the former one had published ahead are deleted.
        """
        async with self._engine.begin() as connection:
            await connection.execute(select(func.pg_advisory_xact_lock(locks.REPLAY)))
            row = (await connection.execute(select(replays).where(replays.c.name == REPLAY))).first()
            known = None if row is None else _as_replay(row)
            replay = next_replay(known, speed, requested_start_s, now_s)
            if replay == known:
                return replay
            await _withdraw_ahead(connection, now_s)
            start_at = None if requested_start_s is None else at(requested_start_s)
            values = {"real_at": at(replay.real_s), "grid_at": at(replay.grid_s), "speed": replay.speed}
            values["requested_start_at"] = start_at
            statement = insert(replays).values(name=REPLAY, **values)
            statement = statement.on_conflict_do_update(index_elements=["name"], set_=values).returning(replays)
            return _as_replay((await connection.execute(statement)).one())

    async def save_points(self, key: SourceKey, found: Sequence[Point], fetched_s: float) -> None:
        """Store points; a later value of a known interval replaces it, but an estimate never replaces a measurement."""
        rows = [
            {
                **vars(key),
                **{"start_at": at(point.start_s), "end_at": at(point.end_s), "gco2_per_kwh": point.gco2_per_kwh},
                **{"is_estimated": point.is_estimated, "fetched_at": at(fetched_s)},
            }
            for point in found
        ]
        values = ("end_at", "gco2_per_kwh", "is_estimated")

        def differs(new: Any) -> ColumnElement[bool]:
            known, now = (tuple_(*(each[name] for name in values)) for each in (points.c, new))
            return and_(or_(points.c.is_estimated, not_(new.is_estimated)), known.is_distinct_from(now))

        await self._upsert(points, rows, (*SOURCE, "start_at"), (*values, "fetched_at"), differs)

    async def _upsert(
        self,
        table: TableClause,
        rows: Sequence[Mapping[str, Any]],
        keys: Sequence[str],
        values: Sequence[str],
        where: Callable[[Any], ColumnElement[bool] | None] = lambda _: None,
    ) -> None:
        """Store rows; of those that are known by their keys, the values, where a condition on the new row holds."""
        async with self._engine.begin() as connection:
            for first in range(0, len(rows), ROWS_PER_STATEMENT):
                statement = insert(table).values(rows[first : first + ROWS_PER_STATEMENT])
                new = statement.excluded
                set_ = {name: new[name] for name in values}
                await connection.execute(
                    statement.on_conflict_do_update(index_elements=keys, set_=set_, where=where(new))
                )

    async def known_until_s(self, key: SourceKey) -> float | None:
        """Return where the stored points end; ``None`` if there are none."""
        return await self._instant_s(
            select(points.c.end_at).where(_of(key)).order_by(points.c.start_at.desc()).limit(1)
        )

    async def _instant_s(self, query: Select[Any]) -> float | None:
        """Return the instant that a query finds, UTC seconds; None if it finds none."""
        async with self._engine.connect() as connection:
            found = (await connection.execute(query)).scalar()
        return None if found is None else found.timestamp()

    async def points(
        self, key: SourceKey, start_s: float, end_s: float, *, limit: int, begins_by_s: float, newest: bool = False
    ) -> tuple[Point, ...]:
        """Return intervals that overlap ``[start_s, end_s)`` and have begun by ``begins_by_s``, in chronological order.

        If there are more than ``limit``, the oldest are returned, or with ``newest`` the newest.
        """
        found, start_at = points.alias(), at(start_s)
        before = select(func.max(found.c.start_at)).where(_of(key, found), found.c.start_at <= start_at)
        query = (
            select(points)
            .where(
                _of(key),
                points.c.start_at >= func.coalesce(before.scalar_subquery(), start_at),
                points.c.start_at < at(end_s),
                points.c.start_at <= at(begins_by_s),
                points.c.end_at > start_at,
            )
            .order_by(points.c.start_at.desc() if newest else points.c.start_at)
            .limit(limit)
        )
        async with self._engine.connect() as connection:
            rows = list((await connection.execute(query)).all())
        if newest:
            rows.reverse()
        return tuple(map(_as_point, rows))

    async def save_forecast(self, key: SourceKey, issue: ForecastIssue, fetched_s: float) -> None:
        """Store a forecast as issued; storing one again replaces it."""
        steps = [[point.start_s, point.end_s, point.gco2_per_kwh] for point in issue.points]
        row = {**vars(key), "generated_at": at(issue.generated_s), "fetched_at": at(fetched_s), "points": steps}
        keys, values = (*SOURCE, "generated_at"), ("points", "fetched_at")
        await self._upsert(forecasts, [row], keys, values, lambda new: forecasts.c.points != new.points)

    async def forecast(self, key: SourceKey, as_of_s: float) -> ForecastIssue | None:
        """Return the newest forecast made by ``as_of_s``."""
        if (row := await self._newest(forecasts, key, as_of_s)) is None:
            return None
        steps: list[list[float]] = row.points
        fetched_s = row.fetched_at.timestamp()
        points = tuple(Point(*step, is_estimated=True, fetched_s=fetched_s) for step in steps)
        return ForecastIssue(row.generated_at.timestamp(), points)

    async def _newest(self, table: Any, key: SourceKey, as_of_s: float) -> Any:
        """Return the last row of a source in a table of forecasts that was made by then; None if there is none."""
        made_at = table.c.generated_at
        query = select(table).where(_of(key, table), made_at <= at(as_of_s)).order_by(made_at.desc()).limit(1)
        async with self._engine.connect() as connection:
            return (await connection.execute(query)).first()

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[bool]:
        """Take the lock for learning, and yield whether it was free; the lock ends with the connection."""
        async with self._engine.connect() as connection:
            free = await connection.execute(select(func.pg_try_advisory_xact_lock(locks.CARBON_LEARNING)))
            yield bool(free.scalar())

    async def save_learned(self, key: SourceKey, made: LearnedForecast) -> None:
        """Store a learned forecast, replacing one from the same instant."""
        steps = [[p.start_s, p.end_s, p.gco2_per_kwh, p.p10, p.p90] for p in made.points]
        values = {"method": made.method, "note": made.note, "points": steps, "backtest": made.backtest}
        row = {**vars(key), "generated_at": at(made.generated_s), **values}
        await self._upsert(learned, [row], (*SOURCE, "generated_at"), (*values,))

    async def learned(self, key: SourceKey, as_of_s: float) -> LearnedForecast | None:
        """Return the last forecast learned by ``as_of_s``."""
        if (row := await self._newest(learned, key, as_of_s)) is None:
            return None
        made_s = row.generated_at.timestamp()
        points = tuple(
            Step(start_s, end_s, value, Kind.LEARNED, True, p10, p90, made_s)
            for start_s, end_s, value, p10, p90 in row.points
        )
        return LearnedForecast(made_s, row.method, row.note, points, row.backtest)

    async def save_expected(self, key: SourceKey, found: Mapping[float, Mapping[str, float]], fetched_s: float) -> None:
        """Store what wind and sun are expected to generate, MW by source, by the beginnings of hours."""
        rows = [
            {**_place(key), "start_at": at(hour_s), "power_mw": dict(mix), "fetched_at": at(fetched_s)}
            for hour_s, mix in found.items()
        ]
        keys = ("zone", "provider", "start_at")
        await self._upsert(
            expected, rows, keys, ("power_mw", "fetched_at"), lambda new: expected.c.power_mw != new.power_mw
        )

    async def expected(self, key: SourceKey) -> dict[float, dict[str, float]]:
        """Return what wind and sun were expected to generate, MW by source, by the beginnings of hours."""
        query = select(expected.c.start_at, expected.c.power_mw).filter_by(**_place(key)).order_by(expected.c.start_at)
        async with self._engine.connect() as connection:
            return {row.start_at.timestamp(): row.power_mw for row in await connection.execute(query)}

    async def expected_until_s(self, key: SourceKey) -> float | None:
        """Return when the last hour begins of which that is known; None if there is none."""
        return await self._instant_s(select(func.max(expected.c.start_at)).filter_by(**_place(key)))

    async def save_prices(
        self, zone: str, currency: str, per_kwh: Mapping[float, float], demand_per_kw_month: float, now_s: float
    ) -> None:
        """Store prices by the beginnings of their hours; an hour that is over keeps the price that it had."""
        rows = [
            {
                **{"start_at": at(hour_s), "zone": zone, "currency": currency, "per_kwh": Decimal(repr(price))},
                **{"demand_per_kw_month": Decimal(repr(demand_per_kw_month)), "fetched_at": at(now_s)},
            }
            for hour_s, price in per_kwh.items()
        ]
        values = ("currency", "per_kwh", "demand_per_kw_month", "fetched_at")
        ends_at = at(now_s - S_PER_HOUR)
        await self._upsert(prices, rows, ("start_at", "zone"), values, lambda _: prices.c.start_at > ends_at)

    async def prices(self, zone: str, start_s: float, end_s: float) -> tuple[str, dict[float, float]] | None:
        """Return the currency, and the prices of the hours that overlap ``[start_s, end_s)``; None if there are none.

        Hours in another currency than the last of them are left out.
        """
        query = (
            select(prices.c.start_at, prices.c.currency, prices.c.per_kwh)
            .where(prices.c.zone == zone, prices.c.start_at > at(start_s - S_PER_HOUR), prices.c.start_at < at(end_s))
            .order_by(prices.c.start_at)
        )
        async with self._engine.connect() as connection:
            rows = (await connection.execute(query)).all()
        if not rows:
            return None
        currency: str = rows[-1].currency
        return currency, {row.start_at.timestamp(): float(row.per_kwh) for row in rows if row.currency == currency}

    async def priced_until_s(self, zone: str) -> float | None:
        """Return when the last hour begins whose price is stored; None if there is none."""
        return await self._instant_s(select(func.max(prices.c.start_at)).where(prices.c.zone == zone))

    async def prune_prices(self, before_s: float) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(delete(prices).where(prices.c.start_at < at(before_s)))

    async def prune(self, key: SourceKey, before_s: float, max_points: int, max_forecasts: int) -> int:
        """Delete rows that began by ``before_s`` or exceed the most to keep; return the number of deleted rows."""
        gone = 0
        kept = (
            (points, points.c.start_at, max_points),
            (forecasts, forecasts.c.generated_at, max_forecasts),
            (learned, learned.c.generated_at, max_forecasts),
        )
        async with self._engine.begin() as connection:
            for table, column, most in kept:
                oldest = select(column).where(_of(key, table)).order_by(column.desc()).offset(most).limit(1)
                limit_at = (await connection.execute(oldest)).scalar()
                bound = at(before_s) if limit_at is None else max(at(before_s), limit_at)
                result = await connection.execute(delete(table).where(_of(key, table), column <= bound))
                gone += result.rowcount
            old = delete(expected).filter_by(**_place(key)).where(expected.c.start_at <= at(before_s))
            gone += (await connection.execute(old)).rowcount
        return gone


def _as_point(row: Any) -> Point:
    start_s, end_s, fetched_s = row.start_at.timestamp(), row.end_at.timestamp(), row.fetched_at.timestamp()
    return Point(start_s, end_s, row.gco2_per_kwh, row.is_estimated, fetched_s)


def _as_replay(row: Any) -> Replay:
    requested_s = row.requested_start_at and row.requested_start_at.timestamp()
    return Replay(row.real_at.timestamp(), row.grid_at.timestamp(), row.speed, requested_s)


def _of(key: SourceKey, table: Any = points) -> ColumnElement[bool]:
    return and_(*(table.c[name] == value for name, value in vars(key).items()))


def _place(key: SourceKey) -> dict[str, str]:
    return {"zone": key.zone, "provider": key.provider}


async def _withdraw_ahead(connection: AsyncConnection, now_s: float) -> None:
    now = at(now_s)
    recorded = points.c.provider == RECORDED
    await connection.execute(delete(points).where(recorded, points.c.start_at >= now))
    await connection.execute(update(points).where(recorded, points.c.end_at > now).values(end_at=now))
    ahead = and_(forecasts.c.provider == RECORDED, forecasts.c.generated_at > now)
    await connection.execute(delete(forecasts).where(ahead))
    # Learned while the grid's clock ran otherwise: its hours lie elsewhere now.
    await connection.execute(delete(learned).where(learned.c.provider == RECORDED))
