"""HTTP of uploads."""

from __future__ import annotations

import re

from fastapi import APIRouter

from services.admission.uploads import Uploads
from services.contracts.sources import Upload, UploadChunk, UploadSpec
from services.kit.identity import ProjectCaller
from services.kit.problems import not_found


def upload_routes(uploads: Uploads) -> APIRouter:
    """Return the routes that are about uploads."""
    router = APIRouter()

    @router.put("/v1/uploads/{sha256}")
    async def start_upload(caller: ProjectCaller, sha256: str, spec: UploadSpec) -> Upload:
        return await uploads.start(caller, _checked(sha256), spec.size_bytes)

    @router.get("/v1/uploads/{sha256}")
    async def get_upload(caller: ProjectCaller, sha256: str) -> Upload:
        return await uploads.get(caller, _checked(sha256))

    @router.put("/v1/uploads/{sha256}/chunks/{number}")
    async def send_upload_chunk(caller: ProjectCaller, sha256: str, number: str, chunk: UploadChunk) -> Upload:
        if not re.fullmatch("[0-9]{1,9}", number):
            raise not_found("chunk")
        return await uploads.put_chunk(caller, _checked(sha256), int(number), chunk.data)

    return router


def _checked(sha256: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise not_found("upload: its name is a SHA-256 in 64 lower-case hexadecimal digits")
    return sha256
