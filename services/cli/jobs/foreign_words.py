"""The words of Slurm's, PBS's and LSF's lines, read as options of Slurm."""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

SECONDS = re.compile(r"\d+s")


class Meant(NamedTuple):
    """What an option means: Slurm's option and its value, empty if there is none, and the text that it was given as."""

    option: str
    value: str
    text: str


_SHORT = {
    **{"-G": "--gpus", "-N": "--nodes", "-n": "--ntasks", "-t": "--time", "-a": "--array", "-J": "--job-name"},
    **{"-D": "--chdir", "-d": "--dependency", "-H": "--hold", "-o": "--output", "-e": "--error"},
}
_PBS_FLAGS = frozenset("hIVXz")
_PBS_SAME = {
    **{"N": "--job-name", "J": "--array", "t": "--array", "d": "--chdir", "w": "--chdir", "M": "--mail-user"},
    **{"h": "--hold", "v": "--export"},
}
_LSF_FLAGS = frozenset(("H", "N", "B", "x", "r", "rn", "K", "I", "Ip", "Is"))
_LSF_LONG = ("gpu", "cwd", "env", "oo", "eo", "app", "sla", "sp", "ext", "hl")
_LSF_SAME = {"cwd": "--chdir", "n": "--ntasks", "u": "--mail-user", "H": "--hold"}
_LSF_GPUS = {
    "gpu": (r"(?:^|:)num=(\d+)(?:/\w+)?(?::|$)|$", r"-|num=\d+(?:/host)?"),
    "R": (r"\bngpus(?:_physical|_excl_p)?=(\d+)", r"rusage\[\w+=\d+\]"),
}
"""Where the number of GPUs is in a value, 1 if it is not, and values that have nothing else."""
_LSF_CONDITIONS = {"done": "afterok", "ended": "afterany", "exit": "afternotok"}
_PBS_MAIL = {"n": "NONE", "a": "FAIL", "b": "BEGIN", "e": "END"}


def _of_slurm(words: Sequence[str]) -> Iterator[Meant]:
    """Yield the options of a ``#SBATCH`` line; a word without a dash is the value of the one before it."""
    left = list(words)
    while left:
        word = left.pop(0)
        option, _, value = word.partition("=")
        if word.startswith("-") and not word.startswith("--"):
            option, value = _SHORT.get(word[:2], word[:2]), word[2:].removeprefix("=")
        if not value and left and not left[0].startswith("-"):
            value = left.pop(0)
            word = f"{word} {value}"
        yield Meant(option, value, word)


def _parted(words: Sequence[str], flags: Collection[str], long: Collection[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the value and the text of each option of a line; the name of any other word is empty.

    ``flags`` have no value, and all but the ``long`` options one letter.
    """
    left = list(words)
    while left:
        word = left.pop(0)
        given = word[1:] if word.startswith("-") else ""
        name = given if given in flags else next((each for each in long if given.startswith(each)), given[:1])
        value = given[len(name) :]
        if name and name not in flags and not value and left:
            value = left.pop(0)
            word = f"{word} {value}"
        yield name, value, word


def _of_pbs(words: Sequence[str]) -> Iterator[Meant]:
    """Yield what the options of a ``#PBS`` line mean."""
    for option, value, word in _parted(words, _PBS_FLAGS):
        if option == "l":
            yield from _resources(value)
        elif option in _PBS_SAME:
            yield Meant(_PBS_SAME[option], value, word)
        elif option == "V":
            yield Meant("--export", "ALL", word)
        elif option == "m":
            events = ",".join(_PBS_MAIL.get(each, value) for each in value)
            yield Meant("--mail-type", events, word)
        elif option == "W" and value.startswith("depend="):
            yield Meant("--dependency", value.removeprefix("depend="), word)
        elif option in ("o", "e"):
            file = value.removeprefix(":").replace("^array_index^", "%a")
            file += f"%x.{option}%A" if file.endswith("/") else ""
            yield Meant("" if ":" in file else "--output" if option == "o" else "--error", file, word)
        elif option != "j" or value not in ("oe", "eo", "n"):
            # By those, the log has both streams, and a file of output too unless errors have their own.
            yield Meant("", "", word)


def _resources(value: str) -> Iterator[Meant]:
    """Yield what a list such as ``select=2:ncpus=8:ngpus=4,walltime=1:00:00`` means."""
    for part in value.split(","):
        name, _, amount = part.partition("=")
        text = f"-l {part}"
        if name == "walltime" and re.fullmatch(r"(\d+:){0,2}\d+", amount):
            limit_s = 0
            for digits in amount.split(":"):
                limit_s = limit_s * 60 + int(digits)
            yield Meant("--time", f"{limit_s}s", text)
        elif name in ("ngpus", "gpus") and amount.isdecimal():
            yield Meant("--gpus", amount, text)
        elif name in ("select", "nodes"):
            yield from _chunks(amount, text)
        else:
            yield Meant("", "", text)


def _chunks(amount: str, text: str) -> Iterator[Meant]:
    nodes = gpus = 0
    others: list[str] = []
    for chunk in amount.split("+"):
        first, *parts = chunk.split(":")
        count = int(first) if first.isdecimal() else 1
        others += [] if first.isdecimal() else [first]
        nodes += count
        for part in parts:
            found = re.fullmatch(r"n?gpus=(\d+)", part)
            gpus += count * int(found[1]) if found else 0
            others += [] if found or part in ("ncpus=1", "ppn=1") else [part]
    if gpus:
        yield Meant("--gpus", str(gpus), text)
    yield Meant("--nodes", str(nodes), text)
    if others:
        yield Meant("", f"not obeyed: {', '.join(dict.fromkeys(others))}", text)


def _of_lsf(words: Sequence[str]) -> Iterator[Meant]:
    """Yield what the options of a ``#BSUB`` line mean."""
    for option, value, word in _parted(words, _LSF_FLAGS, _LSF_LONG):
        yield from _lsf_option(option, value.strip(), word)


def _lsf_option(option: str, value: str, word: str) -> Iterator[Meant]:
    if option in _LSF_SAME:
        yield Meant(_LSF_SAME[option], value, word)
    elif option in ("N", "B"):
        yield Meant("--mail-type", "END" if option == "N" else "BEGIN", word)
    elif option == "W" and (limit := re.fullmatch(r"(?:(\d+):)?(\d+)(?:/.*)?", value)):
        yield Meant("--time", f"{int(limit[1] or 0) * 3_600 + int(limit[2]) * 60}s", word)
    elif option == "J" and (found := re.fullmatch(r"([^\[\]]*)(?:\[([^\]]*)\](%\d+)?)?", value)):
        if found[1]:
            yield Meant("--job-name", found[1], word)
        if found[2]:
            yield Meant("--array", found[2] + (found[3] or ""), word)
    elif option in ("o", "oo", "e", "eo"):
        file = value.replace("%J", "%A").replace("%I", "%a")
        yield Meant("--output" if option.startswith("o") else "--error", file, word)
    elif option == "env":
        yield Meant("--export", re.sub(r"\s*,\s*", ",", value), word)
    elif option == "w" and (needs := _needs(value)):
        yield Meant("--dependency", needs, word)
    elif option in _LSF_GPUS and (count := re.search(_LSF_GPUS[option][0], value)):
        yield Meant("--gres", f"gpu:{count[1] or 1}", word)
        if not re.fullmatch(_LSF_GPUS[option][1], value):
            yield Meant("", "only the number of GPUs is obeyed", word)
    else:
        yield Meant("", "", word)


def _needs(value: str) -> str:
    """Return a condition on jobs in Slurm's words; empty unless it is that all of some jobs have ended in some way."""
    parts = [re.fullmatch(r"\s*(?:(\w+)\()?[\"']?([\w.-]+)[\"']?\)?\s*", part) for part in value.split("&&")]
    named = [(_LSF_CONDITIONS.get(part[1] or "done"), part[2]) for part in parts if part]
    if len(named) < len(parts) or not all(condition for condition, _ in named):
        return ""
    return ",".join(f"{condition}:{job}" for condition, job in named)


READERS = {"#SBATCH": _of_slurm, "#PBS": _of_pbs, "#BSUB": _of_lsf}
"""How the lines of each scheduler are read; in a script with lines for several, the first of these counts."""
