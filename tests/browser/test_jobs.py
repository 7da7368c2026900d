"""What a person does with jobs: submit one, watch it, read its output, hold, release and cancel it."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.integration.conftest import Installation

LOOP = "sh -c 'n=0; while true; do n=$((n+1)); echo step $n; sleep 0.2; done'"


def _submit(page: Page, name: str, command: str) -> str:
    """Fill in the form, send it, and return the id of the job whose page then opens."""
    page.goto("/jobs/new")
    page.get_by_label("Name").fill(name)
    page.get_by_label("Command").fill(command)
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile("/jobs/job_"))
    return page.url.rsplit("/", 1)[1]


def test_a_job_is_submitted_watched_and_cancelled(open_page: OpenPage, site: Installation) -> None:
    page = open_page("/jobs/new")
    job_id = _submit(page, "watched", LOOP)

    expect(page.locator("#summary .badge")).to_have_text("running")
    expect(page.locator("#log")).to_contain_text("step 3")
    expect(page.locator("#life canvas")).to_be_visible()
    expect(page.locator("#life-note")).to_contain_text("the job's state")
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="No").click()
    assert site.job(job_id)["state"] == "running"
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()

    expect(page.locator("#summary .badge")).to_have_text("cancelled")
    assert site.job(job_id)["state"] == "cancelled"
    expect(page.get_by_role("button", name="Cancel job")).to_have_count(0)


def test_a_job_is_held_and_released(open_page: OpenPage, site: Installation) -> None:
    page = open_page("/jobs/new")
    page.get_by_label("Hold it until it is released").check()
    page.get_by_label("Name").fill("kept-back")
    page.get_by_label("Command").fill("true")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile("/jobs/job_"))

    expect(page.locator("#summary .badge")).to_have_text("held")
    page.get_by_role("button", name="Release").click()
    expect(page.locator("#summary .badge")).to_have_text("succeeded")
    assert site.job(page.url.rsplit("/", 1)[1])["state"] == "succeeded"


def test_a_waiting_job_is_asked_what_would_start_it(open_page: OpenPage, site: Installation) -> None:
    spec = {"name": "in-the-way", "command": ["sleep", "600"], "gpus": {"min": 4}, "preemptible": False}
    first = site.gateway.call("POST", "/v1/jobs", body=spec)["id"]
    site.wait_for(first, lambda job: job["state"] == "running")
    waits = site.gateway.call("POST", "/v1/jobs", body={**spec, "name": "wide", "gpus": {"min": 8}})["id"]
    page = open_page(f"/jobs/{waits}")

    page.get_by_role("button", name="What would start it now or earlier?").click()
    expect(page.locator("#why")).to_contain_text("submitted again with 4 GPUs instead of 8, it would start now.")
    site.gateway.call("POST", f"/v1/jobs/{waits}/hold")
    expect(page.locator("#summary .badge")).to_have_text("held")
    expect(page.locator("#why")).not_to_contain_text("it would start now")
    expect(page.get_by_role("button", name="What would start it now or earlier?")).to_have_count(0)
    for job_id in (waits, first):
        site.gateway.call("POST", f"/v1/jobs/{job_id}/cancel")
    site.wait_for_ends([waits, first], 60)


def test_the_list_changes_by_itself_and_is_filtered(open_page: OpenPage, site: Installation) -> None:
    page = open_page("/jobs")
    expect(page.locator("#live")).to_have_text("live")
    spec = {"name": "appears-by-itself", "command": ["sleep", "1"], "project": "tables"}
    job_id = site.gateway.call("POST", "/v1/jobs", body=spec)["id"]

    row = page.locator(f'[data-key="{job_id}"]')
    expect(row.locator(".badge")).to_have_text("succeeded")
    expect(row).to_contain_text(f"#{site.job(job_id)['number']}")
    page.get_by_label("Name contains").fill("BY-ITSELF")
    page.get_by_label("State").select_option("failed")
    expect(page.locator("#list")).to_have_text("No job matches the filter.")
    page.get_by_label("State").select_option("succeeded")
    expect(row).to_be_visible()
    assert "q=BY-ITSELF" in page.url
    page.reload()
    expect(row).to_be_visible()


def test_pages_of_the_list_are_turned_by_the_server(open_page: OpenPage, site: Installation) -> None:
    batch = {"jobs": [{"name": f"many-{i}", "command": ["true"], "hold": True} for i in range(70)]}
    site.gateway.call("POST", "/v1/jobs:batch", body=batch)
    page = open_page("/jobs?q=many-&state=held")

    rows = page.locator("#list tbody tr")
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="Older").click()
    expect(rows).to_have_count(20)
    expect(page.get_by_role("button", name="Older")).to_be_disabled()
    page.get_by_role("button", name="Newer").click()
    expect(rows).to_have_count(50)
    expect(rows.first).to_contain_text("many-69")


def test_what_the_api_refuses_stands_beside_its_field(open_page: OpenPage) -> None:
    page = open_page("/jobs/new")
    page.get_by_label("Name").fill("not a name!")
    page.get_by_label("Command").fill("true")
    page.get_by_role("button", name="Submit").click()

    expect(page.locator("#name-error")).to_be_visible()
    expect(page.get_by_label("Name")).to_be_focused()
    page.get_by_label("Name").fill("a-name")
    page.get_by_label("GPUs, at least").fill("5000")
    page.get_by_role("button", name="Estimate").click()
    expect(page.get_by_text("No grid zone of the cluster has as many GPUs of one kind as it asks for.")).to_be_visible()


def test_an_estimate_says_when_and_how_much(open_page: OpenPage) -> None:
    page = open_page("/jobs/new")
    page.get_by_label("Name").fill("guessed")
    page.get_by_label("Command").fill("python3 train.py")
    page.get_by_role("button", name="Estimate").click()

    expect(page.locator("#estimated")).to_contain_text("Under the policy")
