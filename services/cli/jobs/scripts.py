"""Job scripts: their ``#WATTSHIFT`` lines, those of other schedulers, and the command that carries their text.

The text travels in the job's spec, so editing the file after submission changes nothing.
"""

import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from services.cli.commands import EXIT_USAGE, CliError

DIRECTIVE = "#WATTSHIFT"
LONGEST_BYTES = 32_768  #: As long as an argument of a command may be

_SHELLS = frozenset(("sh", "bash", "dash", "ksh", "zsh"))
_RUN_FROM_FILE = (
    'file=${{WATTSHIFT_CHECKPOINT_DIR:-.}}/"$1"; '
    '[ -e "$file" ] || {{ printf %s "$2" >"$file.$$" && mv "$file.$$" "$file"; }} || exit 126; '
    'shift 2; exec {interpreter} "$file" "$@"'
)
"""Other interpreters than shells read a file; its name depends on its content, so that restarts find it again."""


@dataclass(frozen=True)
class Script:
    """A script as it was when it was submitted."""

    name: str  #: The file's name
    text: str  #: Its whole text
    directives: list[tuple[int, list[str]]]
    """The words of each ``#WATTSHIFT`` line before the first command, with the number of the line."""
    foreign: list[tuple[int, str]]  #: The lines in that part that other schedulers obey, with their numbers

    def command(self, arguments: list[str], path: str) -> list[str]:
        """Return the program and arguments that run the script.

        Args:
            path: Where the job finds the file; only Python without a ``#!`` line is run from there, beside its modules.

        Raises:
            CliError: The script is too long.
        """
        if self.name.endswith(".py") and not self.text.startswith("#!"):
            return ["python3", path, *arguments]
        size = len(self.text.encode())
        if size > LONGEST_BYTES:
            raise CliError(
                f"{self.name} has {size:,} bytes; a script may have {LONGEST_BYTES:,}. Call a longer program by its "
                "path from a short script",
                EXIT_USAGE,
            )
        interpreter = _interpreter(self.text)
        if _is_shell(interpreter):
            return [*interpreter, "-c", self.text, self.name, *arguments]
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:12]
        run = _RUN_FROM_FILE.format(interpreter=shlex.join(interpreter))
        return ["/bin/sh", "-c", run, self.name, f".{digest}-{self.name}", self.text, *arguments]


def read_script(name: str, text: str) -> Script:
    """Return a script; ``CliError`` if a directive cannot be split into words, or no interpreter is named."""
    name = Path(name).name if name != "-" else "stdin.sh"
    endings = ("", ".sh", ".bash", ".sbatch", ".slurm", ".pbs", ".lsf", ".py")
    if not text.startswith("#!") and Path(name).suffix not in endings:
        raise CliError(
            f"{name} does not say what runs it: begin it with a line such as #!/usr/bin/env julia, or submit the "
            f"command itself: wattshift submit -- julia {name}",
            EXIT_USAGE,
        )
    directives: list[tuple[int, list[str]]] = []
    foreign: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            break
        if re.match(r"(?:#SBATCH|#PBS|#BSUB)\s", line):
            foreign.append((number, line))
        if line.startswith(DIRECTIVE) and not line[len(DIRECTIVE) :].strip(" \t").startswith("#"):
            rest = line[len(DIRECTIVE) :]
            if rest and not rest[0].isspace():
                continue  # another word that begins so
            try:
                directives.append((number, shlex.split(rest, comments=True)))
            except ValueError as error:
                raise CliError(f"{name}, line {number}: {str(error).lower()}", EXIT_USAGE) from None
    return Script(name, text, directives, foreign)


def _interpreter(text: str) -> list[str]:
    first = text.partition("\n")[0]
    words = first[2:].split() if first.startswith("#!") else []
    if len(words) > 2 and Path(words[0]).name == "env" and words[1] == "-S":
        del words[1]
    return words or ["/bin/sh"]


def _is_shell(interpreter: list[str]) -> bool:
    words = interpreter[1:] if Path(interpreter[0]).name == "env" else interpreter
    return bool(words) and Path(words[0]).name in _SHELLS


_PLAIN, _SINGLE, _DOUBLE = "", "'", '"'
_OF_THE_SHELL = {"!", ".", ":", "cd", "eval", "exec", "exit", "export", "read", "set", "trap", "ulimit", "umask"}
"""What POSIX has the shell do itself: there is no such program."""


def needs_shell(command: str) -> bool:
    """Return whether a command line is a shell's: it has syntax beyond quotes, or begins with a word of the shell."""
    quote, at = _PLAIN, 0
    while at < len(command):
        letter = command[at]
        if letter == "\\" and quote != _SINGLE:
            at += 2
            continue
        if quote == _PLAIN and letter in "|&;<>()$`*?[\n":
            return True
        if quote == _DOUBLE and letter in "$`":
            return True
        if letter in "'\"" and quote in (_PLAIN, letter):
            quote = _PLAIN if quote else letter
        at += 1
    first = command.split(maxsplit=1)[0] if command.split() else ""
    return first in _OF_THE_SHELL or ("=" in first and first.partition("=")[0].isidentifier())
