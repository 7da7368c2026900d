"""What a page shows is what the API and the ledger say, to the last digit."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from urllib.parse import parse_qs, urlsplit
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Locator, Request, Route, expect

from tests.browser.conftest import ZONE, OpenPage
from tests.integration.conftest import Installation

CLOCK_CHANGES = {
    "Europe/Berlin": ("2026-03-29", "2026-10-25"),
    "America/St_Johns": ("2026-03-08", "2026-11-01"),
    "Australia/Lord_Howe": ("2026-04-05", "2026-10-04"),  # by half an hour
    "America/Santiago": ("2026-04-05", "2026-09-06"),  # at midnight, which one of these days does not have
}


def midnight(day: date, zone: str) -> datetime:
    """Return when a day begins there."""
    return datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(zone)).astimezone(UTC)


def value(shown: Locator) -> float:
    """Return the exact value behind a figure."""
    expect(shown).to_be_visible()
    return float(shown.get_attribute("value") or "nan")


@pytest.fixture(scope="module")
def ended(site: Installation) -> str:
    """A job that has run and whose last energy has arrived."""
    spec = {"name": "counted", "command": ["sleep", "4"], "project": "agreement"}
    job_id = site.gateway.call("POST", "/v1/jobs", body=spec)["id"]
    site.wait_for_ends([job_id], 60)
    site.wait_for(job_id, lambda job: job["footprint"]["energy_j"] > 0)
    return job_id


def test_a_jobs_footprint_is_the_sum_of_its_lines_in_the_ledger(
    open_page: OpenPage, site: Installation, ended: str
) -> None:
    page = open_page(f"/jobs/{ended}")
    energy, carbon = value(page.locator("#job-energy")), value(page.locator("#job-carbon"))

    lines = site.gateway.get(f"/v1/jobs/{ended}/footprint")["intervals"]
    assert lines
    assert energy == pytest.approx(sum(line["energy_j"] for line in lines), rel=1e-9)
    assert carbon == pytest.approx(sum(line["carbon_gco2"] for line in lines), rel=1e-9)
    for line in lines:  # location-based: energy times intensity, at a PUE of 1
        assert line["carbon_gco2"] == pytest.approx(line["energy_j"] / 3.6e6 * line["intensity_gco2_per_kwh"], rel=1e-6)


def test_the_report_is_that_of_the_ledger(open_page: OpenPage, site: Installation, ended: str) -> None:
    page = open_page("/reports")
    row = page.locator("#groups tr", has_text="agreement")

    report = site.gateway.get("/v1/reports/footprint", group_by="project")
    line = next(each for each in report["lines"] if each["group"] == "agreement")
    # A database adds doubles in any order: the last digit may differ between two sums.
    assert line["footprint"]["energy_j"] == pytest.approx(site.job(ended)["footprint"]["energy_j"], rel=1e-14)
    assert value(row.locator("data").first) == pytest.approx(line["footprint"]["carbon_gco2"], rel=1e-9)


def test_a_report_leads_from_a_project_to_its_jobs_and_the_lines_of_the_ledger(
    open_page: OpenPage, site: Installation, ended: str
) -> None:
    page = open_page("/reports?period=today")
    page.locator("#groups").get_by_role("link", name="agreement").click()
    expect(page.locator("#project")).to_contain_text("Only the project agreement")
    jobs = page.locator("#groups tbody tr").filter(has_not=page.locator(".sum"))
    expect(page.locator("#groups").get_by_role("link", name="counted")).to_have_count(1)
    assert "period=today" in page.url
    expect(page.locator("#requests-card")).to_be_hidden()
    assert value(page.locator("#total-energy")) == pytest.approx(site.job(ended)["footprint"]["energy_j"], rel=1e-9)
    assert jobs.count() >= 1
    page.locator("#groups").get_by_role("link", name="counted").click()
    rows = page.locator("#ledger tbody tr")
    expect(rows.first).to_be_visible()
    sums = [sum(value(row.locator("data").nth(column)) for row in rows.all()) for column in (0, 2)]
    assert sums[0] == pytest.approx(value(page.locator("#job-energy")), rel=1e-9)
    assert sums[1] == pytest.approx(value(page.locator("#job-carbon")), rel=1e-9)
    expect(page.locator("#ledger-note")).to_contain_text("all of them")
    page.go_back()
    expect(page.locator("#project")).to_contain_text("Only the project agreement")


def test_counts_of_now_are_those_of_the_api(open_page: OpenPage, site: Installation) -> None:
    batch = {"jobs": [{"name": f"counted-{i}", "command": ["true"], "hold": True} for i in range(3)]}
    site.gateway.call("POST", "/v1/jobs:batch", body=batch)
    page = open_page("/")
    expect(page.locator("#count-held")).to_be_visible()
    counts = site.gateway.get("/v1/jobs:counts")

    assert counts["held"] >= 3
    expect(page.locator("#count-held")).to_have_attribute("value", str(counts["held"]))
    expect(page.locator("#policy-name")).to_have_text(site.gateway.get("/v1/policies/active")["name"])
    now = site.gateway.get("/v1/carbon/US-CAL-CISO/current")["point"]["gco2_per_kwh"]
    assert value(page.locator("#intensity-now")) == pytest.approx(now)


def test_times_are_those_of_the_viewers_zone(open_page: OpenPage, site: Installation, ended: str) -> None:
    page = open_page(f"/jobs/{ended}")
    shown = page.locator("#summary time").first
    expect(shown).to_be_visible()
    submitted = datetime.fromisoformat(site.job(ended)["submitted_at"])

    assert datetime.fromisoformat(shown.get_attribute("datetime") or "") == submitted
    assert submitted.astimezone(ZoneInfo(ZONE)).strftime("%H:%M:%S") in (shown.get_attribute("title") or "")
    assert shown.inner_text().endswith(submitted.astimezone(ZoneInfo(ZONE)).strftime("%H:%M"))


def test_what_is_unknown_is_called_unknown(open_page: OpenPage, site: Installation, ended: str) -> None:
    """Without stated factors, market-based and embodied emissions are not known, and not 0."""
    assert ended
    assert site.gateway.get("/v1/reports/footprint")["total_accounts"]["market_gco2"] is None
    page = open_page("/reports")
    fact = page.locator(".facts > div", has=page.get_by_text("Market-based", exact=True))

    expect(fact.locator("dd")).to_have_text("unknown")


@pytest.mark.parametrize("zone", CLOCK_CHANGES)
def test_periods_are_of_whole_days_where_the_clock_changes(open_page: OpenPage, site: Installation, zone: str) -> None:
    """Each period begins as its first day does, and the days of the chart have all hours of it, each once."""
    report = site.gateway.get("/v1/reports/footprint", group_by="project")
    page = open_page("/reports", timezone_id=zone)

    def query(request: Request) -> dict[str, datetime]:
        asked = parse_qs(urlsplit(request.url).query)
        return {name: datetime.fromisoformat(asked[name][0]) for name in ("start", "end") if name in asked}

    def hours(route: Route) -> None:
        start, end = query(route.request).values()
        found = (start.replace(minute=0) + timedelta(hours=n + (start.minute > 0)) for n in range(24 * 32))
        grams = {"carbon_gco2": 1_000, "idle_carbon_gco2": 0}
        items = [{"start_at": each.isoformat(), **grams} for each in found if each < end]
        route.fulfill(body=json.dumps({"items": items}))

    page.route("**/v1/reports/hours?*", hours)
    page.route("**/v1/reports/footprint?*", lambda route: route.fulfill(body=json.dumps(report)))
    for day in (
        date.fromisoformat(each) + timedelta(days=later) for each in CLOCK_CHANGES[zone] for later in (0, 1, 6)
    ):
        now = midnight(day, zone) + timedelta(hours=12)
        page.clock.set_fixed_time(now)
        report["end_at"] = now.isoformat()
        for period, first in {"7": day - timedelta(days=6), "month": day.replace(day=1), "today": day}.items():
            with page.expect_request("**/v1/reports/footprint?*") as sent:
                page.goto(f"/reports?period={period}")
            assert query(sent.value)["start"] == midnight(first, zone), (zone, day, period)
            if day > first:
                told = f"Emissions of {(day - first).days + 1} days, 12 kg CO₂ on the last"  # of as many hours
                expect(page.locator("#trend")).to_have_attribute("aria-label", told)
