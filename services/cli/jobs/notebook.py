"""Work on GPUs of one's own: Jupyter or another server, reached at a port here, or a terminal."""

import os
import shlex
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_FAILED, EXIT_USAGE, CliError
from services.cli.jobs import job_output
from services.cli.jobs.exec import CommandAfterDashes, end_with, in_this_terminal, words_after_dashes
from services.cli.jobs.following import ended_words, states
from services.cli.jobs.forward import carry_all, is_over, listener_at, piped
from services.cli.jobs.names import ENDED, number_of
from services.cli.jobs.specs import SpecOptions, spec_of
from services.cli.jobs.submit import check_folders, signed, submit_for_a_while
from services.cli.terminal import LostError, end_by, handled, run_session

PORT = "{port}"
PORT_VARIABLE = "MASTER_PORT"  #: Of the ports of its node, the job alone has this one
_MOST_FAILURES = 5
# The token is made where it is used: what the job's spec has, all of its tenant can read.
_SERVE = """umask 077
[ "$NODE_RANK" = 0 ] || exec sleep infinity
token=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \\n') && printf %s "$token" >"$WATTSHIFT_CHECKPOINT_DIR/token" || exit 1
export JUPYTER_TOKEN="$token"
{serve}
"""
_JUPYTER = """for each in notebook jupyterlab; do
  python3 -c "import importlib.util as found; exit(not found.find_spec('$each'))" && set -- "$each"
done
if [ $# = 0 ]; then
  echo "Jupyter is not there; this line installs it: $(command -v python3) -m pip install jupyterlab" >&2
  exit 127
fi
[ "$(id -u)" != 0 ] || set -- "$1" --allow-root
exec python3 -m "$@" --no-browser --ip=127.0.0.1 --port="$MASTER_PORT" --ServerApp.port_retries=0"""
_NOT_YET = 75
_AWAIT = f"""\
import os, socket, sys, time
for _ in range(25):
    try:
        socket.create_connection(("localhost", int(os.environ[sys.argv[1]]))).close()
        print(open(os.environ["WATTSHIFT_CHECKPOINT_DIR"] + "/token").read())
        sys.exit()
    except ConnectionRefusedError:
        time.sleep(0.2)
sys.exit({_NOT_YET})
"""


def register(app: typer.Typer) -> None:
    app.command(context_settings={"allow_interspersed_args": False})(notebook)
    app.command("shell", cls=CommandAfterDashes)(shell)


def notebook(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]", help=f"Another server than Jupyter; {PORT} in it is where to listen."),
    ] = None,
    gpus: Annotated[str, typer.Option(help="How many GPUs, as for submit.")] = "1",
    model: Annotated[str | None, typer.Option(help="GPU model that it needs.")] = None,
    limit: Annotated[str | None, typer.Option("--time", help="How long it may run, such as 8h.")] = None,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "notebook",
    local: Annotated[
        int,
        typer.Option("--local", min=0, max=65_535, help="Port here; by default 8888, or a free one; 0: a free one."),
    ] = 8888,
    keep: Annotated[bool, typer.Option("--keep", help="Let the job go on when this command ends.")] = False,
) -> None:
    """Run Jupyter on GPUs in this folder, and reach it from here until Ctrl-C, which ends it.

    wattshift notebook --gpus 2
    wattshift notebook tensorboard --logdir runs --port {port}
    """
    if command and not any(PORT in word for word in command):
        raise CliError(f"write {PORT} where the command takes its port: --port {PORT}", EXIT_USAGE)
    options = SpecOptions(gpus=gpus, model=model, time=limit, name=name, processes="per_node", preemptible=False)
    words = ["/bin/sh", "-c", _SERVE.format(serve=_serve(command)), "notebook"]
    spec = signed(spec_of(options, words, name, dict(os.environ)))
    gateway = Gateway()
    check_folders(gateway, [spec])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # a closed terminal must not leave GPUs behind
    job = submit_for_a_while(gateway, spec)
    output.say(f"{number_of(job)}  {job['id']}  {name}")
    has_ended = False
    try:
        token = _started(gateway, job["id"])
        with _listening(local) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/" + ("" if command else f"?token={token}")
            output.console.print(url)
            output.say(f"Ctrl-C ends {'this, and not the job' if keep else 'the job'}.")
            carry_all(gateway, job["id"], PORT_VARIABLE, listener)
        has_ended = True
    except KeyboardInterrupt:
        pass
    except CliError:
        has_ended = is_over(gateway, job["id"])
        raise
    finally:
        if not (keep or has_ended):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                gateway.call("POST", f"/v1/jobs/{job['id']}/cancel")
                output.say(f"\n{name} is being ended.")
            except CliError as error:  # its GPUs are in use until somebody ends it
                output.say(f"\n{name} could not be ended: {error}. To end it: wattshift cancel {job['id']}")
    if has_ended:
        output.say(ended_words(gateway.get(f"/v1/jobs/{job['id']}")))
        raise typer.Exit(EXIT_FAILED)
    if keep:
        output.say(f"\nIt goes on. To end it: wattshift cancel {job.get('number') or job['id']}")


def _serve(command: list[str] | None) -> str:
    if not command:
        return _JUPYTER
    return "exec " + " ".join(f'"${PORT_VARIABLE}"'.join(map(_quoted, word.split(PORT))) for word in command)


def _quoted(part: str) -> str:
    return shlex.quote(part) if part else ""


def _listening(port: int) -> socket.socket:
    """Listen on a port here, or on a free one if that is taken."""
    with suppress(CliError):
        return listener_at(port)
    return listener_at(0)


def _started(gateway: Gateway, job_id: str) -> str:
    """Return the server's token once it listens; ``CliError`` if the job ended first, or cannot be reached."""
    failures = 0
    for _ in _runs(gateway, job_id):
        token: list[bytes] = []
        errors: list[bytes] = []
        code = _NOT_YET
        with suppress(LostError):  # it ends
            code, _ = piped(gateway, job_id, ["python3", "-c", _AWAIT, PORT_VARIABLE], token.append, errors.append)
        if not code:
            return b"".join(token).decode().strip()
        failures += code != _NOT_YET
        if failures == _MOST_FAILURES:
            last = b"".join(errors).decode(errors="replace").strip().rpartition("\n")[2]
            raise CliError(f"its port cannot be reached: {last}", EXIT_FAILED)
    raise AssertionError("a job that has ended is an error")


def _runs(gateway: Gateway, job_id: str) -> Iterator[None]:
    """Yield each time that a job is seen to run, and say meanwhile why it waits.

    Raises:
        CliError: It has ended; the message has the last lines of its standard error.
    """
    said = ""
    for job in states(gateway, job_id):
        if job["state"] in ENDED:
            raise CliError("\n".join([ended_words(job), *job_output.last_lines(gateway, job)]), EXIT_FAILED)
        if job["state"] == "running":
            yield
            continue
        now = f"{job['name']} is {job['state']}" + (f": {job['detail']}" if job.get("detail") else "")
        if now != said:
            _say(said := now)


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
        job = submit_for_a_while(gateway, spec)["id"]
        jobs.append(job)
        _say(f"{job} waits for {gpus} GPU{'s' if gpus > 1 else ''}; Ctrl-C cancels it")
        next(_runs(gateway, job))
        body = {"command": ["/bin/sh", "-c", _ATTEND, "sh", *program], "stdin": True, **terminal}
        started = f"{job} runs; it ends with this terminal, and after {time_limit} at the latest"
        code, detail = run_session(gateway, job, body, on_started=lambda: _say(started))
        jobs.clear()  # it ends by itself now, and has succeeded
    end_with(code, detail)


@contextmanager
def _cancelled_at_the_end(gateway: Gateway) -> Iterator[list[str]]:
    """Yield a list whose jobs are cancelled when the block ends, even if this process is told to terminate."""
    jobs: list[str] = []
    try:
        with handled(signal.SIGTERM, signal.SIGHUP, by=end_by):
            yield jobs
    except LostError:
        _say("the job is being ended")
        raise
    finally:
        for job_id in jobs:
            with suppress(CliError):
                gateway.call("POST", f"/v1/jobs/{job_id}/cancel")


def _say(text: str) -> None:
    output.say(f"wattshift: {text}")
