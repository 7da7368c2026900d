"""Where benchmarks leave their figures: results/benchmarks/NAME.json, with the machine named."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "results" / "benchmarks"


def write_result(name: str, figures: dict[str, Any]) -> None:
    """Write a benchmark's figures, units in their names, beside what they were measured on."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }
    document = {"benchmark": name, "machine": machine, **figures}
    (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
