"""Write ``deploy/openapi.json``, the published description of the public API: ``python -m gateway.published``."""

from __future__ import annotations

import json
from pathlib import Path

from gateway.openapi import describe
from services.kit.release import RELEASE

PATH = Path(__file__).parents[1] / "deploy" / "openapi.json"


def published() -> str:
    """Return the file's text: what the gateway serves at ``/openapi.json``, indented."""
    return json.dumps(describe(RELEASE), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(published(), encoding="utf-8")
    print(f"wrote {PATH}")
