"""Faults of simulated devices, read from files: for tests, and for trials of how a cluster copes with them.

The file is ``simulated_faults.json`` in the agent's state folder: a list such as
``[{"step": "create", "outcome": "busy", "skip": 1, "times": 2}]``. Each step of a cut (``mode``, ``destroy``,
``create``) looks at the first entry for it: ``skip`` steps pass, then the next ``times`` steps end in the outcome; all
of them if ``times`` is missing. ``hold`` is no error: the step waits for as long as the file is there.

``simulated_health.json`` holds the GPUs' states, by index: ``{"2": {"lost": true}}``, or the fields of ``Health``, or
``"xid": 79``, which is reported once for as long as it stays there.
"""

import time
from pathlib import Path
from typing import Any, Literal

import orjson

from gpu_agent import files
from gpu_agent.devices import driver

Step = Literal["mode", "destroy", "create"]

_ERRORS: dict[str, driver.DeviceError] = {
    "busy": driver.DeviceBusyError("In use by another client"),
    "refused": driver.NotPermittedError("Insufficient Permissions"),
    "unsupported": driver.NotSupportedError("Not Supported"),
    "failed": driver.DeviceError("Unknown Error"),
}
_LOOK_S = 0.02
_SLOWDOWN_C = 90.0


class CutFaults:
    """The content of the file of faults; without a file, nothing fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, step: Step) -> None:
        """Raise the error that a step should end in, or wait while it is held."""
        found = self._take(step)
        if found == "hold":
            while self._path.exists():
                time.sleep(_LOOK_S)
        elif found is not None:
            raise type(_ERRORS[found])(str(_ERRORS[found]))

    def _take(self, step: Step) -> str | None:
        def take(entries: list[dict[str, Any]]) -> str | None:
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
                files.replace(self._path, orjson.dumps(entries), durable=False)
            return None if passes else outcome

        return files.read(self._path, take, "simulated.faults_unreadable")


class Sickness:
    """The content of the file of states; without a file, all GPUs are well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._states: dict[int, dict[str, Any]] = {}
        self._reported: set[driver.DeviceEvent] = set()

    def health(self, index: int) -> driver.Health:
        state = self._read().get(index, {})
        if state.get("lost"):
            raise driver.DeviceLostError("GPU is lost")
        pids = state.get("pids")
        known = {name: state.get(name) for name in ("temperature_c", "too_hot", "uncorrected_errors")}
        return driver.Health(**known, slowdown_c=_SLOWDOWN_C, pids=None if pids is None else tuple(pids))

    def events(self) -> list[driver.DeviceEvent]:
        """Return the Xids in the file that have not been returned before."""
        there = {driver.DeviceEvent(index, int(each["xid"])) for index, each in self._read().items() if "xid" in each}
        new = sorted(there - self._reported, key=lambda event: (event.index, event.xid))
        self._reported = there
        return new

    def _read(self) -> dict[int, dict[str, Any]]:
        def take(found: dict[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
            return {int(index): dict(state) for index, state in found.items()}

        if not self._path.exists():
            self._states = {}
        elif (states := files.read(self._path, take, "simulated.health_unreadable")) is not None:
            self._states = states
        return self._states
