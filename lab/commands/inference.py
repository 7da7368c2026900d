"""``wattshift lab inference``: what Clover and other schemes would have done with an inference service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from services.cli.commands import EXIT_NOT_FOUND, EXIT_USAGE, CliError
from services.cli.output import console, print_json, table


def inference(
    carbon: Annotated[
        str,
        typer.Option(
            help="Hourly gCO2/kWh: ciso-march, ciso-september or eso-march, a CSV file of one column, or a grid's file."
        ),
    ],
    family: Annotated[str, typer.Option(help="Model family, in the profile's column of that name.")] = "efficientnet",
    gpus: Annotated[int, typer.Option(help="How many GPUs there are.")] = 10,
    profile: Annotated[
        Path | None, typer.Option(help="CSV of variants measured alone on slices; by default EfficientNet on an H200.")
    ] = None,
    shared_profile: Annotated[
        Path | None, typer.Option(help="CSV of variants measured together on slices; same columns.")
    ] = None,
    accuracy: Annotated[Path | None, typer.Option(help="JSON object of per cent by variant.")] = None,
    scheme: Annotated[
        Literal["clover", "base", "co2opt", "blover", "oracle"], typer.Option(help="Who chooses configurations.")
    ] = "clover",
    carbon_weight: Annotated[float, typer.Option("--lambda", help="Weight of carbon against accuracy, 0 to 1.")] = 0.5,
    max_accuracy_loss_pct: Annotated[
        float | None, typer.Option(help="Accuracy floor: the greatest loss against the best variant, per cent.")
    ] = None,
    hours: Annotated[int, typer.Option(help="How many hours of the trace.")] = 48,
    load: Annotated[float, typer.Option(help="Requests as a share of BASE's capacity.")] = 0.8,
    reference_gpus: Annotated[
        int | None, typer.Option(help="GPUs of BASE, which sets load and SLA; by default --gpus.")
    ] = None,
    evaluation_s: Annotated[float, typer.Option(help="Seconds of traffic that an evaluation takes.")] = 10.0,
    recut_s: Annotated[
        float, typer.Option(help="Seconds that a GPU is out of service when it is cut anew, one GPU after the other.")
    ] = 0.0,
    trigger_pct: Annotated[float, typer.Option(help="Optimise when the intensity changed by this much.")] = 5.0,
    screen: Annotated[
        bool, typer.Option(help="Predict configurations before measuring any; without, search as the paper prints it.")
    ] = True,
    bound: Annotated[bool, typer.Option(help="Compute an upper bound of the objective as well.")] = False,
    seed: Annotated[int, typer.Option(help="Equal input and equal seed give equal results.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve Poisson requests with model variants on slices of GPUs, and show carbon, accuracy and latency."""
    from lab.inference.hours import TRACES
    from lab.inference.run import InferenceRun, Scheme
    from services.core.domain.errors import DomainError

    named = {"--profile": profile, "--shared-profile": shared_profile, "--accuracy": accuracy}
    for option, path in named.items():
        if path is not None and not path.is_file():
            raise CliError(f"{option}: there is no file {str(path)!r}", EXIT_NOT_FOUND)
    if carbon not in TRACES and not Path(carbon).is_file():
        raise CliError(f"there is no file {carbon!r}; bundled traces: {', '.join(TRACES)}", EXIT_NOT_FOUND)
    try:
        result = InferenceRun(
            carbon=carbon,
            family=family,
            gpus=gpus,
            scheme=Scheme(scheme),
            carbon_weight=carbon_weight,
            hours=hours,
            seed=seed,
            profile=profile,
            shared_profile=shared_profile,
            accuracy=accuracy,
            max_accuracy_loss_pct=max_accuracy_loss_pct,
            reference_gpus=reference_gpus,
            load=load,
            evaluation_s=evaluation_s,
            recut_s=recut_s,
            trigger_pct=trigger_pct,
            screen=screen,
            bound=bound,
        ).simulate()
    except DomainError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    if as_json:
        print_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    title = f"{result['family']} on {result['gpus']} GPUs, {result['carbon']}, {result['hours']} h, {result['scheme']}"
    right = (">Carbon", ">Accuracy", ">p95/SLA", ">Objective", ">Evaluations", ">Met SLA", ">Optimising", ">Took")
    shown = table(*right, title=title)
    shown.add_row(
        f"{-result['carbon_saving_pct']:+.1f} %",
        f"{-result['accuracy_loss_pct']:+.2f} %",
        f"{result['p95_over_sla']:.3f}",
        f"{result['objective_mean']:.2f}",
        str(result["evaluations"]),
        "-" if result["sla_ok_share"] is None else f"{100 * result['sla_ok_share']:.0f} %",
        f"{100 * result['optimisation_time_share']:.2f} %",
        f"{result['wall_s']:.1f} s",
    )
    console.print(shown)
    if result.get("bound_mean") is not None:
        console.print(f"no configuration has a mean objective above {result['bound_mean']:.2f}")
    previous: dict[str, int] = {}
    for hour in result["timeline"]:
        if hour["configuration"] != previous:
            previous = hour["configuration"]
            mix = ", ".join(f"{count} {what}" for what, count in previous.items())
            console.print(f"hour {hour['hour']}, {hour['gco2_per_kwh']:g} gCO2/kWh: {mix}")
    for note in result.get("notes", ()):
        console.print(f"[dim]{escape(note)}[/]")
