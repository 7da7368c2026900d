"""Changing the policy, and asking before what others would do."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenPage
from tests.integration.conftest import Installation


@pytest.fixture(autouse=True)
def _as_it_was(site: Installation) -> Iterator[None]:
    before = site.gateway.get("/v1/policies/active")
    yield
    site.gateway.call("PUT", "/v1/policies/active", body={"name": before["name"], "parameters": before["parameters"]})


def test_another_policy_is_put_in_force_with_a_parameter(open_page: OpenPage, site: Installation) -> None:
    page = open_page("/policies")
    page.locator("#list").get_by_role("button", name=re.compile("^green ")).click()
    page.get_by_label("mu", exact=True).fill("2.5")
    page.get_by_role("button", name="Put green in force").click()
    page.get_by_role("dialog").get_by_role("button", name="Put in force").click()

    expect(page.locator("#active-name")).to_have_text("green")
    active = site.gateway.get("/v1/policies/active")
    assert (active["name"], active["parameters"]["mu"]) == ("green", 2.5)
    expect(page.locator("#active")).to_contain_text("mu = 2.5")


def test_a_wrong_parameter_is_said_beside_it_and_changes_nothing(open_page: OpenPage, site: Installation) -> None:
    before = site.gateway.get("/v1/policies/active")
    page = open_page("/policies")
    page.locator("#list").get_by_role("button", name=re.compile("^green ")).click()
    page.get_by_label("mu", exact=True).fill("a lot")
    page.get_by_role("button", name="Put green in force").click()
    page.get_by_role("dialog").get_by_role("button", name="Put in force").click()

    expect(page.locator("#parameter-mu-error")).to_be_visible()
    assert site.gateway.get("/v1/policies/active") == before


def test_policies_are_compared_in_place_with_their_front(open_page: OpenPage, site: Installation) -> None:
    page = open_page("/policies")
    page.get_by_label("Jobs", exact=True).select_option("green-day")
    page.get_by_label("Days").fill("0.1")
    checked = page.locator("#compared input:checked")
    expect(checked.first).to_be_visible()  # some are, once the list is there
    while checked.count():
        checked.first.uncheck()
    page.get_by_label("fifo", exact=True).check()
    page.get_by_label("Vary a parameter").select_option("green.mu")
    page.get_by_label("Its values").fill("1 2 3")
    page.get_by_role("button", name="Compare").click()

    rows = page.locator("#results tbody tr")
    expect(rows).to_have_count(4, timeout=120_000)
    expect(page.locator("#results figure circle")).to_have_count(4)
    finished = site.gateway.get("/v1/simulations", limit=4)["items"]
    assert {work["status"] for work in finished} == {"succeeded"}
    fifo = next(work for work in finished if work["policies"] == ["fifo"])
    result = site.gateway.get(f"/v1/simulations/{fifo['id']}")["result"]
    shown = rows.filter(has_text="fifo").locator("data").first
    grams = (result[0] if isinstance(result, list) else result)["carbon_kg"] * 1000
    assert float(shown.get_attribute("value") or "nan") == pytest.approx(grams, rel=1e-12)


def test_one_number_walks_from_carbon_to_time_with_the_front_of_the_past_week(
    open_page: OpenPage, site: Installation
) -> None:
    site.gateway.call(
        "PUT", "/v1/policies/active", body={"name": "joint", "parameters": {"hour_wh": 60.0, "stay_share": 0.05}}
    )
    spec = {"name": "for-the-front", "command": ["true"], "working_dir": "/tmp", "gpus": {"min": 1}}
    site.wait_for_ends([site.gateway.call("POST", "/v1/jobs", body=spec)["id"]], 60)
    page = open_page("/policies")
    slider = page.get_by_label("From least carbon (left) to least time (right)")
    expect(page.locator("#trade-off")).to_contain_text("hour_share = 0.2, in force")
    page.get_by_role("button", name="Find the front on the past week").click()

    expect(page.locator("#trade-off figure circle")).to_have_count(6, timeout=120_000)
    slider.press("ArrowLeft")
    expect(page.locator("#trade-says")).to_contain_text("hour_share = 0.1: ")
    page.get_by_role("button", name="Put in force").click()

    expect(page.locator("#active")).to_contain_text("hour_share = 0.1")
    parameters = site.gateway.get("/v1/policies/active")["parameters"]
    assert (parameters["hour_share"], parameters["hour_wh"], parameters["stay_share"]) == (0.1, None, 0.05)


def test_a_policy_without_the_number_has_no_slider(open_page: OpenPage, site: Installation) -> None:
    site.gateway.call("PUT", "/v1/policies/active", body={"name": "las", "parameters": {}})
    page = open_page("/policies")

    expect(page.locator("#active-name")).to_have_text("las")
    expect(page.locator("#trade-off")).to_be_hidden()
