"""What must add up in any installation, stated anew over rows of the public API and lines of the ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
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


def no_time_twice(lines: Iterable[Mapping[str, str]], jobs: Mapping[str, Mapping[str, Any]]) -> None:
    """Hold that no job is charged for more GPU time than it can have held GPUs."""
    charged = defaultdict[str, float](float)
    for line in lines:
        if line["job_id"]:
            charged[line["job_id"]] += float(line["gpu_s"])
    for job, gpu_s in charged.items():
        if (found := jobs.get(job)) and found["started_at"] and found["ended_at"]:
            most = found["spec"]["gpus"].get("max") or found["spec"]["gpus"].get("min") or 1
            lived_s = at_s(found["ended_at"]) - at_s(found["started_at"])
            assert gpu_s <= most * (lived_s + 3), (job, gpu_s, lived_s, most)


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
