"""Write what is made from the services' routers: the gateway's table, the published description, the Python client.

``python -m tools.published``, in a checkout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from services.kit.release import RELEASE
from tools.openapi import describe
from tools.operations import operations, row_of

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "clients" / "python" / "generate.py"


def published() -> dict[str, str]:
    """Return the files' texts by their paths: the table, and the description twice, for people and for the gateway."""
    known = operations()
    description = describe(RELEASE, known)
    rows = ",\n".join(json.dumps(row_of(operation.route)) for operation in known)
    return {
        "gateway/routes.json": f"[\n{rows}\n]\n",
        "gateway/openapi.json": json.dumps(description, ensure_ascii=False, separators=(",", ":")) + "\n",
        "deploy/openapi.json": json.dumps(description, indent=2, ensure_ascii=False) + "\n",
    }


def lost(text: str, before: str) -> list[str]:
    """Return operations that a new table lacks or calls otherwise than the one before: clients call them by name."""
    now, then = (
        {f"{row['operation']} {row['method']} {row['path']}" for row in json.loads(each)} for each in (text, before)
    )
    return sorted(then - now)


if __name__ == "__main__":
    texts, table = published(), "gateway/routes.json"
    if gone := lost(texts[table], (ROOT / table).read_text(encoding="utf-8")):
        sys.exit(f"An operation keeps its name, method and path; remove its row from {table} to give it up: {gone}")
    for path, text in texts.items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}", flush=True)
    subprocess.run([sys.executable, str(CLIENT)], check=True)
