"""``--results PATH``: bring files of a job here when it ends, before its folder on another host is gone.

The job's first process announces that its program has ended, and stays for as long as a command beside it fetches the
files. The two communicate through files in the job's checkpoint folder, one set for each of its gangs.
"""

import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, CliError
from services.cli.jobs.following import FINAL
from services.cli.jobs.forward import piped
from services.contracts.jobs import JobSpec
from services.contracts.launchers import WRAPPER

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
    while (job := _job(gateway, job_id)) is None or job["state"] not in FINAL:
        if job and job["state"] == "running" and job["generation"] > gang:
            errors: list[bytes] = []
            with tempfile.TemporaryFile() as archive:
                command = ["/bin/sh", "-c", _FETCH, "results", *paths]
                try:
                    code, detail = piped(gateway, job_id, command, archive.write, errors.append)
                    gang = job["generation"]
                    if archive.tell():
                        said = _unpacked(archive, here)
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


def _unpacked(archive: Any, here: Path) -> str:
    """Unpack an archive; return a text that says how many files came; ``CliError`` if it cannot be unpacked."""
    archive.seek(0)
    try:
        with tarfile.open(fileobj=archive) as members:
            files = sum(member.isfile() for member in members)
            members.extractall(here, filter="data")  # nothing outside the folder, and no special files
    except (tarfile.TarError, OSError) as error:
        raise CliError(f"cannot unpack what came: {error}") from None
    return f"{files} file{'' if files == 1 else 's'} came to {here}"
