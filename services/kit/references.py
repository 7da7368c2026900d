"""What a valid spec asks for and cannot get: secrets and uploads that its tenant lacks, a start that Linux refuses."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING

from services.contracts.codes import ProblemCode
from services.contracts.jobs import JobSpec
from services.contracts.problems import FieldError
from services.kit.problems import ProblemError

if TYPE_CHECKING:  # the command line looks at uploads without it
    from services.contracts.serving import ServerProcess

NO_UPLOAD = "There is no complete upload with this SHA-256; upload it first, as `wattshift submit --upload` does."
STRING_BYTES = 128 * 1024  #: One argument or `NAME=VALUE` of Linux' execve, with the zero at its end
START_BYTES = 2 * 1024 * 1024 - STRING_BYTES
"""All of them with a pointer to each, less room for what nodes add: a quarter of the usual stack of 8 MiB."""


def secret_places(spec: JobSpec) -> dict[str, str]:
    """Return the secrets that a job names, each with the pointer to the first place where it does so."""
    places = {use.name: f"/secrets/{number}/name" for number, use in reversed([*enumerate(spec.secrets or ())])}
    if spec.source and spec.source.git and spec.source.git.secret:
        places.setdefault(spec.source.git.secret, "/source/git/secret")
    return places


def named_upload(spec: JobSpec) -> str | None:
    """Return the SHA-256 of the upload that a job runs in; None if it names none."""
    return spec.source.upload if spec.source else None


def missing_references(
    spec: JobSpec, secrets: Iterable[str], uploads: Container[str | None], prefix: str = ""
) -> list[FieldError]:
    """Return one error for each secret and upload that a job names but that does not exist.

    Args:
        secrets: Those that it names and its tenant does not have.
        uploads: SHA-256 of those that its tenant does not have.
        prefix: The pointer to the job in its submission.
    """
    places = secret_places(spec)
    what = "There is no secret {0}; set it with `wattshift secrets set {0}`, or PUT /v1/secrets/{0}."
    errors = [FieldError(pointer=prefix + places[name], detail=what.format(name)) for name in secrets]
    upload = named_upload(spec)
    if upload is not None and upload in uploads:
        errors.append(FieldError(pointer=f"{prefix}/source/upload", detail=NO_UPLOAD))
    return errors


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
