"""Small files that survive: written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, content: bytes, *, durable: bool = True, mode: int = 0o600) -> None:
    """Replace a file, all or nothing; on disk when this returns, if ``durable``."""
    draft = path.with_name(path.name + ".tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.write(descriptor, content)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(draft, path)
    if durable:
        sync_folder(str(path.parent))


def sync_folder(folder: str) -> None:
    """Make new names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
