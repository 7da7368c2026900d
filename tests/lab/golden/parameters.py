"""What may be set of each policy of the lab; remake it with `python -m tests.lab.golden.parameters`."""

import json
from pathlib import Path
from typing import Any

from lab.policies.entries import ENTRIES
from services.kit.policies import load_policies
from tests.golden import parameters

FILE = Path(__file__).parent / "parameters.json"


def policies() -> dict[str, Any]:
    """Return, by policy, how it is treated, and each of its parameters in a line; the lab's policies are loaded."""
    return {name: found for name, found in parameters.policies().items() if name in ENTRIES}


if __name__ == "__main__":
    load_policies()
    FILE.write_text(json.dumps(policies(), indent=1) + "\n", encoding="utf-8")
