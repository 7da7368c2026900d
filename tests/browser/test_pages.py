"""Every page in both themes and on a phone: it can be used without a mouse or eyes, and fits."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from gateway.dashboard.pages import PAGES
from tests.browser.conftest import PHONE, OpenPage
from tests.integration.conftest import Installation

LOOKS: dict[str, dict[str, Any]] = {"light": {}, "dark": {"color_scheme": "dark"}, "phone": PHONE}
PATHS = {page.name: page.path for page in PAGES}


@pytest.fixture(scope="module")
def jobs(site: Installation) -> dict[str, str]:
    """Jobs in all states that last, one with a long name; their ids by what they are."""
    made = {
        "ended": {"command": ["sh", "-c", "echo done"]},
        "failed": {"command": ["sh", "-c", "echo broken >&2; exit 3"]},
        "held": {"command": ["true"], "hold": True},
        "running": {"command": ["sleep", "600"], "gpus": {"min": 2}},
        "a-name-that-is-as-long-as-the-longest-name-that-jobs-may-have.1": {"command": ["sleep", "600"]},
    }
    ids = {
        name: site.gateway.call("POST", "/v1/jobs", body={"name": name, **spec})["id"] for name, spec in made.items()
    }
    site.wait_for_ends([ids["ended"], ids["failed"]], 60)
    return ids


def serious(page: Page) -> list[str]:
    """Return what axe finds that keeps somebody from using the page."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:120] for node in each['nodes'][:3]]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


def settle(page: Page) -> None:
    """Return when the page shows what it has asked for."""
    expect(page.locator("main .loading:visible")).to_have_count(0)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", PATHS)
def test_a_page_can_be_used_by_everybody(open_page: OpenPage, jobs: dict[str, str], name: str, look: str) -> None:
    page = open_page(PATHS[name].replace("{name}", jobs["running"]), **LOOKS[look])
    settle(page)

    assert serious(page) == []
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{wide} px wider than the window"
    expect(page.locator("h1")).to_have_count(1)
    for each in page.locator(".scroll:has(> table.rows)").all():
        assert each.evaluate("it => it.scrollWidth <= it.clientWidth"), each.get_attribute("aria-label")


@pytest.mark.parametrize("look", LOOKS)
def test_the_sign_in_page_can_be_used_by_everybody(open_page: OpenPage, look: str) -> None:
    assert serious(open_page("/", key="", **LOOKS[look])) == []


def test_the_keyboard_reaches_what_the_mouse_does(open_page: OpenPage, jobs: dict[str, str]) -> None:
    page = open_page("/jobs?state=held")
    row = page.locator(f'[data-key="{jobs["held"]}"] a')
    expect(row).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(40):
        page.keyboard.press("Tab")
        if row.evaluate("link => link === document.activeElement"):
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("held")


def test_a_node_opens_and_a_gpu_is_taken_out_of_service(
    open_page: OpenPage, site: Installation, jobs: dict[str, str]
) -> None:
    page = open_page("/nodes")
    node = site.nodes()[0]["id"]
    page.get_by_role("button", name=node, exact=True).click()
    devices = page.get_by_role("region", name=f"Devices of {node}").locator("tbody tr")
    expect(devices).to_have_count(4)
    devices.first.get_by_role("button", name="Take out").click()
    expect(devices.first).to_contain_text("out of service")
    assert site.gateway.get(f"/v1/nodes/{node}")["gpu_health"][0]["drained"]
    devices.first.get_by_role("button", name="Return").click()
    expect(devices.first).to_contain_text("well")
    assert jobs
    expect(page.locator("#nodes")).to_contain_text("node-")


def test_a_job_that_is_not_there_is_said_not_to_be(open_page: OpenPage) -> None:
    page = open_page("/jobs/job_00000000000000000000000000")

    expect(page.locator("#summary")).to_contain_text("There is no such job")
