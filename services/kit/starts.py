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


def check_start(processes: Mapping[str, JobSpec | ServerProcess]) -> None:
    """Check that commands and environments, by the pointers to their specs, are none that no Linux node could start.

    Specs that an earlier release stored may have larger ones, so that this is no part of reading them.

    Raises:
        ProblemError: 422, one is too large.
    """
    errors: list[FieldError] = []
    for pointer, process in processes.items():
        words = {f"/command/{at}": word for at, word in enumerate(process.command)}
        words |= {f"/environment/{name}": f"{name}={value}" for name, value in process.environment.items()}
        sizes = {place: len(word.encode(errors="replace")) + 1 for place, word in words.items()}
        total = sum(sizes.values()) + 8 * len(sizes)
        most = "of an argument or variable Linux takes"
        errors += (
            FieldError(pointer=pointer + place, detail=f"has {size - 1:,} bytes; {most} {STRING_BYTES - 1:,}")
            for place, size in sizes.items()
            if size > STRING_BYTES
        )
        if total > START_BYTES:
            detail = f"command and environment have {total:,} bytes together; a program starts with {START_BYTES:,}"
            errors.append(FieldError(pointer=f"{pointer}/command", detail=detail))
    if errors:
        detail = f"{errors[0].pointer}: {errors[0].detail}"
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, detail, errors=errors[:50])
