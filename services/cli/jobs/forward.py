"""Reach a port and files of a job, through its own namespaces: ``wattshift forward``, ``cp``, and ``--results PATH``.

With that, a job's first process announces that its program has ended, and stays for as long as a command beside it
fetches the files, before its folder on another host is gone. The two communicate through files in the job's checkpoint
folder, one set for each of its gangs.
"""

import os
import socket
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE, CliError
from services.cli.jobs.jobs import JobArgument
from services.cli.jobs.names import ENDED, job_id
from services.cli.terminal import passed_on, session
from services.contracts.jobs import JobSpec
from services.contracts.launchers import WRAPPER
from services.core.domain.counted import counted
from wattshift.sessions import Sender, read_event

_PIECE_BYTES = 64 * 1024
RELAY = """\
import os, socket, sys, threading
peer = socket.create_connection(("localhost", int(os.environ.get(sys.argv[1], sys.argv[1]))))
def send():
    while data := os.read(0, 65536):
        peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := peer.recv(65536):
    while data:
        data = data[os.write(1, data):]
"""
"""What a connection runs in the job: bytes pass both ways, whatever is spoken, WebSockets too.

Its port is a number, or the variable of the job that has it."""
LOOK_S = 2.0


def register(app: typer.Typer) -> None:
    app.command()(forward)
    app.command()(cp)


def forward(
    job: JobArgument,
    port: Annotated[int, typer.Argument(min=1, max=65_535, help="Where something listens in the job.")],
    local: Annotated[
        int | None, typer.Option("--local", min=0, max=65_535, help="Port here; by default the same, 0 for a free one.")
    ] = None,
) -> None:
    """Reach a port of a running job from here, until Ctrl-C: Jupyter, TensorBoard or any other server.

    wattshift submit --gpus 1 --name nb jupyter lab --no-browser --port 8888
    wattshift forward nb 8888
    """
    gateway = Gateway()
    found = job_id(gateway, job)
    if (state := gateway.get(f"/v1/jobs/{found}")["state"]) in ENDED:
        raise CliError(f"{job} has ended ({state}): nothing listens there any more", EXIT_REFUSED)
    with listener_at(port if local is None else local) as listener:
        output.say(f"http://127.0.0.1:{listener.getsockname()[1]} leads to port {port} of {job}; Ctrl-C ends that")
        with suppress(KeyboardInterrupt):
            carry_all(gateway, found, port, listener)
            output.say(f"wattshift: {job} has ended")


def listener_at(port: int) -> socket.socket:
    """Listen on this machine's loopback address; port 0 picks a free one; ``CliError`` if the port is taken."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        why = f"cannot listen on port {port}: {error.strerror}"
        raise CliError(f"{why}; choose another with --local", EXIT_USAGE) from None


def is_over(gateway: Gateway, found: str) -> bool:
    """Return whether a job has ended; while the control plane does not answer, it counts as going on."""
    try:
        return gateway.get(f"/v1/jobs/{found}")["state"] in ENDED
    except CliError as error:
        if error.exit_code != EXIT_UNAVAILABLE:
            raise
        return False


def carry_all(gateway: Gateway, found: str, port: int | str, listener: socket.socket) -> None:
    """Carry connections to a port of a job until the job is over, which is checked every ``LOOK_S``. See ``carry``."""
    listener.settimeout(LOOK_S)
    look_at = time.monotonic() + LOOK_S
    while True:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(None)
            threading.Thread(target=carry, args=(gateway, found, port, connection), daemon=True).start()
        if time.monotonic() >= look_at:
            if is_over(gateway, found):
                return
            look_at = time.monotonic() + LOOK_S


def carry(gateway: Gateway, found: str, port: int | str, connection: socket.socket) -> None:
    """Carry one connection to a port of a job, until either end closes it; say why if that is not possible."""
    said: list[bytes] = []

    def feed(sender: Sender) -> None:
        with suppress(OSError):
            while data := connection.recv(_PIECE_BYTES):
                sender.feed(data)
        sender.end()

    with connection:
        try:
            command = ["python3", "-c", RELAY, str(port)]
            code, detail = piped(gateway, found, command, connection.sendall, said.append, feed)
            if code:
                last = b"".join(said).decode(errors="replace").strip().rpartition("\n")[2]
                output.say(f"wattshift: port {port}: {detail or last or f'the connection ended with status {code}'}")
        except (CliError, OSError) as error:
            output.say(f"wattshift: port {port}: {error}")
        finally:
            with suppress(OSError):  # to close it is not enough while the other thread reads from it
                connection.shutdown(socket.SHUT_RDWR)


def cp(
    source: Annotated[str, typer.Argument(metavar="JOB:PATH", help="A file or folder of a job.")],
    target: Annotated[Path, typer.Argument(metavar="TO", help="The folder it is put in, or its name here.")] = Path(),
) -> None:
    """Copy a file or folder of a job here; a relative path starts in the job's working folder.

    Of a job that has ended, for as long as the node has its files; --results of submit brings them back by itself.

    wattshift cp train:results .
    wattshift cp train:results.json run-7.json
    """
    job, _, path = source.partition(":")
    if not job or not path.strip("/"):
        raise CliError("name a job and a path in it: wattshift cp JOB:results .", EXIT_USAGE)
    into = target if target.is_dir() else target.parent
    if not into.is_dir():
        raise CliError(f"{into} is not a folder", EXIT_NOT_FOUND)
    gateway = Gateway()
    found = job_id(gateway, job)
    said: list[bytes] = []
    try:
        with tempfile.TemporaryFile() as archive:
            if gateway.get(f"/v1/jobs/{found}")["state"] == "running":
                folder, name = os.path.split(path.rstrip("/"))
                command = ["tar", "-C", folder or ".", "-cf", "-", "--", name]
                code, detail = piped(gateway, found, command, archive.write, said.append)
            else:
                with gateway.stream(f"/v1/jobs/{found}/files", method="POST", json={"path": path}) as answer:
                    events = filter(None, map(read_event, answer.iter_lines()))
                    code, detail = passed_on(events, archive.write, said.append)
            if code:
                raise CliError(detail or b"".join(said).decode(errors="replace").strip(), EXIT_FAILED)
            _unpacked(archive, into, source, None if target == into else target.name)
    except OSError as error:
        raise CliError(f"cannot keep what came of {source}: {error.strerror or error}", EXIT_FAILED) from error


def piped(
    gateway: Gateway,
    found: str,
    command: list[str],
    out: Callable[[bytes], object],
    err: Callable[[bytes], object],
    feed: Callable[[Sender], None] | None = None,
) -> tuple[int, str]:
    """Run a command in a job; return its exit status, and why it ended if not by itself.

    Args:
        found: The job's id.
        feed: Feeds standard input, in a thread of its own.

    Raises:
        CliError: The command cannot be run, or the connection was lost.
        OSError: Raised by ``out`` or ``err``.
    """
    with session(gateway, found, {"command": command, "stdin": feed is not None}) as (events, sender):
        if feed is not None:
            threading.Thread(target=feed, args=(sender,), daemon=True).start()
        return passed_on(events, out, err)


POLL_S = 0.5
PATIENCE_S = 20  #: How long the job stays for a fetcher that does not come, or is silent
_STAY = """[ "${NODE_RANK:-0}${LOCAL_RANK:-0}" = 00 ] || exec "$@"
trap : HUP INT TERM
"$@"
code=$?
turn="$WATTSHIFT_CHECKPOINT_DIR/.results.${WATTSHIFT_GENERATION:-1}"
: >"$turn.ready"
last= silent=0
while [ ! -e "$turn.taken" ] && [ "$silent" -lt PATIENCE ]; do
  seen=$(cat "$turn.fetcher" 2>/dev/null)
  if [ "$seen" = "$last" ]; then silent=$((silent + 1)); else last=$seen silent=0; fi
  sleep 1
done
rm -f "$turn.ready" "$turn.fetcher" "$turn.taken"
exit $code
""".replace("PATIENCE", str(PATIENCE_S))
_FETCH = """turn="$WATTSHIFT_CHECKPOINT_DIR/.results.${WATTSHIFT_GENERATION:-1}"
(at=0; while at=$((at + 1)); do echo $at >"$turn.fetcher"; sleep 1; done) >/dev/null 2>&1 &
trap "kill $!" EXIT
while [ ! -e "$turn.ready" ]; do sleep 0.2; done
tar -cf - -- "$@"
code=$?
: >"$turn.taken"
exit $code
"""


def staying(command: list[str]) -> list[str]:
    """Return a command that runs another and then stays until its files have been fetched."""
    return ["/bin/sh", "-c", _STAY, WRAPPER, *command]


def checked_results(paths: list[str], specs: list[JobSpec], *, ends: bool) -> list[str]:
    """Return the paths to bring back; none if the job runs in a folder that it does not lose.

    Args:
        paths: As given on the command line.
        ends: Whether the command waits for the jobs to end.

    Raises:
        CliError: A path lies outside the job's folder, or its files could not be brought back.
    """
    for path in paths:
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise CliError(f"--results: {path!r} is no path in the job's folder, such as results", EXIT_USAGE)
    if paths and not ends:
        raise CliError("--results goes with --wait or --follow: the files come when the job ends", EXIT_USAGE)
    if paths and (len(specs) > 1 or specs[0].array is not None):
        raise CliError("--results brings back files of one job, not of several", EXIT_USAGE)
    if paths and specs[0].source is None:
        output.say(f"wattshift: --results: the job leaves its files in {specs[0].working_dir} itself")
        return []
    return paths


@contextmanager
def fetched(gateway: Gateway, job_id: str, paths: list[str]) -> Iterator[None]:
    """Bring files of a job here when it ends, while the block follows the job to its end."""
    fetcher = threading.Thread(target=fetch, args=(gateway, job_id, paths, Path.cwd()), daemon=True)
    fetcher.start()
    yield
    fetcher.join()


def fetch(gateway: Gateway, job_id: str, paths: list[str], here: Path) -> None:
    """Fetch what each of a job's gangs leaves, newer files over older ones, and say what came or why nothing did."""
    said, gang = f"the job has left no {', '.join(paths)}", 0
    while (job := _job(gateway, job_id)) is None or job["state"] not in ENDED:
        if job and job["state"] == "running" and job["generation"] > gang:
            errors: list[bytes] = []
            with tempfile.TemporaryFile() as archive:
                command = ["/bin/sh", "-c", _FETCH, "results", *paths]
                try:
                    code, detail = piped(gateway, job_id, command, archive.write, errors.append)
                    gang = job["generation"]
                    if archive.tell():
                        files = _unpacked(archive, here, "what came")
                        said = f"{counted(files, 'file')} came to {here}"
                    if code:
                        said = detail or b"".join(errors).decode(errors="replace").partition("\n")[0] or said
                except (CliError, OSError) as error:
                    said = str(error)
        threading.Event().wait(POLL_S)
    output.say(f"wattshift: --results: {said}")


def _job(gateway: Gateway, job_id: str) -> Any:
    with suppress(CliError):
        return gateway.get(f"/v1/jobs/{job_id}")
    return None


def _unpacked(archive: IO[bytes], into: Path, what: str, name: str | None = None) -> int:
    """Unpack an archive, under ``name`` if given; return how many files came; ``CliError`` if that cannot be done."""
    archive.seek(0)
    try:
        with tarfile.open(fileobj=archive) as members:
            if name is not None:
                came = next(iter(members.getnames()), "")
                for member in members:
                    member.name = name + member.name.removeprefix(came)
                    if member.islnk():
                        member.linkname = name + member.linkname.removeprefix(came)
            members.extractall(into, filter="data")  # nothing outside the folder, and no special files
            return sum(member.isfile() for member in members)
    except (tarfile.TarError, OSError) as error:
        raise CliError(f"cannot unpack {what}: {error}", EXIT_FAILED) from None
