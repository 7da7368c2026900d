"""HTTP endpoints for what jobs are given: secrets and uploads."""

import re
from typing import Annotated

from fastapi import APIRouter, Query

from services.admission.secrets import Secrets
from services.admission.uploads import Uploads
from services.contracts.codes import ProblemCode
from services.contracts.invalid import NAME_PATTERN, NAME_RULE
from services.contracts.queries import SecretQuery
from services.contracts.secrets import Secret, SecretList, SecretSpec
from services.contracts.sources import Upload, UploadChunk, UploadSpec
from services.kit.identity import Caller, ProjectCaller
from services.kit.problems import ProblemError
from services.kit.routes import from_state, named_by

TheSecrets = Annotated[Secrets, from_state("secrets")]
TheUploads = Annotated[Uploads, from_state("uploads")]
UploadName = Annotated[
    str, named_by("[0-9a-f]{64}", "upload: its name is a SHA-256 in 64 lower-case hexadecimal digits")
]
ChunkNumber = Annotated[str, named_by("[0-9]{1,9}", "chunk")]
router = APIRouter(tags=["inputs"])


@router.put(
    "/v1/secrets/{name}",
    responses={409: {"description": "The installation has no key to seal secrets with: `capability_missing`."}},
)
async def set_secret(caller: Caller, name: str, spec: SecretSpec, secrets: TheSecrets) -> Secret:
    """Set a secret of the tenant.

    Jobs that name it get its value. No answer ever contains it.
    """
    return await secrets.put(caller, _checked(name), spec)


@router.get("/v1/secrets")
async def list_secrets(caller: Caller, secrets: TheSecrets) -> SecretList:
    """List the secrets of the tenant, without their values."""
    return await secrets.list(caller)


@router.delete("/v1/secrets/{name}", status_code=204)
async def delete_secret(caller: Caller, name: str, query: Annotated[SecretQuery, Query()], secrets: TheSecrets) -> None:
    """Delete a secret.

    Running jobs keep its value; jobs that have yet to start with it fail.
    """
    await secrets.remove(caller, _checked(name), query.project)


def _checked(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise ProblemError(422, ProblemCode.INVALID_REQUEST, f"The name of a secret {NAME_RULE}.")
    return name


@router.put(
    "/v1/uploads/{sha256}",
    responses={
        409: {"description": "It was begun with another size: `conflict`."},
        413: {"description": "It is larger than an archive may be: `body_too_large`."},
    },
)
async def start_upload(caller: ProjectCaller, sha256: UploadName, spec: UploadSpec, uploads: TheUploads) -> Upload:
    """Begin or continue an upload.

    The archive is named by its SHA-256. What the tenant has uploaded before is not sent again.
    """
    return await uploads.start(caller, sha256, spec.size_bytes)


@router.get("/v1/uploads/{sha256}")
async def get_upload(caller: ProjectCaller, sha256: UploadName, uploads: TheUploads) -> Upload:
    """Get how much of an upload has arrived."""
    return await uploads.get(caller, sha256)


@router.put("/v1/uploads/{sha256}/chunks/{number}")
async def send_upload_chunk(
    caller: ProjectCaller, sha256: UploadName, number: ChunkNumber, chunk: UploadChunk, uploads: TheUploads
) -> Upload:
    """Send a part of an upload.

    After the last one, the whole is checked against its SHA-256; if they differ, all of it has to be sent again.
    """
    return await uploads.put_chunk(caller, sha256, int(number), chunk.data)
