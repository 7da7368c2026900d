"""Where a job's files come from on nodes that share no folder with the submitter: an upload, or a git repository."""

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from services.contracts.schema import Instant, Int, Message, Name, NodeMessage, Text, maybe, said

UPLOAD_CHUNK_BYTES = 512 * 1024  #: Bytes of every chunk of an upload but the last: as Base64, one fits into a request

_GIT_URL = re.compile(
    r"(https://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?|ssh://([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?"
    r"|file://)/[^\s\x00-\x1f]+|[A-Za-z0-9_][\w.-]*@[A-Za-z0-9][A-Za-z0-9.-]*:(?!/?-)[^\s\x00-\x1f]+"
)


def _git_url(url: str) -> str:
    """Return a repository's address if it is safe to pass to git: no option, no helper program, no password."""
    if not _GIT_URL.fullmatch(url):
        raise ValueError(
            "must be https://HOST/PATH, ssh://USER@HOST/PATH or USER@HOST:PATH; credentials are given by a secret"
        )
    return url


Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
GitUrl = Annotated[str, StringConstraints(max_length=1_000), AfterValidator(_git_url)]
Commit = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")]


def absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be an absolute path")
    return path


AbsolutePath = Annotated[Text, AfterValidator(absolute)]


class GitSource(Message):
    """A commit of a repository that nodes can reach."""

    url: GitUrl = said("`https://HOST/PATH`, `ssh://USER@HOST/PATH` or `USER@HOST:PATH`.")
    revision: Commit = said("A whole commit id, so that all nodes and restarts have the same files.")
    secret: Name | None = maybe(
        "A secret with a token, `USER:TOKEN`, or a private key for SSH. The job does not get it."
    )


class Source(Message):
    """The job's files. The job runs in what is unpacked on each node, or in a folder in it."""

    upload: Sha256 | None = maybe("The SHA-256 of an archive that the tenant has uploaded.")
    git: GitSource | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.upload is None) == (self.git is None):
            raise ValueError("a source is an upload or a git repository: name one of them")
        return self


class UploadSpec(Message):
    """An archive that is about to be uploaded: a tar file, compressed by gzip."""

    size_bytes: Int = Field(ge=1, le=2**40)


class Upload(Message):
    """An archive, and how much of it has arrived."""

    sha256: str
    size_bytes: int
    chunks: int = said("Of 512 KiB each, but the last.")
    next_chunk: int | None = said("The first that is missing, from 0; null once the archive is complete.")
    created_at: Instant


class UploadChunk(Message):
    """A part of an archive."""

    data: str = said("In Base64.", max_length=UPLOAD_CHUNK_BYTES * 4 // 3 + 4)


class ChunkWanted(NodeMessage):
    """A node's request for a part of the archive of a gang that it is about to start."""

    allocation_id: str = Field(max_length=200)
    number: int = Field(ge=0, lt=2**31)


class OpenedChunk(NodeMessage):
    """A part of an archive, for the node that starts a job with it."""

    chunks: int
    data: str
