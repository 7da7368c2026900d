"""``wattshift profile pool``: measure how the modes of a pool's file serve its classes, and write that into it."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_USAGE, AsJson, CliError, Group
from services.cli.jobs.following import states
from services.cli.jobs.job_output import JobOutput
from services.cli.jobs.submit import submit_for_a_while
from services.cli.planning.solving import checked
from services.cli.plugins import add_moved
from services.cli.serving import load_sweep
from services.cli.serving.profiling import Reading, mean_power_w, printed, program, reading_of
from services.cli.values import filled, json_document, made
from services.contracts.jobs import GpuRequest, JobSpec, Processes
from services.contracts.pools import ClassTerms
from services.contracts.serving import PoolPartition, PoolSpec, ServerMode
from services.kit.text import decimal

GRACE_S = 10.0
SINGLE_CLASS_TOKENS = 512, 256  #: Of a request where no thresholds say what is long


def register(app: typer.Typer) -> None:
    profile = Group(app, "profile", "Measure profiles on GPUs of the cluster.")
    profile.add(pool)
    add_moved(profile, {"inference": "wattshift lab profile inference"})


def pool(
    file: Annotated[Path, typer.Argument(help="The pool's spec as JSON; docs/pools.md describes it.")],
    out: Annotated[Path | None, typer.Option(help="File for the spec with what was measured; by default FILE.")] = None,
    modes: Annotated[list[str] | None, typer.Option("--mode", help="Only this mode; may be repeated.")] = None,
    levels: Annotated[
        str, typer.Option(help="Numbers of requests at once to try, in this order.")
    ] = "1,2,4,8,16,32,64",
    lengths: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS=INPUT,OUTPUT", help="Tokens of a class's requests; may be repeated."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, max=3_600, help="How long each measurement takes at least.")] = 20,
    warmup: Annotated[float, typer.Option(min=0, max=3_600, help="Seconds of requests before it.")] = 5,
    ready_timeout: Annotated[float, typer.Option(min=1, max=86_400, help="How long a server may take to load.")] = 900,
    python: Annotated[str, typer.Option(help="Python 3.8 or later on the node, or in the modes' images.")] = "python3",
    as_json: AsJson = False,
) -> None:
    """Measure the latency, rate and power of a pool's modes by class and load, and write profiles into its file."""
    document = json_document(file)
    spec = checked(document, PoolSpec, str(file))
    unknown = sorted(set(modes or ()) - {mode.name for mode in spec.modes})
    if unknown:
        raise CliError(f"{file} has no mode {unknown[0]}", EXIT_NOT_FOUND)
    plan = {
        "model": next(iter(spec.models), ""),
        "classes": _classes(spec, lengths or ()),
        "levels": _levels(levels),
        "seconds": seconds,
        "warmup_s": warmup,
        "ready_timeout_s": ready_timeout,
        "timeout_s": max(600.0, 10 * seconds),
        "grace_s": GRACE_S,
        "health_path": spec.probes.health_path,
    }
    rows: list[dict[str, Any]] = []
    for mode in spec.modes:
        if modes and mode.name not in modes:
            continue
        if not mode.command:
            raise CliError(f"mode {mode.name} has no command to start a server with", EXIT_USAGE)
        measured = _Measuring(Gateway(), mode, plan, filled(python), quiet=as_json).result()
        rows += measured["rows"]
        _fill(document, mode.name, measured)
        checked(document, PoolSpec, str(file))
        with made(out or file) as part:  # after each mode: a later one may fail
            part.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    output.tell({"file": str(out or file), "measured": rows}, as_json, f"{out or file}: {len(rows)} measurements")


def _levels(text: str) -> list[int]:
    try:
        found = [decimal(each, int) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= each <= 1_024 for each in found):
        raise CliError(f"--levels are numbers from 1 to 1024, such as 1,2,4, not {text!r}", EXIT_USAGE)
    return found


def _classes(spec: PoolSpec, lengths: Sequence[str]) -> list[dict[str, Any]]:
    """Return the classes of all partitions, with their limits and the lengths of their requests."""
    stated: dict[str, list[int]] = {}
    for text in lengths:
        name, _, tokens = text.partition("=")
        try:
            stated[name] = [decimal(each, int) for each in tokens.split(",")]
        except ValueError:
            stated[name] = []
        if len(stated[name]) != 2 or not all(1 <= each <= 10**6 for each in stated[name]):
            raise CliError(f"--lengths is CLASS=INPUT,OUTPUT in tokens, such as SL=90,900, not {text!r}", EXIT_USAGE)
    known = {each.name for part in spec.partitions for each in part.classes}
    if unknown := sorted(set(stated) - known):
        raise CliError(f"--lengths names class {unknown[0]}; classes are {', '.join(sorted(known))}", EXIT_USAGE)
    found: list[dict[str, Any]] = []
    for part in spec.partitions:
        for each in part.classes:
            inputs, outputs = stated.get(each.name) or _typical(part, each)
            limits = each.model_dump(include={"max_latency_s", "max_ttft_ms", "max_tbt_ms"})
            found.append(
                {"partition": part.name, "name": each.name, "input_tokens": inputs, "output_tokens": outputs, **limits}
            )
    return found


def _typical(part: PoolPartition, terms: ClassTerms) -> tuple[int, int]:
    """Return the tokens of a class's request: half of a threshold for short, twice as much for long."""
    if part.thresholds is None:
        return SINGLE_CLASS_TOKENS
    limits = part.thresholds.input_tokens, part.thresholds.output_tokens
    inputs, outputs = (
        2 * most if side == "L" else max(most // 2, 1) for side, most in zip(terms.name, limits, strict=True)
    )
    return inputs, outputs


class _Measuring:
    """A job that measures one mode, and the readings of its GPUs."""

    def __init__(self, gateway: Gateway, mode: ServerMode, plan: dict[str, Any], python: str, *, quiet: bool) -> None:
        self._gateway, self._mode, self._quiet = gateway, mode, quiet
        plan = plan | {"command": [filled(word) for word in mode.command]}
        self._spec = JobSpec(
            name=f"profile-{mode.name}"[:63],
            command=[python, "-c", program(load_sweep), json.dumps(plan)],
            image=mode.image,
            environment=mode.environment,
            working_dir=mode.working_dir,
            gpus=GpuRequest(min=mode.gpus, max=mode.gpus, model=mode.gpu_model),
            processes=Processes.PER_NODE,
            labels={"profile": mode.name},
            preemptible=False,
            grace_s=2 * GRACE_S,
        )
        self._readings: dict[tuple[str, int], dict[float, Reading]] = {}

    def result(self) -> dict[str, Any]:
        """Run the job; return the time until it was ready, the power when idle, and the measurements with theirs."""
        job_id = submit_for_a_while(self._gateway, self._spec)["id"]
        said = ""
        job: Any = None
        try:
            for job in states(self._gateway, job_id):
                if job["state"] == "queued" and (why := job.get("detail")) and why != said and not self._quiet:
                    output.say(f"{self._mode.name}: {why}")
                    said = why
                self._read(job)
        except BaseException:
            with suppress(CliError):  # it has ended, or nobody answers any more
                self._gateway.call("POST", f"/v1/jobs/{job_id}/cancel")
            raise
        text = b"".join(JobOutput(self._gateway, job_id, "stdout").pieces(0)).decode(errors="replace")
        found = printed(text)
        failure = next((each["error"] for each in found if "error" in each), None)
        if failure is not None or job["state"] != "succeeded":
            why = failure or job.get("detail") or f"the job has {job['state']}"
            raise CliError(f"{self._mode.name}: {why}; `wattshift logs {job_id}` has its output", EXIT_FAILED)
        rows = [each for each in found if "qps" in each]
        for each in rows:
            each |= {"mode": self._mode.name, "power_w": self._power_w(each)}
            if not self._quiet:
                output.say(_line(each))
        idle = next(each for each in found if each.get("idle"))
        return {
            "start_s": next(each["ready_s"] for each in found if "ready_s" in each),
            "idle_w": self._power_w(idle),
        } | {"rows": rows}

    def _read(self, job: dict[str, Any]) -> None:
        places = [(share["node_id"], gpu) for share in job["placement"] or () for gpu in share["devices"]]
        if not places:
            return
        if len({node for node, _ in places}) > 1:
            detail = (
                "its job's GPUs are on several nodes, and an instance's are on one; try again when one has them free"
            )
            raise CliError(f"{self._mode.name}: {detail}", EXIT_FAILED)
        nodes = {each["id"]: each for each in self._gateway.get("/v1/nodes")["items"]}
        for node, gpu in places:
            if node in nodes and (reading := reading_of(nodes[node], gpu)) is not None:
                self._readings.setdefault((node, gpu), {})[reading.at_s] = reading

    def _power_w(self, measured: dict[str, Any]) -> float:
        """Return the mean power of all GPUs of the job while something was measured."""
        total_w = 0.0
        for readings in self._readings.values():
            during = [readings[at_s] for at_s in sorted(readings) if measured["start_s"] <= at_s <= measured["end_s"]]
            if len(during) < 2:
                raise CliError(
                    f"{self._mode.name}: the agent read a GPU {len(during)} times while it was measured; measure for "
                    "longer with --seconds",
                    EXIT_FAILED,
                )
            total_w += mean_power_w(during, self._mode.gpu_model)
        return total_w


def _line(row: dict[str, Any]) -> str:
    where = f"{row['mode']} {row['partition']}/{row['class']}, {row['at_once']} at once"
    times = f"{row['latency_s']:.3g} s, first token {row['ttft_ms']:.0f} ms, {row['tbt_ms']:.1f} ms a token"
    return f"{where}: {row['qps']:.3g}/s, {times}, {row['power_w']:.0f} W"


def _fill(document: Any, mode: str, measured: dict[str, Any]) -> None:
    for each in document["modes"]:
        if each["name"] == mode:
            each |= {"start_s": round(measured["start_s"], 1), "idle_w": round(measured["idle_w"], 1)}
    for part in document["partitions"]:
        for terms in part["classes"]:
            rows = [
                each for each in measured["rows"] if (each["partition"], each["class"]) == (part["name"], terms["name"])
            ]
            kept = [each for each in rows if load_sweep.keeps(each, terms)]
            best = max(kept, key=lambda each: float(each["qps"])) if kept else rows[0]
            profile = {
                "mode": mode,
                "max_qps": round(best["qps"], 4) if kept else 0,
                **{name: round(best[name], 4) for name in ("power_w", "latency_s", "ttft_ms", "tbt_ms")},
            }
            terms["profiles"] = [each for each in terms.get("profiles", []) if each["mode"] != mode] + [profile]
