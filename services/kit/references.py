"""The secrets and uploads that a job's spec names, and the errors of a spec whose tenant does not have them."""

from collections.abc import Container, Iterable

from services.contracts.jobs import JobSpec
from services.contracts.problems import FieldError

NO_UPLOAD = "There is no complete upload with this SHA-256; upload it first, as `wattshift submit --upload` does."


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
