"""The lines of a script that other schedulers obey: ``#SBATCH``, ``#PBS`` and ``#BSUB``.

What a ``#SBATCH`` line asks for is obeyed where it has an exact meaning here, and named to the caller where not, like
everything that ``#PBS`` and ``#BSUB`` lines say. Nothing is ignored silently, for a job that runs on one GPU instead of
four, or without its time limit, is another job.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.cli.client import EXIT_USAGE, CliError

SBATCH = "#SBATCH"

_SHORT = {
    "-G": "--gpus",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-t": "--time",
    "-a": "--array",
    "-J": "--job-name",
    "-D": "--chdir",
    "-d": "--dependency",
    "-H": "--hold",
    "-o": "--output",
    "-e": "--error",
}
_WHY_NOT = {
    "--nodes": "a gang may lie on any number of nodes, and the script runs once on each",
    "--ntasks": "the script runs once on each node",
    "--ntasks-per-node": "the script runs once on each node",
    "--output": "`wattshift logs` shows the output",
    "--error": "`wattshift logs` shows the output",
}
_CONDITIONS = {"afterok": "ok", "afterany": "any", "afternotok": "not_ok"}
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_COUNT = re.compile(r"(?:gpu|(?:gpu:)?(?:(?P<count>\d{1,6})|(?P<type>[^:]*[^:\d][^:]*?)(?::(?P<of_type>\d{1,6}))?))")
_VARIABLE = re.compile(r"\bSLURM_[A-Z_]+")


@dataclass
class _Asked:
    """One option of a ``#SBATCH`` line, the last of its name."""

    line: int
    name: str
    value: str
    text: str


def obeyed(
    name: str, text: str, lines: Sequence[tuple[int, str]], given: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the options of ``wattshift submit`` that a script's foreign lines mean, and what is not obeyed.

    Args:
        name: The script's name.
        text: All of it.
        lines: Its foreign lines, with their numbers.
        given: The options that win over these lines, by the names of ``submit``'s parameters.

    Raises:
        CliError: A line cannot be split into words.
    """
    asked: dict[str, _Asked] = {}
    unknown: list[tuple[int, str]] = []
    of_another_part = False
    for number, line in lines:
        directive, rest = re.split(r"\s", line, maxsplit=1)
        if directive != SBATCH or of_another_part:
            unknown.append((number, line.strip()))
            continue
        try:
            words = shlex.split(rest, comments=True)
        except ValueError as error:
            raise CliError(f"{name}, line {number}: {str(error).lower()}", EXIT_USAGE) from None
        if words in (["hetjob"], ["packjob"]):
            of_another_part = True
            unknown.append((number, line.strip()))
            continue
        for each in _options(number, words):
            asked[each.name] = each
    found, why_not = _meanings(asked)
    options = [word for parameter, words in found.items() if parameter not in given for word in words]
    if "gpus" in found and not {"gpus", "processes"} & set(given):
        options += ["--processes", "per_node"]  # as Slurm runs it; what the script starts makes use of the GPUs
    unknown += [(each.line, _named(each, why)) for each, why in why_not]
    said = [f"line {number}: {what}" for number, what in sorted(unknown)]
    if asked and "gpus" not in found and not {"gpus", "slice"} & set(given):
        said.append("it asks for no number of GPUs that is understood, and gets 1")
    if asked and (variables := sorted(set(_VARIABLE.findall(text)))):
        instead = " (WATTSHIFT_ARRAY_INDEX is)" if any("ARRAY" in each for each in variables) else ""
        said.append(f"it reads {', '.join(variables)}, not set here{instead}")
    return options, said


def _options(number: int, words: Sequence[str]) -> list[_Asked]:
    """Return the options of one line; a word that begins with no dash is the value of the one before it."""
    found: list[_Asked] = []
    for word in words:
        if not word.startswith("-") and found and not found[-1].value:
            found[-1].value = word
            found[-1].text += f" {word}"
        elif word.startswith("--") or not word.startswith("-"):
            option, _, value = word.partition("=")
            found.append(_Asked(number, option, value, word))
        else:
            found.append(_Asked(number, _SHORT.get(word[:2], word[:2]), word[2:].removeprefix("="), word))
    return found


def _named(each: _Asked, why: str) -> str:
    return f"{each.text} ({why})" if why else each.text


def _meanings(asked: dict[str, _Asked]) -> tuple[dict[str, list[str]], list[tuple[_Asked, str]]]:
    """Return words for each parameter of ``submit``, and the options that are not obeyed, with the reason if any."""
    found: dict[str, list[str]] = {}
    why_not: dict[str, str] = {}
    gpus, partly = _gpus(asked)
    if gpus:
        found["gpus"] = ["--gpus", str(gpus)]
    why_not |= dict.fromkeys(partly, f"it gets {gpus} GPUs, of any type" if gpus else "")
    for each in asked.values():
        name, value = each.name, each.value
        if name == "--time" and (limit_s := _time_s(value)) is not None:
            if limit_s:
                found["time"] = ["--time", f"{limit_s}s"]
        elif name == "--array" and value:
            found["array"] = ["--array", value]
        elif name == "--job-name" and value:
            found["name"] = ["--name", value]
        elif name == "--chdir" and value:
            found["workdir"] = ["--workdir", value]
        elif name == "--hold":
            found["hold"] = ["--hold"]
        elif name == "--dependency" and (after := _after(value)):
            found["after"] = after
        elif (name == "--nodes" and value == "1" and gpus <= 1) or (
            name in ("--ntasks", "--ntasks-per-node") and value == "1"
        ):
            continue
        elif name not in _OF_GPUS:
            why_not.setdefault(name, _WHY_NOT.get(name, ""))
    return found, [(asked[name], why) for name, why in why_not.items()]


_OF_GPUS = ("--gpus", "--gpus-per-node", "--gres", "--gpus-per-task")


def _gpus(asked: dict[str, _Asked]) -> tuple[int, list[str]]:
    """Return the GPUs of the whole job, 0 if that is not certain, and the options of GPUs that are obeyed in part."""
    nodes = _whole(asked, "--nodes")
    tasks = _whole(asked, "--ntasks" if "--ntasks" in asked else "--ntasks-per-node")
    if tasks and "--ntasks" not in asked:
        tasks *= nodes
    totals: dict[str, int] = {}
    partly: list[str] = []
    for name, times in (("--gpus", 1), ("--gpus-per-node", nodes), ("--gres", nodes), ("--gpus-per-task", tasks)):
        if name not in asked:
            continue
        entries = asked[name].value.split(",")
        counts = [_COUNT.fullmatch(each) for each in entries if name != "--gres" or each.partition(":")[0] == "gpu"]
        if times and len(counts) == 1 and (count := counts[0]) is not None:
            totals[name] = int(count["count"] or count["of_type"] or 1) * times
            if count["type"] or len(entries) > 1:
                partly.append(name)
        else:
            partly.append(name)
    total = next(iter(totals.values()), 0)
    return total, list(dict.fromkeys([*partly, *(name for name, each in totals.items() if each != total)]))


def _whole(asked: dict[str, _Asked], name: str) -> int:
    """Return the number that an option gives, 1 if it is not there, 0 if it is a range or no number."""
    least, _, most = (asked[name].value if name in asked else "1").partition("-")
    return int(least) if least.isdecimal() and most in ("", least) else 0


def _time_s(value: str) -> int | None:
    """Return a limit of Slurm's, ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``; 0 for none.

    None: it is of no such form.
    """
    if value.upper() in ("UNLIMITED", "INFINITE", "0"):
        return 0
    if (found := _TIME.fullmatch(value)) is None:
        return None
    days, first, second, third = (int(each) if each else None for each in found.groups())
    first = first or 0
    if days is not None:
        hours, minutes, seconds = first, second or 0, third or 0
    elif third is not None:
        hours, minutes, seconds = first, second or 0, third
    else:
        hours, minutes, seconds = 0, first, second or 0
    return (days or 0) * 86_400 + hours * 3_600 + minutes * 60 + seconds


def _after(value: str) -> list[str]:
    """Return the words for a dependency of jobs that must all have ended; none for one of another form."""
    words: list[str] = []
    for part in value.split(","):
        condition, *jobs = part.split(":")
        if condition not in _CONDITIONS or not jobs or not all(re.fullmatch(r"[\w.-]+", job) for job in jobs):
            return []
        words += [word for job in jobs for word in ("--after", f"{_CONDITIONS[condition]}:{job}")]
    return words
