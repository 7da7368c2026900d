"""Folders that jobs have filled, removed and measured whatever is in them: a job can nest folders without end.

``shutil.rmtree`` and ``Path.rglob`` recurse once per level, and paths have a maximum length: a job that nests folders
deeper would break the clean-up for all jobs. No link is followed.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(folder: Path) -> None:
    """Remove a folder with everything in it, or as much as can be removed."""
    with suppress(OSError):
        top = os.open(folder, _FLAGS)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _empty(top: int) -> None:
    """Empty a folder: each subfolder is moved up before it is emptied in turn, so that none is deep."""
    prefix, moved = f".{secrets.token_hex(8)}-", 0
    waiting = _remove_files(top)
    while waiting:
        name = waiting.pop()
        with suppress(OSError):
            inner = os.open(name, _FLAGS, dir_fd=top)
            try:
                for each in _remove_files(inner):
                    moved += 1
                    with suppress(OSError):
                        os.rename(each, f"{prefix}{moved}", src_dir_fd=inner, dst_dir_fd=top)
                        waiting.append(f"{prefix}{moved}")
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def _remove_files(folder: int) -> list[str]:
    """Remove everything but folders; return the names of the folders."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in found if is_folder]


def disk_bytes(folder: Path) -> int:
    """Return a folder's disk use, without what is nested so deeply that no path leads there."""
    total, waiting = 0, [os.fspath(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return total
