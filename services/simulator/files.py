"""Files sent in a request: unpacked, named by a hash of their content, and kept on disk while they are read."""

import base64
import binascii
import gzip
import hashlib
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from services.contracts.simulations import InlineFile, StoredFile
from services.core.domain.errors import DomainError
from services.simulator.readers.text import PARQUET_MAGIC

_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class Content:
    """A file's name and bytes."""

    name: str
    data: bytes

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the content, which names it."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def stored(self) -> StoredFile:
        """The file's reference in a problem."""
        return StoredFile(name=self.name, sha256=self.sha256, size=len(self.data))

    def packed(self) -> bytes:
        return gzip.compress(self.data, 6, mtime=0)


def unpack(file: InlineFile, max_bytes: int) -> Content:
    """Return the content of an inline file.

    Raises:
        DomainError: It is not gzip, is Parquet, or exceeds ``max_bytes`` when unpacked.
    """
    try:
        if file.gzip_base64 is None:
            data = (file.text or "").encode()
        else:
            # Never more than is allowed: a few kilobytes can unpack to gigabytes.
            unpacker = zlib.decompressobj(_GZIP)
            data = unpacker.decompress(base64.b64decode(file.gzip_base64, validate=True), max_bytes + 1)
            if len(data) <= max_bytes and (unpacker.unused_data or not unpacker.eof):
                raise DomainError(f"{file.name}: gzip_base64 is cut short, or holds more than one packed text")
    except (binascii.Error, zlib.error) as error:
        raise DomainError(f"{file.name}: gzip_base64 is not a text, packed with gzip, in base64") from error
    if len(data) > max_bytes:
        raise DomainError(f"{file.name} is larger than {max_bytes} bytes, unpacked")
    if data.startswith(PARQUET_MAGIC):  # a table whose size only its reader would learn
        raise DomainError(f"{file.name} is Parquet; send it as CSV")
    return Content(file.name, data)


@contextmanager
def on_disk(contents: Mapping[str, Content]) -> Iterator[dict[str, Path]]:
    """Yield the paths of files that exist until the end of the block, keyed as ``contents`` is."""
    with tempfile.TemporaryDirectory(prefix="wattshift-simulation-") as folder:
        paths: dict[str, Path] = {}
        for option, content in contents.items():
            paths[option] = Path(folder) / option / content.name
            paths[option].parent.mkdir()
            paths[option].write_bytes(content.data)
        yield paths
