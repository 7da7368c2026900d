"""``wattshift lab forecast``: a grid's future carbon intensity, learned from a file of its past."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.commands import EXIT_NOT_FOUND, EXIT_USAGE, CliError
from services.cli.output import console, print_json, say, table
from services.core.domain.errors import DomainError

if TYPE_CHECKING:
    from services.learning.carbon import Forecast

DAY_H = 24


def forecast(
    zone: Annotated[str, typer.Option(help="The zone to forecast; the file may hold others.")],
    history: Annotated[Path, typer.Option(help="A CSV file with Electricity Maps' columns, gzipped or not.")],
    at: Annotated[
        str | None,
        typer.Option(help="Time at which the forecast is made, ISO 8601 (UTC); by default the end of the file."),
    ] = None,
    hours: Annotated[int, typer.Option(help="How far ahead, 1 to 168.")] = 96,
    signal: Annotated[
        str, typer.Option(help="direct or lifecycle; marginal for files of WattTime and PJM.")
    ] = "direct",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Forecast carbon intensity, with quantiles, from a file of a grid's past; needs no control plane."""
    import numpy as np

    from lab.readers.intensities import read_intensities
    from services.learning.carbon import forecast
    from services.learning.carbon_history import HOUR_S, history_of
    from services.simulator.readers.carbon import signal_named
    from services.simulator.readers.text import utc_s

    if not history.exists():
        raise CliError(f"there is no file {str(history)!r}", EXIT_NOT_FOUND)
    try:
        past = read_intensities(history, signal_named(signal), zone)
        end_s = float(past.times_s[-1]) + past.step_s if at is None else utc_s(at, "--at")
        known = history_of(past.times_s, past.values, end_s, past.shares, step_s=past.step_s, expected=past.expected)
        made = forecast(known, hours)
    except (DomainError, ValueError, OSError) as error:
        raise CliError(str(error), EXIT_USAGE) from None
    rows: list[dict[str, Any]] = [
        {
            "time": f"{np.datetime64(int(made.start_s + hour * HOUR_S), 's')}Z",
            "gco2_per_kwh": round(float(value), 3),
            "p10": None if made.p10 is None else round(float(made.p10[hour]), 3),
            "p90": None if made.p90 is None else round(float(made.p90[hour]), 3),
        }
        for hour, value in enumerate(made.values)
    ]
    if len(past.sentences) > 1:
        for sentence in past.sentences:
            say(f"wattshift: {sentence}")
    if made.note:
        say(f"wattshift: {made.method}: {made.note}")
    if as_json:
        print_json(rows)
        return
    _show(zone, made, rows)


def _show(zone: str, made: Forecast, rows: list[dict[str, Any]]) -> None:
    shown = table("from", ">gCO2/kWh", ">p10", ">p90", title=f"{zone}, {made.method}")
    for row in rows:
        cells = ("" if row[name] is None else f"{row[name]:.1f}" for name in ("gco2_per_kwh", "p10", "p90"))
        shown.add_row(row["time"], *cells)
    console.print(shown)
    if made.backtest is not None:
        for method, errors in made.backtest.mae.items():
            days = ", ".join(f"{error:.1f}" for error in errors)
            console.print(f"mean absolute error by day ahead, {method}: {days} ({made.backtest.forecasts} forecasts)")
