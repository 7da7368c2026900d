"""Power limits and clocks in a simulation: what policies know about them, and measurements in progress.

A ``ProfileControls`` runs a gang for a window at each control value measured for its kind of job, from the highest
down, while it does its work; the curve is then known for this and every later job of the kind on that GPU model. During
each window the gang runs at the speed and power of that value, so that measuring costs its true time and energy.
"""

from collections import deque
from dataclasses import dataclass

from services.core.cycle.snapshot import Curves
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.simulator.workload import Workload


@dataclass(frozen=True, slots=True)
class ControlWindow:
    """One control value of a gang, None for the default; the next step follows after ``window_s``."""

    kind: ControlKind
    value: float | None
    window_s: float = 0.0


class Measurements:
    """The known control curves by kind of job, and the gangs being measured."""

    def __init__(self, workload: Workload, models: tuple[str, ...], *, known: bool) -> None:
        """Start with every predicted curve known, or with none."""
        self._profiles, self._models = workload.profiles, models
        self._curves: list[dict[tuple[int, ControlKind], ControlCurve]] = [{} for _ in workload.profiles]
        self._steps: dict[int, deque[ControlWindow]] = {}
        self._lines: dict[int, int] = {}
        self._begun = 0
        for at, profile in enumerate(workload.profiles if known else ()):
            for model, name in enumerate(models):
                prediction = profile.prediction(name)
                for kind, curve in prediction.controls.items() if prediction else ():
                    self._curves[at][model, kind] = curve
        self.curves: tuple[Curves, ...] = tuple(self._curves)
        """As ``Snapshot.control_curves``, one entry per profile of the workload."""

    def begin(self, row: int, profile: int, model: int, kind: ControlKind, window_s: float) -> int | None:
        """Queue the measurement windows of a job's gang.

        Returns:
            The sequence number to pass to ``next``; None if there is nothing to start: the kind of job has no curve, or
                the
            gang is already being measured and these windows follow those.
        """
        curve = self._truth(profile, model, kind)
        if curve is None:
            return None
        windows = [ControlWindow(kind, float(value), window_s) for value in curve.values[::-1]]
        measured = bool(self._steps.get(row))
        self._steps.setdefault(row, deque()).extend([*windows, ControlWindow(kind, None)])
        if measured:
            return None
        self._begun += 1
        self._lines[row] = self._begun
        return self._begun

    def next(self, row: int, line: int) -> ControlWindow | None:
        """Return and remove a gang's next step; None at the end of its sequence, or if another one has replaced it."""
        steps = self._steps.get(row)
        return steps.popleft() if steps and self._lines[row] == line else None

    def rows(self) -> list[int]:
        return [row for row, steps in self._steps.items() if steps]

    def end(self, row: int, kind: ControlKind | None = None) -> None:
        """Drop the remaining steps of a gang that is gone, or only those of one kind of control."""
        steps = self._steps.pop(row, None)
        if kind is not None and steps is not None:
            self._steps[row] = deque(step for step in steps if step.kind is not kind)

    def learn(self, profile: int, model: int, kind: ControlKind) -> None:
        """Store what the predictor learns from the measurements, which are exact; without one, the measured curve."""
        prediction = self._profiles[profile].prediction(self._models[model])
        curve = (prediction.controls.get(kind) if prediction else None) or self._truth(profile, model, kind)
        assert curve is not None
        self._curves[profile] = {**self._curves[profile], (model, kind): curve}
        self.curves = tuple(self._curves)

    def _truth(self, profile: int, model: int, kind: ControlKind) -> ControlCurve | None:
        truth = self._profiles[profile].truth(self._models[model])
        return None if truth is None else truth.controls.get(kind)
