"""Programs that start the processes of a distributed job themselves, and how to recognise them in a command."""

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


PROGRAMS = _set(
    "torchrun torchrun-hpc accelerate accelerate-launch deepspeed ray colossalai horovodrun composer mpirun mpiexec "
    "mpiexec.hydra orterun prterun srun lightning fabric"
)
"""Names of programs that start one process for each GPU, or look for the GPUs themselves."""

MODULES = _set(
    "torch.distributed.run torch.distributed.launch accelerate.commands.launch accelerate.commands.accelerate_cli "
    "deepspeed.launcher.runner colossalai.cli horovod.runner horovod.runner.launch composer.cli.launcher deepspeed "
    "lightning lightning.fabric.cli"
)
"""The same for ``python -m MODULE``."""

_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?")
_SHELLS = _set("sh bash dash zsh ksh ash")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_SEPARATORS = re.compile(r"(?:&&|\|\||[;&|()\n])+")
_PREFIXES = _set("exec nohup time command then do else if { !")
_ONE_ARGUMENT = {
    "env": _set("-u --unset -C --chdir"),
    "nice": _set("-n --adjustment"),
    "ionice": _set("-c --class -n --classdata"),
    "stdbuf": _set("-i -o -e --input --output --error"),
    "timeout": _set("-k --kill-after -s --signal"),
    "numactl": _set("-m --membind -N --cpunodebind -C --physcpubind -i --interleave -p --preferred"),
    "uv": _set("--with --python -p --project --directory --extra --group"),
    "poetry": _set("-C --directory -P --project"),
    "conda": _set("-n --name -p --prefix --cwd"),
    "tini": _set(""),
}
_DEEPEST = 4


WRAPPER = "wattshift-wrapper"
"""The name of a shell that only prepares the command behind it: ``sh -c TEXT NAME COMMAND``."""


def is_launcher(command: Sequence[str], depth: int = 0) -> bool:
    """Return whether a command starts the processes of a distributed job itself.

    It is recognised by the name of its program, also at an absolute path, as ``python -m MODULE``, behind programs that
    only prepare another one (``env A=B``, ``nice``, ``timeout``, ``uv run``, ...), and anywhere in the string of
    ``sh -c``. A script that calls a launcher is not opened: such a job has to say ``processes: per_node``.
    """
    words = _without_prefixes(list(command))
    if not words or depth > _DEEPEST:
        return False
    if options_at(words) is not None:
        return True
    if PurePosixPath(words[0]).name not in _SHELLS:
        return False
    return any(is_launcher(part, depth + 1) for part in _shell_commands(words[1:]))


def options_at(command: Sequence[str]) -> tuple[str, int] | None:
    """Return a launcher's name and the position in the command at which its options begin.

    None if the command is not a launcher, or runs one inside the string of a shell.
    """
    words = _without_prefixes(list(command))
    at = len(command) - len(words)
    if not words:
        return None
    program = PurePosixPath(words[0]).name
    if program in PROGRAMS:
        return program, at + 1
    if not _PYTHON.fullmatch(program):
        return None
    skipped = 1
    while words[skipped : skipped + 1] and words[skipped].startswith("-") and words[skipped] not in ("-m", "-c"):
        skipped += 2 if words[skipped] in ("-W", "-X") else 1
    if words[skipped : skipped + 1] == ["-m"] and words[skipped + 1 : skipped + 2] and words[skipped + 1] in MODULES:
        return words[skipped + 1], at + skipped + 2
    if words[skipped : skipped + 1] and PurePosixPath(words[skipped]).name in PROGRAMS:
        return PurePosixPath(words[skipped]).name, at + skipped + 1
    return None


def _without_prefixes(words: list[str]) -> list[str]:
    """Strip assignments and programs that only prepare the one that follows them."""
    while words:
        program = PurePosixPath(words[0]).name
        if _ASSIGNMENT.match(words[0]) or words[0] in _PREFIXES:
            words = words[1:]
        elif words[3:4] == [WRAPPER]:
            words = words[4:]
        elif program in _ONE_ARGUMENT:
            words = _after_options(words[1:], _ONE_ARGUMENT[program])
            if program == "timeout":
                words = words[1:]
            elif program in ("uv", "poetry", "conda") and words[:1] == ["run"]:
                words = _after_options(words[1:], _ONE_ARGUMENT[program])
        else:
            break
    return words


def _after_options(words: list[str], with_argument: frozenset[str]) -> list[str]:
    while words and words[0].startswith("-"):
        if words[0] == "--":
            return words[1:]
        words = words[2:] if words[0] in with_argument else words[1:]
    return words


def _shell_commands(arguments: list[str]) -> list[list[str]]:
    """Return the commands in the string of ``sh -c``; none if it is not such a call or cannot be read."""
    for number, word in enumerate(arguments):
        if not word.startswith("-"):
            return []
        if word.lstrip("-").endswith("c") and not word.startswith("--"):
            if number + 1 == len(arguments):
                return []
            return [words for part in _parts(arguments[number + 1]) if (words := _words(part))]
    return []


def _parts(text: str) -> list[str]:
    """Split at the separators of a shell that are outside quotes."""
    parts: list[str] = []
    start, quote, at = 0, "", 0
    while at < len(text):
        letter = text[at]
        if letter == "\\" and quote != "'":
            at += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif found := _SEPARATORS.match(text, at):
            parts.append(text[start:at])
            start = at = found.end()
            continue
        at += 1
    return [*parts, text[start:]]


def _words(part: str) -> list[str]:
    try:
        return shlex.split(part, comments=True)
    except ValueError:
        return []
