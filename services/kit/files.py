"""Small files that survive crashes: written completely or not at all."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

DRAFT = ".tmp"  #: How the names of files end that are being written, also those that a killed process left


def replace(path: Path, content: bytes, *, durable: bool = True, mode: int = 0o600) -> None:
    """Replace a file atomically; if ``durable``, it is on disk when this returns."""
    draft = path.with_name(path.name + DRAFT)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(draft, path)
    if durable:
        sync_folder(str(path.parent))


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """Yield a path to write to; the file takes its name only at the end of the block, once it is complete.

    A device or pipe is written to as it is, and a link stays one: to take their place would destroy them.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, flags: int = os.O_RDONLY) -> Generator[None]:
    """Hold the lock of a file or folder during the block; ``BlockingIOError`` if another process holds it."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: str) -> None:
    """Make new names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
