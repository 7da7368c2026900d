"""Small files that survive: written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_agent.shim import sync_folder


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
