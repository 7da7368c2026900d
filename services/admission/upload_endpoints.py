"""HTTP endpoints for uploads."""

import re
from typing import Annotated

from fastapi import APIRouter

from services.admission.uploads import Uploads
from services.contracts.sources import Upload, UploadChunk, UploadSpec
from services.kit.identity import ProjectCaller
from services.kit.problems import not_found
from services.kit.routes import from_state

TheUploads = Annotated[Uploads, from_state("uploads")]
router = APIRouter(tags=["inputs"])


@router.put(
    "/v1/uploads/{sha256}",
    responses={
        409: {"description": "It was begun with another size: `conflict`."},
        413: {"description": "It is larger than an archive may be: `body_too_large`."},
    },
)
async def start_upload(caller: ProjectCaller, sha256: str, spec: UploadSpec, uploads: TheUploads) -> Upload:
    """Begin or continue an upload.

    The archive is named by its SHA-256. What the tenant has uploaded before is not sent again.
    """
    return await uploads.start(caller, _checked(sha256), spec.size_bytes)


@router.get("/v1/uploads/{sha256}")
async def get_upload(caller: ProjectCaller, sha256: str, uploads: TheUploads) -> Upload:
    """Get how much of an upload has arrived."""
    return await uploads.get(caller, _checked(sha256))


@router.put("/v1/uploads/{sha256}/chunks/{number}")
async def send_upload_chunk(
    caller: ProjectCaller, sha256: str, number: str, chunk: UploadChunk, uploads: TheUploads
) -> Upload:
    """Send a part of an upload.

    After the last one, the whole is checked against its SHA-256; if they differ, all of it has to be sent again.
    """
    if not re.fullmatch("[0-9]{1,9}", number):
        raise not_found("chunk")
    return await uploads.put_chunk(caller, _checked(sha256), int(number), chunk.data)


def _checked(sha256: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise not_found("upload: its name is a SHA-256 in 64 lower-case hexadecimal digits")
    return sha256
