"""``--output`` and ``--error``: also write what a job prints to files, whose names may contain Slurm's patterns."""

import re
import shlex

from services.cli.commands import EXIT_USAGE, CliError
from services.cli.jobs.names import user_name
from services.contracts.launchers import WRAPPER

PATTERN = re.compile(r"(?:[^%\0]|%[jAaxuN%])+")
_PARTS = re.compile(r"(%[jAaxuN%])")
_AT_START = {
    "%j": '"$WATTSHIFT_JOB_ID"',
    "%A": '"${WATTSHIFT_ARRAY_ID:-$WATTSHIFT_JOB_ID}"',
    "%a": '"${WATTSHIFT_ARRAY_INDEX:-0}"',
    "%N": '"$(hostname)"',
}
# The program keeps its process, signals and exit status. What copies lives as long as something can still write, and a
# signal to all processes does not end it before. A job that goes on after a preemption adds to its files.
_COPY = """out={out} err={err}
if [ "${{NODE_RANK:-0}}${{LOCAL_RANK:-0}}" = 00 ]; then
  if [ "${{WATTSHIFT_GENERATION:-1}}" = 1 ]; then : >"$out" && : >"$err"; else : >>"$out" && : >>"$err"; fi || exit 1
  pipes=$(mktemp -d) && mkfifo "$pipes/1" "$pipes/2" || exit 1
  (trap "" HUP INT TERM; exec tee -a -- "$out" <"$pipes/1") &
  (trap "" HUP INT TERM; exec tee -a -- "$err" <"$pipes/2" >&2) &
  exec >"$pipes/1" 2>"$pipes/2"
  rm -r "$pipes"
fi
exec "$@"
"""


def copying(command: list[str], name: str, out: str | None, err: str | None) -> list[str]:
    """Return a command that runs another and copies what its first process prints to files.

    Args:
        out: File for standard output; None for no file.
        err: File for standard error; None for the same file.

    Raises:
        CliError: A pattern is unknown.
    """
    out_word, err_word = (_shell_word(pattern, name) for pattern in (out or "/dev/null", err or out or "/dev/null"))
    return ["/bin/sh", "-c", _COPY.format(out=out_word, err=err_word), WRAPPER, *command]


def _shell_word(pattern: str, name: str) -> str:
    if not PATTERN.fullmatch(pattern):
        raise CliError(f"{pattern!r} is no name of a file with the patterns %j, %A, %a, %x, %u, %N and %%", EXIT_USAGE)
    now = {"%x": name, "%u": user_name(), "%%": "%"}
    parts = _PARTS.split(pattern)
    return "".join(_AT_START.get(part) or shlex.quote(now.get(part, part)) for part in parts if part)
