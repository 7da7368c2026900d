"""The example workload, live: what `./run` shows."""

import asyncio
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.cli import output
from services.cli.client import Gateway, data_dir
from services.cli.commands import EXIT_FAILED, CliError
from services.cli.jobs.names import ENDED
from services.cli.jobs.specs import read_specs
from services.cli.jobs.submit import submit_all
from services.cli.main import run
from services.cli.output import console
from services.cli.plots import sparkline
from services.cli.site import local
from services.core.domain.counted import counted
from services.core.domain.units import J_PER_KWH
from services.kit.pulse import EVERY_S
from services.standalone import remembered, stack
from services.standalone.data_folder import DataFolder
from services.standalone.processes import lack_of_gpus

WORKLOAD = Path(__file__).parents[1] / "examples" / "workload.json"

GRID_S_PER_S = 900  #: A recorded day of the grid passes in 96 s: the workload sees both dirty and green hours

ROUND_S = 5  #: In grid time this is 75 minutes; the paper's round is 30

ENVIRONMENT = {
    "CARBON_REPLAY_SPEED": str(GRID_S_PER_S),
    "SCHEDULER_ROUND_INTERVAL_S": str(ROUND_S),
    "SCHEDULER_MIN_PROFILE_S": "3",
}

POLICY = {"name": "green", "parameters": {"curve_window_s": 86_400 / GRID_S_PER_S}}
"""GREEN compares the intensity with the mean of a day; the replayed day is this long."""


def demo(
    exit_after: Annotated[
        bool, typer.Option("--exit", help="Stop after the workload; exit 0 if every job succeeded.")
    ] = False,
    folder: local.DataDir = None,
    nodes: local.Nodes = None,
    port: local.Port = None,
) -> None:
    """Start everything on this machine, submit the example workload and show it live."""

    where = folder or data_dir()
    is_first_start = not (where / "admin.key").exists()

    def show(gateway: Gateway, stop: Stop) -> int:
        local.print_up(gateway.url, where, is_first_start)
        gateway.call("PUT", "/v1/policies/active", body=POLICY)
        accepted = submit_all(gateway, read_specs(WORKLOAD), f"demo-{uuid.uuid4().hex}")
        console.print(f"{len(accepted)} jobs accepted; the grid is replayed {GRID_S_PER_S} times faster than recorded")
        view = View(gateway, [job["id"] for job in accepted], stop)
        view.watch()
        succeeded = view.print_summary()
        if not exit_after:
            console.print(f"\n[green]up[/] at [bold]{gateway.url}[/]  ({gateway.url}/docs); Ctrl-C stops it")
            console.print("in another terminal, after .venv/bin/wattshift: jobs, nodes, carbon, policy, report, submit")
            with suppress(StopAskedError):
                stop.wait()
        return 0 if succeeded else EXIT_FAILED

    if nodes is None and remembered.read(DataFolder(where)).nodes is None and lack_of_gpus():
        nodes = "2x4"  # simulated, and remembered: a plain `up` on the same folder brings them back
    raise typer.Exit(run_with_stack(show, folder=where, nodes=nodes, port=port, environment=ENVIRONMENT))


class StopAskedError(Exception):
    """The user asked to stop."""


class Stop:
    """Set by Ctrl-C or SIGTERM; everything else that waits meanwhile waits through it."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        """Ask to stop."""
        self._asked.set()

    def wait(self, seconds: float | None = None) -> None:
        """Return after ``seconds``, or never; raise StopAskedError as soon as a stop is asked for."""
        if self._asked.wait(seconds):
            raise StopAskedError


def run_with_stack(
    show: Callable[[Gateway, Stop], int],
    *,
    folder: Path | None,
    nodes: str | None,
    port: int | None,
    environment: Mapping[str, str],
) -> int:
    """Start everything in this process, call ``show`` in a thread, stop everything; return what ``show`` returned.

    The stack stays with the main thread, because its processes die with the thread that started them.
    """

    async def run() -> int:
        stop, loop = Stop(), asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        running = stack.Stack(folder or data_dir(), nodes=nodes, port=port, env=environment)
        with local.waiting_shown() as waiting:

            async def tell() -> None:
                while True:
                    waiting(running.status())
                    await asyncio.sleep(EVERY_S)

            telling = asyncio.create_task(tell())
            try:
                await running.start()
            finally:
                telling.cancel()  # no await: whoever cancels here would leave it running
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.ask)
            key = local.own_key(running.folder.path / "admin.key")
            return await asyncio.to_thread(_interruptible, show, Gateway(running.gateway_url, key), stop)
        finally:
            with console.status("stopping"):
                await running.stop()

    try:
        with local.stack_errors():
            return asyncio.run(run())
    except asyncio.CancelledError:
        return 130


def _interruptible(show: Callable[[Gateway, Stop], int], gateway: Gateway, stop: Stop) -> int:
    with suppress(StopAskedError):
        return show(gateway, stop)
    return 130


@dataclass
class View:
    """The jobs of one run, and their states so far."""

    gateway: Gateway
    job_ids: list[str]
    stop: Stop
    intensities: list[float] = field(default_factory=list[float])
    seen: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    started_s: float = field(default_factory=time.monotonic)

    def watch(self, poll_s: float = 0.5) -> None:
        """Show the jobs until all have ended: a live screen on a terminal, a line for each change elsewhere."""
        with self._screen() as show:
            while True:
                jobs = self.jobs()
                show(jobs)
                if all(job["state"] in ENDED for job in jobs):
                    return
                self.stop.wait(poll_s)

    def jobs(self) -> list[Any]:
        """Return the run's jobs in the order of submission."""
        wanted = set(self.job_ids)
        found = {job["id"]: job for job in self.gateway.pages("/v1/jobs", 500) if job["id"] in wanted}
        return [found[job_id] for job_id in self.job_ids if job_id in found]

    @contextmanager
    def _screen(self) -> Iterator[Any]:
        if not console.is_terminal:
            yield self._print_changes
            return
        with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible") as live:
            yield lambda jobs: live.update(self._picture(jobs), refresh=True)

    def _print_changes(self, jobs: list[Any]) -> None:
        for job in jobs:
            now = (job["state"], job["gpus"])
            if self.seen.get(job["id"]) != now:
                self.seen[job["id"]] = now
                at = output.duration(time.monotonic() - self.started_s)
                gpus = counted(job["gpus"], "GPU") if job["gpus"] else ""
                console.print(f"{at:>10}  {job['name']:<20} {job['state']:<11} {gpus:<8} {job.get('reason') or ''}")

    def _picture(self, jobs: list[Any]) -> RenderableType:
        nodes = self.gateway.get("/v1/nodes")["items"]
        head = Text.assemble(
            ("wattshift ", "bold"),
            (self.gateway.url, "cyan"),
            f"   {output.duration(time.monotonic() - self.started_s)}",
        )
        return Group(head, self._grid_line(nodes), self._node_lines(nodes), "", self._job_lines(jobs))

    def _grid_line(self, nodes: list[Any]) -> RenderableType:
        if not nodes:
            return Text("no nodes yet", style="dim")
        now = self.gateway.get(f"/v1/carbon/{nodes[0]['zone']}/current")
        value = now["point"]["gco2_per_kwh"]
        self.intensities = [*self.intensities, value][-60:]
        mean = sum(self.intensities) / len(self.intensities)
        style = "green" if value < mean else "yellow"
        return Text.assemble(
            f"grid {now['zone']}  ", (f"{value:.0f} gCO2/kWh ", f"bold {style}"), (sparkline(self.intensities), style)
        )

    def _node_lines(self, nodes: list[Any]) -> RenderableType:
        shown = Table.grid(padding=(0, 2))
        for node in nodes:
            bar = ProgressBar(total=node["gpus"] or 1, completed=node["gpus_in_use"], width=20)
            use = f"{node['gpus_in_use']}/{node['gpus']} GPUs"
            shown.add_row(node["id"], output.state(node["state"]), use, bar, f"{node['power_w']:.0f} W")
        return shown

    def _job_lines(self, jobs: list[Any]) -> RenderableType:
        shown = output.table("job", "state", ">GPUs", "done", ">energy", ">CO2", "why")
        for job, *used in zip(jobs, *_used(jobs), strict=True):
            share = output.progress_share(job) or 0.0
            shown.add_row(
                job["name"],
                output.state(job["state"]),
                str(job["gpus"] or "-"),
                ProgressBar(total=1, completed=share, width=16),
                *used,
                "" if job["state"] in ENDED else output.reason(job),
            )
        return shown

    def print_summary(self) -> bool:
        """Print what each job took and emitted; return whether every job succeeded and the ledger adds up."""
        self._await_ledger()
        jobs = self.jobs()
        shown = output.table("job", "end", ">preempted", ">JCT", ">energy", ">CO2", ">gCO2/kWh")
        for job, *used in zip(jobs, *_used(jobs), strict=True):
            footprint = job["footprint"]
            kwh = footprint["energy_j"] / J_PER_KWH
            shown.add_row(
                job["name"],
                output.state(job["state"]),
                f"{job['preemptions']} x" if job["preemptions"] else "",
                output.duration(_completion_s(job) or 0),
                *used,
                f"{footprint['carbon_gco2'] / kwh:.0f}" if kwh else "-",
            )
        console.print(shown)
        self._print_shift(jobs)
        report = self.gateway.get("/v1/reports/footprint", group_by="project")
        total, idle = report["total"], report["idle"]
        console.print(
            f"cluster: {output.energy(total['energy_j'])}, {output.carbon(total['carbon_gco2'])} CO2, "
            f"of which idle {idle['energy_j'] / (total['energy_j'] or 1):.0%}"
        )
        invariants = self.gateway.get("/v1/invariants")
        broken = [entry["name"] for entry in invariants["invariants"] if not entry["holds"]]
        console.print("consistency: " + ("[red]" + ", ".join(broken) + "[/]" if broken else "[green]all hold[/]"))
        return invariants["holds"] and len(jobs) == len(self.job_ids) and all(j["state"] == "succeeded" for j in jobs)

    def _print_shift(self, jobs: list[Any]) -> None:
        """Print the mean intensity at which the low-power half of the jobs ran, and the high-power half."""
        footprints = [job["footprint"] for job in jobs if job["footprint"]["gpu_s"]]
        by_power = sorted(footprints, key=lambda footprint: footprint["gpu_energy_j"] / footprint["gpu_s"])
        for name, half in (("low", by_power[: len(by_power) // 2]), ("high", by_power[len(by_power) // 2 :])):
            kwh = sum(footprint["energy_j"] for footprint in half) / J_PER_KWH
            gco2 = sum(footprint["carbon_gco2"] for footprint in half)
            if kwh:
                console.print(f"{name}-power jobs ran at {gco2 / kwh:.0f} gCO2/kWh on average")

    def _await_ledger(self, timeout_s: float = 15) -> None:
        """Wait until every job's last interval of energy has arrived."""
        deadline = time.monotonic() + timeout_s
        before: list[float] = []
        while time.monotonic() < deadline:
            now = [job["footprint"]["energy_j"] for job in self.jobs()]
            if now == before and all(now):
                return
            before = now
            self.stop.wait(3)
        raise CliError("the ledger has not received every job's energy; see `wattshift nodes`")


def _completion_s(job: dict[str, Any]) -> float | None:
    """Return a job's completion time (JCT), submission to end, in seconds; None until it ends."""
    ended = output.instant(job.get("ended_at"))
    submitted = output.instant(job["submitted_at"])
    return (ended - submitted).total_seconds() if ended and submitted else None


def _used(jobs: list[Any]) -> tuple[list[str], list[str]]:
    footprints = [job["footprint"] for job in jobs]
    return output.energies(each["energy_j"] for each in footprints), output.emissions(
        each["carbon_gco2"] for each in footprints
    )


def main() -> None:
    """Show it; an expected failure prints one line on standard error."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(demo)
    run(lambda: app(prog_name="./run"))


if __name__ == "__main__":
    main()
