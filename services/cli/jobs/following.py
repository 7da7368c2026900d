"""Wait for jobs, and follow the output of one across all of its gangs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from services.cli import output
from services.cli.client import Gateway, each_time
from services.cli.commands import CliError
from services.cli.jobs import arrays, job_output
from services.cli.jobs.names import ENDED, path_of
from services.contracts.codes import ProblemCode

STREAM = "both"  #: What is shown unless a stream is asked for
POLL_S = 0.5
EXIT_INTERRUPTED = 130


def states(gateway: Gateway, job_id: str) -> Iterator[Any]:
    """Yield a job or an array as it is now, and again after each pause, at last as it has ended."""
    for job in each_time(gateway, path_of(job_id), POLL_S):
        yield job
        if job["state"] in ENDED:
            return


def follow(
    gateway: Gateway,
    job_id: str,
    stream: str = STREAM,
    *,
    raw: bool = False,
    tail: int | None = None,
    since: str | None = None,
    pattern: str | None = None,
) -> Any:
    """Print a job's output as it comes, from its current or next gang until the job ends; return the ended job.

    The output goes to standard output; what happens to the job, to standard error.

    Args:
        stream: ``both``, ``stdout`` or ``stderr``.
        raw: Whether the output may control the terminal.
        tail: How many of the existing lines to begin with; by default all.
        since: Begin with what was written from this time on, ISO 8601; by default with all.
        pattern: A regular expression; lines that do not match are left out.
    """
    printed, said = 0, ""
    for job in each_time(gateway, f"/v1/jobs/{job_id}", POLL_S):
        is_final = job["state"] in ENDED
        if not is_final:
            said = _tell(job, said)
        has_output = job["generation"] > printed and (is_final or job["state"] in ("running", "preempting"))
        if has_output:  # of earlier gangs, none is printed: the job may have had many before somebody follows it
            log = job_output.JobOutput(gateway, job_id, stream, job["generation"])
            try:
                output.print_log(job_output.lines_with(log.followed(log.start(tail, since)), pattern), raw=raw)
                printed, tail, since = job["generation"], None, None
                continue
            except CliError as error:
                if error.code != ProblemCode.NO_DATA:
                    raise
        if is_final:  # how it ended comes after its output, also if it had ended before
            _tell(job, said)
            return job
    raise AssertionError("it is asked until the job has ended")


def _tell(job: dict[str, Any], said: str) -> str:
    """Print a job's state unless that was the last thing printed; return the text."""
    state, detail = job["state"], job.get("detail") or ""
    now = f"{job['name']} is {state}" if state not in ENDED else ended_words(job)
    if state in ("queued", "held", "preempting") and detail:
        now += f": {detail}"
    if now != said:
        output.say(now)
    return now


def ended_words(job: dict[str, Any]) -> str:
    """Return how a job ended, in one sentence."""
    footprint = job["footprint"]
    used = f"{output.energy(footprint['energy_j'])}, {output.carbon(footprint['carbon_gco2'])} CO2 recorded so far"
    how = "was cancelled" if job["state"] == "cancelled" else job["state"]
    if job["state"] == "failed" and job.get("exit_code"):
        how += f" with exit code {job['exit_code']}"
    if arrays.is_array(job):
        return f"{job['name']} {how}: of its {job['count']} tasks {arrays.counts(job)} ({used})"
    detail = job.get("detail") or ""
    why = f": {detail}" if detail and job["state"] == "failed" else ""
    return f"{job['name']} {how}{why}" if why else f"{job['name']} {how} ({used})"


@contextmanager
def interruptible(job_ids: list[str]) -> Iterator[None]:
    """Let Ctrl-C end only the waiting: say that the jobs continue, and how to cancel them."""
    try:
        yield
    except KeyboardInterrupt:
        what = "The job goes on" if len(job_ids) == 1 else "The jobs go on"
        output.say(f"\n{what}. To cancel: wattshift cancel {' '.join(job_ids[:20])}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
