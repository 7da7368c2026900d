"""What ``wattshift.ray`` needs of Ray, where Ray is not: placement groups that are there while a file says so."""

import os
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["STAND_IN_RAY"])


def is_initialized() -> bool:
    """Return whether ``init`` was called."""
    return (FOLDER / "initialized").exists()


def init(**_: Any) -> None:
    """Connect."""
    (FOLDER / "initialized").touch()
