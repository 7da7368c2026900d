"""``wattshift top``: the cluster as it is now, kept up to date: the grid, nodes with their power, and the queue."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE, CliError
from services.cli.output import console
from services.cli.plots import greenest, meter, resampled, sparkline
from services.cli.reports import savings
from services.cli.site.cluster import DAY_S, WINDOW_S, curve_of

STATES = ("running", "starting", "preempting", "queued", "held")
MOST_JOBS = 500  #: Of each state
SPARK = 48


def register(app: typer.Typer) -> None:
    app.command()(top)


def top(
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit; needs no terminal.")] = False,
) -> None:
    """Watch jobs, nodes, power and carbon intensity; arrows scroll the jobs, q or Ctrl-C ends it."""
    picture = Picture(Gateway())
    if once:
        picture.look()
        console.print(picture.drawn(rows=MOST_JOBS))
        return
    if not (console.is_terminal and sys.stdin.isatty()):
        raise CliError("top needs a terminal; `wattshift top --once` prints one picture", EXIT_USAGE)
    with _keys() as pressed, Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            picture.look()
            until_s = time.monotonic() + every
            while (left_s := until_s - time.monotonic()) > 0:
                live.update(picture.drawn(rows=console.size.height), refresh=True)
                key = pressed(left_s)
                if key in ("q", "Q", "\x03"):
                    return
                picture.scroll(key)


class Picture:
    """What was last seen, and how it is drawn; what the caller's key may not see is left out."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._jobs: list[Any] = []
        self._nodes: list[Any] | None = None
        self._grid: list[tuple[str, Any]] = []
        self._policy = ""
        self._saved: dict[str, Any] | None = None
        self._problem = ""
        self._first = 0
        self._seen_at = datetime.now(UTC)

    def look(self) -> None:
        """Ask the gateway; while it does not answer, its last answers stay on the screen."""
        try:
            # State by state: of many, the newest would else leave out those that run.
            found = {
                job["id"]: job for state in STATES for job in self._gateway.pages("/v1/jobs", MOST_JOBS, state=[state])
            }
            self._jobs = sorted(found.values(), key=lambda job: (STATES.index(job["state"]), job["submitted_at"]))
            self._policy = self._gateway.get("/v1/policies/active")["name"]
            self._nodes = self._read_nodes()
            self._grid = self._read_grid()
            self._saved = savings.newest(self._gateway)
            self._problem, self._seen_at = "", datetime.now(UTC)
        except CliError as error:
            if error.exit_code != EXIT_UNAVAILABLE:
                raise
            self._problem = str(error)

    def scroll(self, key: str) -> None:
        """Move the list of jobs."""
        page = max(console.size.height - 12, 1)
        by = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -page, "\x1b[6~": page}.get(key, 0)
        self._first = min(max(self._first + by, 0), max(len(self._jobs) - 1, 0))

    def drawn(self, rows: int) -> RenderableType:
        """Return the picture for a screen of ``rows`` lines."""
        above = [self._head(), *self._saved_lines(), *self._grid_lines(), *self._node_lines(rows), Text("")]
        left = max(rows - len(above) - 3, 3)
        return Group(*above, self._job_table(left))

    def _read_nodes(self) -> list[Any] | None:
        try:
            found: list[Any] = self._gateway.get("/v1/nodes")["items"]
        except CliError as error:
            if error.exit_code != EXIT_REFUSED:
                raise
            return None
        return found

    def _read_grid(self) -> list[tuple[str, Any]]:
        zones = [entry["zone"] for entry in self._gateway.get("/v1/carbon/zones")["items"]]
        if self._nodes:
            zones = [zone for zone in zones if zone in {node["zone"] for node in self._nodes}] or zones
        found: list[tuple[str, Any]] = []
        for zone in zones[:4]:
            with suppress(CliError):  # nothing was fetched of the zone yet
                path = f"/v1/carbon/{zone}/outlook"
                found.append((zone, self._gateway.get(path, past_s=DAY_S, ahead_s=DAY_S, clock="grid")))
        return found

    def _head(self) -> Text:
        counts = {state: sum(job["state"] == state for job in self._jobs) for state in STATES}
        more = {state: "+" if count >= MOST_JOBS else "" for state, count in counts.items()}
        jobs = ", ".join(f"{count}{more[state]} {state}" for state, count in counts.items() if count) or "no jobs"
        head = Text.assemble(("wattshift ", "bold"), (self._gateway.url, "cyan"), f"  policy {self._policy}  {jobs}  ")
        if self._problem:
            head.append(f"{self._problem} (as of {output.clock(self._seen_at, '%H:%M:%S')})", style="bold red")
        return head

    def _saved_lines(self) -> list[RenderableType]:
        if self._saved is None:
            return []
        return [Text(line, overflow="crop", no_wrap=True) for line in savings.briefly(self._saved)]

    def _grid_lines(self) -> list[RenderableType]:
        lines: list[RenderableType] = []
        for zone, outlook in self._grid:
            curve = curve_of(outlook)
            line = Text.assemble((f"{zone:<12} ", "bold"))
            if past := [piece for piece in curve if piece.is_past]:
                stale = " stale" if outlook["is_stale"] else ""
                line.append(f"{past[-1].value:>4.0f} gCO2/kWh{stale}  ", style="yellow" if stale else "")
            columns = resampled(curve, SPARK) if curve else []  # past and future on one scale
            for bar, (_, is_past) in zip(sparkline([value for value, _ in columns]), columns, strict=True):
                line.append(bar, style="cyan" if is_past else "green")
            if found := greenest(curve, WINDOW_S / outlook["time_scale"]):
                line.append(f"  greenest four hours from {output.clock(found[0], '%a %H:%M')}: {found[1]:.0f}")
            lines.append(line)
        return lines

    def _node_lines(self, rows: int) -> list[RenderableType]:
        if self._nodes is None:
            return []
        most = max(rows // 3, 2)
        lines: list[RenderableType] = [self._power_line(self._nodes)]
        for node in self._nodes[:most]:
            share = node["gpus_in_use"] / (node["gpus"] or 1)
            lines.append(
                Text.assemble(
                    f"{node['id']:<16.16} ",
                    (f"{node['state']:<8.8} ", output.STATE_STYLES.get(node["state"], "")),
                    meter(share, 20),
                    f" {node['gpus_in_use']:>3}/{node['gpus']:<3} GPUs {node['power_w']:>7.0f} W  {node['zone']}",
                )
            )
        if len(self._nodes) > most:
            lines.append(Text(f"and {len(self._nodes) - most} more nodes", style="dim"))
        return lines

    @staticmethod
    def _power_line(nodes: list[Any]) -> Text:
        in_use, gpus = sum(node["gpus_in_use"] for node in nodes), sum(node["gpus"] for node in nodes)
        power_w = sum(node["power_w"] for node in nodes)
        use = f" {in_use:>3}/{gpus:<3} GPUs"
        bar = meter(in_use / (gpus or 1), 20, "cyan")
        return Text.assemble((f"{'all nodes':<26}", "bold"), bar, use, (f" {power_w:>7.0f} W", "bold"))

    def _job_table(self, rows: int) -> Table:
        shown = output.table("job", "state", ">GPUs", ">done", ">CO2", ">waited", "why")
        jobs = self._jobs[self._first : self._first + rows]
        emitted = output.emissions(job["footprint"]["carbon_gco2"] for job in self._jobs)
        for job, carbon in zip(jobs, emitted[self._first :], strict=False):
            share = output.progress_share(job)
            since = job.get("started_at") or datetime.now(UTC).isoformat()
            waited_s = (datetime.fromisoformat(since) - datetime.fromisoformat(job["submitted_at"])).total_seconds()
            shown.add_row(
                job["name"],
                output.state(job["state"]),
                str(job["gpus"] or "-"),
                "" if share is None else f"{share:.0%}",
                carbon,
                output.duration(waited_s),
                output.reason(job),
            )
        return shown


@contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits some seconds for a key and returns it, if any; restore the terminal at the end."""
    descriptor = sys.stdin.fileno()
    kept = termios.tcgetattr(descriptor)

    def pressed(within_s: float) -> str:
        if not select.select([descriptor], [], [], within_s)[0]:
            return ""
        return os.read(descriptor, 16).decode("ascii", "ignore") or "q"  # the end of input: the terminal is gone

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, kept)
