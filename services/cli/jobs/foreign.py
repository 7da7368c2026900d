"""The lines of a script that other schedulers obey: ``#SBATCH``, ``#PBS`` and ``#BSUB``.

A line is obeyed where it has an exact meaning here; otherwise the caller is told. Nothing is silently ignored: a job
that runs on one GPU instead of four, or without its time limit, is a different job. PBS and LSF lines are read as the
equivalent options of Slurm (``foreign_words``). In a script with lines for several schedulers, those for Slurm count,
or else those for PBS.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from services.cli.commands import EXIT_USAGE, CliError
from services.cli.jobs.copied_output import PATTERN
from services.cli.jobs.foreign_words import READERS, SECONDS

SBATCH = "#SBATCH"
SUBMITTERS = ("sbatch", "srun")
_FLAGS = frozenset(
    ("-H", "-l", "-s", "-Q", "-v", "-W", "--exclusive", "--requeue", "--no-requeue", "--parsable", "--pty", "--overlap")
)
_VALUES = frozenset(
    (
        *("-G", "-N", "-n", "-t", "-a", "-J", "-D", "-d", "-o", "-e", "-c", "-p", "-A", "-q", "-w", "-x", "-C"),
        *("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--nodes", "--ntasks", "--ntasks-per-node"),
        *("--cpus-per-task", "--cpus-per-gpu", "--mem", "--mem-per-cpu", "--mem-per-gpu", "--partition", "--account"),
        *("--qos", "--job-name", "--output", "--error", "--chdir", "--dependency", "--export", "--mail-type", "--time"),
        *("--mail-user", "--constraint", "--nodelist", "--exclude", "--reservation", "--begin", "--comment", "--array"),
        *("--licenses", "--signal", "--open-mode", "--ntasks-per-gpu"),
    )
)
"""Options of Slurm that stand alone, and those that a value follows."""
_SAME = {"--array": "--array", "--job-name": "--name", "--chdir": "--workdir"}
_FILES = ("--output", "--error")
_MAIL = {
    "NONE": (),
    "BEGIN": ("started",),
    "END": ("ended",),
    "FAIL": ("failed",),
    "TIME_LIMIT": ("failed",),
    "ALL": ("started", "ended"),
    "ARRAY_TASKS": (),
}
"""What of a job is posted for an event of which mail would be sent; each task of an array is a job here anyway."""
_OF_GPUS = ("--gpus", "--gpus-per-node", "--gres", "--gpus-per-task")
_OF_TASKS = ("--ntasks", "--ntasks-per-node")
_WHY_NOT = {
    "--nodes": "a gang may lie on any number of nodes, and the script runs once on each",
    **dict.fromkeys(_OF_TASKS, "the script runs once on each node"),
    **dict.fromkeys(_FILES, "of patterns, a file's name may have %j, %A, %a, %x, %u, %N and %%"),
    "--mail-type": f"of the events, {', '.join(_MAIL)} have a meaning here",
    "--mail-user": "no mail is sent; messages go to a webhook, which `wattshift webhooks create URL` makes",
    "--export": "a variable that it names is not set here",
}
_CONDITIONS = {"afterok": "ok", "afterany": "any", "afternotok": "not_ok"}
_COUNT = re.compile(r"(?:gpu|(?:gpu:)?(?:(?P<count>\d{1,6})|(?P<type>[^:]*[^:\d][^:]*?)(?::(?P<of_type>\d{1,6}))?))")
_VARIABLE = re.compile(r"\b(?:SLURM|PBS|LSB)_[A-Z_]+")
_FOLDERS = ("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "LS_SUBCWD")  #: Where the script was submitted
_SRUN = re.compile(r"^\s*(?:exec\s+|time\s+)?srun\s", re.MULTILINE)


@dataclass
class _Asked:
    """One option of a ``#SBATCH`` line."""

    line: int
    text: str
    value: str


def obeyed(
    name: str, text: str, lines: Sequence[tuple[int, str]], given: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return what a script's foreign lines mean as options of ``wattshift submit``, and what is not obeyed.

    Args:
        lines: Its foreign lines, with their numbers.
        given: The options that take precedence over these lines, by the names of ``submit``'s parameters.

    Raises:
        CliError: A line cannot be split into words.
    """
    asked: dict[str, _Asked] = {}
    ignored: list[tuple[int, str]] = []
    of_another_part = False
    there = {line.split(maxsplit=1)[0] for _, line in lines}
    counts = next((each for each in READERS if each in there), SBATCH)
    for number, line in lines:
        directive, rest = re.split(r"\s", line, maxsplit=1)
        try:
            words = shlex.split(rest, comments=True) if directive == counts and not of_another_part else []
        except ValueError as error:
            raise CliError(f"{name}, line {number}: {str(error).lower()}", EXIT_USAGE) from None
        of_another_part |= words in (["hetjob"], ["packjob"])
        if directive != counts or of_another_part:
            ignored.append((number, line.strip()))
            continue
        for option, value, text_of in READERS[directive](words):
            if option in ("--export", "--mail-type") and option in asked and directive != SBATCH:
                asked[option].value += f",{value}"
            elif option or directive == SBATCH:
                asked[option] = _Asked(number, text_of, value)
            else:
                ignored.append((number, f"{text_of} ({value})" if value else text_of))
    gpus, inexact = _gpus(asked)
    options = ["--gpus", str(gpus)] if gpus and "gpus" not in given else []
    if options and "processes" not in given:
        options += ["--processes", "per_node"]  # as Slurm runs it; what the script starts makes use of the GPUs
    for option, each in asked.items():
        meaning = (None if option in inexact else []) if option in _OF_GPUS else _meaning(option, each.value, gpus)
        if meaning is None:
            why = f"it gets {gpus} GPUs, of any type" if option in inexact and gpus else _WHY_NOT.get(option)
            ignored.append((each.line, f"{each.text} ({why})" if why else each.text))
        elif meaning and (option == "--export" or meaning[0].removeprefix("--") not in given):
            options += meaning
    said = [f"line {number}: {what}" for number, what in sorted(ignored)]
    if asked and not gpus and not {"gpus", "slice"} & set(given):
        said.append("it asks for no number of GPUs that is understood, and gets 1")
    if asked and "upload" not in given:
        options += [
            word for each in _FOLDERS if re.search(rf"\b{each}\b", text) for word in ("--env", f"{each}={os.getcwd()}")
        ]
    if asked and (variables := sorted(set(_VARIABLE.findall(text)) - {word.partition("=")[0] for word in options})):
        instead = " (WATTSHIFT_ARRAY_INDEX is)" if any(each.find("ARRAY") > 0 for each in variables) else ""
        said.append(f"it reads {', '.join(variables)}, not set here{instead}")
    if asked and _SRUN.search(text) and shutil.which("srun") is None:
        said.append(
            "it calls srun, which is not here: let it start the program itself, by --processes per_gpu once a GPU"
        )
    return options, said


def as_own(words: Sequence[str], own: Mapping[str, bool]) -> str:
    """Return the ``wattshift submit`` line for words typed as if for Slurm, and below it what that line leaves out.

    Empty if an option is neither Slurm's nor our own.

    Args:
        words: What was typed: options, then a program or script with its own arguments.
        own: Options of ``submit`` that keep their meaning, and whether a value follows each.
    """
    mine: list[str] = []
    theirs: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        option, has_value, _ = words[at].partition("=")
        is_own = option in own
        if not is_own and not option.startswith("--"):
            option, has_value = option[:2], has_value or option[2:]
        if not is_own and option not in _FLAGS | _VALUES:
            return ""
        stop = at + 1 + (not has_value and (own[option] if is_own else option in _VALUES))
        (mine if is_own else theirs).extend(words[at:stop])
        at = stop
    given = [word.partition("=")[0].lstrip("-").replace("-", "_") for word in mine]
    options, said = obeyed("", "", [(0, f"{SBATCH} {shlex.join(theirs)}")] if theirs else [], given)
    line = shlex.join(["wattshift", "submit", *mine, *options, *words[at:]])
    left_out = "; ".join(each.removeprefix("line 0: ") for each in said)
    return f"{line}\nwhich leaves this out: {left_out}" if left_out else line


def parted(words: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the words that are options of ``submit``, with their values, and the rest."""
    mine: list[str] = []
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, has_value, _ = word.partition("=")
        (mine if name in own else others).append(word)
        if own.get(name) and not has_value and left:
            mine.append(left.pop(0))
    return mine, others


def _meaning(option: str, value: str, gpus: int) -> list[str] | None:
    """Return the words for an option that is not about GPUs; None if it has no exact meaning here."""
    if option in _MEANINGS:
        return _MEANINGS[option](value)
    if option in _FILES:
        return [option, value] if PATTERN.fullmatch(value) else None
    if value == "1" and (option in _OF_TASKS or (option == "--nodes" and gpus <= 1)):
        return []
    return [_SAME[option], value] if option in _SAME and value else None


def _gpus(asked: dict[str, _Asked]) -> tuple[int, set[str]]:
    """Return the number of GPUs of the whole job, 0 if uncertain, and the GPU options that are not obeyed exactly."""
    nodes = _whole(asked, "--nodes")
    tasks = _whole(asked, "--ntasks") if "--ntasks" in asked else nodes * _whole(asked, "--ntasks-per-node")
    totals: dict[str, int] = {}
    inexact: set[str] = set()
    for option, times in zip(_OF_GPUS, (1, nodes, nodes, tasks), strict=True):
        if option not in asked:
            continue
        entries = asked[option].value.split(",")
        counts = [_COUNT.fullmatch(each) for each in entries if option != "--gres" or each.partition(":")[0] == "gpu"]
        if times and len(counts) == 1 and (count := counts[0]):
            totals[option] = int(count["count"] or count["of_type"] or 1) * times
            inexact |= {option} if count["type"] or len(entries) > 1 else set()
        else:
            inexact.add(option)
    total = next(iter(totals.values()), 0)
    return total, inexact | {option for option, each in totals.items() if each != total}


def _whole(asked: dict[str, _Asked], option: str) -> int:
    """Return the number that an option gives: 1 if the option is absent, 0 if it is a range or not a number."""
    least, _, most = (asked[option].value if option in asked else "1").partition("-")
    return int(least) if least.isdecimal() and most in ("", least) else 0


def _time(value: str) -> list[str] | None:
    """Return the words for one of Slurm's time limits: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``.

    Empty for no limit; None if it is not a time limit.
    """
    if value.upper() in ("UNLIMITED", "INFINITE"):
        return []
    if SECONDS.fullmatch(value):
        return ["--time", value]
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", value):
        return None
    days, has_days, clock = value.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = (*([] if has_days or len(parts) == 3 else [0]), *parts, 0, 0)[:3]
    limit_s = int(days or 0) * 86_400 + hours * 3_600 + minutes * 60 + seconds
    return ["--time", f"{limit_s}s"] if limit_s else []


def _notify(value: str) -> list[str] | None:
    """Return the words for messages on events; None if one of the events has no counterpart here."""
    events = value.upper().split(",")
    if not set(events) <= set(_MAIL):
        return None
    asked = dict.fromkeys(word for event in events for word in _MAIL[event])
    return ["--notify", ",".join(asked)] if asked else []


def _after(value: str) -> list[str] | None:
    """Return the words for a dependency on jobs that must all have ended; None if it has another form."""
    words: list[str] = []
    for part in value.split(","):
        condition, *jobs = part.split(":")
        if condition not in _CONDITIONS or not jobs or not all(re.fullmatch(r"[\w.-]+", job) for job in jobs):
            return None
        words += [word for job in jobs for word in ("--after", f"{_CONDITIONS[condition]}:{job}")]
    return words


def _export(value: str) -> list[str] | None:
    """Return the words for the variables to pass on: ``ALL``, ``NONE`` or those named; None if one is not set here."""
    names = value.split(",")
    every = [each for each in ("ALL", "NONE", "NIL") if each in (name.upper() for name in names)]
    rest = [name for name in names if name and name.upper() not in every]
    if not all("=" in name or name in os.environ for name in rest):
        return None
    return [
        *(["--env", "*"] if "ALL" in every else ["--clean-env"]),
        *(word for name in rest for word in ("--env", name)),
    ]


_MEANINGS: dict[str, Callable[[str], list[str] | None]] = {
    **{"--time": _time, "--dependency": _after, "--export": _export, "--mail-type": _notify},
    "--hold": lambda _: ["--hold"],
}
