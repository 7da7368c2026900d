"""What must add up in any installation, stated anew over rows of the public API and lines of the ledger."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

MARGIN = 1.2  #: Hardware may draw this much more than its limits; times of readings are known to a second
PRICES = """currency = "EUR"
[zones.{zone}]
per_kwh = 0.1
timezone = "America/St_Johns"
hours = [{hours}]
"""
"""Each local hour has a price of its own, in a time zone whose hours begin within those of UTC."""


def prices(zone: str) -> str:
    """Return a file of prices for a zone."""
    hours = ", ".join(f"{{from = {at}, to = {at + 1}, per_kwh = {at / 100}}}" for at in range(24))
    return PRICES.format(zone=zone, hours=hours)


def per_kwh(hour: int) -> float:
    """Return the price of an hour of UTC in winter, of which the first half is local hour ``hour - 4``."""
    return 0.1 + fmean(((hour - 4) % 24, (hour - 3) % 24)) / 100


def at_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def one_holder(jobs: Iterable[Mapping[str, Any]]) -> None:
    """Hold that no GPU is held twice, nor whole and in slices, by jobs of one answer, and each job's count is right."""
    held, parents = Counter[tuple[str, int]](), set[tuple[str, int]]()
    for job in jobs:
        units = [(share["node_id"], unit) for share in job["placement"] for unit in share["devices"]]
        assert len(units) == job["gpus"], job
        held.update(units)
        parents |= {(node, (unit - 1_024) // 8) for node, unit in units if unit >= 1_024}
    assert all(count == 1 for count in held.values()), held.most_common(3)
    assert not parents & set(held), ("whole, and in slices", parents & set(held))


def budgets(rows: Iterable[Mapping[str, Any]], lines: Iterable[Mapping[str, str]], month: str) -> list[Any]:
    """Return the budgets whose use is not what the ledger's lines of the month add up to."""
    wrong, lines = list[Any](), list(lines)
    of = {"gpu_h": ("gpu_s", 3_600.0), "kwh": ("energy_j", 3.6e6), "gco2": ("carbon_gco2", 1.0)}
    for row in rows:
        name, unit = of[row["quantity"]]
        used = sum(
            float(line[name] or 0)
            for line in lines
            if line["tenant"] == row["tenant_id"]
            and row["project"] in (None, line["project"])
            and line["start_at"].startswith(month)
        )
        if row["month"] != month or row["used"] != pytest.approx(used / unit, rel=1e-3, abs=1e-6):
            wrong.append((row, used / unit))
        elif row["exceeded"] != (row["used"] >= row["amount"]):
            wrong.append((row, "exceeded"))
    return wrong


def lines_add_up(
    lines: Sequence[Mapping[str, str]],
    days: Iterable[Mapping[str, Any]],
    hours: Iterable[Mapping[str, Any]],
    report: Any,
) -> None:
    """Hold that lines, days, hours and the whole agree in energy, emissions and money, each line by its own figures."""
    by_day, by_hour, money = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
    for line in lines:
        energy_j, facility_j = float(line["energy_j"]), float(line["facility_energy_j"])
        assert facility_j == pytest.approx(energy_j * float(line["pue"]), rel=1e-9, abs=1e-9), line
        gco2 = facility_j / 3.6e6 * float(line["intensity_gco2_per_kwh"])
        assert float(line["carbon_gco2"]) == pytest.approx(gco2, rel=1e-6, abs=1e-9), line
        assert 0 <= float(line["estimated_energy_j"]) <= energy_j * (1 + 1e-9), line
        parts = sum(float(line[name] or 0) for name in ("gpu_energy_j", "cpu_energy_j", "static_energy_j"))
        assert energy_j == pytest.approx(parts, rel=1e-9, abs=1e-9), line
        hour = int(line["start_at"][11:13])
        money += facility_j / 3.6e6 * per_kwh(hour)
        by_hour[line["start_at"][:13]] += energy_j
        if line["job_id"]:
            by_day[line["start_at"][:10]] += energy_j
    assert {each["group"]: each["footprint"]["energy_j"] for each in days} == pytest.approx(by_day, rel=1e-6, abs=1e-3)
    told = {each["start_at"][:13]: each["energy_j"] for each in hours}
    assert told == pytest.approx({hour: by_hour[hour] for hour in told}, rel=1e-6, abs=1e-3)
    assert report["total"]["energy_j"] == pytest.approx(sum(by_hour.values()), rel=1e-6, abs=1e-3)
    accounts = report["total_accounts"]
    if accounts["money"] is not None:
        assert report["currency"] == "EUR"
        assert accounts["money"] == pytest.approx(money, rel=1e-3, abs=1e-9)
        assert sum(each["money"] for each in hours) == pytest.approx(money, rel=1e-3, abs=1e-9)


def within_physics(lines: Iterable[Mapping[str, str]], most_w: Mapping[str, float]) -> None:
    """Hold that no interval of a node has more energy than its hardware can draw in that time, whoever used it."""
    used = defaultdict[tuple[str, str, str], float](float)
    for line in lines:
        if line["node_id"] in most_w:
            used[line["node_id"], line["start_at"], line["end_at"]] += float(line["energy_j"])
    for (node, start, end), energy_j in used.items():
        assert energy_j <= most_w[node] * MARGIN * (at_s(end) - at_s(start) + 1) + 1, (node, start, end, energy_j)


def array_adds_up(array: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]]) -> None:
    """Hold that an array says of its tasks what they say themselves."""
    assert len(tasks) == array["count"], (array, len(tasks))
    assert len({each["array_index"] for each in tasks}) == len(tasks)
    states = Counter(each["state"] for each in tasks)
    assert {state: count for state, count in array["tasks"].items() if count} == states, array
    assert array["gpus"] == sum(each["gpus"] for each in tasks), array
    holding = sum(each["gpus"] > 0 for each in tasks)
    assert array["max_running"] is None or holding <= array["max_running"], array


def waited(job: Mapping[str, Any], before: Mapping[str, Mapping[str, Any]]) -> None:
    """Hold that a job that ran began after those that it was to follow had ended, as it was to follow them."""
    for how, names in (job["spec"].get("after") or {}).items():
        for each in names or []:
            if job["started_at"] and (first := before.get(each)):
                assert first["ended_at"], (job, first)
                assert at_s(first["ended_at"]) <= at_s(job["started_at"]) + 0.001, (job, first)
                assert how == "any" or first["state"] == "succeeded", (job, first)


def promised_once(windows: Iterable[Mapping[str, Any]], gpus: Mapping[str, int]) -> None:
    """Hold that reservations that are ahead or in force promise no node's GPUs twice at any moment."""
    live = [each for each in windows if each["state"] in ("ahead", "in_force") and each["tenant_id"]]
    for moment in {each["start_at"] for each in live}:
        promised = Counter[str]()
        for each in live:
            if at_s(each["start_at"]) <= at_s(moment) < at_s(each["end_at"]):
                promised.update(each["gpus"])
        assert all(count <= gpus.get(node, count) for node, count in promised.items()), (moment, promised)


def holds_what_is_there(jobs: Iterable[Mapping[str, Any]], devices: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Hold that jobs have devices that their nodes have: slices of the size asked for, or GPUs that are not cut."""
    there = {(node, each["index"]): each for node, known in devices.items() for each in known}
    for job in jobs:
        wanted = job["spec"]["gpus"].get("slice")
        for share in job["placement"]:
            for at in share["devices"] if share["node_id"] in devices else ():
                device = there.get((share["node_id"], at))
                assert device is not None, ("a device that its node does not have", job, at)
                if wanted is None:
                    assert "parent" not in device, ("a slice for a job that asked for none", job, device)
                    assert not device.get("mig_enabled"), ("a GPU that is cut", job, device)
                else:
                    assert device.get("sevenths", 7) == int(wanted[0]), ("another slice", job, device)


FINAL = ("succeeded", "failed", "cancelled")
FOLLOWING = {
    "queued": {"starting", "held", *FINAL},
    "held": {"queued", "held", *FINAL},  # held by a budget, and then by its user
    "starting": {"running", "preempting", "queued", "held", *FINAL},
    "running": {"preempting", "queued", "held", *FINAL},
    "preempting": {"queued", "held", *FINAL},
}
"""States that may follow one another, as the description of a job's life says."""
A_POLICYS = {"outranked", "scale_out", "scale_in", "fair_share", "guaranteed", "greener_hours", "shorter_first",
             "greener_zone", "defragmentation"}  # fmt: skip
"""Reasons of stops that a guaranteed run, or a job that may not be stopped, keeps off."""
LATE_S = 10.0  #: By how much a node may be late with what it tells of a gang's end
Claims = list[tuple[str, float, float, int]]  #: Gang, from when to when, and on how many devices, by a node's word


class Life:
    """A job and what happened to it: its states, and the gangs that it had."""

    def __init__(self, job: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> None:
        self.job = job
        named = ((each["type"].removeprefix("job."), each) for each in events)
        named = ((each["data"]["state"] if name == "submitted" else name, each) for name, each in named)
        self.states = [(name, at_s(each["at"]), each["data"]) for name, each in named if name in (*FOLLOWING, *FINAL)]
        self.gangs = dict[str, tuple[float, float]]()
        for at, (state, since_s, data) in enumerate(self.states):
            if state == "starting":
                ends = (s for name, s, _ in self.states[at:] if name in ("queued", "held", *FINAL))
                self.gangs[data["allocation_id"]] = since_s, next(ends, float("inf"))

    def waits_at(self, moment_s: float, margin_s: float) -> bool:
        """Whether it was queued at a moment, or within the margin of it."""
        return any(
            state == "queued" and since_s - margin_s <= moment_s <= until_s + margin_s
            for (state, since_s, _), until_s in zip(
                self.states, [*(s for _, s, _ in self.states[1:]), float("inf")], strict=True
            )
        )

    def check(self, min_run_s: float) -> None:
        """Hold that its states followed one another as promised, and no policy stopped it too early, or at all."""
        job, states = self.job, [state for state, _, _ in self.states]
        for before, after in pairwise(states):
            assert after in FOLLOWING.get(before, ()), (job, before, after, states)
        assert not states or states[-1] == job["state"], (job, states)
        assert len(self.gangs) == job["generation"], (job, self.states)
        had_s = 0.0
        for state, at, data in self.states:
            had_s = at if state == "starting" else had_s
            if state == "preempting" and data["reason"] in A_POLICYS:
                assert job["spec"]["preemptible"], ("stopped, though it may not be", job, self.states)
                assert not job["spec"]["gpus"].get("slice"), ("stopped on a slice", job, self.states)
                assert at - had_s >= min_run_s, ("stopped within its guaranteed run", job, self.states)


def given_back_to_who_waited(lives: Collection[Life]) -> None:
    """Hold that what was given back by guarantees was for a tenant that had a job waiting, and another one."""
    for life in lives:
        for state, at, data in life.states:
            if state == "preempting" and data["reason"] == "guaranteed":
                owner = re.search(r"the tenant (\w+), to which", data["detail"])
                wait = {each.job["tenant_id"] for each in lives if each.waits_at(at, 1.0)} - {life.job["tenant_id"]}
                assert owner[1] in wait if owner else wait, ("given back to nobody who waits", life.job, life.states)


def reserved_stays(lives: Collection[Life], windows: Collection[Mapping[str, Any]]) -> None:
    """Hold that no policy stops what began on its tenant's reservation while that lasts."""
    for life in lives:
        for (before, since_s, began), (state, at, data) in pairwise(
            each for each in life.states if each[0] in ("starting", "preempting")
        ):
            if before == "starting" and began["reason"] == "reserved" and state == "preempting":
                own = [each for each in windows if each["tenant_id"] == life.job["tenant_id"]]
                lasting = [(at_s(each["start_at"]), at_s(each["cancelled_at"] or each["end_at"]), each) for each in own]
                then = [each for each in lasting if each[0] <= since_s < each[1]]
                is_over = not then or any(until_s < at + 0.5 for _, until_s, _ in then)
                assert is_over or data["reason"] not in A_POLICYS, ("stopped in a reservation", life.states, then)


def charged_as_held(lives: Mapping[str, Life], claims: Claims, lines: Iterable[Mapping[str, str]]) -> None:
    """Hold that each job is charged for the time that nodes told of while it had its gangs, and little beside."""
    least, most, charged = (defaultdict[str, float](float) for _ in range(3))
    for gang, start_s, end_s, devices in claims:
        if life := lives.get(gang.rpartition(".")[0]):
            since_s, until_s = life.gangs[gang]
            job = life.job["id"]
            least[job] += devices * max(min(end_s, until_s) - max(start_s, since_s), 0.0)
            most[job] += devices * max(min(end_s, until_s + LATE_S) - max(start_s, since_s - LATE_S), 0.0)
    lines = list(lines)
    for line in lines:
        charged[line["job_id"]] += float(line["gpu_s"])
    for job in lives:
        told, booked = [each for each in claims if job in each[0]], [each for each in lines if each["job_id"] == job]
        assert least[job] * 0.999 - 0.1 <= charged[job] <= most[job] * 1.001 + 0.1, (
            (job, least[job], charged[job], most[job]), lives[job].states, told, booked
        )  # fmt: skip
