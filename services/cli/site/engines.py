"""The site's engines: what they are told, and the processes that bridge them."""

import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import RenderableType

from services.cli import output
from services.cli.client import Gateway, local_sockets, local_url
from services.cli.commands import EXIT_FAILED, AsJson, CliError, Group, Watch
from services.cli.values import made
from services.kit.sockets import SOCKETS

SACCT = (
    "--allusers",
    "--allocations",
    "--parsable2",
    "--format=JobID,User,Submit,Start,End,State,ElapsedRaw,AllocTRES,ReqTRES",
)


def register(app: typer.Typer) -> None:
    engine = Group(app, "engine", "Show the engines that run jobs on this site, or steer one.", list_engines)
    engine.add(slurm, ray, slurm_history, days=list_days, jobs=list_jobs)


def list_engines(watch: Watch = False, as_json: AsJson = False) -> None:
    """Show the engines, and what was decided about their jobs today."""
    gateway = Gateway()
    if as_json:
        return output.print_json(gateway.get("/v1/engines")["items"])
    output.show(lambda: _table(gateway.get("/v1/engines")["items"]), watch=watch)


def _table(found: list[Any]) -> RenderableType:
    shown = output.table("engine", "mode", "state", ">GPUs", ">in use", "jobs", "today", "heard")
    for each in found:
        state = each["problem"] or ("heard" if each["heard"] else "silent")
        jobs = ", ".join(f"{count} {name}" for name, count in sorted(each["jobs"].items()))
        days = each["days"][:1]
        today = "\n".join(f"{count} {name}" for name, count in days[0]["counts"].items()) if days else ""
        shown.add_row(
            f"{each['name']} ({each['kind']})", each["mode"], state, str(each["gpus"]), str(each["gpus_in_use"]), jobs,
            today, output.age(each["reported_at"]),
        )  # fmt: skip
    return shown if found else "no engine was reported: start a bridge, such as `wattshift engine slurm`"


def list_days(
    name: Annotated[str, typer.Argument(help="The engine, as `wattshift engine` names it.")],
    days: Annotated[int, typer.Option(min=1, max=3_660, help="How far back, today included.")] = 31,
    as_json: AsJson = False,
) -> None:
    """Show what was decided about an engine's jobs day by day, and what a dry run would have saved."""
    found = Gateway().get(f"/v1/engines/{name}/days", days=days)["items"]
    if as_json:
        output.print_json(found)
    elif not found:
        output.console.print(f"nothing was decided of jobs of {name} in {days} days")
    else:
        output.console.print(_days_table(found))


def _days_table(found: list[Any]) -> RenderableType:
    shown = output.table("day", ">jobs", ">later", ">by", ">emitted", ">would have", ">saved", "decided", "left out")
    saved = [each["savings"] or {} for each in found]
    columns = [[each.get(name) for each in saved] for name in ("carbon_gco2", "would_carbon_gco2")]
    grams = output.emissions(
        [*columns[0], *columns[1], *(None if a is None else a - b for a, b in zip(*columns, strict=True))]
    )
    for at, each in enumerate(found):
        decided = ", ".join(f"{count} {name}" for name, count in sorted(each["counts"].items()))
        shown.add_row(
            each["day"], *_saved(each["savings"], grams[at :: len(found)]), decided, _left_out(each["savings"])
        )
    return shown


def _saved(savings: dict[str, Any] | None, grams: list[str]) -> list[str]:
    """Return the figures of a day's dry run; ``grams``: emissions as they were, as they would have been, and saved."""
    if savings is None:
        return [""] * 6
    by = "-" if savings["later_h"] is None else output.duration(savings["later_h"] * 3_600)
    shown = ["-"] * 3 if savings["carbon_gco2"] is None else grams
    return [str(savings["jobs"]), str(savings["later"]), by, *shown]


def _left_out(savings: dict[str, Any] | None) -> str:
    if savings is None:
        return ""
    said = [f"{savings[name]} {name}" for name in ("unplanned", "unmeasured", "unpriced") if savings[name]]
    return ", ".join([*said, *([] if savings["settled"] else ["not settled"])])


def list_jobs(
    name: Annotated[str, typer.Argument(help="The engine, as `wattshift engine` names it.")],
    would: Annotated[
        bool, typer.Option("--would", help="Only jobs that are held for a greener hour, or would be without --dry-run.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which jobs wait in an engine, until when each is held for a greener hour, and what that saves."""
    found = Gateway().get(f"/v1/engines/{name}/jobs", **({"held": True} if would else {}))
    if as_json:
        return output.print_json(found)
    if found["items"]:
        output.console.print(_jobs_table(found["items"]))
    else:
        output.console.print("no job is held for a greener hour" if would else "no job waits")
    for line in _steerable(found["hours"]):
        output.console.print(line, markup=False)


def _jobs_table(found: list[Any]) -> RenderableType:
    shown = output.table("job", "name", "user", "queue", ">GPUs", "until", ">in", ">saves", "waits for")
    grams = output.emissions([each["saves_gco2"] for each in found])
    for each, saves in zip(found, grams, strict=True):
        at = output.instant(each["held_until"])
        until = ["", "", ""]
        if at is not None:
            until = [f"{at:%a %H:%M} UTC", output.duration((at - datetime.now(UTC)).total_seconds()), saves]
        waits_for = "a greener hour" if at else each["waits_for"] or "its turn"
        shown.add_row(
            each["number"], each["name"], each["user"], each["queue"], str(each["gpus"]), *until, waits_for
        )  # fmt: skip
    return shown


def _steerable(hours: list[Any]) -> list[str]:
    """Return how much of an engine's work can be steered, and why the rest cannot."""
    total_h = sum(each["gpu_h"] for each in hours)
    if not total_h:
        return []
    steered_h = sum(each["gpu_h"] for each in hours if not each["why_not"])
    rest = [f"{each['gpu_h'] / total_h:.0%} {each['why_not']}" for each in hours if each["why_not"]]
    said = f"{steered_h / total_h:.0%} of {total_h:,.0f} GPU hours in the last 7 days can be steered"
    return [f"{said}; left alone: {', '.join(rest)}" if rest else said]


Control = Annotated[
    bool, typer.Option("--control/--dry-run", help="Change the engine's jobs, or only count what would be changed.")
]
Name = Annotated[str | None, typer.Option(help="The name of the bridge, and of this engine.")]
Zone = Annotated[str | None, typer.Option(help="Grid zone of the nodes.")]


def slurm(
    control: Control = False,
    partition: Annotated[
        list[str] | None, typer.Option(help="Steer the jobs of this partition alone; may be given again.")
    ] = None,
    name: Name = None,
    zone: Zone = None,
) -> None:
    """Run the bridge to this host's Slurm until it is stopped.

    It runs as a user whom Slurm lets change other people's jobs, such as root, and reads further settings from
    the variables ENGINE_SLURM_..., as the token of `wattshift nodes enroll NAME --engine`, ENGINE_SLURM_ENROLL_TOKEN.
    """
    _become_bridge("slurm", control, NODE_ID=name, ZONE=zone, PARTITIONS=",".join(partition or []) or None)


def ray(
    control: Control = False,
    address: Annotated[str | None, typer.Option(help="Ray's dashboard; by default http://127.0.0.1:8265.")] = None,
    name: Name = None,
    zone: Zone = None,
) -> None:
    """Run the bridge to a Ray cluster until it is stopped.

    It reads further settings from the variables ENGINE_RAY_..., as the token of `wattshift nodes enroll NAME --engine`,
    ENGINE_RAY_ENROLL_TOKEN.
    """
    _become_bridge("ray", control, NODE_ID=name, ZONE=zone, ADDRESS=address)


def _become_bridge(kind: str, control: bool, **given: str | None) -> NoReturn:
    """Go on as the bridge to an engine, which reports to this machine's installation unless a setting names another."""
    settings = {"MODE": "control" if control else "dry_run", **given}
    named = {f"ENGINE_{kind.upper()}_{key}": value for key, value in settings.items() if value is not None}
    environment = {**os.environ, **named}
    if (telemetry := local_url("telemetry")) is not None:
        environment = {"WATTSHIFT_TELEMETRY_URL": telemetry, SOCKETS: local_sockets(), **environment}
    command = [sys.executable, "-P", "-m", f"services.engines.{kind}.app"]
    os.execve(sys.executable, command, environment)


def slurm_history(
    start: Annotated[str, typer.Option(help="First day of the history, as 2026-11-01.")],
    days: Annotated[int, typer.Option(min=1, help="How many days of it.")] = 7,
    policy: Annotated[str, typer.Option(help="Policies to compare.")] = "fifo,green,joint",
    carbon: Annotated[str, typer.Option(help="Whose grid: a zone with a recording, or a file.")] = "GB",
    keep: Annotated[Path | None, typer.Option(help="Where to keep what sacct answered.")] = None,
) -> None:
    """Show what policies would have done with the jobs that this Slurm has run, according to its accounting."""
    environment = {**os.environ, "SLURM_TIME_FORMAT": "%FT%T%z"}
    period = [f"--starttime={start}", "--endtime=now"]
    try:
        answer = subprocess.run(["sacct", *SACCT, *period], env=environment, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", "") or str(error)
        raise CliError(f"sacct does not say what has run: {words.strip()[-300:]}", EXIT_FAILED) from error
    with tempfile.TemporaryDirectory() as folder:
        file = keep or Path(folder) / "sacct.txt"
        with made(file) as part:
            part.write_text(answer.stdout, encoding="utf-8")
        options = ["--jobs", str(file), "--policy", policy, "--carbon", carbon, "--start", start, "--days", str(days)]
        command = [sys.executable, "-P", "-m", "services.cli.main", "simulate", "training", *options]
        raise typer.Exit(subprocess.run(command, check=False).returncode)
