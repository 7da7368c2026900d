"""Commands for the cluster: nodes, carbon, policy, footprint."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Group as RichGroup
from rich.console import RenderableType
from rich.text import Text

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_FAILED, EXIT_USAGE, AsJson, CliError, Group, Watch
from services.cli.jobs.names import checked_name
from services.cli.output import console
from services.cli.plots import Piece, greenest, plot
from services.cli.plugins import add_moved
from services.cli.site.grid import maintain
from services.cli.site.slices import partition, slice_words
from services.cli.values import duration_s, parameter_value, text_of
from services.core.accounting.meters import agrees

OneGpu = Annotated[int | None, typer.Option("--gpu", help="Only this one of its GPUs, by its index.")]


def register(app: typer.Typer) -> None:
    words = "Show the cluster's nodes, let one in, take one out of service, power it down or up, or cut its GPUs."
    nodes = Group(app, "nodes", words, list_nodes)
    nodes.add(drain, resume, enroll, invite, revoke, **{action: _power(action) for action in POWER})
    nodes.add(partition, maintain, topology)
    Group(app, "policy", "Show the policies, or change the one in force.", list_policies).add(set_policy)
    grids = Group(app, "carbon", "Show a zone's carbon intensity.", cls=_ZoneOrCommand)
    grids.command("show")(carbon)
    add_moved(grids, {"forecast": "wattshift lab forecast"})
    app.command()(check)


class _ZoneOrCommand(typer.core.TyperGroup):
    """``carbon [ZONE]`` means ``carbon show [ZONE]``: a word that names no command names a zone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["show", *args]
        return super().parse_args(ctx, args)


def list_nodes(watch: Watch = False, as_json: AsJson = False) -> None:
    """Show the cluster's nodes."""
    gateway = Gateway()
    if as_json:
        return output.print_json(gateway.get("/v1/nodes")["items"])

    def shown() -> RenderableType:
        try:
            room = room_words(gateway.get("/v1/topology"))
        except CliError:  # nodes are shown while the scheduler is away, too
            room = Text()
        return RichGroup(_node_table(gateway.get("/v1/nodes")["items"]), room)

    output.show(shown, watch=watch)


def room_words(found: dict[str, Any]) -> Text:
    """Return how many GPUs are free, and the largest gang that could start within one domain of each level."""
    gangs = ", ".join(f"{each['level']} {each['free']}" for each in found["levels"])
    return Text(f"{found['free_gpus']} GPUs free; largest gang by level: {gangs}" if gangs else "")


def _node_table(found: list[Any]) -> RenderableType:
    slices = [slice_words(node) for node in found]
    columns = ["node", "state", ">GPUs", ">in use", "model", *(["slices"] if any(slices) else []), ">power", "zone"]
    columns += ["meters", "jobs apart"]
    shown = output.table(*columns, "driver", "heard")
    for node, cut in zip(found, slices, strict=True):
        words = "\n".join([" ".join([output.state(node["state"]), *power_words(node)]), *health_words(node)])
        models = sorted({device["model"] for device in node["devices"]})
        power = f"{node['power_w']:.0f} W"
        heard = output.age(node["heartbeat_at"])
        shown.add_row(
            node["id"], words, str(node["gpus"]), str(node["gpus_in_use"]), ", ".join(models),
            *([cut] if any(slices) else []), power, node["zone"], meter_words(node), protection_words(node),
            node["driver"], heard,
        )  # fmt: skip
    return shown if found else "no nodes have registered"


def meter_words(node: dict[str, Any]) -> str:
    """Return whether a node's energy counters agree with its power, and how many intervals are not as measured."""
    readings = [each for each in node["readings"] if each.get("energy_j") is not None]
    ratios = {each["index"]: each["counter_ratio"] for each in readings if each.get("counter_ratio") is not None}
    off = [f"GPU {index}: {ratio:.2g} x its power" for index, ratio in ratios.items() if not agrees(ratio)]
    words = [f"[yellow]{each}[/]" for each in off]
    if not off and ratios:
        words.append("[green]agree[/]" if len(ratios) == len(readings) else "[dim]some unchecked[/]")
    if marked := node.get("marked_intervals", 0):
        words.append(f"[yellow]{marked} intervals not as measured[/]")
    return "\n".join(words) or "[dim]unchecked[/]"


def protection_words(node: dict[str, Any]) -> str:
    """Return whether jobs on a node are kept apart, or which protections are lacking."""
    known = node.get("protections", [])
    lacking = [each["name"].replace("_", " ") for each in known if not each["holds"]]
    if not known:
        return "[dim]not said[/]"
    return f"[yellow]no {', '.join(lacking)}[/]" if lacking else "[green]yes[/]"


def drain(node: str, gpu: OneGpu = None) -> None:
    """Drain a node, or one of its GPUs: running jobs continue, and nothing new starts there."""
    Gateway().call("POST", f"/v1/nodes/{node}{_of_gpu(gpu)}/drain")
    console.print(f"{_named(node, gpu)} is draining")


def resume(node: str, gpu: OneGpu = None) -> None:
    """Return a drained node to service, or one of its GPUs that was drained or sick."""
    Gateway().call("POST", f"/v1/nodes/{node}{_of_gpu(gpu)}/resume")
    console.print(f"{_named(node, gpu)} is back in service")


def _of_gpu(gpu: int | None) -> str:
    return "" if gpu is None else f"/gpus/{gpu}"


def _named(node: str, gpu: int | None) -> str:
    return node if gpu is None else f"GPU {gpu} of {node}"


def health_words(node: dict[str, Any]) -> list[str]:
    """Return which GPUs of a node get no new work, and why."""
    return [
        f"[red]GPU {each['gpu']} is out of service[/]: {each['detail']}"
        if each["cause"]
        else f"[yellow]GPU {each['gpu']} is draining[/]"
        for each in node.get("gpu_health", [])
    ]


def enroll(
    node: str,
    engine: Annotated[
        bool, typer.Option("--engine", help="For the bridge to an engine, such as Slurm, instead of an agent.")
    ] = False,
    lifetime: Annotated[str, typer.Option(metavar="TIME", help="How long the token can be used: 15m, 2h, 1d.")] = "1h",
    as_json: AsJson = False,
) -> None:
    """Let a host become a node: print a token that its agent, or a bridge, trades for a credential, once."""
    body = {"lifetime_s": duration_s(lifetime, "--lifetime"), "role": "engine" if engine else "agent"}
    found = Gateway().call("POST", f"/v1/nodes/{checked_name(node, 'node')}/enrollments", body=body)
    if as_json:
        return output.print_json(found)
    within = f"The token can be used once, within {output.duration(duration_s(lifetime, '--lifetime'))}."
    if engine:
        start = f"Start the bridge named {node} with this (ENGINE_SLURM_ENROLL_TOKEN, or the same of KUEUE, RAY)."
        settings = f"ENROLL_TOKEN={found['token']}"
    else:
        start = f"On the host that is to be {node}, start the agent with these settings."
        settings = f"GPU_AGENT_NODE_ID={node}\nGPU_AGENT_ENROLL_TOKEN={found['token']}"
    console.print(f"{start} {within}")
    console.print(settings, markup=False)


def invite(
    node: Annotated[
        str | None, typer.Argument(help="In whose place a host joins; without it, under a name that no node has.")
    ] = None,
    lifetime: Annotated[str, typer.Option(metavar="TIME", help="How long the token can be used: 15m, 2h, 1d.")] = "10m",
    as_json: AsJson = False,
) -> None:
    """Let a host join: print the command to type there, once."""
    print_invitation(Gateway(), node, duration_s(lifetime, "--lifetime"), as_json)


def print_invitation(gateway: Gateway, node: str | None = None, lifetime_s: float = 600, as_json: bool = False) -> None:
    """Print the command that makes another host a node."""
    body = {"node_id": node and checked_name(node, "node"), "lifetime_s": lifetime_s}
    found = gateway.call("POST", "/v1/nodes/invitations", body=body)
    if as_json:
        return output.print_json(found)
    within = output.duration(lifetime_s)
    console.print(f"to make another host a node, type there, once, within {within}:")
    console.print(f"wattshift join {found['url']} {found['token']}", markup=False)


def revoke(node: str) -> None:
    """Revoke a node's credential: it gets no answers and no commands from now on."""
    Gateway().call("POST", f"/v1/nodes/{node}/revoke")
    console.print(f"{node} is let in no more; what runs there ends when its lease does, and lists leave it out then")


def power_words(node: dict[str, Any]) -> list[str]:
    """Return what is shown beside a node's state: draining, power state, pinned."""
    power = node["power"]
    words = ["[yellow]draining[/]"] if node["draining"] else []
    if node.get("measures_only"):
        words.append("[cyan]only measures[/]" + (f" {node['engine_node']}" if node.get("engine_node") else ""))
    if node.get("closed"):
        words.append(f"[red]takes no work[/]: {node['closed']}")
    if node.get("credential", "own") != "own":
        words.append("[red]revoked[/]" if node["credential"] == "revoked" else "[yellow]shared token[/]")
    if power["state"] != "on":
        color = "red" if power["state"] == "failed" else "blue"
        words.append(f"[{color}]{power['state'].replace('_', ' ')} {output.age(power['since'])}[/]")
    return words + (["[cyan]pinned[/]"] if power["pinned_awake"] else [])


def topology(
    file: Annotated[Path | None, typer.Argument(help="A file of racks and the like, or Slurm's topology.conf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the levels of the network and the largest gang that each has room for, or say by a file where nodes are."""
    gateway = Gateway()
    if file is not None:
        gateway.call("PUT", "/v1/topology", body={"file": text_of(file)})
    found = gateway.get("/v1/topology")
    if as_json:
        return output.print_json(found)
    if file is not None:
        console.print("taken; it counts from the next round on, for gangs that start then")
        return
    shown = output.table("level", ">domains", ">largest", ">largest free gang")
    for each in found["levels"]:
        shown.add_row(each["level"], str(each["domains"]), str(each["gpus"]), str(each["free"]))
    console.print(shown if found["levels"] else "no round has been held yet")
    console.print(room_words(found))


POWER = {
    "sleep": "Power an idle node down; a gang that is planned on it wakes it.",
    "wake": "Wake a node.",
    "pin-awake": "Keep a node awake, and wake it if it is off.",
    "unpin": "Let plans power a node down again.",
}


def _power(action: str) -> Any:
    def command(node: str, as_json: AsJson = False) -> None:
        power = Gateway().call("POST", f"/v1/nodes/{node}/{action}")
        pinned = ", pinned awake" if power["pinned_awake"] else ""
        output.tell(power, as_json, f"{node} is {power['state'].replace('_', ' ')}{pinned}")

    command.__doc__ = POWER[action]
    return command


def carbon(
    zone: Annotated[str | None, typer.Argument(help="Grid zone; all zones if omitted.")] = None,
    signal: Annotated[str | None, typer.Option(help="average_direct, average_lifecycle or marginal.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a zone's carbon intensity, now and ahead."""
    gateway = Gateway()
    if zone is None:
        zones = gateway.get("/v1/carbon/zones")["items"]
        if as_json:
            return output.print_json(zones)
        shown = output.table("zone", "name", "provider", "signals", "attribution")
        for entry in zones:
            shown.add_row(
                entry["zone"], entry["name"], entry["provider"], ", ".join(entry["signals"]), entry["attribution"]
            )
        console.print(shown)
        return
    now = gateway.get(f"/v1/carbon/{zone}/current", signal=signal)
    forecast = gateway.get(f"/v1/carbon/{zone}/forecast", signal=signal)
    if as_json:
        return output.print_json({"current": now, "forecast": forecast})
    outlook = gateway.get(f"/v1/carbon/{zone}/outlook", signal=signal, past_s=DAY_S, ahead_s=2 * DAY_S, clock="grid")
    stale = " [yellow](stale)[/]" if now["is_stale"] else ""
    scale = f", replayed {now['time_scale']:g} times faster than it was recorded" if now["time_scale"] != 1 else ""
    console.print(f"[bold]{zone}[/]  {now['point']['gco2_per_kwh']:.0f} gCO2/kWh now{stale}")
    console.print(f"  {now['signal']} by {now['provider']}{scale}")
    _show_curve(curve_of(outlook), forecast["method"], outlook["time_scale"])


DAY_S = 86_400.0
WINDOW_S = 4 * 3_600.0  #: Of the grid: how long the greenest window is that is named


def curve_of(outlook: Any) -> list[Piece]:
    """Return an outlook as a curve; steps that have begun count as past."""
    now = datetime.fromisoformat(outlook["now"])
    pieces: list[Piece] = []
    for point in outlook["points"]:
        start, end = (datetime.fromisoformat(point[name]) for name in ("start_at", "end_at"))
        pieces.append(Piece(start, end, point["gco2_per_kwh"], start <= now))
    return pieces


def _show_curve(curve: list[Piece], method: str, time_scale: float) -> None:
    if not curve:
        return
    console.print()
    for line in plot(curve, width=min(console.width, 100), height=8):
        console.print(line, no_wrap=True, crop=True)
    console.print(f"  [cyan]█[/] until now   [green]█[/] expected ({method})")
    if found := greenest(curve, WINDOW_S / time_scale):
        start, mean = found
        begins = output.clock(start, "%a %H:%M")
        console.print(f"  greenest four hours of the grid ahead: from {begins}, {mean:.0f} gCO2/kWh")


def list_policies(
    everything: Annotated[bool, typer.Option("--all", help="Every policy, and what each parameter means.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the policy in force with its parameters, and the names of the others."""
    gateway = Gateway()
    policies, active = gateway.get("/v1/policies")["items"], gateway.get("/v1/policies/active")
    if as_json:
        return output.print_json({"active": active, "policies": policies})
    if active.get("problem"):
        console.print(f"[red]{active['name']} cannot be built[/]: {active['problem']}; another one is in force")
    for entry in policies:
        if entry["active"] or everything:
            mark = "[green]●[/]" if entry["active"] else " "
            console.print(f"{mark} [bold]{entry['name']}[/]  {entry['summary']}  [dim]{entry['source']}[/]")
        if entry["active"]:
            console.print(_parameter_table(entry["parameters"], active["parameters"], meanings=everything))
    if not everything:
        others = ", ".join(entry["name"] for entry in policies if not entry["active"])
        console.print(f"others: {others}; --all says what they do, and what the parameters mean")


def _parameter_table(parameters: list[Any], values: dict[str, Any], *, meanings: bool) -> RenderableType:
    shown = output.table("  parameter", ">value", "unit", *(["meaning"] if meanings else []))
    for each in parameters:
        words = "  " + each["name"], str(values.get(each["name"], each["default"])), each["unit"] or ""
        shown.add_row(*words, *([each["meaning"]] if meanings else []))
    return shown


def set_policy(
    name: str,
    param: Annotated[list[str] | None, typer.Option("--param", "-p", help="key=value; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the policy that decides from the next round on."""
    answer = Gateway().call("PUT", "/v1/policies/active", body={"name": name, "parameters": parameters_of(param or [])})
    output.tell(answer, as_json, f"[bold]{answer['name']}[/] is in force: {json.dumps(answer['parameters'])}")


def parameters_of(pairs: list[str]) -> dict[str, Any]:
    """Return ``key=value`` words as parameters; see ``values.parameter_value``."""
    parameters: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise CliError(f"--param takes key=value, not {pair!r}", EXIT_USAGE)
        parameters[key] = parameter_value(value)
    return parameters


def check(as_json: AsJson = False) -> None:
    """Check that the live system is consistent; exit 1 if a rule is broken."""
    found = Gateway().get("/v1/invariants")
    if as_json:
        output.print_json(found)
    else:
        for invariant in found["invariants"]:
            mark = "[green]holds[/] " if invariant["holds"] else "[red]broken[/]"
            console.print(f"{mark} {invariant['name']}: {invariant['detail']}")
    if not found["holds"]:
        raise typer.Exit(EXIT_FAILED)
