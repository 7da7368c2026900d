"""``wattshift pools``: pools of model servers that run as planned: their plans, instances and traffic."""

from array import array
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway, each_time
from services.cli.commands import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_USAGE, AsJson, CliError, Group
from services.cli.output import console
from services.cli.planning.pools import show_plan
from services.cli.values import json_object, past_time, refuse_dropped, with_commands_filled

PoolArgument = Annotated[str, typer.Argument(metavar="NAME", help="The pool's name.")]

LOG_COLUMNS = ("arrived_at", "input_tokens", "output_tokens")
WINDOW_S = 5
BATCH_WINDOWS, BATCH_REQUESTS = 720, 50_000  #: Of one report: an hour, or less where much came
WAIT_S = 0.5
CARRIED = ("applied", "proposed")
ASKED_BY = {
    "clock": "the clock",
    "request": "an operator",
    "node_lost": "a node was lost",
    "node_back": "a node is back",
    "shortfall": "GPUs were taken",
    "gpus_freed": "GPUs were freed",
    "demand": "more demand",
    "intensity": "another intensity",
    "grid_order": "an order of the grid",
}
Windows = dict[int, "array[int]"]
"""Input and output tokens of a window's requests, one after the other: a log may have millions."""


def register(app: typer.Typer) -> None:
    pools = Group(app, "pools", "Run pools of model servers as planned.", list_pools)
    pools.add(list_pools, show_pool, set_pool, delete, report, accept, mode=set_mode, plan=plan_now, plans=list_plans)
    pools.add(instances=list_instances, clocks=list_clocks)


def list_pools(as_json: AsJson = False) -> None:
    """Show the pools."""
    found = Gateway().pages("/v1/pools")
    shown = output.table("pool", "mode", ">revision", "planned", "instances")
    for pool in found:
        instances = ", ".join(f"{count} {output.state(name)}" for name, count in pool["instances"].items())
        shown.add_row(pool["name"], _mode(pool), str(pool["revision"]), _planned(pool), instances or "none")
    output.tell(found, as_json, shown if found else "no pools")


def show_pool(name: PoolArgument, as_json: AsJson = False) -> None:
    """Show a pool: its spec, the plan in force, its instances."""
    gateway = Gateway()
    pool = gateway.get(f"/v1/pools/{name}")
    instances = gateway.pages(f"/v1/pools/{name}/instances")
    plan = _plan_in_force(gateway, pool)
    if as_json:
        return output.print_json({**pool, "plan": plan, "live_instances": instances})
    spec = pool["spec"]
    rows = {
        "pool": pool["name"],
        "tenant": pool["tenant_id"],
        "mode": _mode(pool),
        "revision": str(pool["revision"]),
        "objective": f"{spec['objective']}, {spec['head_room']:g} times the demand",
        "places": ", ".join(f"{each['name']} ({each['zone']})" for each in spec["places"]),
        "modes": ", ".join(f"{each['name']} ({each['gpus']} x {each['gpu_model']})" for each in spec["modes"]),
        "partitions": ", ".join(each["name"] for each in spec["partitions"]),
        "plan": _planned(pool),
    }
    console.print(output.in_rows(rows))
    if plan is not None:
        _show_result(plan)
    _show_instances(instances)


def set_pool(
    name: PoolArgument,
    file: Annotated[Path, typer.Argument(help="The pool's spec as JSON; docs/pools.md describes it.")],
    as_json: AsJson = False,
) -> None:
    """Create a pool, or replace its spec; the same spec again changes nothing.

    {python} in a mode's command stands for the Python of this installation and {examples} for the folder of examples.
    """
    pool = Gateway().call("PUT", f"/v1/pools/{name}", body=with_commands_filled(json_object(file), "modes"))
    output.tell(pool, as_json, f"{name} is at revision {pool['revision']}, {_mode(pool)}")


def set_mode(
    name: PoolArgument,
    mode: Annotated[str, typer.Argument(help="automatic: plans are carried out; fixed: they are proposals.")],
    as_json: AsJson = False,
) -> None:
    """Choose whether a pool's plans are carried out or only proposed."""
    pool = Gateway().call("PATCH", f"/v1/pools/{name}", body={"mode": mode})
    output.tell(pool, as_json, f"{name} is {_mode(pool)}")


def delete(name: PoolArgument, as_json: AsJson = False) -> None:
    """Delete a pool: its instances are drained, and it is gone once the last one has ended."""
    pool = Gateway().call("DELETE", f"/v1/pools/{name}")
    left = sum(pool["instances"].values())
    output.tell(pool, as_json, f"{name} is being deleted; {left} instances to drain")


def plan_now(
    name: PoolArgument,
    wait: Annotated[
        bool, typer.Option(help="Wait for the outcome; exit 1 unless the plan is applied or proposed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a pool now; --wait shows the plan."""
    gateway = Gateway()
    plan = gateway.call("POST", f"/v1/pools/{name}/plans")
    if not wait:
        output.tell(plan, as_json, f"{plan['id']} is {plan['state']}")
        return
    for plan in each_time(gateway, f"/v1/pools/{name}/plans/{plan['id']}", WAIT_S):  # noqa: B020
        if plan["outcome"] is not None:
            break
    if as_json:
        output.print_json(plan)
    else:
        _show_result(plan)
        why = f": {plan['failure']['detail']}" if plan["failure"] else ""
        console.print(f"{plan['id']} is {_outcome(plan)}{why}")
    if plan["outcome"] not in CARRIED:
        raise typer.Exit(EXIT_FAILED)


def list_plans(
    name: PoolArgument,
    outcome: Annotated[list[str] | None, typer.Option(help="Only plans with this outcome; may be repeated.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many plans to show, newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show a pool's plans and their outcomes, newest first."""
    found = Gateway().pages(f"/v1/pools/{name}/plans", limit, outcome=outcome or None)
    shown = output.table("plan", "from", "asked by", ">revision", "outcome", ">took", "why")
    for plan in found:
        took = "-" if plan["plan_s"] is None else f"{plan['plan_s']:.1f} s"
        why = plan["failure"]["detail"] if plan["failure"] else ""
        asked = ASKED_BY.get(plan["trigger"], plan["trigger"].replace("_", " "))
        begins = output.clock(plan["from_at"])
        shown.add_row(plan["id"], begins, asked, str(plan["revision"]), _outcome(plan), took, why)
    output.tell(found, as_json, shown if found else "no plans")


def accept(
    name: PoolArgument,
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Id of the proposed plan.")],
    as_json: AsJson = False,
) -> None:
    """Carry out a plan that was proposed."""
    found = Gateway().call("POST", f"/v1/pools/{name}/plans/{plan}/apply")
    output.tell(found, as_json, f"{found['id']} is {_outcome(found)}")


def list_instances(
    name: PoolArgument,
    everything: Annotated[bool, typer.Option("--all", help="Include instances that have ended.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many instances to show, newest first.")] = 500,
    as_json: AsJson = False,
) -> None:
    """Show a pool's instances, newest first."""
    from services.contracts.serving import InstanceState

    states = [state.value for state in InstanceState] if everything else None
    found = Gateway().pages(f"/v1/pools/{name}/instances", limit, state=states)
    if as_json:
        output.print_json(found)
    else:
        _show_instances(found)


def list_clocks(
    name: PoolArgument,
    instance: Annotated[str | None, typer.Option(help="Only the clocks of this instance.")] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Only minutes from this time on: 2h, or a date and time such as 2026-03-01T12:00."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many lines to show, newest first.")] = 60,
    as_json: AsJson = False,
) -> None:
    """Show the clocks that followed latency, minute by minute, newest first."""
    since_at = past_time(since, "--since").isoformat() if since else None
    found = Gateway().pages(f"/v1/pools/{name}/clocks", limit, instance=instance, since=since_at)
    shown = output.table("minute", "instance", "clocks", ">mean", ">range", ">over a limit", ">nothing seen", "model")
    for each in found:
        unused = f", not used: {each['unused']}" if each["unused"] else ""
        known = "-" if each["model_error"] is None and not unused else f"{_percent(each['model_error'])}{unused}"
        shown.add_row(
            output.clock(each["start_at"]),
            each["instance"],
            each["policy"] + (", dry run" if each["dry_run"] else ""),
            f"{each['mean_mhz']:.0f} MHz",
            f"{each['lowest_mhz']:.0f} .. {each['highest_mhz']:.0f}",
            f"{each['exceeded']} of {each['decisions']}",
            f"{each['unobserved']} of {each['decisions']}",
            known,
        )
    output.tell(found, as_json, shown if found else "no clocks have followed latency")


def report(
    name: PoolArgument,
    file: Annotated[
        Path, typer.Argument(help="CSV, or CSV.gz, with the columns arrived_at, input_tokens and output_tokens.")
    ],
    source: Annotated[
        str, typer.Option(help="Who saw these requests; those of several sources are added up.")
    ] = "file",
    since: Annotated[
        str | None, typer.Option(help="Leave out requests that arrived before this time: ISO 8601, or seconds.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report the requests of a log; demand is predicted from them.

    arrived_at is ISO 8601 (UTC without an offset) or seconds of UTC. The log must contain all requests between its
    first and its last. Reporting it again changes nothing.
    """
    windows = _read_log(file, since)
    gateway, received = Gateway(), {"windows": 0, "requests": 0}
    with output.errors.status("reporting") as status:
        for batch in _batches(windows):
            receipt = gateway.call("POST", f"/v1/pools/{name}/traffic", body={"source": source, "windows": batch})
            received = {what: received[what] + receipt[what] for what in received}
            status.update(f"{received['requests']} requests, until {batch[-1]['start_at']}")
    hours = received["windows"] * WINDOW_S / 3_600
    output.tell(received, as_json, f"{received['requests']} requests in {hours:.3g} h")


def _read_log(file: Path, since: str | None) -> Windows:
    """Return the requests of each window between the first and the last."""
    from services.simulator.raw import ReadReport
    from services.simulator.readers.text import TraceFormatError, moment_s, open_text, table, whole

    report = ReadReport(file.name, "requests")
    found: Windows = {}
    try:
        since_s = moment_s(since) if since else float("-inf")
    except ValueError:
        raise CliError(f"--since takes an ISO 8601 date and time, or seconds, not {since!r}", EXIT_USAGE) from None
    try:
        with open_text(file) as opened:
            for line, row in table(opened, LOG_COLUMNS, report):
                try:
                    arrived_s = moment_s(row["arrived_at"], "arrived_at")
                    lengths = [whole(row[column], column) for column in LOG_COLUMNS[1:]]
                    start_s = int(arrived_s // WINDOW_S) * WINDOW_S
                except ValueError as error:
                    report.drop(line, str(error))
                    continue
                report.kept += 1
                if arrived_s >= since_s:
                    found.setdefault(start_s, array("q")).extend(lengths)
    except TraceFormatError as error:
        raise CliError(str(error), EXIT_USAGE if file.exists() else EXIT_NOT_FOUND) from None
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}", EXIT_NOT_FOUND) from None
    refuse_dropped(file, report)
    if not found:
        raise CliError(f"{file} has no requests" + (f" since {since}" if since else ""), EXIT_USAGE)
    return found


def _batches(windows: Windows) -> Iterator[list[dict[str, Any]]]:
    """Yield windows in order, those in between without requests too, in batches that fit into one report."""
    batch: list[dict[str, Any]] = []
    held = 0
    for start_s in range(min(windows), max(windows) + WINDOW_S, WINDOW_S):
        lengths = windows.get(start_s, array("q"))
        requests = list(zip(lengths[::2], lengths[1::2], strict=True))
        if batch and (len(batch) == BATCH_WINDOWS or held + len(requests) > BATCH_REQUESTS):
            yield batch
            batch, held = [], 0
        batch.append({"start_at": datetime.fromtimestamp(start_s, UTC).isoformat(), "requests": requests})
        held += len(requests)
    yield batch


def _plan_in_force(gateway: Gateway, pool: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return gateway.get(f"/v1/pools/{pool['name']}/plans/{pool['plan_id']}") if pool["plan_id"] else None
    except CliError as error:
        if error.exit_code != EXIT_NOT_FOUND:  # it was made long ago, and is no longer kept
            raise
        return None


def _show_result(plan: dict[str, Any]) -> None:
    from services.contracts.serving import PoolPlanResult

    if plan["result"] is None:
        return
    result = PoolPlanResult.model_validate(plan["result"])
    forecasts = result.forecasts
    rates = [place.gco2_per_kwh for place in forecasts.intensity.values()]  # none where the plan needs no grid
    peaks = [each for part in forecasts.demand.values() for each in part.peaks_qps.values()]
    steps = max(map(len, [*rates, *peaks]), default=0)
    show_plan(result.plan, hours=steps * forecasts.step_s / 3_600, has_running=True)


def _show_instances(instances: list[dict[str, Any]]) -> None:
    shown = output.table("instance", "place", "mode", "class", "state", "clock", "age", "url", "why")
    for each in instances:
        why = " ".join(filter(None, (each.get("reason"), each.get("detail"))))
        shown.add_row(
            each["id"], each["place"], each["mode"], each["request_class"] or "-", output.state(each["state"]),
            _clock(each.get("clock")), output.age(each["created_at"]), each["url"] or "-", why,
        )  # fmt: skip
    console.print(shown if instances else "no instances")


def _clock(clock: dict[str, Any] | None) -> str:
    if clock is None:
        return "-"
    now = "?" if clock["clock_mhz"] is None else f"{clock['clock_mhz']} MHz"
    if clock["dry_run"]:
        return f"{now}, {clock['policy']} would set {clock['wanted_mhz']}"
    share = clock["unobserved_share"]
    blind = f", kept for {100 * share:.0f} % of the minute: nothing seen of its requests" if share else ""
    return f"{now}, {clock['policy']}{blind}"


def _percent(share: float | None) -> str:
    return "no model" if share is None else f"off by {100 * share:.0f} %"


def _outcome(plan: dict[str, Any]) -> str:
    return output.state(plan["outcome"] or plan["state"])


def _mode(pool: dict[str, Any]) -> str:
    return "[yellow]being deleted[/]" if pool["is_deleted"] else pool["spec"]["mode"]


def _planned(pool: dict[str, Any]) -> str:
    if pool["plan_id"] is None:
        return "not yet"
    stale = " [yellow](for an earlier interval)[/]" if pool["is_plan_stale"] else ""
    return f"{output.age(pool['planned_at'])} ago, {pool['plan_id']}{stale}"
