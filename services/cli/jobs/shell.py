"""``wattshift shell``: a terminal on GPUs of its own."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_FAILED, CliError
from services.cli.jobs.exec import CommandAfterDashes, end_with, in_this_terminal, words_after_dashes
from services.cli.jobs.following import FINAL, POLL_S
from services.cli.jobs.specs import SpecOptions, spec_of
from services.cli.jobs.submit import check_folders, signed, submit_all
from services.cli.terminal import LostError, run_session

DEFAULT_TIME, DEFAULT_GRACE = "1h", "30s"
ATTEND_S = 60  #: How long the job waits for its terminal before it gives its GPUs back

_HOLD = f"""\
[ "$WATTSHIFT_NNODES" = 1 ] || {{ echo "the GPUs of a shell must be on one node; ask for fewer" >&2; exit 1; }}
trap '' TERM
file="$WATTSHIFT_CHECKPOINT_DIR/terminal.$WATTSHIFT_GENERATION"
left={ATTEND_S * 5}
until [ -s "$file" ]; do
    left=$((left - 1))
    [ "$left" -gt 0 ] || {{ echo "nobody opened its terminal within {ATTEND_S} s" >&2; exit 1; }}
    sleep 0.2
done
read -r pid < "$file"
while kill -0 "$pid" 2> /dev/null; do sleep 0.2; done
"""
"""What the job itself runs: it holds the GPUs as long as the terminal's program, and is killed after the grace."""

_ATTEND = 'echo $$ > "$WATTSHIFT_CHECKPOINT_DIR/terminal.$WATTSHIFT_GENERATION" && exec "$@"'


def register(app: typer.Typer) -> None:
    app.command("shell", cls=CommandAfterDashes)(shell)


def shell(
    context: typer.Context,
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs, all on one node.")] = 1,
    model: Annotated[str | None, typer.Option(help="GPU model, as nodes report it.")] = None,
    memory: Annotated[str | None, typer.Option(help="Least memory of each GPU, GiB.")] = None,
    slice_: Annotated[str | None, typer.Option("--slice", help="A MIG slice instead, such as 2g.")] = None,
    container: Annotated[str | None, typer.Option(metavar="IMAGE", help="Container image to run in.")] = None,
    time_limit: Annotated[str, typer.Option("--time", metavar="DURATION", help="Longest session.")] = DEFAULT_TIME,
    grace: Annotated[str, typer.Option(metavar="DURATION", help="How long it may go on after that.")] = DEFAULT_GRACE,
    workdir: Annotated[Path | None, typer.Option(help="Folder to begin in; by default the present one.")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="As for submit.")] = None,
    project: Annotated[str | None, typer.Option(help="For reports and filters.")] = None,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "shell",
) -> None:
    """Open a terminal on GPUs: submit a job that holds them, and wait until it starts.

    wattshift shell --gpus 2 --time 4h
    wattshift shell --gpus 1 -- python3

    It runs your login shell, or what follows --. The job ends when that does, or when this command does.
    """
    terminal = in_this_terminal()
    program = words_after_dashes(context) or [os.environ.get("SHELL") or "/bin/sh", "-l"]
    if container and not words_after_dashes(context):
        program = ["/bin/sh", "-l"]
    kept = {"gpus": str(gpus), "slice": slice_, "time": time_limit}
    options = SpecOptions.of(context.params, **kept, preemptible=False, processes="per_node", progress="none")
    spec = signed(spec_of(options, ["/bin/sh", "-c", _HOLD], name, dict(os.environ)))
    gateway = Gateway()
    check_folders(gateway, [spec], writes=False)
    with _cancelled_at_the_end(gateway) as jobs:
        job = submit_all(gateway, [spec])[0]["id"]
        jobs.append(job)
        _say(f"{job} waits for {gpus} GPU{'s' if gpus > 1 else ''}; Ctrl-C cancels it")
        _wait_until_running(gateway, job)
        body = {"command": ["/bin/sh", "-c", _ATTEND, "sh", *program], "stdin": True, **terminal}
        started = f"{job} runs; it ends with this terminal, and after {time_limit} at the latest"
        code, detail = run_session(gateway, job, body, on_started=lambda: _say(started))
        jobs.clear()  # it ends by itself now, and has succeeded
    end_with(code, detail)


def _wait_until_running(gateway: Gateway, job_id: str) -> None:
    """Wait until a job runs, saying meanwhile why it waits."""
    said = ""
    while (job := gateway.get(f"/v1/jobs/{job_id}"))["state"] != "running":
        why = job.get("detail") or ""
        if job["state"] in FINAL:
            raise CliError(f"the job has {job['state']}: {why}" if why else f"the job has {job['state']}", EXIT_FAILED)
        if why and why != said:
            _say(why)
            said = why
        time.sleep(POLL_S)


@contextlib.contextmanager
def _cancelled_at_the_end(gateway: Gateway) -> Iterator[list[str]]:
    """Yield a list whose jobs are cancelled when the block ends, even if this process is told to terminate."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    jobs: list[str] = []
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield jobs
    except LostError:
        _say("the job is being ended")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for job_id in jobs:
            with contextlib.suppress(CliError):
                gateway.call("POST", f"/v1/jobs/{job_id}/cancel")


def _say(text: str) -> None:
    output.say(f"wattshift: {text}")
