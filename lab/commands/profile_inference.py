"""``wattshift lab profile inference``: measure how fast variants of a model are on slices of a GPU, and what they draw.

For each size, or each mix of sizes, the GPU is cut, and each variant runs there as jobs that send themselves one
request after another (``closed_loop``); those of a mix do so at the same time. The energy
comes from the agent's readings of the GPU's energy counter in that time. Each measurement is in the file at once, so
that a run that was killed continues where it stopped. Afterwards the GPU is cut as it was before.
"""

from __future__ import annotations

import json
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.commands import closed_loop
from lab.commands.slice_profiles import (
    PERCENT,
    Family,
    ProfileFile,
    Row,
    Variant,
    gpu_name,
    is_whole,
    mixes_of,
    read_family,
    row_of,
    slice_sizes,
)
from services.cli import output
from services.cli.bars import bar
from services.cli.client import Gateway
from services.cli.commands import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_USAGE, AsJson, CliError
from services.cli.jobs.names import ENDED
from services.cli.jobs.submit import submit_all
from services.cli.serving.profiling import Reading, program, reading_of
from services.cli.values import filled
from services.contracts.jobs import GpuRequest, JobSpec
from services.core.domain.mig import gpu_of, parent_of, slice_name

POLL_S = 0.5
_GRACE_S = 10.0
_PORTS = (20_000, 30_000)
"""Where instances meet; below the ports that Linux gives to connections."""


group = typer.Typer(help="Measure profiles on GPUs of the cluster.", no_args_is_help=True)


@group.callback()
def _profile() -> None:
    """Measure profiles on GPUs of the cluster."""


@dataclass(frozen=True)
class Settings:
    """How each measurement is made."""

    seconds: float
    warmup_s: float
    ready_timeout_s: float
    python: str
    mps: bool


@group.command()
def inference(
    file: Annotated[Path, typer.Argument(help="The model's variants as JSON; docs/profiles.md describes it.")],
    node: Annotated[str, typer.Option(help="The GPU's node.")],
    gpu: Annotated[int, typer.Option(help="Index of the GPU on its node.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="CSV file that rows are added to; by default inference_slices.csv or inference_shared.csv."),
    ] = None,
    slices: Annotated[
        str, typer.Option(help="Sizes to measure on, one alone; 7g is the GPU as a whole.")
    ] = "1g,2g,3g,4g,7g",
    shared: Annotated[
        bool, typer.Option("--shared", help="Measure instances that run at once on slices of the GPU, by --mixes.")
    ] = False,
    mixes: Annotated[
        str, typer.Option(help="With --shared: what the GPU is cut into, each with an instance of the same variant.")
    ] = "1g+1g+1g+1g+1g+1g+1g,4g+2g+1g",
    seconds: Annotated[float, typer.Option(min=1, max=3_600, help="How long each measurement takes.")] = 10,
    warmup: Annotated[float, typer.Option(min=0, max=3_600, help="Seconds of requests before it.")] = 2,
    ready_timeout: Annotated[float, typer.Option(min=1, max=86_400, help="How long a server may take to load.")] = 300,
    python: Annotated[
        str, typer.Option(help="Python 3.8 or later on the node, or in the variants' images.")
    ] = "python3",
    mps: Annotated[
        bool, typer.Option(help="Do not cut the GPU: limit a server to a part of it through CUDA MPS.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how fast variants of a model answer on slices of a GPU, and the energy of a request."""
    if shared and mps:
        raise CliError("--shared needs slices of their own for instances: it does not go with --mps", EXIT_USAGE)
    family = read_family(file)
    cuts = mixes_of(mixes) if shared else [(size,) for size in slice_sizes(slices)]
    out = out or Path("inference_shared.csv" if shared else "inference_slices.csv")
    settings = Settings(seconds, warmup, ready_timeout, filled(python), mps)
    gateway = Gateway()
    bench = Bench(gateway, node, gpu, settings, quiet=as_json)
    profile = ProfileFile(out, bench.gpu_name)
    wanted = [(sizes, variant) for sizes in cuts for variant in family.variants]
    missing = [each for each in wanted if not profile.has(family.family, each[1].name, each[0])]
    if any(not _is_whole(sizes) for sizes, _ in missing) and not mps and not bench.device["can_partition"]:
        raise CliError(
            f"GPU {gpu} of {node} cannot be cut into slices; measure the whole GPU with --slices 7g, or parts of it by "
            "CUDA MPS with --mps",
            EXIT_USAGE,
        )
    rows: list[Row] = []
    with _left_as_it_was(bench, out), bar(quiet=as_json) as advance:
        advance("", len(wanted) - len(missing), len(wanted))
        for number, (sizes, variant) in enumerate(missing, len(wanted) - len(missing)):
            advance(f"{variant.name} on {_names(sizes)}", number, len(wanted))
            if not mps:
                bench.cut([] if _is_whole(sizes) else list(sizes))
            measured = bench.measure(family, variant, sizes)
            profile.add(measured)
            rows += measured
        advance(family.family, len(wanted), len(wanted))
    count = sum(len(sizes) for sizes, _ in wanted)
    output.tell(
        {"file": str(out), "rows": count, "measured": [row.__dict__ for row in rows]},
        as_json,
        f"{out}: {count} rows, {len(rows)} of them measured now, on {bench.gpu_name}",
    )


def _is_whole(sizes: Sequence[int]) -> bool:
    return len(sizes) == 1 and is_whole(sizes[0])


def _names(sizes: Sequence[int]) -> str:
    return "+".join(map(slice_name, sizes))


class Bench:
    """One GPU of a node, and the jobs that measure on it."""

    def __init__(self, gateway: Gateway, node: str, gpu: int, settings: Settings, *, quiet: bool) -> None:
        self._gateway = gateway
        self.node_id, self.gpu = node, gpu
        self._settings = settings
        self._quiet = quiet
        self.state_file: Path | None = None
        self._before: list[int] = self.sizes(self.node())
        self.jobs: list[str] = []
        self.device = next(
            (each for each in self.node()["devices"] if each["index"] == gpu and parent_of(each["index"]) is None), {}
        )
        if not self.device:
            raise CliError(f"node {node} has no GPU {gpu}", EXIT_NOT_FOUND)
        self.gpu_name = gpu_name(self.node(), self.device)

    def node(self, node_id: str | None = None) -> dict[str, Any]:
        """Return what the control plane knows about a node, by default the GPU's."""
        node_id = node_id or self.node_id
        nodes: list[dict[str, Any]] = self._gateway.get("/v1/nodes")["items"]
        found = next((each for each in nodes if each["id"] == node_id), None)
        if found is None:
            known = ", ".join(each["id"] for each in nodes) or "none"
            raise CliError(f"there is no node {node_id!r}; nodes are {known}", EXIT_NOT_FOUND)
        return found

    def sizes(self, node: dict[str, Any]) -> list[int]:
        """Return the sizes of the GPU's slices, in the order of their places."""
        devices = sorted(node["devices"], key=lambda device: device["index"])
        return [device["sevenths"] for device in devices if device.get("parent") == self.gpu]

    def begin(self, state_file: Path) -> None:
        """Remember how the GPU is cut; after a killed run, how it was cut before that run, and end its jobs."""
        self.state_file = state_file
        try:
            left = json.loads(state_file.read_text(encoding="utf-8"))
            if (left["node"], left["gpu"]) != (self.node_id, self.gpu):
                raise CliError(
                    f"{state_file} says that GPU {left['gpu']} of {left['node']} was left cut by a run that was "
                    "killed: run that again, or cut the GPU yourself and remove the file",
                    EXIT_USAGE,
                )
            self._before, self.jobs = [int(size) for size in left["before"]], _jobs_of(left)
            self._end_jobs()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CliError(f"{state_file} cannot be read ({error}): remove it", EXIT_USAGE) from None
        self._save()

    def end(self) -> None:
        """End the running jobs, and cut the GPU as it was before."""
        self._end_jobs()
        if not self._settings.mps:
            self.cut(self._before)
        if self.state_file is not None:
            self.state_file.unlink(missing_ok=True)

    def cut(self, sizes: list[int]) -> None:
        """Cut the GPU, and wait until its node has done it."""
        node = self.node()
        row = next((each for each in node["partitions"] if each["gpu"] == self.gpu), None)
        is_wanted = row is None or (sorted(row["sizes"]), row["state"]) == (sorted(sizes), "applied")
        if is_wanted and sorted(self.sizes(node)) == sorted(sizes):
            return
        self._gateway.call("PUT", f"/v1/nodes/{self.node_id}/gpus/{self.gpu}/partition", body={"sizes": sizes})
        said = ""
        while True:
            node = self.node()
            row = next(each for each in node["partitions"] if each["gpu"] == self.gpu)
            if row["state"] == "failed":
                raise CliError(f"GPU {self.gpu} of {self.node_id} is not cut: {row['detail']}", EXIT_FAILED)
            if row["state"] == "applied" and sorted(self.sizes(node)) == sorted(sizes):
                return
            if row["detail"]:
                said = self._say(said, f"GPU {self.gpu} of {self.node_id} is to be cut: {row['detail']}")
            time.sleep(POLL_S)

    def measure(self, family: Family, variant: Variant, sizes: Sequence[int]) -> list[Row]:
        """Measure a variant on the GPU's present slices, which have these sizes, with an instance on each."""
        what = f"{variant.name} on {_names(sizes)}"
        for spec in self._specs(family, variant, sizes):
            self.jobs.append(submit_all(self._gateway, [spec])[0]["id"])
            self._save()
        readings: dict[float, Reading] = {}
        said, ended = "", dict[str, dict[str, Any]]()
        while len(ended) < len(self.jobs):
            for job_id in [each for each in self.jobs if each not in ended]:
                job = self._gateway.get(f"/v1/jobs/{job_id}")
                if job["state"] in ENDED:
                    ended[job_id] = self._result(job, what)
                    continue
                if job["state"] == "queued" and job.get("detail"):
                    said = self._say(said, f"{what}: {job['detail']}")
                for node, gpu in self._places(job, sizes, what):
                    if (reading := reading_of(self.node(node), gpu)) is not None:
                        readings[reading.at_s] = reading
            time.sleep(POLL_S)
        of_jobs, self.jobs = self.jobs, []
        self._save()
        read = sorted(readings.values(), key=_at)
        names = self.gpu_name, family.family, variant.name
        return [row_of(*names, size, ended[job], read, sizes) for size, job in zip(sizes, of_jobs, strict=True)]

    def _specs(self, family: Family, variant: Variant, sizes: Sequence[int]) -> Iterator[JobSpec]:
        if len(sizes) == 1:
            yield self._spec(family, variant, sizes[0], {})
            return
        met: dict[str, Any] = {"port": random.randrange(*_PORTS), "token": secrets.token_hex(8)}
        for rank, size in enumerate(sizes):
            yield self._spec(family, variant, size, {"together": {**met, "rank": rank, "instances": len(sizes)}})

    def _spec(self, family: Family, variant: Variant, size: int, together: dict[str, Any]) -> JobSpec:
        settings = self._settings
        body = family.request.body
        plan = {
            "command": [filled(word) for word in variant.command],
            "health_path": family.health_path,
            "request": {
                **family.request.model_dump(),
                "body": body if isinstance(body, str) else "" if body is None else json.dumps(body),
            },
            "ready_timeout_s": settings.ready_timeout_s,
            "warmup_s": settings.warmup_s,
            "seconds": settings.seconds,
            "grace_s": _GRACE_S,
            **together,
        }
        own = {"WATTSHIFT_APP": family.family, "WATTSHIFT_VARIANT": variant.name, "WATTSHIFT_SLICE": slice_name(size)}
        if settings.mps:
            own["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(PERCENT[size])
        on_slice = not is_whole(size) and not settings.mps
        return JobSpec(
            name=f"profile-{variant.name}-{slice_name(size)}",
            command=[settings.python, "-c", program(closed_loop), json.dumps(plan)],
            image=variant.image,
            environment=own | variant.environment,
            working_dir=variant.working_dir,
            gpus=GpuRequest(model=self.device["model"], slice=slice_name(size) if on_slice else None),  # pyright: ignore[reportArgumentType]
            labels={"profile": family.family},
            preemptible=False,
            grace_s=2 * _GRACE_S,
            time_limit_s=(2 if together else 1) * (settings.ready_timeout_s + settings.seconds)
            + settings.warmup_s
            + 6 * _GRACE_S,
        )

    def _places(self, job: dict[str, Any], sizes: Sequence[int], what: str) -> list[tuple[str, int]]:
        """Return the node and the GPU that a job runs on; empty before it starts.

        Raises:
            CliError: it runs on a slice of another GPU, where it may have neighbours. A whole GPU may be any of the
                same model.
        """
        found = [(share["node_id"], gpu_of(index)) for share in job["placement"] for index in share["devices"]]
        if found and not (_is_whole(sizes) or self._settings.mps) and found != [(self.node_id, self.gpu)]:
            ((node, gpu), *_) = found
            raise CliError(
                f"{what}: the job was placed on a slice of GPU {gpu} of {node}; drain that node while this GPU is "
                "measured",
                EXIT_FAILED,
            )
        return found

    def _result(self, job: dict[str, Any], what: str) -> dict[str, Any]:
        """Return what the job printed."""
        text = self._gateway.text(f"/v1/jobs/{job['id']}/logs", stream="stdout").text.strip()
        try:
            found = json.loads(text.splitlines()[-1])
        except (ValueError, IndexError):
            found = {}
        if not isinstance(found, dict) or "requests" not in found:
            why = found.get("error") if isinstance(found, dict) else None
            reason = why or job.get("detail") or f"the job has {job['state']}"
            raise CliError(f"{what}: {reason}; `wattshift logs {job['id']}` has its output", EXIT_FAILED)
        return found

    def _end_jobs(self) -> None:
        """Cancel the running jobs, and wait for them to end."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            with suppress(CliError):  # it has ended, or nobody knows it any more
                self._gateway.call("POST", f"/v1/jobs/{job}/cancel")
        for job in jobs:
            with suppress(CliError):
                while self._gateway.get(f"/v1/jobs/{job}")["state"] not in ENDED:
                    time.sleep(POLL_S)

    def _save(self) -> None:
        if self.state_file is not None:
            state = {"node": self.node_id, "gpu": self.gpu, "before": self._before, "jobs": self.jobs}
            self.state_file.write_text(json.dumps(state), encoding="utf-8")

    def _say(self, said: str, text: str) -> str:
        if text != said and not self._quiet:
            output.say(text)
        return text


def _jobs_of(left: dict[str, Any]) -> list[str]:
    """Return the jobs that a run left behind; earlier releases had one at a time."""
    jobs: list[str] = left["jobs"] if "jobs" in left else [left["job"]]
    return [str(job) for job in jobs if job]


def _at(reading: Reading) -> float:
    return reading.at_s


@contextmanager
def _left_as_it_was(bench: Bench, out: Path) -> Iterator[None]:
    """End the jobs and cut the GPU as it was before, however the block ends; after a kill, the next run does so."""
    bench.begin(out.with_name(out.name + ".state"))
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except BaseException:
        try:
            bench.end()
        except CliError as error:
            output.say(f"{error}; run this again to cut it as it was")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    bench.end()
