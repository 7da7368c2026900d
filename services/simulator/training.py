"""One what-if run from its options: checked, read, run and turned into a document.

The command line and the service both use it. ``prepare`` checks every option; an error names the option at fault.
"""

import base64
import binascii
import gzip
import hashlib
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from services.contracts.simulations import FILE_OPTIONS, LIVE, InlineFile, StoredFile, TrainingOptions, TrainingProblem
from services.core.cycle.placers import PLACERS
from services.core.domain.errors import DomainError, PolicyConfigError
from services.core.domain.topology import NODE, read_topology
from services.core.policies import registry
from services.core.policies.parameters import accepted_names
from services.simulator.bundles import BUNDLED_ZONES
from services.simulator.catalogue import catalogue
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.engine.options import Foreseeing
from services.simulator.engine.orders import SimulatedOrder
from services.simulator.live import LiveRun, is_rigid, live_document, parameters_of, read_live
from services.simulator.raw import TraceFormatError
from services.simulator.readers.carbon import FORECASTS, LONGEST_GAP_S, read_carbon, with_prices
from services.simulator.readers.jobs import read_jobs
from services.simulator.readers.text import PARQUET_MAGIC
from services.simulator.savings import lever_savings
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload

_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class Content:
    """A file's name and bytes."""

    name: str
    data: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def stored(self) -> StoredFile:
        return StoredFile(name=self.name, sha256=self.sha256, size=len(self.data))

    def packed(self) -> bytes:
        return gzip.compress(self.data, 6, mtime=0)


def unpack(file: InlineFile, max_bytes: int) -> Content:
    """Return an inline file's content; ``DomainError`` if it is not gzip, is Parquet, or exceeds ``max_bytes``."""
    try:
        if file.gzip_base64 is None:
            data = (file.text or "").encode()
        else:
            # Never more than is allowed: a few kilobytes can unpack to gigabytes.
            unpacker = zlib.decompressobj(_GZIP)
            data = unpacker.decompress(base64.b64decode(file.gzip_base64, validate=True), max_bytes + 1)
            if len(data) <= max_bytes and (unpacker.unused_data or not unpacker.eof):
                raise DomainError(f"{file.name}: gzip_base64 is cut short, or holds more than one packed text")
    except (binascii.Error, zlib.error) as error:
        raise DomainError(f"{file.name}: gzip_base64 is not a text, packed with gzip, in base64") from error
    if len(data) > max_bytes:
        raise DomainError(f"{file.name} is larger than {max_bytes} bytes, unpacked")
    if data.startswith(PARQUET_MAGIC):  # a table whose size only its reader would learn
        raise DomainError(f"{file.name} is Parquet; send it as CSV")
    return Content(file.name, data)


UNLEARNED = ("perfect", "none")  #: Predictors that are not learned from the jobs of a run

Progress = Callable[[str, int, int], None]
"""Called with the policy, the number of its jobs that have ended, and the number of all."""


class OptionError(DomainError):
    """An invalid option; ``option`` is its name."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True)
class Inputs:
    """The sources of the options that may be files: a bundled name, or the path of a file."""

    jobs: str | Path
    carbon: str | Path
    forecast: str | Path
    prices: Path | None = None


@dataclass(frozen=True)
class TrainingRun:
    """A what-if run with all its inputs read, ready for ``results``."""

    options: TrainingOptions
    parameters: Mapping[str, Mapping[str, Any]]
    workload: Workload
    cluster: ClusterSpec
    trace: CarbonTrace
    engine: EngineOptions
    predictor: Foreseeing | None
    live: LiveRun | None = None
    elsewhere: Sequence[CarbonTrace] = ()  #: The grids of zones that the cluster names, but for that of ``trace``

    def answer(self, report: Progress) -> dict[str, Any] | list[dict[str, Any]]:
        """Run it, and return the results as JSON values."""
        if self.live is not None:
            return live_document(self.live, self.parameters, report)
        if self.options.levers:
            (name,) = self.parameters
            jobs = len(self.workload)
            run = self.workload, self.cluster, self.trace, self.engine

            def of_steps(done: int, steps: int) -> None:
                report(name, jobs * done // steps, jobs)

            return lever_savings(name, self.parameters[name], *run, of_steps)
        return self.document(list(self.results(report)))

    def results(self, report: Progress | None = None) -> Iterator[SimulationResult]:
        """Yield each policy's result, in order; ``wall_s`` is measured here."""
        for name, parameters in self.parameters.items():
            began_s = time.perf_counter()
            result = simulate(
                name,
                self.workload,
                self.cluster,
                self.trace,
                parameters=parameters,
                options=replace(self.engine, rigid=is_rigid(name, parameters)),
                predictor=self.predictor,
                progress=None if report is None else partial(report, name),
                elsewhere=self.elsewhere,
            )
            yield replace(result, wall_s=round(time.perf_counter() - began_s, 3))

    def document(self, results: Sequence[SimulationResult]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return results as JSON values: an object, or a list if there are several policies."""
        workload = {"workload": self.workload.name, "notes": list(self.workload.notes)}
        documents = [{**result.summary(), "cluster": self.options.cluster, **workload} for result in results]
        return documents[0] if len(documents) == 1 else documents


def prepare(options: TrainingOptions, inputs: Inputs) -> TrainingRun:
    """Check the options and read the inputs; ``OptionError`` if an option, or a file it names, is invalid."""
    parameters = _parameters(options)
    if options.levers and (len(parameters) > 1 or options.format == LIVE or options.predictor not in UNLEARNED):
        raise OptionError("levers", "levers are those of one policy, on past jobs, with predictor perfect or none")
    if options.format == LIVE:
        return _prepare_live(options, inputs, parameters)
    with of_option("cluster"):
        cluster = ClusterSpec.parse(options.cluster)
    if options.placement not in PLACERS:
        raise OptionError("placement", f"unknown placement {options.placement!r}; known: {', '.join(PLACERS)}")
    with of_option("topology"):
        topology = read_topology(options.topology)
        levels = (NODE, *topology.levels)
        if options.within is not None and options.within not in levels:
            raise OptionError("within", f"there is no level {options.within}; there are {', '.join(levels)}")
    with of_option("round_minutes"):
        engine = EngineOptions(
            seed=options.seed,
            round_interval_s=60.0 * options.round_minutes,
            passive_interval_s=options.passive_interval_s,
            power_down_after_s=None if options.power_down_minutes is None else 60.0 * options.power_down_minutes,
            node_mtbf_s=None if options.node_mtbf_days is None else 86_400.0 * options.node_mtbf_days,
            host_idle_w=options.host_idle_w,
            horizon_s=3_600.0 * options.horizon_hours,
            placement=options.placement,
            topology=topology,
            within=options.within or "",
            batch_tuning=options.batch_tuning,
            tenant_guarantees=options.tenant_guarantees,
            tenant_weights=dict(options.tenant_weights) or None,
            orders=tuple(
                SimulatedOrder(each.start_at.timestamp(), each.duration_s, each.cut, each.to_w, each.notice_s)
                for each in options.orders
            ),
        )
    with of_option("carbon"):
        trace = _grid(options, inputs, None if inputs.carbon in BUNDLED_ZONES else cluster.zones[0] or None)
        elsewhere = [_grid(options, inputs, zone) for zone in cluster.zones if zone not in ("", trace.zone)]
        values = [each.curve.intensity_gco2_per_kwh for each in (trace, *elsewhere)]
        if any(np.array_equal(values[0], each) for each in values[1:]):
            raise OptionError("carbon", "the file does not say which of its values are of which zone of the cluster")
    if elsewhere and options.levers:
        raise OptionError("levers", "levers are those of a cluster in one zone")
    if elsewhere and inputs.prices is not None:
        raise OptionError("prices", "prices are those of a cluster in one zone")
    if elsewhere and inputs.forecast not in FORECASTS:
        raise OptionError("forecast", "a file of forecasts is of one zone, and the cluster lies in several")
    with of_option("jobs"):
        workload = read_jobs(
            inputs.jobs,
            format=options.format,
            recipe=options.recipe,
            start=options.start,
            days=options.days,
            seed=options.seed,
            undated_s=trace.curve.start_s,
        )
    with of_option("predictor"):
        predictor = _predictor(options)
        if predictor is not None and workload.recurrence is None:
            raise OptionError("predictor", f"recipes 'a-srpt' say which jobs recur, this one does not: {workload.name}")
    with of_option("start"):
        _check_covered(workload, (trace, *elsewhere))
    workload = predicted(options.predictor, workload)
    return TrainingRun(options, parameters, workload, cluster, trace, engine, predictor, elsewhere=elsewhere)


def _prepare_live(options: TrainingOptions, inputs: Inputs, parameters: dict[str, dict[str, Any]]) -> TrainingRun:
    with of_option("jobs"):
        live = read_live(Path(inputs.jobs))
    with of_option("placement"):
        live = replace(live, engine=replace(live.engine, seed=options.seed, placement=options.placement))
    given = parameters_of(live, parameters)
    return TrainingRun(options, given, live.workload, live.cluster, live.trace, live.engine, None, live)


@contextmanager
def opened(problem: TrainingProblem, contents: Mapping[str, Content]) -> Iterator[TrainingRun]:
    """Yield the run that a problem describes.

    Args:
        contents: The problem's stored files, by option.

    Raises:
        OptionError: As for ``prepare``.
    """
    with tempfile.TemporaryDirectory(prefix="wattshift-simulation-") as folder:
        paths: dict[str, Path] = {}
        for option, content in contents.items():
            paths[option] = Path(folder) / option / content.name
            paths[option].parent.mkdir()
            paths[option].write_bytes(content.data)
        named = {name: getattr(problem, name) for name in FILE_OPTIONS if name not in paths}
        try:
            run = prepare(problem, Inputs(**named, **paths))
        except OptionError as error:
            message = str(error)
            for path in paths.values():  # files are named as their senders do, without the folder they were written to
                message = message.replace(str(path), path.name)
            raise OptionError(error.option, message) from error
        yield run


def predicted(name: str, workload: Workload) -> Workload:
    """Return the jobs prepared for that predictor; with ``none``, lengths are unknown until jobs report progress."""
    return replace(workload, predicted_work_s=np.full(len(workload), np.nan)) if name == "none" else workload


def _predictor(options: TrainingOptions) -> Foreseeing | None:
    """Return what learns lengths during the run; None for those whose predictions are in the workload."""
    name, learned = options.predictor, catalogue().predictors
    if name in learned:
        return learned[name](options.seed)
    if name not in UNLEARNED:
        more = "" if learned else "; the package wattshift-lab, which is not installed here, has those that learn"
        raise DomainError(f"unknown predictor {name!r}; known: {', '.join((*UNLEARNED, *learned))}{more}")
    return None


@contextmanager
def of_option(option: str) -> Iterator[None]:
    """Convert an error raised within the block into an ``OptionError`` for that option."""
    try:
        yield
    except OptionError:
        raise
    except (ValueError, OverflowError) as error:  # DomainError is the former
        raise OptionError(option, str(error)) from error


def _grid(options: TrainingOptions, inputs: Inputs, zone: str | None = None) -> CarbonTrace:
    """Return the grid that is asked for, or a zone's: bundled as that is, or of the same file."""
    given: dict[str, Any] = {"signal": options.signal, "forecast": inputs.forecast}
    carbon = inputs.carbon
    if zone is not None and carbon in BUNDLED_ZONES:
        if zone not in BUNDLED_ZONES:
            raise OptionError("cluster", f"no grid of zone {zone} is bundled; bundled: {', '.join(BUNDLED_ZONES)}")
        carbon = zone
    elif zone is not None:
        given["zone"] = zone
    try:  # the days after the last submission matter too: jobs still run then
        trace = read_carbon(carbon, start=options.start, **given)
    except TraceFormatError:
        trace = read_carbon(carbon, start=options.start, days=options.days, **given)
    if inputs.prices is None:
        return trace
    with of_option("prices"):
        return with_prices(trace, inputs.prices)


def _check_covered(workload: Workload, grids: Iterable[CarbonTrace]) -> None:
    """Refuse jobs that begin where nothing is known of a grid: its first value would hold for all of them."""
    first_s = float(workload.submitted_s[0])
    for grid in grids:
        if not grid.curve.start_s - LONGEST_GAP_S <= first_s < grid.curve.end_s:
            jobs, first, last = (np.datetime64(int(at), "s") for at in (first_s, grid.curve.start_s, grid.curve.end_s))
            raise DomainError(
                f"the first job is submitted at {jobs}, and {grid.zone} is known only from {first} to {last}; "
                "say by start where in that the jobs begin"
            )


def _parameters(options: TrainingOptions) -> dict[str, dict[str, Any]]:
    """Return each policy's parameters; one given without a policy's name applies to every policy that has it."""
    names = [registry.policy_name(name) for name in options.policies if name]
    unknown = [name for name in names if registry.entry_of(name) is None]
    if unknown:
        raise OptionError("policy", registry.unknown_policy(unknown[0]))
    if not names:
        raise OptionError("policy", f"name a policy; known: {registry.known_policies()}")
    if len(set(names)) < len(names):
        raise OptionError("policy", "the same policy is named more than once")
    keys = {name: accepted_names(registry.policy_entry(name).config) for name in names}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in options.params.items():
        owner, dot, inner = key.rpartition(".")
        of = [name for name in names if (not dot or name == owner) and inner in keys[name]]
        if not of:
            known = "; ".join(f"{name}: {', '.join(sorted({*keys[name].values()})) or 'none'}" for name in names)
            raise OptionError("params", f"{json.dumps(key)} sets no parameter of these policies ({known})")
        for name in of:
            chosen[name][keys[name][inner]] = value
    try:
        for name in names:
            registry.build_policy(name, chosen[name])
    except PolicyConfigError as error:
        raise OptionError("params", f"{error.pointer.lstrip('/')}: {error}") from error
    return chosen
