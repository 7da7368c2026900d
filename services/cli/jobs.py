"""Commands on jobs: submit, inspect, control."""

from __future__ import annotations

import json
import shlex
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from services.cli import output
from services.cli.client import EXIT_FAILED, EXIT_USAGE, CliError, Gateway
from services.cli.output import console
from services.cli.values import filled
from services.contracts.jobs import MAX_BATCH_JOBS, JobBatch, JobSpec
from services.contracts.nodes import LOG_NEXT_OFFSET_HEADER
from services.contracts.problems import ProblemCode
from services.core.domain.jobs import JobState

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]

FINAL = {state.value for state in JobState if state.is_final}


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(submit)
    app.command("jobs")(list_jobs)
    app.command("job")(show_job)
    app.command()(logs)
    for command in ("cancel", "hold", "release"):
        app.command(command, help=f"{command.capitalize()} jobs.")(_steer(command))


def read_specs(path: Path) -> list[JobSpec]:
    """Return the jobs of a file: one spec, a list of them, or ``{"jobs": [...]}``; `-` is standard input.

    ``{python}`` in a command stands for the Python of this installation and ``{examples}`` for the folder of examples.

    Raises:
        CliError: The file cannot be read, or a spec is not valid; the message names the field.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        document: Any = json.loads(text)
    except (OSError, ValueError) as error:
        raise CliError(f"cannot read {path}: {error}", EXIT_USAGE) from error
    if isinstance(document, dict):
        specs: Any = document.get("jobs", [document])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    else:
        specs = document
    try:
        batch = JobBatch.model_validate({"jobs": specs})
    except ValidationError as error:
        first = error.errors()[0]
        raise CliError(f"{path}: /{'/'.join(map(str, first['loc']))}: {first['msg']}", EXIT_USAGE) from error
    return [spec.model_copy(update={"command": [filled(word) for word in spec.command]}) for spec in batch.jobs]


def submit_all(gateway: Gateway, specs: list[JobSpec], idempotency_key: str | None = None) -> list[Any]:
    """Submit jobs, in batches where there are many; return the accepted jobs in order."""
    key = idempotency_key or uuid.uuid4().hex
    if len(specs) == 1:
        return [gateway.call("POST", "/v1/jobs", body=specs[0], headers={"idempotency-key": key})]
    accepted: list[Any] = []
    for number, start in enumerate(range(0, len(specs), MAX_BATCH_JOBS)):
        batch = JobBatch(jobs=specs[start : start + MAX_BATCH_JOBS])
        headers = {"idempotency-key": f"{key}-{number}"}
        accepted += gateway.call("POST", "/v1/jobs:batch", body=batch, headers=headers)["jobs"]
    return accepted


def submit(
    file: Annotated[Path | None, typer.Argument(help="JSON file with one or more jobs; - for standard input.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of a job given on the command line.")] = None,
    gpus: Annotated[str, typer.Option(help="Gang size: N, or MIN-MAX.")] = "1",
    command: Annotated[str | None, typer.Option("--command", "-c", help="Command line, quoted as for a shell.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="Submitting again with the same key is safe.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait for the end; exit 1 unless every job succeeds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit jobs from a file, or one job: wattshift submit --gpus 1-4 --command 'python3 train.py'."""
    if (file is None) == (command is None):
        raise CliError("give either a file or a --command", EXIT_USAGE)
    specs = read_specs(file) if file else [_spec_of(name, gpus, shlex.split(command or ""))]
    gateway = Gateway()
    accepted = submit_all(gateway, specs, idempotency_key)
    if wait:
        accepted = list(wait_for(gateway, [job["id"] for job in accepted]))
    if as_json:
        output.print_json(accepted)
    else:
        for job in accepted:
            console.print(f"{job['id']}  {output.state(job['state'])}  {job['name']}")
    if wait and any(job["state"] != "succeeded" for job in accepted):
        raise typer.Exit(EXIT_FAILED)


def _spec_of(name: str | None, gpus: str, command: list[str]) -> JobSpec:
    least, _, most = gpus.partition("-")
    try:
        document = {"name": name or Path(command[0]).name if command else "", "command": command}
        return JobSpec.model_validate({**document, "gpus": {"min": int(least), "max": int(most or least)}})
    except ValueError as error:
        raise CliError(f"that is not a job: {error}", EXIT_USAGE) from error


def wait_for(gateway: Gateway, job_ids: list[str], poll_s: float = 0.5) -> Iterator[Any]:
    """Yield each job once it has ended, in the order given."""
    for job_id in job_ids:
        while (job := gateway.get(f"/v1/jobs/{job_id}"))["state"] not in FINAL:
            time.sleep(poll_s)
        yield job


def list_jobs(
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in this state; may be repeated.")] = None,
    project: Annotated[str | None, typer.Option(help="Only jobs of this project.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only jobs with this label, key=value; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many jobs to show, newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    jobs = Gateway().pages("/v1/jobs", limit, state=state or None, project=project, label=label or None)
    if as_json:
        output.print_json(jobs)
    else:
        console.print(job_table(jobs) if jobs else "no jobs")


def job_table(jobs: list[Any]) -> Table:
    """Return jobs as a table."""
    figures = ("GPUs", "done", "energy", "CO2")
    shown = output.table("job", "name", "state", "GPUs", "done", "energy", "CO2", "age", "why", right=figures)
    for job in jobs:
        share = output.progress_share(job)
        shown.add_row(
            job["id"],
            job["name"],
            output.state(job["state"]),
            str(job["gpus"] or "-"),
            "-" if share is None else f"{share:.0%}",
            output.energy(job["footprint"]["energy_j"]),
            output.carbon(job["footprint"]["carbon_gco2"]),
            output.age(job["submitted_at"]),
            job.get("reason") or "",
        )
    return shown


def show_job(job: JobArgument, as_json: AsJson = False) -> None:
    """Show a job: its state, the reason, its energy and its emissions."""
    gateway = Gateway()
    found, profile = gateway.get(f"/v1/jobs/{job}"), gateway.get(f"/v1/jobs/{job}/profile")
    prediction = _prediction(gateway, job)
    if as_json:
        output.print_json({**found, "profile": profile, "prediction": prediction})
        return
    footprint, gang = found["footprint"], found["spec"]["gpus"]
    rows = {
        "job": found["id"],
        "name": found["name"],
        "state": output.state(found["state"]),
        "why": f"{found.get('reason') or '-'}  {found.get('detail') or ''}",
        "expected start": found.get("expected_start_at") or "-",
        "GPUs": f"{found['gpus']} of {gang['min']} to {gang['max'] or gang['min']}",
        "placement": ", ".join(f"{s['node_id']}{s['devices']}" for s in found["placement"]) or "-",
        "set to": _settings_words(found, profile),
        "profile": _profile_words(profile),
        "predicted": _prediction_words(prediction),
        "progress": _progress_words(found),
        "submitted": f"{found['submitted_at']} ({output.age(found['submitted_at'])} ago)",
        "ended": found.get("ended_at") or "-",
        "gangs": f"{found['generation']} ({found['preemptions']} preemptions, {found['restarts']} restarts)",
        "exit code": str(found.get("exit_code", "-")),
        "energy": f"{output.energy(footprint['energy_j'])} ({output.energy(footprint['gpu_energy_j'])} by GPUs)",
        "emissions": f"{output.carbon(footprint['carbon_gco2'])} CO2",
    }
    shown = output.table("", "")
    for label, value in rows.items():
        shown.add_row(f"[bold]{label}[/]", value)
    console.print(shown)


def _settings_words(job: dict[str, Any], profile: dict[str, Any]) -> str:
    watts, clock = job.get("power_limit_w"), job.get("clock_mhz")
    words = [f"{watts:g} W per GPU" if watts else "", f"{clock} MHz" if clock else ""]
    asked = ", ".join(word for word in words if word) or "defaults"
    newest = next((each for each in profile["in_force"] if each["current"]), None)
    if newest is None or (newest["power_limit_w"], newest["clock_mhz"]) != (watts, clock):
        return asked
    told = f", {min(newest['enforced_w']):g} W as read back from the devices" if newest["enforced_w"] else ""
    return f"{asked} (in force since {newest['since']}{told})"


def _prediction(gateway: Gateway, job: str) -> dict[str, Any] | None:
    """Return the prediction for a job; None if there is none."""
    try:
        return gateway.get(f"/v1/predictions/{job}")
    except CliError as error:
        if error.code != ProblemCode.CONFLICT:
            raise
        return None


def _prediction_words(prediction: dict[str, Any] | None) -> str:
    if prediction is None:
        return "nothing yet"
    if not prediction["group_seen"]:
        told = "0: the first of its group"
    else:
        told = (
            f"{prediction['gpu_s']:.0f} +- {prediction['spread_gpu_s']:.0f} GPU seconds, from {prediction['examples']} "
            f"jobs of its group ({prediction['low_gpu_s']:.0f} to {prediction['high_gpu_s']:.0f})"
        )
    actual = prediction["actual_gpu_s"]
    return told if actual is None else f"{told}; actual {actual:.0f}"


def _profile_words(profile: dict[str, Any]) -> str:
    units = {"power_limit": "W", "clock": "MHz"}
    lines = [
        f"{curve['gpu_model']}: {curve['values'][0]:g} to {curve['values'][-1]:g} {units[curve['setting']]}, "
        f"measured on {', '.join(map(str, curve['measured_gpus']))} GPUs; "
        f"error {curve['time_mape']:.1%} in time, {curve['energy_mape']:.1%} in energy"
        + ("" if curve["batch_known"] else "; other sizes assume a usual batch, because the job does not state its own")
        if curve["values"]
        else f"{curve['gpu_model']}: {curve['detail']}"
        for curve in profile["curves"]
    ]
    for newest in profile["measurements"][:1]:
        at = f"{newest['position'] + 1} of {len(newest['settings'])} values"
        lines.append(f"{newest['state']}, {at}  {newest['detail']}" if newest["state"] != "done" else newest["detail"])
    return "\n".join([f"of {profile['kind']}", *filter(None, lines)]) if any(lines) else "nothing was measured"


def _progress_words(job: dict[str, Any]) -> str:
    progress = job.get("progress")
    if not progress:
        return "-"
    share = output.progress_share(job)
    return f"{progress['done']:g}" + (f" of {progress['total']:g} ({share:.0%})" if share is not None else "")


def logs(
    job: JobArgument,
    stderr: Annotated[bool, typer.Option("--stderr", help="Show standard error instead of standard output.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")] = False,
    generation: Annotated[int | None, typer.Option(help="Show the output of an earlier gang of the job.")] = None,
) -> None:
    """Print a job's output."""
    gateway = Gateway()
    stream = "stderr" if stderr else "stdout"
    path = f"/v1/jobs/{job}/logs"
    if follow:
        with gateway.stream(path, stream=stream, follow="true", generation=generation) as answer:
            for chunk in answer.iter_bytes():
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()
        return
    offset = 0
    while True:
        answer = gateway.text(path, stream=stream, offset=offset, generation=generation)
        sys.stdout.buffer.write(answer.content)
        if not answer.content:
            break
        offset = int(answer.headers.get(LOG_NEXT_OFFSET_HEADER, offset + len(answer.content)))
    sys.stdout.flush()


def _steer(action: str) -> Any:
    def command(
        jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs.")], as_json: AsJson = False
    ) -> None:
        gateway = Gateway()
        answers = [gateway.call("POST", f"/v1/jobs/{job}/{action}") for job in jobs]
        if as_json:
            output.print_json(answers)
        else:
            for answer in answers:
                console.print(f"{answer['id']}  {output.state(answer['state'])}  {answer.get('detail') or ''}")

    return command
