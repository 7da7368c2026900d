"""An LSTM of peak rates, for ``services.core.profiles.traffic``; needs torch.

The paper's network takes counts per 5-second window and gives the counts of the next 360 windows; the greatest of each
step is the peak. The paper states neither sizes nor loss: one layer, squared error, sizes as below. A network trained
in this way predicts each window's mean, and the greatest of 60 means lies below the mean of the greatest;
``target="peaks"`` is trained on the peaks themselves and has no such bias.

Source: FREESH appendix D.3.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEPS_AHEAD, WINDOW_S
from services.core.profiles.traffic import WINDOWS, Traffic

LATEST_SAMPLES = 2_000
"""Learned from at most so many moments, the latest."""
LEAST_SCALE_QPS = 1 / WINDOW_S


WITHOUT_TORCH = "needs torch: pip install './lab[lstm]'"


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise DomainError(f"the LSTM {WITHOUT_TORCH}") from error


@dataclass(frozen=True)
class Lstm:
    """How to train a network.

    Attributes:
        target: ``windows`` as in the paper: window counts in, window counts out. ``peaks``: peaks of steps in and out.
        seen: Windows or steps that the network looks back on; by default 5 minutes of windows, an hour of steps.
        hidden: Size of its state.
        epochs: Passes over the samples.
        seed: Equal history and equal seed give equal networks on one machine.
    """

    target: Literal["windows", "peaks"] = "windows"
    seen: int | None = None
    hidden: int = 32
    epochs: int = 30
    seed: int = 1

    @property
    def name(self) -> str:
        """The name, which says what it is trained on."""
        return f"LSTM on {self.target}"

    @property
    def look_back(self) -> int:
        """How many points the network looks back on."""
        return self.seen or (WINDOWS if self.target == "windows" else 12)

    @property
    def _per_step(self) -> int:
        return WINDOWS if self.target == "windows" else 1

    def steps_needed(self, history: Traffic) -> int | str:
        """Return the points that it looks back on, and half an hour to learn from."""
        if find_spec("torch") is None:
            return WITHOUT_TORCH
        if self.target == "windows" and history.counts is None:
            return "needs the counts of windows"
        return -(-self.look_back // self._per_step) + STEPS_AHEAD + 1

    def fit(self, history: Traffic) -> LstmModel:
        """Return the trained network.

        Raises:
            DomainError: torch is not installed.
        """
        torch = _torch()
        points = _points(history, self.target)
        scale = np.maximum(points.mean(axis=0), LEAST_SCALE_QPS)
        ahead, stride = STEPS_AHEAD * self._per_step, max(1, self._per_step // 10)
        last = len(points) - self.look_back - ahead
        starts = np.arange(last, -1, -stride)[:LATEST_SAMPLES]
        series = torch.tensor(points / scale, dtype=torch.float32)
        inputs = torch.stack([series[start : start + self.look_back] for start in starts.tolist()])
        targets = torch.stack(
            [series[start + self.look_back : start + self.look_back + ahead] for start in starts.tolist()]
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = _network(torch, history.n_classes, self.hidden, ahead)
            optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
            for _ in range(self.epochs):
                for batch in torch.randperm(len(inputs)).split(64):
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(_predicted(network, inputs[batch], ahead), targets[batch])
                    loss.backward()
                    optimizer.step()
        return LstmModel(self, network, scale)


@dataclass(frozen=True)
class LstmModel:
    """A trained network, and its unit: (n_classes,) queries per second."""

    trained: Lstm
    network: Any
    scale: Floats

    def forecast(self, history: Traffic) -> Floats:
        """Return the peaks of the next half hour; (STEPS_AHEAD, n_classes) queries per second."""
        torch = _torch()
        look_back = self.trained.look_back
        steps = -(-look_back // (WINDOWS if self.trained.target == "windows" else 1))
        points = _points(history.since(len(history) - steps), self.trained.target)[-look_back:]
        ahead = STEPS_AHEAD * (WINDOWS if self.trained.target == "windows" else 1)
        with torch.no_grad():
            seen = torch.tensor(points / self.scale, dtype=torch.float32)[None]
            predicted = _predicted(self.network, seen, ahead)[0].numpy() * self.scale
        return np.maximum(predicted.reshape(STEPS_AHEAD, -1, history.n_classes).max(axis=1), 0.0).astype(np.float64)


def _points(history: Traffic, target: str) -> Floats:
    """Return the series that a network sees; (n_points, n_classes) queries per second."""
    if target == "peaks":
        return history.peaks_qps
    if history.counts is None:
        raise DomainError("an LSTM on windows needs the counts of windows, not the peaks alone")
    return history.counts.reshape(-1, history.n_classes) / WINDOW_S


def _network(torch: Any, n_classes: int, hidden: int, ahead: int) -> Any:
    recurrent = torch.nn.LSTM(n_classes, hidden, batch_first=True)
    return torch.nn.ModuleDict({"recurrent": recurrent, "head": torch.nn.Linear(hidden, ahead * n_classes)})


def _predicted(network: Any, seen: Any, ahead: int) -> Any:
    """Return (n_samples, ahead, n_classes): the mean of what was seen plus the change that the last state predicts."""
    states, _ = network["recurrent"](seen)
    change = network["head"](states[:, -1]).reshape(len(seen), ahead, -1)
    return change + seen.mean(dim=1, keepdim=True)
