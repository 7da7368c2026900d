"""Profiles of model variants on slices: what is measured, the CSV file that it goes into, and the arithmetic."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from lab.inference.profiles import SLICE_SM_PERCENT
from services.cli.commands import EXIT_FAILED, EXIT_USAGE, CliError
from services.cli.serving.profiling import Reading, mean_power_w
from services.cli.values import json_document
from services.contracts.invalid import first_error
from services.contracts.jobs import Argument
from services.contracts.schema import Message, Real, Text
from services.contracts.secrets import EnvironmentName
from services.core.domain.errors import DomainError
from services.core.domain.gpus import SLICE_SEVENTHS
from services.core.domain.mig import WHOLE, placed, sevenths_of
from services.kit.text import write_row

SHORT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,23}$"
PERCENT: dict[int, int] = dict(zip(SLICE_SEVENTHS, SLICE_SM_PERCENT, strict=True))
"""``sm_percent`` of a slice, by its size in sevenths."""


class Variant(Message):
    """A model server; it listens on ``$WATTSHIFT_PORT`` of the loopback address."""

    name: Annotated[str, StringConstraints(pattern=SHORT_NAME)]
    command: list[Argument] = Field(min_length=1, max_length=500)
    image: Text | None = Field(default=None, max_length=500)
    environment: dict[EnvironmentName, Argument] = Field(default_factory=dict[EnvironmentName, Argument])
    working_dir: Text | None = Field(default=None, max_length=4_096)


class Request(Message):
    """The request that is sent repeatedly."""

    method: Literal["GET", "POST", "PUT"] = "POST"
    path: Annotated[str, StringConstraints(pattern=r"^/[^\s]*$", max_length=2_000)] = "/"
    body: Any = Field(default=None, description="Sent as JSON, or as it is if it is a text.")
    content_type: Text = "application/json"
    timeout_s: Real = Field(default=60, gt=0, le=3_600)


class Family(Message):
    """The variants of a model, and the request they are measured with."""

    family: Annotated[str, StringConstraints(pattern=SHORT_NAME)]
    variants: list[Variant] = Field(min_length=1, max_length=100)
    request: Request = Request()
    health_path: Annotated[str, StringConstraints(pattern=r"^/[^\s]*$", max_length=2_000)] = "/v2/health/ready"

    @model_validator(mode="after")
    def _has_names(self) -> Self:
        names = [variant.name for variant in self.variants]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"variant {twice} is there twice")
        return self


def read_family(file: Path) -> Family:
    """Return the family in a JSON file."""
    try:
        return Family.model_validate(json_document(file))
    except ValidationError as error:
        raise CliError(f"{file}: {first_error(error, whole='the file')}", EXIT_USAGE) from None


def slice_sizes(text: str) -> list[int]:
    """Return the sizes that ``1g,2g,7g`` names, in sevenths and from small to large."""
    try:
        return sorted({sevenths_of(name.strip()) for name in text.split(",")})
    except DomainError as error:
        raise CliError(f"--slices: {error}", EXIT_USAGE) from None


def mixes_of(text: str) -> list[tuple[int, ...]]:
    """Return the mixes that ``4g+2g+1g,1g+1g`` names, each in sevenths and from large to small.

    Raises:
        CliError: there is no such slice, one GPU does not hold them all, or a mix has only one slice.
    """
    found: list[tuple[int, ...]] = []
    for mix in text.split(","):
        try:
            sizes = tuple(sorted((sevenths_of(name.strip()) for name in mix.split("+")), reverse=True))
            placed(sizes)
        except DomainError as error:
            raise CliError(f"--mixes: {error}", EXIT_USAGE) from None
        if len(sizes) < 2:
            raise CliError(f"--mixes: {mix.strip()} is one slice alone, which --slices measures", EXIT_USAGE)
        found.append(sizes)
    return list(dict.fromkeys(found))


def instances_of(sizes: Sequence[int]) -> str:
    """Return the file's entry for instances that run at once on slices of these sizes, in sevenths."""
    return "1" if len(sizes) == 1 else _mix(sizes)


@dataclass(frozen=True)
class Row:
    """One measurement, with the file's columns in their order. Times are of requests, power is of the whole GPU."""

    gpu: str
    family: str
    variant: str
    sm_percent: int
    concurrent_instances: str
    requests: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    requests_per_s: float
    gpu_power_w: float
    gpu_energy_j_per_own_request: float
    sm_mhz: int


COLUMNS = [field.name for field in fields(Row)]


def row_of(
    gpu: str,
    family: str,
    variant: str,
    size: int,
    measured: dict[str, Any],
    readings: Sequence[Reading],
    mix: Sequence[int] = (WHOLE,),
) -> Row:
    """Return the row of one measurement.

    Args:
        size: Of the slice, in sevenths.
        readings: Of the GPU, before, during and after the requests.
        mix: The sizes of all instances that were measured at once; a single one, of any size, means that it ran alone.

    Raises:
        CliError: fewer than two readings fell into the time of the requests.
    """
    during = [each for each in readings if measured["start_s"] <= each.at_s <= measured["end_s"]]
    if len(during) < 2:
        raise CliError(
            f"{variant}: the agent read the GPU {len(during)} times while it was measured; measure for longer with "
            "--seconds",
            EXIT_FAILED,
        )
    power_w, rate = mean_power_w(during, gpu), measured["requests"] / (measured["end_s"] - measured["start_s"])
    clocks = [each.clock_mhz for each in during if each.clock_mhz is not None]
    return Row(
        gpu=gpu,
        family=family,
        variant=variant,
        sm_percent=PERCENT[size],
        concurrent_instances=instances_of(mix),
        requests=measured["requests"],
        mean_ms=round(measured["mean_ms"], 4),
        p50_ms=round(measured["p50_ms"], 4),
        p95_ms=round(measured["p95_ms"], 4),
        requests_per_s=round(rate, 2),
        gpu_power_w=round(power_w, 1),
        gpu_energy_j_per_own_request=round(power_w / rate, 5),
        sm_mhz=round(sum(clocks) / len(clocks)) if clocks else 0,
    )


class ProfileFile:
    """A CSV file, to which each row is added as soon as it is measured.

    Args:
        gpu: The GPU that is measured; a file about another one is refused.

    Raises:
        CliError: the file exists and is not a profile, or is about another GPU.
    """

    def __init__(self, path: Path, gpu: str) -> None:
        self.path = path
        self._done: set[tuple[str, str, str]] = set()
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            self._write(_line(COLUMNS), whole=True)
            return
        except OSError as error:
            raise CliError(f"{path} cannot be read: {error.strerror}", EXIT_USAGE) from None
        whole = text[: text.rfind("\n") + 1]  # a run that was killed left part of a line
        rows = csv.DictReader(io.StringIO(whole))
        if rows.fieldnames is None or list(rows.fieldnames) != COLUMNS:
            raise CliError(f"{path} has other columns than a profile: name another file with --out", EXIT_USAGE)
        kept: dict[tuple[str, str, str], list[list[str]]] = {}
        for row in rows:
            if None in row.values() or None in row:
                raise CliError(f"{path} line {rows.line_num} is no row of a profile", EXIT_USAGE)
            if row["gpu"] != gpu:
                raise CliError(f"{path} is of {row['gpu']}, not of {gpu}: name another file with --out", EXIT_USAGE)
            kept.setdefault((row["family"], row["variant"], _key(row)), []).append(list(row.values()))
        lines = [COLUMNS]
        for key, of_mix in kept.items():
            instances = len(key[2].split("+"))
            done = len(of_mix) // instances * instances  # a run that was killed left some instances of a mix
            lines += of_mix[:done]
            self._done |= {key} if done else set()
        if (known := "".join(map(_line, lines))) != text:
            self._write(known, whole=True)

    def has(self, family: str, variant: str, sizes: Sequence[int]) -> bool:
        """Return whether instances of a variant were measured at once on slices of these sizes, in sevenths."""
        return (family, variant, _mix(sizes)) in self._done

    def add(self, rows: Sequence[Row]) -> None:
        """Add the rows of instances that were measured at once; they are on disk when this returns."""
        self._write("".join(_line([str(value) for value in astuple(row)]) for row in rows), whole=False)

    def _write(self, text: str, *, whole: bool) -> None:
        path = self.path.with_name(f"{self.path.name}.part") if whole else self.path
        try:
            with path.open("w" if whole else "a", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if whole:
                path.replace(self.path)
        except OSError as error:
            raise CliError(f"{self.path} cannot be written: {error.strerror}", EXIT_USAGE) from None


def _key(row: dict[str, str]) -> str:
    mix = row["concurrent_instances"]
    return mix if "+" in mix else row["sm_percent"]


def _mix(sizes: Sequence[int]) -> str:
    return "+".join(str(PERCENT[size]) for size in sizes)


def _line(values: Sequence[str]) -> str:
    text = io.StringIO()
    write_row(text, values)
    return text.getvalue()


def gpu_name(node: dict[str, Any], device: dict[str, Any]) -> str:
    """Return a GPU's name for the file, as NVIDIA writes it; that of a simulated GPU says so."""
    maker = "NVIDIA" if node["driver"] == "nvml" else "simulated"
    return f"{maker} {device['model']}"


def is_whole(size: int) -> bool:
    """Return whether a size in sevenths is that of the whole, uncut GPU."""
    return size == WHOLE
