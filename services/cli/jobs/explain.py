"""``wattshift explain``: why a job or an array waits, how it runs, or what happened to it, on one page."""

from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from typing import Annotated, Any

import typer
from rich.markup import escape

from services.cli import output
from services.cli.client import Gateway, each_time
from services.cli.commands import AsJson
from services.cli.jobs import arrays, job_output
from services.cli.jobs.estimate import IS_NOW, emission_words, is_now
from services.cli.jobs.names import is_array, job_or_array, number_of, path_of
from services.cli.output import console
from services.core.domain.counted import counted

POLL_S = 1.0


def register(app: typer.Typer) -> None:
    app.command()(explain)


def explain(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="The number, such as 12, the id, its beginning, or the name of a job or an array."
        ),
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it is known what the other policies would do with the job.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Its grounds too: lengths, levers, its story, the other policies.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain in five lines why a job waits, how it runs, or what happened to it; for an array, the next task too."""
    gateway = Gateway()
    found_id = job_or_array(gateway, job)
    if is_array(found_id):
        array = gateway.get(path_of(found_id))
        task = None if array["next_task"] is None else _explanation(gateway, array["next_task"], wait=wait)
        answer: dict[str, Any] = {"array": array, "next_task": task}
        lines = array_lines(array, task, datetime.now(UTC), everything=everything)
    else:
        answer = _explanation(gateway, found_id, wait=wait)
        lines = explanation_lines(answer, datetime.now(UTC), everything=everything or wait)
        if answer["state"] == "failed" and not as_json:
            said = job_output.last_lines(gateway, gateway.get(path_of(found_id)))
            lines += ["  last errors:", *(f"    {escape(line)}" for line in said)] if said else []
    if as_json:
        return output.print_json(answer)
    for line in lines:
        console.print(line)


def _explanation(gateway: Gateway, job_id: str, *, wait: bool) -> dict[str, Any]:
    path = f"{path_of(job_id)}/explain"
    for known in each_time(gateway, path, POLL_S) if wait else ():
        if (known["under_policies"] or {}).get("status") != "pending":
            break
    return gateway.get(path, one_change="true")


def array_lines(
    array: dict[str, Any],
    task: dict[str, Any] | None,
    now: datetime,
    zone: tzinfo | None = None,
    *,
    everything: bool = True,
) -> list[str]:
    """Return an array as lines: its tasks by state, why some of them wait, and an explanation of the next one."""
    lines = [f"[bold]{escape(array['name'])}[/] ({_ids(array, array['id'])}) {_is(array['state'])}."]
    lines.append(f"  tasks: {array['count']}, of which {arrays.counts(array)}")
    if array["max_running"]:
        lines.append(f"  limit: at most {array['max_running']} run at once")
    if array["waiting"]:
        lines.append(f"  waiting for: {arrays.waiting_words(array)}")
    footprint = array["footprint"]
    if footprint["energy_j"] > 0:
        used = f"{output.energy(footprint['energy_j'])}, {output.carbon(footprint['carbon_gco2'])} CO2"
        lines.append(f"  used: {used} with PUE, {output.duration(footprint['gpu_s'])} of GPU time")
    if task is not None:
        lines += [
            "  the next task:",
            *(f"    {line}" for line in explanation_lines(task, now, zone, everything=everything)),
        ]
    return lines


def explanation_lines(
    found: dict[str, Any], now: datetime, zone: tzinfo | None = None, *, everything: bool = True
) -> list[str]:
    """Return an explanation as lines, at most five or ``everything``; times in ``zone``, by default this machine's."""
    page = Page(found, now, zone)
    return [*page.lines()] if everything else [*page.brief()]


def _ids(job: dict[str, Any], job_id: str) -> str:
    return f"{number_of(job)}, {job_id}" if job.get("number") else job_id


def _is(state: str) -> str:
    """Return a state as the end of a sentence: `is queued`, `has failed`."""
    auxiliary = {"succeeded": "has", "failed": "has", "cancelled": "was"}.get(state, "is")
    return f"{auxiliary} {output.state(state)}"


def _saved(carbon_gco2: float | None) -> str:
    if carbon_gco2 is None:
        return "CO2 unknown"
    return f"{output.carbon(abs(carbon_gco2))} CO2 {'saved' if carbon_gco2 >= 0 else 'more'}"


def _later(minutes: float | None) -> str:
    if minutes is None:
        return "time unknown"
    return f"ends {output.duration(abs(minutes) * 60)} {'later' if minutes >= 0 else 'earlier'}"


class Page:
    """An explanation being laid out for a terminal."""

    def __init__(self, found: dict[str, Any], now: datetime, zone: tzinfo | None) -> None:
        self._found = found
        self._now = now
        self._zone = zone

    def _answer(self) -> Iterator[str]:
        found = self._found
        yield f"[bold]{found['name']}[/] ({_ids(found, found['job_id'])}) {_is(found['state'])}."
        yield f"  {escape(found['summary'])}"

    def brief(self) -> Iterator[str]:
        """Yield the answer and the three lines that say the most about it."""
        found = self._found
        yield from self._answer()
        if waiting := found["waiting"]:
            lines = [*self._waiting(waiting)]
            chosen = ("  asks for: ", "  may start: ", "  if it began now: ")
        elif running := found["running"]:
            lines = [*self._running(running)]
            chosen = ("  since: ", "  ends: ", "  next round")
        elif ended := found["ended"]:
            lines = [*self._ended(ended), *(self._footprint() if found["footprint"]["energy_j"] > 0 else ())]
            chosen = ("  exit status: ", "  waited ", "  used: ")
        else:
            return
        yield from (line for line in lines if line.startswith(chosen))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page, from the answer down to what it rests on."""
        found = self._found
        yield from self._answer()
        if found["waiting"]:
            yield from self._waiting(found["waiting"])
        if found["running"]:
            yield from self._running(found["running"])
        if found["ended"]:
            yield from self._ended(found["ended"])
        if found["footprint"]["energy_j"] > 0:
            yield from self._footprint()
        yield from self._levers(found.get("levers") or [])
        yield from self._story()
        if found["under_policies"]:
            yield from self._policies(found["under_policies"])
        for sentence in found["assumptions"]:
            yield f"  [dim]{escape(sentence)}[/]"

    def _waiting(self, waiting: dict[str, Any]) -> Iterator[str]:
        asked, place = waiting["gpus"], waiting["place"]
        size = str(asked["min"]) if asked["min"] == asked["max"] else f"{asked['min']} to {asked['max']}"
        gpus = "GPU" if size == "1" else "GPUs"
        gpus = f"{asked['slice']} slice" if asked.get("slice") else gpus
        kind = f" of model {asked['model']}" if asked["model"] else ""
        kind += f" with {asked['memory_gib']:g} GiB" if asked["memory_gib"] else ""
        kind += f" in the zone {asked['zone']}" if asked.get("zone") else ""
        drained = f", {asked['drained']} more on drained nodes" if asked["drained"] else ""
        what = "slices" if asked.get("slice") else "GPUs"
        free = f"{asked['free']} of {asked['suitable']} suitable {what} are free{drained}"
        yield f"  asks for: {size} {gpus}{kind}; {free}"
        if place and place["ahead"]:
            jobs = counted(place["ahead"], "job that asks", "jobs that ask")
            named = [f"{each['name']} ({each['gpus']})" for each in place["first"]]
            more = place["ahead"] - place["hidden_ahead"] - len(named)
            named += [f"{more} more"] if more else []
            named += [f"{place['hidden_ahead']} of others"] if place["hidden_ahead"] else []
            yield f"  ahead of it: {jobs} for {counted(place['ahead_gpus'], 'GPU')}: {', '.join(named)}"
        yield f"  may start: {self._expected(waiting)}"
        yield from self._length(waiting["length"])
        forecast = waiting["forecast"]
        for label, key in (("if it began now", "now"), ("in the greenest window", "greenest")):
            same = key == "greenest" and is_now(waiting)
            yield f"  {label}: {IS_NOW if same else self._emission(waiting[key], waiting['length'])}"
        if forecast:
            made = f"made {self._ago(forecast['made_at'])}" if forecast["made_at"] else "of unknown age"
            stale = ", stale: its newest value is older than it should be" if forecast["stale"] else ""
            until = self._time(forecast["known_until"])
            yield f"  forecast: {forecast['zone']}, {forecast['signal']}, {made}, known until {until}{stale}"

    def _expected(self, waiting: dict[str, Any]) -> str:
        at, comparison = waiting["expected_start_at"], self._found["under_policies"] or {}
        if waiting["starts_now"]:
            return "at the next round, within seconds"
        if at is None:
            return "not known yet; the queue is being simulated" if comparison.get("status") == "pending" else "unknown"
        if waiting["expected_start_from"] == "policy":
            return f"{self._time(at)}, planned by the policy, if GPUs are free by then"
        assumed = [f". {each}" for each in comparison.get("assumptions", ()) if each.startswith("The lengths of")]
        return f"{self._time(at)}, by a simulation of the queue if nothing unforeseen happens{''.join(assumed)}"

    def _length(self, length: dict[str, Any]) -> Iterator[str]:
        if length["seconds"] is not None:
            between = ""
            if length["low_s"] is not None and length["high_s"] is not None:
                low, high = output.duration(length["low_s"]), output.duration(length["high_s"])
                between = f", 8 of 10 between {low} and {high}"
            yield f"  length: {output.duration(length['seconds'])}{between}"

    def _emission(self, emission: dict[str, Any] | None, length: dict[str, Any]) -> str:
        if emission is None:
            return "unknown"
        at = output.instant(emission["starts_at"])
        when = f", from {self._time(emission['starts_at'])}" if at and (at - self._now).total_seconds() > 60 else ""
        total, between = emission["carbon_gco2"], ""
        if total is not None and length["seconds"] and length["low_s"] is not None and length["high_s"] is not None:
            low, high = (output.carbon(total * length[key] / length["seconds"]) for key in ("low_s", "high_s"))
            between = f" ({low} to {high})"
        return emission_words(emission, between) + when

    def _running(self, running: dict[str, Any]) -> Iterator[str]:
        where = ", ".join(f"{share['node_id']}{share['devices']}" for share in running["placement"])
        yield f"  since: {self._time(running['since'])}, on {where}"
        for sentence in running["why"]:
            yield f"  why: {escape(sentence)}"
        yield from self._length(running["length"])
        end = running["expected_end_at"]
        yield f"  ends: {self._time(end)}, if it goes on like this" if end else "  ends: unknown"
        if stop_at := running.get("stop_at"):
            yield f"  killed: {self._time(stop_at)}, if it has not ended by then"
        if following := running["next"]:
            what = "it would be stopped" if following["action"] == "stop" else "it would run on"
            size = f" and restarted on {counted(following['gpus'], 'GPU')}" if following["gpus"] else ""
            when = f", {self._time(following['at'])}" if following["at"] else ""
            detail = "" if following["detail"] in self._found["summary"] else f" {following['detail']}"
            yield f"  next round{when}: {what}{size}.{detail}"

    def _ended(self, ended: dict[str, Any]) -> Iterator[str]:
        never = "none, as it never ran" if not ended["starts"] else "unknown"
        status = never if ended["exit_code"] is None else str(ended["exit_code"])
        starts = "once" if ended["starts"] == 1 else f"{ended['starts']} times"
        stops = f"preempted: {ended['preemptions']}; restarted after failures: {ended['restarts']}"
        yield f"  exit status: {status}"
        yield f"  waited {output.duration(ended['waited_s'])}; held GPUs for {output.duration(ended['held_gpus_s'])}"
        if ended["starts"]:
            yield f"  started {starts}; {stops}"

    def _footprint(self) -> Iterator[str]:
        footprint, mean = self._found["footprint"], self._found["baseline_gco2"]
        used = f"{output.energy(footprint['energy_j'])}, {output.carbon(footprint['carbon_gco2'])} CO2"
        share = footprint["estimated_energy_j"] / footprint["energy_j"]
        estimated = f", {share:.0%} of the energy estimated" if share >= 0.005 else ""
        yield f"  used: {used} with PUE, {output.duration(footprint['gpu_s'])} of GPU time{estimated}"
        if mean is not None:
            share = f"; the job emitted {footprint['carbon_gco2'] / mean:.0%} of that" if mean > 0 else ""
            yield f"  same work at mean intensity: {output.carbon(mean)} CO2{share}"

    def _levers(self, levers: list[dict[str, Any]]) -> Iterator[str]:
        """Yield what each lever of the policy does, with those that do nothing in one line."""
        if not levers:
            return
        yield "  levers of the policy, each against the job without it:"
        used = [each for each in levers if (each["carbon_saved_gco2"], each["minutes_added"]) != (0, 0)]
        for each in used:
            name, saved = each["lever"].replace("_", " "), _saved(each["carbon_saved_gco2"])
            yield escape(f"    {name}: {saved}, {_later(each['minutes_added'])}. {each['detail']}")
        idle = [each["lever"].replace("_", " ") for each in levers if each not in used]
        if idle:
            yield f"    no effect: {', '.join(idle)}"

    def _story(self) -> Iterator[str]:
        lines, left_out = self._found["story"], self._found["story_left_out"]
        if not lines:
            return
        yield "  what happened:"
        for at, line in enumerate(lines):
            if left_out and at == len(lines) // 2:
                yield f"    ... {left_out} more events ..."
            yield f"    {self._clock(line['at'])}  {escape(line['text'])}"

    def _policies(self, comparison: dict[str, Any]) -> Iterator[str]:
        if comparison["status"] != "ready":
            yield f"  under other policies: {comparison['status']}. {comparison['detail'] or ''}".rstrip()
        if not comparison["items"]:
            return
        yield f"  under each policy, if no further job came (queue as of {self._time(comparison['as_of'])}):"
        groups: dict[tuple[str, ...], list[str]] = {}
        items = sorted(comparison["items"], key=lambda item: item["ends_at"] or "9")
        emitted = output.emissions(item["carbon_gco2"] for item in items)
        for item, grams in zip(items, emitted, strict=True):
            name = f"{item['policy']} (in force)" if item["in_force"] else item["policy"]
            groups.setdefault(self._outcome(item, grams), []).append(name)
        rows = [("starts", "waits", "ends", "CO2", "policy")]
        rows += [(*outcome, ", ".join(names)) for outcome, names in groups.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield escape("    " + "  ".join(map(str.ljust, row, widths)).rstrip())
        for sentence in comparison["assumptions"]:
            yield f"    [dim]{sentence}[/]"

    def _outcome(self, item: dict[str, Any], grams: str) -> tuple[str, ...]:
        """Return what becomes of the job under a policy, as cells; policies with the same outcome share a line."""
        if item["failure"]:
            return item["failure"], "", "", ""
        starts, ends, waits_s = (item[key] for key in ("starts_at", "ends_at", "waits_s"))
        return (
            "later" if starts is None else self._clock(starts) if waits_s else "now",
            "-" if waits_s is None else output.duration(waits_s),
            self._clock(ends) if ends else "-",
            "-" if item["carbon_gco2"] is None else grams,
        )

    def _local(self, text: str) -> datetime:
        return datetime.fromisoformat(text).astimezone(self._zone)

    def _clock(self, text: str) -> str:
        at = self._local(text)
        return f"{at:%d %b %H:%M:%S} {at.tzname()}"

    def _time(self, text: str) -> str:
        """Return a time of day with its zone and how far off it is, and with the day unless it is today."""
        at, today = self._local(text), self._now.astimezone(self._zone)
        day = "" if at.date() == today.date() else f"{at:%a %d %b} "
        ahead_s = (at - self._now).total_seconds()
        away = f"in {output.duration(ahead_s)}" if ahead_s > 0 else f"{output.duration(-ahead_s)} ago"
        return f"{day}{at:%H:%M} {at.tzname()} ({away})"

    def _ago(self, text: str) -> str:
        return f"{output.duration((self._now - self._local(text)).total_seconds())} ago"
