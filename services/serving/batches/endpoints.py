"""Files and batches for routers, which pass on what clients of OpenAI's API send: HTTP only."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from services.contracts.batches import Batch, BatchFile, BatchFileList, BatchList, BatchRequest, DeletedFile
from services.contracts.queries import Plain
from services.kit.identity import Caller
from services.kit.routes import from_state
from services.serving.batches.service import Batches

router = APIRouter(prefix="/internal/openai/v1")

TheBatches = Annotated[Batches, from_state("batches")]
FilesLimit = Annotated[int, Plain, Query(ge=1, le=10_000)]
BatchesLimit = Annotated[int, Plain, Query(ge=1, le=100)]


@router.post("/files")
async def upload_file(request: Request, caller: Caller, batches: TheBatches) -> BatchFile:
    """Upload a file."""
    return await batches.upload(caller, request.headers.get("content-type", ""), request.stream())


@router.get("/files")
async def list_files(
    caller: Caller,
    batches: TheBatches,
    limit: FilesLimit = 1_000,
    after: str | None = None,
    purpose: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> BatchFileList:
    """List files."""
    return await batches.files(caller, limit, after, purpose, ascending=order == "asc")


@router.get("/files/{file}")
async def get_file(file: str, caller: Caller, batches: TheBatches) -> BatchFile:
    """Get a file without its content."""
    return await batches.file(caller, file)


@router.get("/files/{file}/content")
async def read_file(file: str, caller: Caller, batches: TheBatches) -> StreamingResponse:
    """Read a file's content."""
    found = await batches.file(caller, file)
    headers = {"content-length": str(found.bytes)}
    return StreamingResponse(batches.content(caller, file), media_type="application/jsonl", headers=headers)


@router.delete("/files/{file}")
async def delete_file(file: str, caller: Caller, batches: TheBatches) -> DeletedFile:
    """Delete a file."""
    return await batches.remove_file(caller, file)


@router.post("/batches")
async def create_batch(request: BatchRequest, caller: Caller, batches: TheBatches) -> Batch:
    """Create a batch."""
    return await batches.create(caller, request)


@router.get("/batches")
async def list_batches(
    caller: Caller, batches: TheBatches, limit: BatchesLimit = 20, after: str | None = None
) -> BatchList:
    """List batches."""
    return await batches.page(caller, limit, after)


@router.get("/batches/{batch}")
async def get_batch(batch: str, caller: Caller, batches: TheBatches) -> Batch:
    """Get a batch."""
    return await batches.find(caller, batch)


@router.post("/batches/{batch}/cancel")
async def cancel_batch(batch: str, caller: Caller, batches: TheBatches) -> Batch:
    """Cancel a batch."""
    return await batches.cancel(caller, batch)
