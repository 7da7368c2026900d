"""Pages keep themselves up to date: by one stream of events, and by asking again only where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import OpenPage
from tests.integration.conftest import Installation
from tests.support.servers import ROOT, wait_until

NEVER_ASKS_AGAIN = "window.setInterval = () => 0"


@pytest.fixture
def policy(site: Installation) -> Iterator[str]:
    """The policy in force, which it is again at the end."""
    active = site.gateway.get("/v1/policies/active")
    yield active["name"]
    terms = {"name": active["name"], "parameters": active["parameters"]}
    site.gateway.call("PUT", "/v1/policies/active", body=terms)


def told_alone(open_page: OpenPage, path: str, **options: Any) -> Page:
    """Open a page whose timers never ask again, and return it once its stream is open."""
    page = open_page(path, **options)
    page.add_init_script(NEVER_ASKS_AGAIN)
    page.reload()
    expect(page.locator("#live")).to_have_text("live")
    return page


@pytest.mark.parametrize(("path", "name"), [("/policies", "#active-name"), ("/", "#policy-name")])
def test_a_new_policy_is_shown_as_it_is_put_in_force(
    open_page: OpenPage, site: Installation, policy: str, path: str, name: str
) -> None:
    page = told_alone(open_page, path)
    expect(page.locator(name)).to_have_text(policy)
    site.gateway.call("PUT", "/v1/policies/active", body={"name": "sjf", "parameters": {}})

    expect(page.locator(name)).to_have_text("sjf")


def test_a_node_that_is_taken_out_of_service_is_shown_so(open_page: OpenPage, site: Installation) -> None:
    node = site.nodes()[0]["id"]
    page = told_alone(open_page, "/nodes")
    line = page.locator(f'.node[data-key="{node}"]')
    expect(line).to_contain_text("up")
    site.gateway.call("POST", f"/v1/nodes/{node}/drain")

    expect(line).to_contain_text("takes no new work")
    site.gateway.call("POST", f"/v1/nodes/{node}/resume")
    expect(line).not_to_contain_text("takes no new work")


def test_a_pool_and_an_application_that_are_made_are_shown(open_page: OpenPage, site: Installation) -> None:
    pool = json.loads((ROOT / "examples" / "pools" / "two-zones.json").read_text())
    pool |= {"mode": "fixed", "places": pool["places"][:1]}  # the other one's zone is not known here
    pools, apps = told_alone(open_page, "/pools"), told_alone(open_page, "/apps")
    expect(pools.locator("#empty")).to_contain_text("There is no pool")
    expect(apps.locator("#empty")).to_contain_text("There is no application")
    fleet = {"gpus": 1, "gpu_model": site.nodes()[0]["devices"][0]["model"], "zone": "US-CAL-CISO"}
    app = {"name": "b", "accuracy_pct": 80, "command": ["true"]}
    app["profiles"] = [{"slice": "7g", "service_ms": 5, "busy_w": 10}]
    spec = {
        "fleet": "live",
        "variants": [app],
        "sla_p95_ms": 50,
        "carbon_weight": 0,
        "requests_per_s": 1,
        "mode": "fixed",
    }
    site.gateway.call("PUT", "/v1/pools/shown", body=pool)
    site.gateway.call("PUT", "/v1/fleets/live", body=fleet)
    site.gateway.call("PUT", "/v1/apps/shown", body=spec)
    try:
        expect(pools.locator("#about")).to_contain_text("stand-in")
        expect(apps.locator("#figures")).to_contain_text("live")
    finally:
        for path in ("/v1/pools/shown", "/v1/apps/shown"):
            site.gateway.call("DELETE", path)
        wait_until(lambda: not site.gateway.get("/v1/apps")["items"])
        site.gateway.call("DELETE", "/v1/fleets/live")


def test_without_a_stream_a_page_asks_again(open_page: OpenPage, site: Installation, policy: str) -> None:
    page = open_page("/policies")

    def refuse(route: Route) -> None:
        route.fulfill(status=429, content_type="application/problem+json", body="{}")

    page.route("**/v1/events*", refuse)
    page.reload()
    expect(page.locator("#active-name")).to_have_text(policy)
    site.gateway.call("PUT", "/v1/policies/active", body={"name": "sjf", "parameters": {}})

    expect(page.locator("#active-name")).to_have_text("sjf")


def test_what_could_not_be_read_at_first_is_read_later(open_page: OpenPage) -> None:
    page = open_page("/")
    is_away = True

    def answer(route: Route) -> None:
        if is_away:
            route.fulfill(status=429, content_type="application/problem+json", body="{}")
        else:
            route.continue_()

    page.add_init_script(NEVER_ASKS_AGAIN)
    page.route(lambda url: "/v1/" in url and "/v1/events" not in url, answer)
    for path in ("/", "/policies", "/admin", "/reports"):
        is_away = True
        page.goto(path)
        expect(page.locator(".notice").first).to_contain_text("429")
        expect(page.locator("main .loading:visible").first).to_be_visible()
        is_away = False

        expect(page.locator("main .loading:visible")).to_have_count(0)
