"""What the router counts, in Prometheus' text format; whichever process of a port is asked answers for all."""

import shutil
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import orjson

from services.kit.files import whole

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
APP_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)
TOKENS_MS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)

MOST_SERIES = 10_000
"""Combinations of labels of one metric: instances come and go. Beyond it the oldest is forgotten, and begins anew."""

Labels = tuple[str, ...]
Amounts = tuple[Labels, list[float]]


@dataclass(frozen=True)
class Gauge:
    """A value at the moment."""

    name: str
    help_text: str
    labels: Labels  #: Names of its labels
    values: Mapping[Labels, float]  #: Its values, by those of the labels
    is_summed: bool = True  #: Whether several processes' values are added up; otherwise the greatest is taken

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help_text, "gauge")
        for labels, value in self.values.items():
            yield f"{self.name}{_labels(self.labels, labels)} {value:g}"


class Counter:
    """A count for each combination of labels."""

    def __init__(self, name: str, help_text: str, labels: Labels) -> None:
        self.name, self._help, self._labels = name, help_text, labels
        self.values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        if labels in self.values:
            self.values[labels] += amount
        else:
            self.values[labels] = amount + 0.0
            _forget_oldest(self.values)

    def amounts(self) -> list[Amounts]:
        return [(labels, [value]) for labels, value in self.values.items()]

    def merge(self, labels: Labels, amounts: list[float]) -> None:
        """Add another process's count for one combination."""
        self.add(labels, amounts[0])

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self._help, "counter")
        for labels, value in self.values.items():
            yield f"{self.name}{_labels(self._labels, labels)} {value:g}"


class Histogram:
    """Counts of values up to each bound, for each combination of labels."""

    def __init__(self, name: str, help_text: str, labels: Labels, bounds: tuple[float, ...] = SECONDS) -> None:
        self.name, self._help, self._labels, self._bounds = name, help_text, labels, bounds
        self._found: dict[Labels, list[float]] = {}

    def observe(self, labels: Labels, value: float) -> None:
        found = self._found.get(labels)
        if found is None:
            found = self._found[labels] = [0.0] * (len(self._bounds) + 2)
            _forget_oldest(self._found)
        found[bisect_left(self._bounds, value)] += 1
        found[-1] += value

    def amounts(self) -> list[Amounts]:
        return list(self._found.items())

    def merge(self, labels: Labels, amounts: list[float]) -> None:
        """Add another process's counts for one combination."""
        found = self._found.get(labels, [0.0] * len(amounts))
        self._found[labels] = [one + other for one, other in zip(found, amounts, strict=True)]
        _forget_oldest(self._found)

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self._help, "histogram")
        for labels, found in self._found.items():
            total = 0.0
            for bound, count in zip((*map(str, self._bounds), "+Inf"), found, strict=False):
                total += count
                yield f"{self.name}_bucket{_labels((*self._labels, 'le'), (*labels, bound))} {total:g}"
            yield f"{self.name}_sum{_labels(self._labels, labels)} {found[-1]:g}"
            yield f"{self.name}_count{_labels(self._labels, labels)} {total:g}"


class Metrics:
    """Everything that the router counts."""

    def __init__(self) -> None:
        def count(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"wattshift_router_{name}", help_text, labels)

        def times(name: str, help_text: str, *labels: str, bounds: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"wattshift_router_{name}_seconds", help_text, labels, bounds)

        by_class = ("model", "request_class")
        self.requests = count("requests_total", "Requests by their answer's status.", *by_class, "status")
        self.ttft = times("ttft", "From arrival to the first token of streams.", *by_class)
        self.e2e = times("e2e", "From arrival to the last byte.", *by_class)
        self.wait = times("queue", "Wait in the lane.", *by_class)
        self.tbt = times("tbt", "Mean time between the tokens of an answer.", *by_class, bounds=TOKENS_MS)
        self.tokens = count("tokens_total", "Tokens of prompts and answers.", *by_class, "kind")
        self.estimated = count(
            "estimated_tokens_requests_total", "Answers whose server did not state its tokens.", *by_class
        )
        self.energy = count("energy_joules_total", "Estimated energy of answers.", *by_class)
        self.carbon = count("carbon_grams_total", "Estimated emissions of answers.", *by_class)
        self.violations = count("slo_violations_total", "Answers that took longer than five times Lat.", *by_class)
        self.upstream = count("upstream_failures_total", "Failures of servers.", "reason")
        self.preemptions = count("preemptions_total", "Requests that lost their place.", *by_class)
        self.blind = count(
            "blind_seconds_total",
            "Seconds in which a server whose clocks follow latency had requests in service and showed no token.",
            *("server", "location"),
        )

        # OpenTelemetry's semantic conventions of generative AI, as its exporter for Prometheus writes them.
        by_server = ("gen_ai_request_model", "gen_ai_operation_name", "server_address", "location")
        self.gen_ai_duration = Histogram(
            "gen_ai_server_request_duration_seconds", "From arrival to the last byte.", (*by_server, "error_type")
        )
        self.gen_ai_first = Histogram(
            "gen_ai_server_time_to_first_token_seconds", "From arrival to the first token of streams.", by_server
        )
        token_labels, bounds = (*by_server, "gen_ai_token_type"), tuple(4.0**n for n in range(14))
        self.gen_ai_tokens = Histogram(
            "gen_ai_client_token_usage", "Tokens of prompts and answers.", token_labels, bounds
        )

        by_variant = ("app", "variant")
        self.app_requests = count(
            "app_requests_total",
            "Requests to applications by their answer's status; without a variant where no instance answered.",
            *(*by_variant, "status"),
        )
        self.app_latency = times(
            "app_latency", "From arrival to the end of an application's answer.", "app", bounds=APP_SECONDS
        )
        self.app_wait = times("app_queue", "Wait in an application's queue.", "app", bounds=APP_SECONDS)
        self.app_energy = count("app_energy_joules_total", "Estimated energy of applications' answers.", *by_variant)
        self.app_carbon = count("app_carbon_grams_total", "Estimated emissions of applications' answers.", *by_variant)

    def all(self) -> dict[str, Counter | Histogram]:
        return {found.name: found for found in vars(self).values() if isinstance(found, Counter | Histogram)}

    def lines(self, gauges: Iterable[Gauge]) -> Iterator[str]:
        for found in (*self.all().values(), *gauges):
            yield from found.lines()


def _forget_oldest(found: dict[Labels, Any]) -> None:
    if len(found) > MOST_SERIES:
        del found[next(iter(found))]


def _head(name: str, help_text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"


def _labels(names: Labels, values: Labels) -> str:
    def quoted(value: Any) -> str:
        return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    if not names:
        return ""
    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in zip(names, values, strict=True)) + "}"


ENDED = "ended.json"


class MetricsFolder:
    """The files of the processes that share a port, each of which writes its own once a second and before it answers.

    Only what is in a file is shown, so that no counter goes back when a process is killed: its file stays until the
    supervising process adds it to those of others that have ended. When all of them end, counting begins anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        """Forget what earlier processes counted."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(parents=True)

    def write(self, process: str, metrics: Metrics, gauges: Sequence[Gauge]) -> None:
        self._replace(f"{process}.json", metrics, gauges={gauge.name: list(gauge.values.items()) for gauge in gauges})

    def read(self, gauges: Iterable[Gauge]) -> tuple[Metrics, list[Gauge]]:
        """Return the counts of all processes together; gauges' names and help texts are taken from those given."""
        files = {path.name: _read(path) for path in sorted(self._path.glob("*.json")) if path.name != ENDED}
        ended = _read(self._path / ENDED)  # after the others: what was added to it meanwhile is counted once
        names = set(ended.get("processes", ()))
        live = [document for name, document in files.items() if document and name not in names]
        total = Metrics()
        for document in (ended, *live):
            _add(total, document)
        return total, [_together(gauge, live) for gauge in gauges]

    def end(self, process: str) -> None:
        """Add the counts of a process that has ended to those of others that have."""
        path = self._path / f"{process}.json"
        ended, document = _read(self._path / ENDED), _read(path)
        if not document:
            return
        total = Metrics()
        _add(total, ended)
        _add(total, document)
        self._replace(ENDED, total, processes=[*ended.get("processes", ()), path.name])
        path.unlink()

    def _replace(self, name: str, metrics: Metrics, **more: Any) -> None:
        counts = {name: found.amounts() for name, found in metrics.all().items()}
        with whole(self._path / name) as part:
            part.write_bytes(orjson.dumps({"counts": counts, **more}))


def _read(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}


def _add(total: Metrics, document: dict[str, Any]) -> None:
    known = total.all()
    counts: dict[str, list[Any]] = document.get("counts", {})
    for name, rows in counts.items():
        for labels, amounts in rows if name in known else ():  # an older release had others
            known[name].merge(tuple(labels), amounts)


def _together(gauge: Gauge, documents: Iterable[dict[str, Any]]) -> Gauge:
    values: dict[Labels, float] = {}
    for document in documents:
        for given, value in cast("list[tuple[list[str], float]]", document["gauges"].get(gauge.name, ())):
            labels = tuple(given)
            before = values.get(labels, 0.0)
            values[labels] = before + value if gauge.is_summed else max(before, value)
    return replace(gauge, values=values)
