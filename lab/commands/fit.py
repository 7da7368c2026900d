"""``wattshift lab fit``: learn from measured points how fast a job runs and how much power it draws."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.bars import bar
from services.cli.commands import EXIT_USAGE, CliError
from services.cli.output import console, print_json, table
from services.cli.values import read_cells
from services.core.domain.errors import DomainError
from services.kit.text import decimal

if TYPE_CHECKING:
    from lab.fits import Judged
    from lab.residuals import Residuals
    from services.core.profiles.capped import CappedModel
    from services.core.profiles.models import EnergyModel, ThroughputModel
    from services.core.profiles.observations import Observations

group = typer.Typer(help="Learn a job's speed and energy from measured points.", no_args_is_help=True)

TIME, ENERGY = "seconds_per_iteration", "energy_j_per_iteration"
COLUMN_OF_LIMIT = "power_limit_w"
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


FORM_IS = {Form.PAPER.value: "the paper's", Form.CAPPED.value: "capped (ours)"}
FormOption = Annotated[
    Form | None,
    typer.Option(
        help="Form of the model: the paper's, or ours for power limits, which needs energies. "
        "Default: capped where the file has both, else paper."
    ),
]
ResidualsOption = Annotated[
    bool,
    typer.Option("--residuals", help="Also correct what the form leaves over (ours), where steps are stairs."),
]


@group.callback()
def _fit() -> None:
    """Learn a job's speed and energy from measured points."""


@group.command()
def throughput(
    file: FileArgument, form: FormOption = None, residuals: ResidualsOption = False, as_json: JsonOption = False
) -> None:
    """Fit step times over GPUs, batch, clock and nodes; parameters of missing columns are not fitted."""
    _fit_file("throughput", file, form, residuals=residuals, as_json=as_json)


@group.command()
def energy(
    file: FileArgument, form: FormOption = None, residuals: ResidualsOption = False, as_json: JsonOption = False
) -> None:
    """Fit energy per step over GPUs, batch, clock and nodes; needs the step times too."""
    _fit_file("energy", file, form, residuals=residuals, as_json=as_json)


def _fit_file(kind: str, file: Path, form: Form | None, *, residuals: bool, as_json: bool) -> None:
    from lab.fits import judged_capped, judged_energy, judged_throughput
    from services.core.domain.controls import ControlKind

    needed = (TIME,) if kind == "throughput" and form is not Form.CAPPED else (TIME, ENERGY)
    points, lines = read_points(file, needed, energies=form is not Form.PAPER)
    if form is None:
        limited = points.axis is ControlKind.POWER_LIMIT and COLUMN_OF_LIMIT not in points.absent
        form = Form.CAPPED if limited and points.with_energy.all() else Form.PAPER
    try:
        with bar("fitting", quiet=as_json):
            if form is Form.CAPPED:
                model, *both = judged_capped(points, residuals=residuals)
                judged = both[kind != "throughput"]
            elif kind == "throughput":
                model, judged = judged_throughput(points, residuals=residuals)
            else:
                model, judged = judged_energy(points, residuals=residuals)
    except DomainError as error:
        raise _refusal(file, lines, error) from None
    _tell(kind, points, model, judged, as_json, residuals=residuals)


def read_points(file: Path, needed: tuple[str, ...], *, energies: bool) -> tuple[Observations, list[int]]:
    """Return the points of a CSV file, with the line of each; an optional column without any value counts as absent.

    Args:
        needed: Columns without which there is no fit.
        energies: Whether energies under power limits are read even if not needed; one that was not measured is
            then NaN.

    Raises:
        CliError: There is no such file, a needed column is missing or empty, or a line is impossible; the message names
            it.
    """
    from services.core.domain.controls import ControlKind
    from services.core.profiles.observations import COLUMN_OF, Observations

    found = read_cells(file)
    header = [name.strip() for name in found[0][1]] if found else []
    missing = [name for name in needed if name not in header]
    if missing:
        raise CliError(f"{file}, line 1: no column {', '.join(missing)} (found: {', '.join(header)})", EXIT_USAGE)
    if len(set(header)) < len(header):
        raise CliError(f"{file}, line 1: a column is there twice", EXIT_USAGE)
    found = [each for each in found[1:] if any(cell.strip() for cell in each[1])]
    for line, row in found:
        if len(row) != len(header):
            raise CliError(f"{file}, line {line}: {len(row)} cells under {len(header)} columns", EXIT_USAGE)
    lines, rows = [line for line, _ in found], [[cell.strip() for cell in row] for _, row in found]
    if not rows:
        raise CliError(f"{file}: no points below the header", EXIT_USAGE)
    given = {name: at for at, name in enumerate(header) if any(row[at] for row in rows)}
    empty = [name for name in needed if name not in given]
    if empty:
        raise CliError(f"{file}: column {', '.join(empty)} is empty on every line", EXIT_USAGE)
    axes = [axis for axis in ControlKind if COLUMN_OF[axis] in given]
    if len(axes) > 1:
        raise CliError(
            f"{file}, line 1: clock_mhz and power_limit_w are both there; keep the one that was controlled", EXIT_USAGE
        )
    axis = axes[0] if axes else ControlKind.CLOCK
    energies &= axis is ControlKind.POWER_LIMIT
    optional = (*CONFIGURATION, COLUMN_OF[axis], *((ENERGY,) if energies else ()))
    names = [name for name in dict.fromkeys((*optional, *needed)) if name in given]
    columns: dict[str, list[float]] = {}
    for name in names:
        may_lack = name == ENERGY and name not in needed
        cells = [row[given[name]] for row in rows]
        columns[name] = [
            math.nan if may_lack and not cell else _number(file, line, name, cell)
            for line, cell in zip(lines, cells, strict=True)
        ]
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
        value = decimal(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CliError(f"{file}, line {line}: {name} is {cell!r}, not a number", EXIT_USAGE)
    return value


def _refusal(file: Path, lines: list[int], error: DomainError) -> CliError:
    from services.core.profiles.observations import PointError

    where = f"{file}, line {lines[error.row]}" if isinstance(error, PointError) else str(file)
    return CliError(f"{where}: {error}", EXIT_USAGE)


def document(
    kind: str,
    points: Observations,
    model: ThroughputModel | EnergyModel | CappedModel,
    judged: Judged,
    *,
    residuals: bool = False,
) -> dict[str, Any]:
    """Return a fit as one JSON object; errors are fractions, and ``mape`` is that of points left out of the fit."""
    from lab.fits import spread_of, standard_errors
    from services.core.profiles.capped import NAMES, CappedModel
    from services.core.profiles.observations import COLUMN_OF

    if isinstance(model, CappedModel):
        form, parameters, quality = (
            Form.CAPPED,
            dict(zip(NAMES, model.vector.tolist(), strict=True)),
            model.time_quality,
        )
    else:
        form, parameters, quality = Form.PAPER, model.parameters._asdict(), model.quality
    if kind == "energy":
        points = points.take(points.with_energy)
    corrected = {"mape_of_the_form": _known(judged.form_mape), "residuals": _correction(judged.residuals)}
    return {
        "model": kind,
        "form": form.value,
        "axis": COLUMN_OF[model.axis],
        "parameters": parameters,
        "standard_errors": dict(zip(parameters, standard_errors(model.covariance), strict=True)),
        "fixed": dict(model.fixed),
        "mape": _known(judged.held_out_mape),
        **(corrected if residuals else {}),
        "mape_in_sample": judged.mape,
        "noise": judged.noise,
        "points": int(points.count.sum()),
        "configurations": quality.configurations,
        "spread": {name: dict(zip(SPREAD, each, strict=True)) for name, each in spread_of(points).items()},
    }


def _known(share: float) -> float | None:
    return None if math.isnan(share) else share


def _correction(residuals: Residuals | None) -> dict[str, Any] | None:
    """Return everything that a correction is computed from; None if the form predicts as well without one."""
    from lab.residuals import COLUMNS

    if residuals is None:
        return None
    return {
        "scales": dict(zip(COLUMNS, residuals.scales.tolist(), strict=True)),
        "at": residuals.at.tolist(),
        "weight": residuals.weight.tolist(),
    }


def _tell(
    kind: str,
    points: Observations,
    model: ThroughputModel | EnergyModel | CappedModel,
    judged: Judged,
    as_json: bool,
    *,
    residuals: bool,
) -> None:
    found = document(kind, points, model, judged, residuals=residuals)
    if as_json:
        print_json(found)
        return
    shown = table("parameter", ">value", ">standard error", title=f"{kind}, by {found['axis']}")
    for name, value in found["parameters"].items():
        if name not in model.fixed or name == "f0_mhz":
            shown.add_row(name, f"{value:.5g}", f"{found['standard_errors'][name]:.2g}")
    console.print(shown)
    console.print(f"form: {FORM_IS[found['form']]}")
    outside = "too few points" if found["mape"] is None else f"{100 * found['mape']:.2f} %"
    console.print(
        f"MAPE on points left out, a tenth at a time: {outside}; on the points fitted: "
        f"{100 * found['mape_in_sample']:.2f} % ({found['points']} points, {found['configurations']} configurations)"
    )
    if residuals:
        before = found["mape_of_the_form"]
        without = "" if before is None else f"; without the correction {100 * before:.2f} % on points left out"
        used = f"{len(found['residuals']['weight'])} points" if found["residuals"] else "no gain, so there is none"
        console.print(f"residual correction (ours): {used}{without}")
    reasons: dict[str, list[str]] = {}
    for name, why in model.fixed.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        console.print(f"[dim]not fitted, as {why}: {', '.join(names)}[/]")
