"""From a zone or a file to the grid of a simulation."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.core.domain.carbon import CarbonCurve
from services.core.domain.errors import DomainError
from services.core.domain.prices import PriceCurve
from services.core.domain.signal import Signal, impossible
from services.core.domain.units import S_PER_HOUR
from services.kit.tariffs import priced, read_hours, read_tariffs
from services.simulator.bundles import BUNDLED_ZONES, bundled_forecasts, bundled_grid
from services.simulator.raw import RawSeries, ReadReport, TraceFormatError
from services.simulator.readers.grids import SIGNALS, read_grid
from services.simulator.readers.text import date_s, number, open_text, table, utc_s
from services.simulator.workload import CarbonTrace, ForecastKind, IssuedForecasts, SitePrices

DAY_S = 86_400.0
FORECASTS = ("perfect", "persistence", "issued")  #: Forecasts that need no file; the last is for bundled zones only
LONGEST_GAP_S = DAY_S  #: A longer gap is refused: holding one value for days would be inventing data


def signal_named(name: str | Signal) -> Signal:
    """Return the signal with a name such as ``direct`` or ``lifecycle``; ``DomainError`` if there is no such signal."""
    if name not in SIGNALS:
        raise DomainError(f"unknown signal {name!r}; known: direct, lifecycle, marginal")
    return SIGNALS[name]


def read_carbon(
    source: str | Path,
    *,
    start: str | float | None = None,
    days: float | None = None,
    signal: str | Signal = Signal.AVERAGE_DIRECT,
    forecast: str | Path = ForecastKind.PERFECT,
    zone: str | None = None,
) -> CarbonTrace:
    """Return the grid for ``days`` from ``start``, and for the day before it if known.

    Args:
        source: A bundled zone (``BUNDLED_ZONES``) or a file.
        start: ISO 8601 (UTC) or UTC seconds; by default the beginning of the data.
        days: How long; by default to the end of the data.
        signal: ``direct``, ``lifecycle`` or ``marginal``.
        forecast: What policies see of the hours ahead: ``perfect``, ``persistence``, a file of forecasts as issued, or
            ``issued``: those bundled for the zone.
        zone: As for ``read_grid``.

    Raises:
        TraceFormatError: The file cannot be read, does not cover the requested period, or has too long a gap there.
    """
    wanted = signal_named(signal)
    if str(source) in BUNDLED_ZONES:
        grid = bundled_grid(str(source), wanted)
    else:
        grid = read_grid(Path(source), wanted, zone=zone)
    start_s = utc_s(start, "start") if isinstance(start, str) else start
    trace = cut(grid, None if start_s is None else float(start_s), days)
    return with_forecast(trace, forecast)


def cut(grid: RawSeries, start_s: float | None, days: float | None) -> CarbonTrace:
    """Return the part of a series that a simulation needs; gaps are filled with the value before them, and noted."""
    times, values = grid.times_s, grid.intensity_gco2_per_kwh
    steps = np.diff(times)
    step_s = float(np.median(steps)) if steps.size else 3600.0
    last_step_s = float(min(steps[-1], step_s)) if steps.size else step_s
    data_end_s = float(times[-1]) + last_step_s
    begin_s = float(times[0]) if start_s is None else start_s
    end_s = data_end_s if days is None else begin_s + days * DAY_S
    if not times[0] <= begin_s < data_end_s or end_s > data_end_s:
        first, last = (np.datetime64(int(moment), "s") for moment in (times[0], data_end_s))
        raise TraceFormatError(f"{grid.zone} is known only from {first} to {last}; choose start and days within that")
    inside = np.flatnonzero((times >= begin_s - DAY_S) & (times < end_s))
    before = int(np.searchsorted(times, begin_s - DAY_S, side="right")) - 1
    low = max(before, 0) if before >= 0 else int(inside[0])
    earlier = CarbonCurve(times[:low], values[:low], float(times[low])) if low else None
    times, values = times[low : inside[-1] + 1], values[low : inside[-1] + 1]
    notes = list(grid.report.sentences())
    gaps = np.flatnonzero(np.diff(times) > 1.5 * step_s)
    for gap in gaps:
        length_s = float(times[gap + 1] - times[gap])
        when = np.datetime64(int(times[gap]), "s")
        if length_s > LONGEST_GAP_S:
            raise TraceFormatError(f"{grid.zone} has a gap of {length_s / 3600:.0f} h after {when}: too long to bridge")
        notes.append(f"gap of {length_s / 3600:.2f} h after {when}: the value before it held over it")
    return CarbonTrace(grid.zone, grid.signal, CarbonCurve(times, values, end_s), before=earlier, notes=tuple(notes))


def with_forecast(trace: CarbonTrace, forecast: str | Path) -> CarbonTrace:
    """Return the trace with the forecasts that policies see.

    Raises:
        TraceFormatError: The issued forecasts are of another signal than the trace (the bundled ones are of direct
            intensity).
    """
    kind, issued, notes = ForecastKind.FILE, None, trace.notes
    if str(forecast) in (ForecastKind.PERFECT, ForecastKind.PERSISTENCE):
        kind = ForecastKind(str(forecast))
    else:
        if trace.signal is not Signal.AVERAGE_DIRECT:
            raise TraceFormatError(f"issued forecasts are of direct intensity; they do not cover {trace.signal.value}")
        if str(forecast) != FORECASTS[-1]:
            found, report = read_forecasts(Path(forecast))
        elif trace.zone in BUNDLED_ZONES:
            with bundled_forecasts(trace.zone) as file:
                found, report = read_forecasts(file)
        else:
            raise TraceFormatError(f"no issued forecasts are bundled for {trace.zone}; name a file of them")
        issued = _meeting(found, trace)
        notes = (*notes, *report.sentences())
    return replace(trace, forecast=kind, issued=issued, notes=notes)


def with_prices(trace: CarbonTrace, path: Path) -> CarbonTrace:
    """Return the trace with what its zone's electricity costs, by a file of tariffs (``services.kit.tariffs``).

    Raises:
        TraceFormatError: A file cannot be read, or has no prices of the zone over the simulated time.
    """
    curve = trace.curve
    hours = range(int(curve.start_s // S_PER_HOUR), math.ceil(curve.end_s / S_PER_HOUR))
    try:
        tariffs = read_tariffs(path)
        if (tariff := tariffs.zones.get(trace.zone)) is None:
            raise ValueError(f"{path.name}: it has no zone {trace.zone}; it has {', '.join(tariffs.zones)}")
        day_ahead = read_hours(path.parent / tariff.day_ahead) if tariff.day_ahead else {}
        prices = PriceCurve.of(priced(tariff, (hour * S_PER_HOUR for hour in hours), day_ahead))
    except ValueError as error:
        raise TraceFormatError(str(error)) from error
    if prices is None:
        raise TraceFormatError(f"{tariff.day_ahead}: it has no prices of the simulated time")
    site = SitePrices(prices, tariffs.currency, bool(tariff.day_ahead), tariff.demand_per_kw_month)
    return replace(trace, prices=site)


def _meeting(issued: IssuedForecasts, trace: CarbonTrace) -> IssuedForecasts:
    """Return the issues before the trace's end; those that end before it begins show how far off later ones may be."""
    kept = issued.issued_s < trace.curve.end_s
    if not (kept & (issued.ends_s > trace.curve.start_s)).any():
        raise TraceFormatError("no forecast was issued for the time simulated")
    return IssuedForecasts(
        issued.issued_s[kept], issued.starts_s[kept], issued.step_s, issued.intensity_gco2_per_kwh[kept]
    )


COLUMNS = ("Datetime (UTC)", "Carbon Intensity Forecast")


def read_forecasts(path: Path) -> tuple[IssuedForecasts, ReadReport]:
    """Return the issues of a file; those that are cut short or have a gap are dropped and reported.

    Rows are of a target hour and a value, and their order matters: each issue is a block of consecutive hours, and a
    target hour appears in several. A new issue begins wherever the hour goes back, and is taken to be known from its
    first hour on.

    Raises:
        TraceFormatError: There is no such file, it has another format, or no issue in it is complete.
    """
    report = ReadReport(path.name, "issued forecasts")
    blocks: list[list[tuple[int, float, float]]] = []  # line, time and value of each hour of each issue
    with open_text(path) as lines:
        for line, row in table(lines, COLUMNS, report):
            try:
                time_s, value = date_s(row[COLUMNS[0]]), number(row[COLUMNS[1]], COLUMNS[1])
            except ValueError as error:
                report.drop(line, str(error))
                continue  # a gap, which costs the issue
            if not blocks or time_s <= blocks[-1][-1][1]:
                blocks.append([])
            blocks[-1].append((line, time_s, value))
    if not blocks:
        raise TraceFormatError(f"{path.name} holds no forecast")
    lengths = [*map(len, blocks)]
    steps = max(set(lengths), key=lengths.count)
    usual = next(block for block in blocks if len(block) == steps)
    step_s = float(np.median(np.diff([time_s for _, time_s, _ in usual]))) if steps > 1 else 3600.0
    starts, values = list[float](), list[tuple[float, ...]]()
    for block in blocks:
        rows, times, issue = zip(*block, strict=True)
        whole = len(times) == steps and np.isfinite(issue).all() and np.allclose(np.diff(times), step_s)
        if not whole or any(impossible(each, 1.0, Signal.AVERAGE_DIRECT) for each in issue):
            for line in rows:
                report.drop(line, f"an issue without its {steps} values, hour after hour")
            continue
        starts.append(times[0])
        values.append(issue)
    if not values:
        raise TraceFormatError("no whole issue; " + "; ".join(report.sentences()))
    report.kept = steps * len(values)
    begins = np.array(starts)
    return IssuedForecasts(begins, begins, step_s, np.array(values)), report
