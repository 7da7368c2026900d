"""Files and batches of requests as OpenAI's API has them, with the carbon of a batch as one more member."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from services.contracts.schema import Int, Message, Text, maybe, said

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
BATCH_HEADER = "x-wattshift-batch"
"""Marks a line of a batch; its value names the places that may answer it, separated by commas."""
BATCH_MODEL_HEADER = "x-wattshift-batch-model"
"""The model that answers a line, in place of the name in its body, which may be an alias of its key."""
WINDOW_S = 86_400
LEAST_KEPT_S, MOST_KEPT_S = 3_600, 2_592_000
Metadata = dict[Annotated[Text, StringConstraints(max_length=64)], Annotated[Text, StringConstraints(max_length=512)]]


class BatchFile(Message):
    """A file that was uploaded, or that a batch wrote."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = said("Unix seconds, as are all times here.")
    expires_at: int
    filename: str
    purpose: str
    status: Literal["uploaded", "processed"] = "processed"


class BatchFileList(Message):
    """One page of files, newest first."""

    object: Literal["list"] = "list"
    data: list[BatchFile]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class DeletedFile(Message):
    """A file that is no more."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class OutputExpiry(Message):
    """How long the files that a batch writes are kept."""

    anchor: Literal["created_at"]
    seconds: Int = Field(ge=LEAST_KEPT_S, le=MOST_KEPT_S)


class BatchRequest(Message):
    """A new batch."""

    input_file_id: Text
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = Field(default=None, max_length=16)
    output_expires_after: OutputExpiry | None = None


class LineError(Message):
    """What is wrong with a line of the input file, or with the file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Message):
    """Why a batch was not begun."""

    object: Literal["list"] = "list"
    data: list[LineError]


class RequestCounts(Message):
    """How far a batch has come."""

    total: int
    completed: int
    failed: int


class BatchCarbon(Message):
    """What a batch's answers took so far, where their servers' power and grid are known, and when it goes on."""

    wh: float
    gco2: float
    saved_gco2: float | None = said(
        "Against the same energy at the moment the batch came, in equal shares at all places that serve "
        "its models; null if that was not known."
    )
    repeated_lines: int = said(
        "Lines that were sent again because a crash or a lost answer left open what became of them."
    )
    next_at: int | None = maybe(
        "Nothing more is planned to be sent before, as it is cleaner then; null if some is sent now, or none is left."
    )


class Batch(Message):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: Metadata | None = None
    wattshift: BatchCarbon


class BatchList(Message):
    """One page of batches, newest first."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
