"""The GPU catalogue as data; remake it with `python -m tests.golden.boards`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.core.domain.gpus import GPU_MODELS

FILE = Path(__file__).parent / "boards.json"


def boards() -> dict[str, Any]:
    """Return every board's figures by its name."""
    return json.loads(json.dumps({name: asdict(board) for name, board in GPU_MODELS.items()}))


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(board)}" for name, board in boards().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
