"""Jobs as people name them: by id, by the beginning of an id, or by name, where that is unambiguous."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from services.cli import output
from services.cli.client import EXIT_NOT_FOUND, EXIT_USAGE, CliError, Gateway
from services.contracts.schema import NAME_PATTERN

PREFIX = "job_"
_ID = re.compile(r"job_[0-9a-z]{26}")
_BEGINNING = re.compile(r"(?:job_)?[0-9a-z]{1,26}")
_SHOWN = 10


def job_id(gateway: Gateway, word: str) -> str:
    """Return the id of the job that ``word`` names.

    Raises:
        CliError: No job has that name or an id that begins so, or several have; the message lists them.
    """
    if _ID.fullmatch(word):
        return word
    found: dict[str, Any] = {}
    if re.match(NAME_PATTERN, word):
        found = _by_id(gateway.pages("/v1/jobs", _SHOWN + 1, name=word))
    if not found and _BEGINNING.fullmatch(word):
        begins = word if word.startswith(PREFIX) else PREFIX + word
        found = _by_id(gateway.pages("/v1/jobs", _SHOWN + 1, id_prefix=begins))
    if not found:
        raise CliError(f"there is no job {word!r}: no name is equal and no id begins so", EXIT_NOT_FOUND)
    if len(found) > 1:
        lines = [
            f"  {job['id']}  {job['name']}  {job['state']}, submitted {output.age(job['submitted_at'])} ago"
            for job in list(found.values())[:_SHOWN]
        ]
        more = ["  ..."] if len(found) > _SHOWN else []
        raise CliError("\n".join([f"{word!r} is ambiguous; give one of these ids:", *lines, *more]), EXIT_USAGE)
    return next(iter(found))


def job_ids(gateway: Gateway, words: Sequence[str]) -> list[str]:
    """Return the ids of jobs, in order; nothing is done to any of them if one is not found. See ``job_id``."""
    return [job_id(gateway, word) for word in words]


def _by_id(jobs: list[Any]) -> dict[str, Any]:
    return {job["id"]: job for job in jobs}
