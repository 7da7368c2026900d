"""Commands and environments that Linux would refuse to start: told before a spec is accepted."""

from collections.abc import Mapping

from services.contracts.codes import ProblemCode
from services.contracts.jobs import JobSpec
from services.contracts.problems import FieldError
from services.contracts.serving import ServerProcess
from services.kit.problems import ProblemError

STRING_BYTES = 128 * 1024  #: One argument or `NAME=VALUE` of Linux' execve, with the zero at its end
START_BYTES = 2 * 1024 * 1024 - STRING_BYTES
"""All of them with a pointer to each, less room for what nodes add: a quarter of the usual stack of 8 MiB."""


def check_start(
    processes: Mapping[str, JobSpec | ServerProcess], secrets: Mapping[str, Mapping[str, int]] | None = None
) -> None:
    """Check that commands and environments, by the pointers to their specs, are none that no Linux node could start.

    Specs that an earlier release stored may have larger ones, so that this is no part of reading them.

    Args:
        secrets: The bytes that the secrets of each spec have now, by its pointer and their names, as far as known.

    Raises:
        ProblemError: 422, one is too large.
    """
    errors: list[FieldError] = []
    for pointer, process in processes.items():
        words = {f"/command/{at}": word for at, word in enumerate(process.command)}
        words |= {f"/environment/{name}": f"{name}={value}" for name, value in process.environment.items()}
        sizes = {place: len(word.encode(errors="replace")) + 1 for place, word in words.items()}
        values = (secrets or {}).get(pointer, {})
        uses = (process.secrets if isinstance(process, JobSpec) else None) or ()
        hidden = [len(f"{use.env}=") + values[use.name] + 1 for use in uses if use.env and use.name in values]
        total = sum(sizes.values()) + sum(hidden) + 8 * (len(sizes) + len(hidden))
        most = "of an argument or variable Linux takes"
        errors += (
            FieldError(pointer=pointer + place, detail=f"has {size - 1:,} bytes; {most} {STRING_BYTES - 1:,}")
            for place, size in sizes.items()
            if size > STRING_BYTES
        )
        if total > START_BYTES:
            what = "command, environment and secrets" if hidden else "command and environment"
            detail = f"{what} have {total:,} bytes together; a program starts with at most {START_BYTES:,}"
            errors.append(FieldError(pointer=f"{pointer}/command", detail=detail))
    if errors:
        detail = f"{errors[0].pointer}: {errors[0].detail}"
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, detail, errors=errors[:50])
