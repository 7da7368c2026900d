"""Errors that a simulated driver makes while it cuts a GPU, as a file tells it: for tests, and for trials of a fleet.

The file is ``simulated_faults.json`` in the agent's state folder: a list such as
``[{"step": "create", "outcome": "busy", "skip": 1, "times": 2}]``. Each step of a cut (``mode``, ``destroy``,
``create``) looks at the first entry for it: ``skip`` steps pass, then ``times`` of them end in the outcome, without
``times`` all of them. ``hold`` is no error: the step waits for as long as the file is there.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

from gpu_agent import files
from gpu_agent.devices.driver import DeviceBusyError, DeviceError, NotPermittedError, NotSupportedError
from services.kit.logging import Log

log = Log(__name__)

Step = Literal["mode", "destroy", "create"]

_ERRORS: dict[str, DeviceError] = {
    "busy": DeviceBusyError("In use by another client"),
    "refused": NotPermittedError("Insufficient Permissions"),
    "unsupported": NotSupportedError("Not Supported"),
    "failed": DeviceError("Unknown Error"),
}
_LOOK_S = 0.02


class CutFaults:
    """What the file says; without one, nothing fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, step: Step) -> None:
        """Raise what a step is to end in, or wait if it is to be held.

        Raises:
            DeviceError: As the file says.
        """
        found = self._take(step)
        if found == "hold":
            while self._path.exists():
                time.sleep(_LOOK_S)
        elif found is not None:
            raise type(_ERRORS[found])(str(_ERRORS[found]))

    def _take(self, step: Step) -> str | None:
        try:
            entries: list[dict[str, Any]] = json.loads(self._path.read_bytes())
            entry = next((each for each in entries if each["step"] == step and each.get("times", 1) > 0), None)
            if entry is None:
                return None
            outcome = str(entry["outcome"])
            if outcome not in (*_ERRORS, "hold"):
                raise ValueError(f"no outcome {outcome!r}")
            passes = int(entry.get("skip", 0)) > 0
            counter = "skip" if passes else "times"
            if counter in entry:
                entry[counter] = int(entry[counter]) - 1
                files.replace(self._path, json.dumps(entries).encode(), durable=False)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("simulated.faults_unreadable", error=str(error))
            return None
        return None if passes else outcome
