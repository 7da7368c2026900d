"""Small files that survive a crash, and what an earlier agent of this node left in those that are JSON."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson

from services.kit.files import replace
from services.kit.logging import Log

__all__ = ["read", "replace", "store"]

log = Log(__name__)

T = TypeVar("T")


def read(path: Path, take: Callable[[Any], T], event: str = "") -> T | None:
    """Return what ``take`` makes of a JSON file; None if there is none, or one that cannot be read.

    Args:
        event: Logged if a file cannot be read, or if ``take`` can make nothing of it; empty: nothing is logged.
    """
    try:
        return take(orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if event:
            log.warning(event, file=str(path), error=str(error) or type(error).__name__)
        return None


def store(path: Path, content: object, event: str, *, durable: bool = True) -> bool:
    """Replace a JSON file; return False, after logging ``event``, if it cannot be written."""
    try:
        replace(path, orjson.dumps(content), durable=durable)
    except OSError as error:
        log.error(event, file=str(path), error=str(error))
        return False
    return True
