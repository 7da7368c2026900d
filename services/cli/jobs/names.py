"""Jobs and arrays as people name them: by number, id, the beginning of an id, or name, where that is unambiguous.

Of several with one name, the only one that has not ended is meant.
"""

import getpass
import os
import re
from typing import Any

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_NOT_FOUND, EXIT_USAGE, CliError
from services.contracts.invalid import JOB_NUMBER, NAME_PATTERN, NAME_RULE
from services.core.domain.jobs import JobState

PATHS = {"job": "/v1/jobs", "array": "/v1/arrays"}
_ID = re.compile(r"(?:job|array)_[0-9a-z]{26}")
_BEGINNING = re.compile(r"(?:(job|array)_)?([0-9a-z]{1,26})")
_SHOWN = 10
ENDED = frozenset(state.value for state in JobState if state.is_final)

USER_LABEL = "user"
"""The label that names who submitted a job, by the account on the machine that it was submitted from."""


def checked_name(name: str, what: str) -> str:
    """Return ``name`` if it is valid for a ``what``; ``CliError`` if it is not."""
    if not re.match(NAME_PATTERN, name):
        raise CliError(f"the name of a {what} {NAME_RULE}, not {name!r}", EXIT_USAGE)
    return name


def number_of(job: dict[str, Any]) -> str:
    """Return what people type instead of a job's id, such as `#12`; `-` if it was accepted before jobs had numbers."""
    if not job.get("number"):
        return "-"
    index = job.get("array_index")
    return f"#{job['number']}" + ("" if index is None else f".{index}")


def is_array(found_id: str) -> bool:
    return found_id.startswith("array_")


def path_of(found_id: str) -> str:
    """Return the path of a job or an array in the API."""
    return f"{PATHS['array' if is_array(found_id) else 'job']}/{found_id}"


def job_or_array(gateway: Gateway, word: str) -> str:
    """Return the id of the job or the array that ``word`` names.

    Raises:
        CliError: Nothing has that name, that number, or an id that begins with it, or several have; the message lists
            them.
    """
    if _ID.fullmatch(word):
        return word
    found: dict[str, Any] = {}
    if re.match(NAME_PATTERN, word):
        for path in PATHS.values():
            found |= _by_id(gateway.pages(path, _SHOWN + 1, name=word))
    live = [each for each, job in found.items() if job["state"] not in ENDED]
    if len(found) <= _SHOWN and len(live) == 1:
        return live[0]
    if not found and (number := re.fullmatch(f"#?{JOB_NUMBER}", word)):
        found = _by_number(gateway, *number.groups())
    if not found and (beginning := _BEGINNING.fullmatch(word)):
        for kind, path in PATHS.items():
            if beginning[1] in (None, kind):
                found |= _by_id(gateway.pages(path, _SHOWN + 1, id_prefix=f"{kind}_{beginning[2]}"))
    if not found:
        raise CliError(
            f"there is no job {word!r}: none has that name or number, or an id that begins with it", EXIT_NOT_FOUND
        )
    if len(found) > 1:
        lines = [
            f"  {job['id']}  {job['name']}  {job['state']}, submitted {output.age(job['submitted_at'])} ago"
            for job in list(found.values())[:_SHOWN]
        ]
        more = ["  ..."] if len(found) > _SHOWN else []
        raise CliError("\n".join([f"{word!r} is ambiguous; give one of these ids:", *lines, *more]), EXIT_USAGE)
    return next(iter(found))


def job_id(gateway: Gateway, word: str) -> str:
    """Return the id of the job that ``word`` names, as ``job_or_array``; ``CliError`` also if it is an array."""
    found = job_or_array(gateway, word)
    if is_array(found):
        array = gateway.get(path_of(found))
        task = f"{array['name']}.{array['first']}"
        raise CliError(f"{word!r} is an array of {array['count']} jobs; name one of them, such as {task}", EXIT_USAGE)
    return found


def array_id(gateway: Gateway, word: str) -> str:
    """Return the id of the array that ``word`` names, as ``job_or_array``; ``CliError`` also if it is a job."""
    found = job_or_array(gateway, word)
    if not is_array(found):
        raise CliError(f"{word!r} is a single job, and no array", EXIT_USAGE)
    return found


def _by_number(gateway: Gateway, number: str, index: str | None) -> dict[str, Any]:
    wanted = {"number": number}
    arrays = gateway.pages(PATHS["array"], _SHOWN + 1, **wanted)
    if index is None:
        return _by_id([*gateway.pages(PATHS["job"], _SHOWN + 1, **wanted), *arrays])
    tasks = [{"array": each["id"], "name": f"{each['name']}.{int(index)}"} for each in arrays]
    return _by_id([task for asked in tasks for task in gateway.pages(PATHS["job"], 1, **asked)])


def _by_id(jobs: list[Any]) -> dict[str, Any]:
    return {job["id"]: job for job in jobs}


def user_name() -> str:
    """Return the name of the account that runs this command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
