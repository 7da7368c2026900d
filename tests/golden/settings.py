"""What the scheduler is set to unless its operator says otherwise; remake it with `python -m tests.golden.settings`."""

import json
from pathlib import Path
from typing import Any

from services.scheduler.settings import SchedulerSettings

FILE = Path(__file__).parent / "settings.json"
TEXT = {"description", "title"}


def settings() -> dict[str, Any]:
    """Return type, default and range of each setting that only the scheduler has."""
    schema = SchedulerSettings.model_json_schema(by_alias=False)
    return {
        name: {word: value for word, value in declared.items() if word not in TEXT}
        for name, declared in schema["properties"].items()
        if name in SchedulerSettings.__annotations__
    }


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(declared)}" for name, declared in settings().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
