"""``wattshift fit``: learn from measured points how fast a job runs and how much power it draws."""

from __future__ import annotations

import csv
import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.client import EXIT_NOT_FOUND, EXIT_USAGE, CliError
from services.cli.output import console, print_json, table
from services.core.domain.errors import DomainError

if TYPE_CHECKING:
    from services.core.profiles.capped import CappedModel
    from services.core.profiles.models import EnergyModel, ThroughputModel
    from services.core.profiles.observations import Observations

group = typer.Typer(help="Learn a job's speed and energy from measured points.", no_args_is_help=True)

TIME, ENERGY = "seconds_per_iteration", "energy_j_per_iteration"
SPREAD = ("distinct", "least", "greatest")
CONFIGURATION = ("gpus", "local_batch", "nodes")
FileArgument = Annotated[
    Path,
    typer.Argument(help=f"CSV with columns gpus, local_batch, clock_mhz (or power_limit_w), nodes, {TIME}, {ENERGY}."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Form(StrEnum):
    """Form of the model: PowerFlow's, or ours for power limits."""

    PAPER = "paper"
    CAPPED = "capped"


FormOption = Annotated[
    Form, typer.Option(help="Form of the model: the paper's, or ours for power limits, which needs energies.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(group, name="fit")


@group.callback()
def _fit() -> None:
    """Learn a job's speed and energy from measured points."""


@group.command()
def throughput(file: FileArgument, form: FormOption = Form.PAPER, as_json: JsonOption = False) -> None:
    """Fit step times over GPUs, batch, clock and nodes; parameters of missing columns are not fitted."""
    from services.core.profiles.capped import fit_capped
    from services.core.profiles.learn import fit_throughput

    fit, needed = (fit_throughput, (TIME,)) if form is Form.PAPER else (fit_capped, (TIME, ENERGY))
    points, lines = read_points(file, needed)
    try:
        model = fit(points, held_out=True)
    except DomainError as error:
        raise _refusal(file, lines, error) from None
    _tell("throughput", model, as_json)


@group.command()
def energy(file: FileArgument, form: FormOption = Form.PAPER, as_json: JsonOption = False) -> None:
    """Fit energy per step over GPUs, batch, clock and nodes; needs the step times too."""
    from services.core.profiles.capped import fit_capped
    from services.core.profiles.learn import fit_energy

    points, lines = read_points(file, (TIME, ENERGY))
    try:
        model = (fit_energy if form is Form.PAPER else fit_capped)(points, held_out=True)
    except DomainError as error:
        raise _refusal(file, lines, error) from None
    _tell("energy", model, as_json)


def read_points(file: Path, needed: tuple[str, ...]) -> tuple[Observations, list[int]]:
    """Return the points of a CSV file, and the line of each.

    Raises:
        CliError: There is no such file, a needed column is missing, or a line is impossible; the message names it.
    """
    from services.core.domain.controls import ControlKind
    from services.core.profiles.observations import COLUMN_OF, Observations

    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise CliError(f"there is no file {str(file)!r}", EXIT_NOT_FOUND) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"cannot read {str(file)!r}: {error}", EXIT_USAGE) from None
    rows = csv.reader(text.splitlines())
    header = [name.strip() for name in next(rows, [])]
    axes = [axis for axis in ControlKind if COLUMN_OF[axis] in header]
    missing = [name for name in needed if name not in header]
    if missing:
        raise CliError(f"{file}, line 1: no column {', '.join(missing)} (found: {', '.join(header)})", EXIT_USAGE)
    if len(set(header)) < len(header):
        raise CliError(f"{file}, line 1: a column is there twice", EXIT_USAGE)
    if len(axes) > 1:
        raise CliError(
            f"{file}, line 1: clock_mhz and power_limit_w are both there; keep the one that was controlled", EXIT_USAGE
        )
    axis = axes[0] if axes else ControlKind.CLOCK
    names = [name for name in (*CONFIGURATION, COLUMN_OF[axis], *needed) if name in header]
    columns: dict[str, list[float]] = {name: [] for name in names}
    lines: list[int] = []
    for row in rows:
        if not any(cell.strip() for cell in row):
            continue
        lines.append(rows.line_num)
        if len(row) != len(header):
            raise CliError(f"{file}, line {lines[-1]}: {len(row)} cells under {len(header)} columns", EXIT_USAGE)
        for name in names:
            columns[name].append(_number(file, lines[-1], name, row[header.index(name)]))
    if not lines:
        raise CliError(f"{file}: no points below the header", EXIT_USAGE)
    try:
        points = Observations.of(
            columns[TIME],
            control=columns.get(COLUMN_OF[axis]),
            axis=axis,
            energy_j_per_iteration=columns.get(ENERGY),
            **{name: columns.get(name) for name in CONFIGURATION},
        )
    except DomainError as error:
        raise _refusal(file, lines, error) from None
    return points, lines


def _number(file: Path, line: int, name: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CliError(f"{file}, line {line}: {name} is {cell.strip()!r}, not a number", EXIT_USAGE)
    return value


def _refusal(file: Path, lines: list[int], error: DomainError) -> CliError:
    from services.core.profiles.observations import PointError

    where = f"{file}, line {lines[error.row]}" if isinstance(error, PointError) else str(file)
    return CliError(f"{where}: {error}", EXIT_USAGE)


def document(kind: str, model: ThroughputModel | EnergyModel | CappedModel) -> dict[str, Any]:
    """Return a fit as one JSON object; errors are shares, ``mape`` is that of points left out of the fit."""
    from services.core.profiles.capped import CappedModel
    from services.core.profiles.observations import COLUMN_OF

    if isinstance(model, CappedModel):
        quality = model.time_quality if kind == "throughput" else model.energy_quality
    else:
        quality = model.quality
    return {
        "model": kind,
        **({"form": Form.CAPPED.value} if isinstance(model, CappedModel) else {}),
        "axis": COLUMN_OF[model.axis],
        "parameters": model.named() if isinstance(model, CappedModel) else model.parameters._asdict(),
        "standard_errors": model.errors(),
        "fixed": dict(model.fixed),
        "mape": None if math.isnan(quality.held_out_mape) else quality.held_out_mape,
        "mape_in_sample": quality.mape,
        "noise": quality.noise,
        "points": quality.measurements,
        "configurations": quality.configurations,
        "spread": {name: dict(zip(SPREAD, each, strict=True)) for name, each in quality.spread.items()},
    }


def _tell(kind: str, model: ThroughputModel | EnergyModel | CappedModel, as_json: bool) -> None:
    found = document(kind, model)
    if as_json:
        print_json(found)
        return
    right = ("value", "standard error")
    shown = table("parameter", *right, right=right, title=f"{kind}, by {found['axis']}")
    for name, value in found["parameters"].items():
        if name not in model.fixed or name == "f0_mhz":
            shown.add_row(name, f"{value:.5g}", f"{found['standard_errors'][name]:.2g}")
    console.print(shown)
    outside = "too few points" if found["mape"] is None else f"{100 * found['mape']:.2f} %"
    console.print(
        f"MAPE on points left out, a tenth at a time: {outside}; on the points fitted: "
        f"{100 * found['mape_in_sample']:.2f} % ({found['points']} points, {found['configurations']} configurations)"
    )
    reasons: dict[str, list[str]] = {}
    for name, why in model.fixed.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        console.print(f"[dim]not fitted, as {why}: {', '.join(names)}[/]")
