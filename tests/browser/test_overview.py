"""What runs, what waits and what was used are seen at once: on the first page, in the list of jobs and in reports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import PHONE, OpenPage
from tests.integration.conftest import Installation

WORK = """for n in $(seq 1 1000); do echo '{"done": '$n'}' >> "$WATTSHIFT_PROGRESS_FILE"; sleep 0.2; done"""


@pytest.fixture(scope="module")
def queue(site: Installation) -> Iterator[dict[str, str]]:
    """A job that tells its progress and holds half of the GPUs, and an array of which one task runs at a time."""
    running = {
        "name": "half-of-it",
        "command": ["sh", "-c", WORK],
        "gpus": {"min": 4},
        "work": {"total": 1000, "unit": "steps"},
    }
    ids = {"half-of-it": site.gateway.call("POST", "/v1/jobs", body=running)["id"]}
    site.wait_for(ids["half-of-it"], lambda job: (job["progress"] or {}).get("done", 0) > 0)
    tasks = {"name": "folded", "array": "0-9%1", "command": ["sleep", "600"], "project": "arrays"}
    ids["folded"] = site.gateway.call("POST", "/v1/jobs", body=tasks)["id"]
    yield ids
    site.gateway.call("POST", f"/v1/arrays/{ids.pop('folded')}/cancel")
    for each in ids.values():
        if site.job(each)["ended_at"] is None:
            site.gateway.call("POST", f"/v1/jobs/{each}/cancel")


def test_the_first_page_says_what_runs_what_waits_and_what_was_drawn(
    open_page: OpenPage, queue: dict[str, str]
) -> None:
    del queue
    page = open_page("/")
    row = page.locator("#running tr", has_text="half-of-it")
    expect(row).to_contain_text("4 GPUs")
    expect(row.locator(".meter")).to_have_attribute("aria-label", re.compile(r"[\d.]+ % done"))
    expect(row.locator("td").last.locator("time")).to_be_visible()
    expect(page.locator("#waiting tr", has_text="array limit")).to_contain_text("9")
    expect(page.locator("#power-chart canvas")).to_be_visible()
    expect(page.locator("#saved")).to_contain_text("first whole day")
    page.get_by_role("link", name="What would last week").click()
    expect(page.locator("#source")).to_have_value("history")


def test_a_gpu_of_the_map_says_who_holds_it_and_leads_there(open_page: OpenPage, queue: dict[str, str]) -> None:
    page = open_page("/nodes")
    page.get_by_label(re.compile(r"GPU \d: half-of-it: [\d.]+ W of [\d.]+ W, [\d.]+ %")).first.click()
    expect(page).to_have_url(re.compile(queue["half-of-it"]))


def test_the_course_of_temperatures_is_beside_draw_and_limit(
    open_page: OpenPage, site: Installation, queue: dict[str, str]
) -> None:
    del queue
    node = site.nodes()[0]["id"]
    assert [each["id"] for each in site.gateway.get("/v1/nodes", trend="true", fields="id,trend")["items"]]
    trend = {"start_at": "2026-03-01T00:00:00Z", "step_s": 600}
    trend |= {"gpus": [{"gpu": 0, "temperature_c": [40, None, 61]}, {"gpu": 1, "temperature_c": [44, 30, 50]}]}
    page = open_page("/")
    known = json.dumps({"items": [{"id": node, "trend": trend}], "next_cursor": None})
    page.route(re.compile(r"/v1/nodes\?.*trend=true"), lambda route: route.fulfill(body=known))
    page.goto("/nodes")

    line = page.locator(f"[id='{node}']")
    expect(line.get_by_label("its hottest GPU: 30 to 61 °C in the past 30 min")).to_be_visible()
    expect(line.locator(".node-power")).to_contain_text(re.compile(r"\d+ °C"))
    line.get_by_role("button", name=node, exact=True).click()
    expect(line.get_by_label("GPU 0: 40 to 61 °C in the past 30 min").locator("polyline")).to_have_count(2)
    expect(line.get_by_label("GPU 1: 30 to 50 °C in the past 30 min").locator("polyline")).to_have_count(1)
    expect(line.get_by_label(re.compile("GPU 2: .* in the past"))).to_have_count(0)


def test_jobs_are_grouped_by_state_and_an_array_is_one_row(open_page: OpenPage, queue: dict[str, str]) -> None:
    page = open_page("/jobs")
    running = page.get_by_role("region", name="Running", exact=True)
    expect(running.locator(f'[data-key="{queue["half-of-it"]}"] .meter')).to_be_visible()
    array = running.locator(f'[data-key="{queue["folded"]}"]')
    expect(array).to_contain_text("1 running")
    expect(page.locator("tr", has_text="folded.3")).to_have_count(0)
    array.get_by_role("link").click()
    expect(page.locator("#list tbody tr")).to_have_count(10)


def test_many_jobs_are_cancelled_at_once(open_page: OpenPage, site: Installation, queue: dict[str, str]) -> None:
    del queue
    batch = {"jobs": [{"name": f"bulk-{i}", "command": ["true"], "hold": True} for i in range(3)]}
    made = site.gateway.call("POST", "/v1/jobs:batch", body=batch)
    page = open_page("/jobs?q=bulk-")
    page.get_by_label("Choose all: Held").check()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("region", name="Ended", exact=True).locator(".badge.cancelled")).to_have_count(3)
    assert {site.job(each["id"])["state"] for each in made["jobs"]} == {"cancelled"}


def test_a_filter_is_kept_in_the_browser(open_page: OpenPage, queue: dict[str, str]) -> None:
    del queue
    page = open_page("/jobs?project=arrays")
    page.get_by_role("button", name="Keep this filter").click()
    page.goto("/jobs")
    page.get_by_role("link", name="arrays", exact=True).click()
    expect(page.get_by_label("Project")).to_have_value("arrays")


def test_fifty_jobs_fit_three_screens_of_a_phone(open_page: OpenPage, site: Installation) -> None:
    batch = {"jobs": [{"name": f"crowd-{i}", "command": ["true"], "hold": True} for i in range(50)]}
    site.gateway.call("POST", "/v1/jobs:batch", body=batch)
    page = open_page("/jobs", **PHONE)
    expect(page.locator("tr", has_text="crowd-49")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollHeight") <= 3 * PHONE["viewport"]["height"]


def test_the_rows_of_a_report_add_up_to_its_total(
    open_page: OpenPage, site: Installation, queue: dict[str, str]
) -> None:
    site.wait_for(queue["half-of-it"], lambda job: job["footprint"]["energy_j"] > 0)
    page = open_page("/reports")
    rows = page.locator("#groups tbody tr")
    expect(rows.last).to_contain_text("total")
    grams = [float(row.locator("data").first.get_attribute("value") or "nan") for row in rows.all()]
    assert sum(grams[:-1]) == pytest.approx(grams[-1], rel=1e-9)
    expect(rows.nth(-2)).to_contain_text("idle")
    rows.first.get_by_role("link").click()
    expect(page).to_have_url(re.compile(r"/reports\?.*group=job.*project="))
    page.locator("#groups").get_by_role("link", name="folded").click()
    expect(page).to_have_url(re.compile(rf"/jobs\?array={queue['folded']}"))


def test_a_report_is_saved_as_one_page_that_asks_nobody(open_page: OpenPage, queue: dict[str, str]) -> None:
    del queue
    page = open_page("/reports")
    expect(page.locator("#groups tbody tr").first).to_be_visible()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save the page").click()
    text = waiting.value.path().read_text()
    assert "total" in text
    assert "Method" in text
    for asks in ("<script", "<link", "csrf", "<form"):
        assert asks not in text


def test_people_secrets_webhooks_and_who_did_what_are_on_the_admin_page(
    open_page: OpenPage, site: Installation
) -> None:
    site.gateway.call("POST", "/v1/tenants", body={"id": "words", "limits": {"max_gpus": 4}})
    site.gateway.call("PATCH", "/v1/tenants/words", body={"limits": {"max_gpus": 8}})
    page = open_page("/admin")
    page.locator("summary", has_text="New user").click()
    page.locator("#user-name").fill("grace")
    page.locator("#new-user").get_by_role("button", name="Create").click()
    expect(page.locator("#users")).to_contain_text("grace")
    page.get_by_role("button", name="Disable").click()
    page.get_by_role("dialog").get_by_role("button", name="Disable").click()
    expect(page.locator("#users")).to_contain_text("disabled")
    page.locator("summary", has_text="Set a secret").click()
    page.locator("#secret-name").fill("A_TOKEN")
    page.locator("#secret-value").fill("hidden")
    page.locator("#new-secret-form").get_by_role("button", name="Set").click()
    expect(page.locator("#secrets")).to_contain_text("A_TOKEN")
    expect(page.locator("#webhooks")).to_contain_text("no webhooks")
    page.locator("summary", has_text="New key").click()
    page.locator("#key-label").fill("half a date")
    page.locator("#key-expires").press("1")  # a browser gives half a date, or half a number, as nothing
    page.locator("#new-key").get_by_role("button", name="Create").click()
    expect(page.locator("#new-key .error")).to_have_text("is no whole date and time")
    page.locator("summary", has_text="New tenant").click()
    page.locator("#tenant-id").fill("unlimited")
    page.locator("#tenant-gpus").press_sequentially("4e")
    page.locator("#new-tenant").get_by_role("button", name="Create").click()
    expect(page.locator("#new-tenant .error")).to_have_text("must be a number")
    assert not {"half a date"} & {each["label"] for each in site.gateway.get("/v1/keys")["items"]}
    assert not {"unlimited"} & {each["id"] for each in site.gateway.get("/v1/tenants")["items"]}
    expect(page.locator("#engines")).to_contain_text("wattshift engine")
    expect(page.locator("#audit tr", has_text="tenant changed").first).to_contain_text("max GPUs 4 → 8")
