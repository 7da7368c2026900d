"""Commands for jobs: list, inspect, control."""

import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, AsJson, CliError, Watch
from services.cli.jobs import arrays, job_output, names
from services.cli.jobs.following import STREAM, ended_words, follow, interruptible
from services.cli.output import console
from services.cli.values import pair, past_time
from services.contracts.codes import ProblemCode

WIDE = 120  #: Columns of a terminal that shows everything of a list of jobs

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="The job's number, such as 12, its id, its beginning, or its name.")
]


def register(app: typer.Typer) -> None:
    app.command("jobs")(list_jobs)
    app.command("job")(show_job)
    app.command()(logs)
    for command in ("cancel", "hold", "release"):
        app.command(command, help=f"{command.capitalize()} jobs, or all tasks of arrays.")(_steer(command))
    words = "Let jobs that wait for the node with their checkpoint start afresh elsewhere; the checkpoint stays there."
    app.command("forget-checkpoint", help=words)(_steer("forget-checkpoint"))


def list_jobs(
    state: Annotated[
        list[str] | None, typer.Option(help="Only jobs in this state; may be repeated, or separated by commas.")
    ] = None,
    mine: Annotated[
        bool,
        typer.Option(
            "--mine",
            help="Only jobs of the user whose API key is in use; if it is no user's, those that your account on this "
            "machine submitted.",
        ),
    ] = False,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only jobs submitted since then: 2d, 6h or 2026-03-01.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="Only jobs of this project.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only jobs with this label, key=value; may be repeated.")
    ] = None,
    array: Annotated[
        str | None, typer.Option(metavar="ARRAY", help="The tasks of this array; otherwise an array is one line.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many jobs to show, newest first.")] = 50,
    watch: Watch = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    states = [each.strip() for word in state or [] for each in word.split(",")]
    after = past_time(since, "--since").isoformat() if since else None
    gateway = Gateway()
    user = gateway.get("/v1/whoami")["user"] if mine else None
    labels = [
        *("=".join(pair(each, "--label")) for each in label or []),
        *([f"{names.USER_LABEL}={names.user_name()}"] if mine and user is None else []),
    ]
    wanted = {"state": states or None, "project": project, "label": labels or None, "submitted_after": after}
    wanted |= {"user": user}
    only = None if array is None else names.array_id(gateway, array)

    def jobs() -> list[Any]:
        if only is not None:
            return gateway.pages("/v1/jobs", limit, array=only, **wanted)
        singles = gateway.pages("/v1/jobs", limit, tasks="false", **wanted)
        return arrays.newest_first(singles, gateway.pages("/v1/arrays", limit, **wanted), limit)

    if as_json:
        output.print_json(jobs())
    else:
        output.show(lambda: job_table(found) if (found := jobs()) else "no jobs", watch=watch)


def job_table(jobs: list[Any]) -> Table:
    """Return jobs as a table; a narrow terminal gets fewer columns, and reasons are never cut off."""
    cells: dict[str, list[str]] = {
        "no.": [names.number_of(job) for job in jobs],
        "job": [job["id"] for job in jobs],
        "name": [job["name"] for job in jobs],
        "state": [output.state(job["state"]) for job in jobs],
        **({"cell": [job.get("cell") or "-" for job in jobs]} if any(job.get("cell") for job in jobs) else {}),
        ">GPUs": [str(job["gpus"] or "-") for job in jobs],
        ">done": ["-" if (share := _share(job)) is None else f"{share:.0%}" for job in jobs],
        ">energy": output.energies(job["footprint"]["energy_j"] for job in jobs),
        ">CO2": output.emissions(job["footprint"]["carbon_gco2"] for job in jobs),
        "age": [output.age(job["submitted_at"]) for job in jobs],
        "why": [arrays.counts(job) if arrays.is_array(job) else output.reason(job) for job in jobs],
    }
    left_out = () if console.width >= WIDE else (">done", ">energy", ">CO2")
    if left_out and "-" not in cells["no."]:
        left_out = ("job", *left_out)
    columns = [column for column in cells if column not in left_out]
    shown = output.table(*columns)
    for row in zip(*(cells[column] for column in columns), strict=True):
        shown.add_row(*row)
    return shown


def _share(job: dict[str, Any]) -> float | None:
    return arrays.done(job) if arrays.is_array(job) else output.progress_share(job)


def show_job(job: JobArgument, as_json: AsJson = False) -> None:
    """Show a job or an array: its state, the reason, its energy and its emissions."""
    gateway = Gateway()
    job = names.job_or_array(gateway, job)
    if names.is_array(job):
        array = gateway.get(names.path_of(job))
        return output.tell(array, as_json, output.in_rows(arrays.rows(array)))
    found, profile = gateway.get(f"/v1/jobs/{job}"), gateway.get(f"/v1/jobs/{job}/profile")
    prediction = _prediction(gateway, job)
    if as_json:
        return output.print_json({**found, "profile": profile, "prediction": prediction})
    footprint, gang = found["footprint"], found["spec"]["gpus"]
    rows = {
        "number": names.number_of(found),
        "job": found["id"],
        "name": found["name"],
        "state": output.state(found["state"]),
        "why": _why(found),
        "expected start": output.clock(found.get("expected_start_at")),
        "GPUs": f"{found['gpus']} of {gang['min']} to {gang['max'] or gang['min']}",
        **(
            {"killed": f"{output.clock(at, output.SECONDS)}, if it has not ended by then"}
            if (at := found.get("stop_at"))
            else {}
        ),
        **({"cell": found["cell"]} if found.get("cell") else {}),
        "placement": ", ".join(f"{s['node_id']}{s['devices']}" for s in found["placement"]) or "-",
        **_batch_row(found),
        "set to": _settings_words(found, profile),
        "profile": _profile_words(profile),
        "predicted": _prediction_words(prediction),
        "progress": _progress_words(found),
        "submitted": f"{output.clock(found['submitted_at'], output.SECONDS)} ({output.age(found['submitted_at'])} ago)",
        "ended": output.clock(found.get("ended_at"), output.SECONDS),
        "gangs": f"{found['generation']} ({found['preemptions']} preemptions, {found['restarts']} restarts)",
        "exit code": "-" if found.get("exit_code") is None else str(found["exit_code"]),
        "energy": f"{output.energy(footprint['energy_j'])} ({output.energy(footprint['gpu_energy_j'])} by GPUs)",
        "emissions": f"{output.carbon(footprint['carbon_gco2'])} CO2",
    }
    if lines := job_output.last_lines(gateway, found):
        rows["last errors"] = "\n".join(lines)
    console.print(output.in_rows(rows))


def _batch_row(job: dict[str, Any]) -> dict[str, str]:
    """Return the batch row of a job that permits a range of batches; empty for any other."""
    permitted, chosen = job["spec"].get("batch"), job.get("batch_size")
    if permitted is None:
        return {}
    now = "" if chosen is None else f"{chosen} samples, "
    return {"batch": f"{now}of {permitted['min']} to {permitted['max']}"}


def _settings_words(job: dict[str, Any], profile: dict[str, Any]) -> str:
    watts, clock = job.get("power_limit_w"), job.get("clock_mhz")
    words = [f"{watts:g} W per GPU" if watts else "", f"{clock} MHz" if clock else ""]
    asked = ", ".join(word for word in words if word) or "defaults"
    newest = next((each for each in profile["in_force"] if each["current"]), None)
    if newest is None or (newest["power_limit_w"], newest["clock_mhz"]) != (watts, clock):
        return asked
    read_back = f", {min(newest['enforced_w']):g} W as read back from the devices" if newest["enforced_w"] else ""
    return f"{asked} (in force since {output.clock(newest['since'], output.SECONDS)}{read_back})"


def _prediction(gateway: Gateway, job: str) -> dict[str, Any] | None:
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
        words = "unknown: no job like it has run here before"
    else:
        words = (
            f"{prediction['gpu_s']:.0f} +- {prediction['spread_gpu_s']:.0f} GPU seconds, from {prediction['examples']} "
            f"jobs of its group ({prediction['low_gpu_s']:.0f} to {prediction['high_gpu_s']:.0f})"
        )
    actual = prediction["actual_gpu_s"]
    return words if actual is None else f"{words}; it took {actual:.0f} GPU seconds"


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
    saved = f"; saved {output.age(progress['saved_at'])} ago" if progress.get("saved_at") else ""
    every = f", last after {output.duration(progress['save_every_s'])}" if progress.get("save_every_s") else ""
    done = f"{progress['done']:g}" + (f" of {progress['total']:g} ({share:.0%})" if share is not None else "")
    return done + saved + every


def logs(
    job: JobArgument,
    stdout: Annotated[bool, typer.Option("--stdout", help="Show standard output alone.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Show standard error alone.")] = False,
    follow_it: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the job ends, over restarts.")
    ] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, metavar="N", help="Only the last N lines.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE|TIME", help="Only what was written since then: 10m, or an ISO 8601 time.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only lines in which this regular expression is found.")
    ] = None,
    generation: Annotated[int | None, typer.Option(help="Show the output of an earlier gang of the job.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Let the output command the terminal: its colours, but anything else too.")
    ] = False,
) -> None:
    """Print a job's output: standard output and standard error together, in the order in which they were written."""
    try:
        re.compile((grep or "").encode())
    except re.error as error:
        raise CliError(f"--grep: {grep!r} is no regular expression: {error}", EXIT_USAGE) from None
    begin = None if since is None else past_time(since, "--since").isoformat()
    gateway = Gateway()
    job = names.job_id(gateway, job)
    stream = STREAM if stdout == stderr else "stderr" if stderr else "stdout"
    if follow_it and generation is None:
        with interruptible([job]):
            follow(gateway, job, stream, raw=raw, tail=tail, since=begin, pattern=grep)
        return
    log = job_output.JobOutput(gateway, job, stream, generation)
    found = (log.followed if follow_it else log.pieces)(log.start(tail, begin))
    size = 0

    def counted() -> Iterator[bytes]:
        nonlocal size
        for piece in found:
            size += len(piece)
            yield piece

    output.print_log(job_output.lines_with(counted(), grep), raw=raw)
    if not size and tail != 0 and generation is None:
        at = gateway.get(f"/v1/jobs/{job}")
        how = ended_words(at) if at["state"] in names.ENDED else f"{at['name']} is {at['state']}"
        where = "" if stream == STREAM else f" to {stream}"
        output.say(f"wattshift: nothing was printed{where}{' since then' if since else ''}; {how}")


def _steer(action: str) -> Any:
    def command(
        jobs: Annotated[
            list[str],
            typer.Argument(metavar="JOB...", help="Numbers of jobs or arrays, ids, beginnings of ids, or names."),
        ],
        as_json: AsJson = False,
    ) -> None:
        gateway = Gateway()
        one = names.job_id if action == "forget-checkpoint" else names.job_or_array
        found = [one(gateway, each) for each in jobs]  # all of them, before anything is done to one
        answers = [gateway.call("POST", f"{names.path_of(each)}/{action}") for each in found]
        if as_json:
            output.print_json(answers)
        else:
            for answer in answers:
                console.print(f"{answer['id']}  {answer['name']}: {what_follows(action, answer)}")

    return command


def what_follows(action: str, job: dict[str, Any]) -> str:
    """Return, in a sentence, what happens next to a job that was steered."""
    if arrays.is_array(job):
        return arrays.what_follows(action, job)
    state, grace = job["state"], job["spec"].get("grace_s", 120)
    has_gang = state in ("starting", "running", "preempting")
    stopping = f"It is being stopped; it has {grace:g} s to save its work"
    if action == "cancel":
        return f"{stopping}, and is cancelled then." if has_gang else "It is cancelled."
    if action == "hold":
        return f"{stopping}, and waits then until it is released." if has_gang else "It waits until it is released."
    then = "It may start on any node." if action == "forget-checkpoint" else "It is queued again."
    return then if state == "queued" else f"It is {state}."


def _why(job: dict[str, Any]) -> str:
    reason, detail = job.get("reason"), job.get("detail")
    if not reason:
        return detail or "-"
    return f"{detail} ({reason})" if detail else reason
