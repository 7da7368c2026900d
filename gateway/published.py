"""Write ``deploy/openapi.json``, the published description of the public API, and the Python client made from it.

``python -m gateway.published``, in a checkout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gateway.openapi import describe
from services.kit.release import RELEASE

ROOT = Path(__file__).parents[1]
PATH = ROOT / "deploy" / "openapi.json"
CLIENT = ROOT / "clients" / "python" / "generate.py"


def published() -> str:
    """Return the file's text: what the gateway serves at ``/openapi.json``, indented."""
    return json.dumps(describe(RELEASE), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(published(), encoding="utf-8")
    print(f"wrote {PATH}", flush=True)
    subprocess.run([sys.executable, str(CLIENT)], check=True)
