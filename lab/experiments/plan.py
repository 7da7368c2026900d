"""The file of an experiment (TOML), and its cells.

.. code-block:: toml

    name = "day"
    cluster = "32x2:RTX3090"
    zones = ["GB", "SE"]                  # bundled zones or files
    signals = ["direct", "lifecycle"]
    seeds = [1]
    baseline = "las"                      # label of the policy that ratios are taken against
    bound_horizons_h = [24, 96, 0]        # slack of the least possible; 0: to the end of the run; leave out for none
    bound_rows = true                     # how far every row is above what its run could have emitted at least
    options = { host_idle_w = 30.0 }      # of the engine, for all

    [[traces]]
    label = "day"
    jobs = "green-day"                    # a bundled trace or a file, with format and recipe where needed
    start = "2023-08-15"
    days = 1
    tail_days = 6                         # days of grid after the last submission, as far as it is known
    cluster = "16x2:RTX3090"              # where this trace is to run on another one
    options = { host_per_job_w = 100.0 }  # of the engine, for this trace

    [[policies]]
    label = "green, mu 3"
    policy = "green"
    params = { mu = 3.0 }
    options = { round_interval_s = 3600.0, predictor = "forest" }   # of lengths: ``lab.foresight.PREDICTORS``
    forecast = "issued"                   # "perfect" if left out; or a file, such as "forecasts/{zone}.csv.gz"
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

from lab.earlier_runs import EarlierRuns
from lab.experiments.hosts import LabOptions
from lab.foresight import RETRAIN_S, learning
from services.core.domain.errors import DomainError
from services.kit.text import decoded
from services.simulator.bundles import BUNDLED_ZONES
from services.simulator.catalogue import catalogue
from services.simulator.readers.carbon import FORECASTS

RESULT_VERSION = 3
"""Raised when a cell's result changes though its inputs do not: all cells then run again. 3: GREEN's queues."""


@dataclass(frozen=True)
class Trace:
    """Jobs and when they are submitted; as ``read_jobs``. ``cluster`` and ``options`` go before the experiment's."""

    label: str
    jobs: str
    start: str
    days: float
    format: str | None = None
    recipe: str | None = None
    tail_days: float = 6.0
    cluster: str | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)


@dataclass(frozen=True)
class Choice:
    """A policy as it is compared: its name, parameters, what the engine does differently for it, and its forecast.

    ``forecast`` is as ``read_carbon`` takes it; in the name of a file ``{zone}`` is filled in.
    """

    label: str
    policy: str
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    forecast: str = "perfect"


T = TypeVar("T", Trace, Choice)


@dataclass(frozen=True)
class Cell:
    """One simulation."""

    choice: Choice
    trace: Trace
    zone: str
    signal: str
    seed: int
    cluster: str
    options: dict[str, Any]

    def key(self) -> str:
        """Return a hash of all inputs, including the contents of files."""
        try:
            contents = [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in file_names(self)]
        except OSError as error:
            raise DomainError(f"{error.filename} cannot be read: {error.strerror}") from error
        inputs = json.dumps([RESULT_VERSION, asdict(self), contents], sort_keys=True, default=str)
        return hashlib.sha256(inputs.encode()).hexdigest()[:20]

    @property
    def named(self) -> tuple[str, str, str, str, int]:
        """Policy and trace by their labels, zone, signal and seed, as tables of results have them."""
        return self.choice.label, self.trace.label, self.zone, self.signal, self.seed

    @property
    def forecast(self) -> str:
        """The forecast the policy sees, as ``read_carbon`` takes it."""
        return self.choice.forecast.format(zone=self.zone)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options for all, for this trace and for this policy, joined; and the seed."""
        return {**self.options, **self.trace.options, **self.choice.options, "seed": self.seed}


def file_names(cell: Cell) -> list[str]:
    """Return the files that a cell reads: those of jobs, grid and forecasts that are not bundled."""
    named = ("", *catalogue().jobs, *BUNDLED_ZONES, *FORECASTS)
    return [name for name in (cell.trace.jobs, cell.zone, cell.forecast) if name not in named]


@dataclass(frozen=True)
class Experiment:
    """The content of a file."""

    name: str
    cluster: str
    zones: tuple[str, ...]
    signals: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str
    traces: tuple[Trace, ...]
    choices: tuple[Choice, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    bound_horizons_h: tuple[float, ...] = ()
    bound_rows: bool = False

    def cells(self) -> list[Cell]:
        """Return every cell, the baseline's first."""
        ordered = sorted(self.choices, key=lambda choice: choice.label != self.baseline)
        return [
            Cell(choice, trace, zone, signal, seed, trace.cluster or self.cluster, self.options)
            for trace in self.traces
            for zone in self.zones
            for signal in self.signals
            for seed in self.seeds
            for choice in ordered
        ]


def load_experiment(path: Path) -> Experiment:
    """Read an experiment's file.

    Raises:
        DomainError: no such file, invalid TOML, a key that is missing, unknown, or of the wrong type, or options that
            the engine does not take.
    """
    try:
        content = tomllib.loads(decoded(path.read_bytes()))
    except FileNotFoundError as error:
        raise DomainError(f"there is no file {path}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DomainError(f"{path} is not TOML: {error}") from error
    known = {"name", "cluster", "zones", "signals", "seeds", "baseline", "traces", "policies", "options"}
    unknown = sorted(set(content) - known - {"bound_horizons_h", "bound_rows"})
    if unknown:
        raise DomainError(f"{path}: unknown key {unknown[0]!r}")
    traces = tuple(_of(Trace, each, f"{path}: traces") for each in _list(content, "traces", path))
    choices = tuple(_of(Choice, each, f"{path}: policies") for each in _list(content, "policies", path))
    labels = [choice.label for choice in choices]
    baseline = str(content.get("baseline", labels[0]))
    if baseline not in labels or len(set(labels)) != len(labels):
        raise DomainError(f"{path}: every policy must have its own label, and the baseline must be one of them")
    shared = dict(content.get("options", {}))
    for trace, choice in product(traces, choices):
        _check_options({**shared, **trace.options, **choice.options}, path)
    if not isinstance(rows := content.get("bound_rows", False), bool):
        raise DomainError(f"{path}: bound_rows must be true or false, not {rows!r}")
    return Experiment(
        name=str(content.get("name", path.stem)),
        cluster=str(content.get("cluster", "32x2:RTX3090")),
        zones=tuple(map(str, _list(content, "zones", path))),
        signals=tuple(map(str, content.get("signals", ["direct"]))),
        seeds=tuple(map(int, content.get("seeds", [1]))),
        baseline=baseline,
        traces=traces,
        choices=choices,
        options=shared,
        bound_horizons_h=tuple(map(float, content.get("bound_horizons_h", []))),
        bound_rows=rows,
    )


def _check_options(options: dict[str, Any], path: Path) -> None:
    """Check what the engine would be given, so that a mistake shows before the first cell runs."""
    given = {name: value for name, value in options.items() if name != "predictor"}
    defaults = {"retrain_s": RETRAIN_S} | {each.name: each.default for each in fields(LabOptions)}
    for name, value in given.items():
        if name not in defaults:
            raise DomainError(f"{path}: options: the engine has no option {name!r}")
        wanted = {bool: "true or false", str: "a text"}.get(type(defaults[name]), "a number")
        fits = {bool: "true or false", str: "a text", int: "a number", float: "a number"}.get(type(value))
        if fits != wanted:
            raise DomainError(f"{path}: options: {name} must be {wanted}, not {value!r}")
    try:
        learning(EarlierRuns("mean"), given.pop("retrain_s", RETRAIN_S))
        LabOptions(**given)
    except DomainError as error:
        raise DomainError(f"{path}: options: {error}") from error


def _list(content: dict[str, Any], key: str, path: Path) -> list[Any]:
    value = content.get(key)
    if not isinstance(value, list) or not value:
        raise DomainError(f"{path}: {key} must be a list that is not empty")
    return cast("list[Any]", value)


def _of(kind: type[T], value: object, where: str) -> T:
    if not isinstance(value, dict):
        raise DomainError(f"{where}: each must be a table")
    table = cast("dict[str, Any]", value)
    names = {each.name for each in fields(kind)}
    unknown = sorted(set(table) - names)
    if unknown:
        raise DomainError(f"{where}: unknown key {unknown[0]!r}")
    if kind is Choice:
        table = {"label": table.get("policy"), **table}
    try:
        return kind(**table)
    except TypeError as error:
        raise DomainError(f"{where}: {error}") from error
